"""Prints the oldest and the newest release of TRL that setup.cfg admits, as far as the package index knows them."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


def admitted(requirement: Requirement, versions: list[str]) -> list[str]:
    """Those the requirement admits, oldest first."""
    return sorted(requirement.specifier.filter(versions), key=Version)


if __name__ == "__main__":
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[1] / "setup.cfg")
    lines = [line for line in setup["options"]["install_requires"].splitlines() if re.match(r"trl\b", line)]
    command = [sys.executable, "-m", "pip", "index", "versions", "trl"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    known = re.search(r"Available versions: (.*)", answer).group(1).split(", ")
    versions = admitted(Requirement(lines[0]), known)
    if not versions:
        sys.exit(f"no release of TRL satisfies {lines[0]!r}; there are {', '.join(known[:5])}, …")
    print(versions[0], versions[-1])

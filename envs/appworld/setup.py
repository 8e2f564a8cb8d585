"""Set up AppWorld in its own virtual environment.

    python -m g2po_envs.appworld.setup ~/.cache/g2po_trl/appworld           # the official tasks
    python -m g2po_envs.appworld.setup ~/.cache/g2po_trl/appworld --tiny    # a few bundled ones, no download

Existing parts are kept; `--tiny` makes its tasks again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from g2po_envs.appworld.server import Installation

VERSION = "0.1.3.post1"
_TINY_TASKS = Path(__file__).with_name("tiny_tasks.py")


def set_up(directory: str | Path, tiny: bool = False) -> Installation:
    """Make the virtual environment, install the apps, and download or make the data. Return the installation.

    Raises:
        RuntimeError: if a step fails; the message has its last output.
    """
    installation = Installation(str(directory))
    for folder in (installation.root, Path(installation.directory, "cache")):
        folder.mkdir(parents=True, exist_ok=True)
    bin_folder = installation.python.parent
    if not (bin_folder / "appworld").exists():
        print(f"AppWorld: set up in {installation.directory}, once; this takes some minutes", flush=True)
        _run("make the virtual environment", installation, [sys.executable, "-m", "venv", str(bin_folder.parent)])
        _run("install appworld", installation, [installation.python, "-m", "pip", "install", f"appworld=={VERSION}"])
    _run("install AppWorld's apps", installation, [bin_folder / "appworld", "install"])
    if tiny:
        _run("make tasks", installation, [installation.python, _TINY_TASKS])
    elif not (installation.root / "data" / "tasks").exists():
        _run("download AppWorld's data", installation, [bin_folder / "appworld", "download", "data"])
    installation.check()
    return installation


def _run(what: str, installation: Installation, command: Sequence) -> None:
    print(f"AppWorld: {what}", flush=True)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=installation.root,
        env={**_network_variables(), **installation.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"could not {what} (exit status {done.returncode}):\n{done.stdout[-3000:]}")


def _network_variables() -> dict[str, str]:
    """Return the environment variables of pip and of network proxies."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PIP_") or name.lower() in ("http_proxy", "https_proxy", "no_proxy", "ssl_cert_file")
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m g2po_envs.appworld.setup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tiny", action="store_true", help="bundled tasks instead of the official ones")
    args = parser.parse_args(argv)
    try:
        installation = set_up(args.directory, args.tiny)
    except RuntimeError as error:
        raise SystemExit(str(error)) from error
    datasets = sorted((installation.root / "data" / "datasets").glob("*.txt"))
    counts = ", ".join(f"{path.stem} {len(path.read_text().split())}" for path in datasets)
    print(f"AppWorld is in {installation.directory}: tasks: {counts}")


if __name__ == "__main__":
    main()

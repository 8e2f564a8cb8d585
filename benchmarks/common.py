"""What the benchmarks share: the facts about a run, arms run in turns, medians, and results files."""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from g2po_trl.utils.json import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Result = TypeVar("Result")


def command() -> str:
    """Return the command of this program as it is typed in the clone, without the machine's folders."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {spec.name}" if spec else f"python {_shown(str(Path(sys.argv[0]).resolve()))}"
    return " ".join([program, *map(_shown, sys.argv[1:])])


def _shown(word: str) -> str:
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def without_folders(text: str) -> str:
    """Return a text with paths as they are in the clone, and those of other folders as their last part."""
    return re.sub(r"(?<![\w.:/])/[^\s'\"=,:]*/", "", text.replace(f"{ROOT}/", ""))


def machine() -> dict[str, Any]:
    """Return cores, architecture, Python and load; with torch loaded also its threads and the GPUs."""
    found = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    found["load"] = [round(load, 1) for load in os.getloadavg()]
    if torch := sys.modules.get("torch"):
        found["torch threads"] = torch.get_num_threads()
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found


def facts(*packages: str, **more: Any) -> dict[str, Any]:
    """Return what a results file begins with: command, machine, versions of installed packages, and `more`.

    Args:
        packages: names of distributions, e.g. `"torch"`.
        more: seeds, settings, …
    """
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {"command": command(), "machine": machine(), **({"versions": versions} if packages else {}), **more}


def interleaved(
    arms: Mapping[str, Callable[[int], Result]], repetitions: int, warm_up: int = 1
) -> dict[str, list[Result]]:
    """Run the arms in turns, so that other jobs on the machine slow all of them alike.

    Args:
        arms: functions of the number of the repetition; those that warm up have numbers below 0.
        repetitions: how often each arm is run and counted.
        warm_up: how often each arm is run before that.

    Returns:
        What each arm returned in each counted repetition.
    """
    found: dict[str, list[Result]] = {name: [] for name in arms}
    for repetition in range(-warm_up, repetitions):
        for name, run in arms.items():
            result = run(repetition)
            if repetition >= 0:
                found[name].append(result)
    return found


def medians(values: Mapping[str, Sequence[float]], digits: int | None = None) -> dict[str, float]:
    """Return the median of each list, rounded to `digits`."""
    found = {name: statistics.median(of) for name, of in values.items()}
    return found if digits is None else {name: round(value, digits) for name, value in found.items()}


def write_results(folder: Path, content: Mapping[str, Any], name: str = "results.json") -> None:
    """Write a results file, compressed if it is named so; its folder is made."""
    if not name.endswith(".gz"):
        write_json(folder / name, content, indent=1)
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))  # equal values, equal bytes


def read_text(path: Path) -> str:
    """Return the text of a results file, or of the compressed one beside it."""
    if path.suffix != ".gz" and path.is_file():
        return path.read_text(encoding="utf-8")
    packed = path if path.suffix == ".gz" else path.with_name(f"{path.name}.gz")
    return gzip.decompress(packed.read_bytes()).decode("utf-8")


def read_lines(path: Path) -> list[Any]:
    """Return the lines of a JSON Lines file, which may be compressed."""
    return [json.loads(line) for line in read_text(path).splitlines()]

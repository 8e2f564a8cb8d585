"""The folders that a page shows: one, or several to be compared."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from ..runs.metrics import METRICS
from ..runs.summary import REPORT
from ..utils.options import require
from .data import Run
from .episode_sets import EpisodeSet, Evaluation


def open_folder(folder: str | Path, live: bool = False) -> Run | Evaluation:
    """Open the folder of a training run, of `g2po credit`, or of an evaluation; else raise `ValueError`.

    `live`: accept a run that has begun and has no trajectories yet.
    """
    remedy = "there is no such folder, pass the output_dir of a run, or of `g2po evaluate`"
    require(Path(folder).is_dir(), "folder", str(folder), remedy)
    is_evaluation = (Path(folder) / "settings.json").is_file() and not (Path(folder) / "run.json").is_file()
    return Evaluation(folder) if is_evaluation else Run(folder, live=live)


def version_of(folders: Iterable[str | Path]) -> str:
    """Return a text that changes when a run or an evaluation writes to one of the folders."""
    patterns = ("*.json", "*.jsonl", "validations/*.json", "trajectories/*.jsonl")
    paths = [path for folder in folders for name in patterns for path in sorted(Path(folder).glob(name))]
    marks = [f"{path} {(stat := path.stat()).st_size} {stat.st_mtime_ns}" for path in paths]
    return hashlib.sha1("\n".join(marks).encode(), usedforsecurity=False).hexdigest()


class Sources:
    """The data of a page: everything in one folder, or success and evaluations of several, which each must have."""

    def __init__(self, *sources: Run | Evaluation):
        self.sources = sources
        for source in sources:
            is_comparable = len(sources) == 1 or source.sets() or source.overview()["curves"]
            remedy = f"it has nothing to compare, pass the output of g2po evaluate --model {source.folder}"
            require(bool(is_comparable), "folder", str(source.folder), remedy)
        self.run = sources[0] if len(sources) == 1 and isinstance(sources[0], Run) else None
        self.numbers: Sequence[int] = self.run.numbers if self.run else ()

    def sets(self) -> dict[str, EpisodeSet]:
        """Return all evaluations by id: "0-KEY" in the first folder, "1-KEY" in the second, and so on."""
        return {f"{i}-{one.key}": one for i, source in enumerate(self.sources) for one in source.sets()}

    def overview(self, iterations: Sequence[int] | None = None) -> dict[str, Any]:
        """Return the data shown when the page of some iterations (`None`: all) opens.

        "training": whether the only folder has iterations. "charts": name, title and scale of the drawn metrics.
        """
        found = self.sets().items()
        sets = [{"id": name, "source": int(name.partition("-")[0]), **one.about()} for name, one in found]
        names = _names([source.folder for source in self.sources])
        sources = [{**source.overview(), "name": name} for source, name in zip(self.sources, names)]
        if self.run:
            sources[0]["iterations"] = self.numbers if iterations is None else list(iterations)
        return {
            "name": " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])),
            "sources": sources,
            "sets": sets,
            "pair": _first_pair(sets),
            "training": bool(self.numbers),
            "charts": [[one.short, one.title, one.scale] for one in METRICS if one.short and one.short != "success"],
        }

    def pieces(self, iterations: Sequence[int] | None = None, prompts: bool = True) -> dict[str, Callable[[], Any]]:
        """Return, by name, functions that read the data that the page loads on demand.

        "iteration-NUMBER", "set-ID" of an evaluation, and "index-PLACE" of a folder with iterations.
        """
        chosen = self.numbers if iterations is None else iterations
        found: dict[str, Callable[[], Any]] = {
            f"iteration-{number}": partial(self.run.iteration, number, prompts) for number in chosen if self.run
        }
        for place, source in enumerate(self.sources):
            if source.numbers:
                found[f"index-{place}"] = partial(source.index.data, chosen) if self.run else source.index.errors
        return found | {f"set-{name}": partial(one.data, prompts) for name, one in self.sets().items()}


def _first_pair(sets: Sequence[dict[str, Any]]) -> list[str | None]:
    """Return the ids of the two evaluations that the page shows side by side when it opens."""
    if not sets:
        return [None, None]
    first, *others = [list(part) for _, part in groupby(sets, lambda one: one["source"])]
    if not others:
        panel = _reported(first)
        return [panel[0]["id"], panel[-1]["id"] if len(panel) > 1 else None]
    panels = {one["panel"] for one in others[0]}
    last = _reported([one for one in first if one["panel"] in panels] or first)[-1]
    beside = [one for one in others[0] if one["panel"] == last["panel"]] or others[0]
    return [last["id"], beside[-1]["id"]]


def _reported(sets: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the evaluations of the set "report", or else of the set with the most evaluations."""
    names = [one["panel"] for one in sets]
    panel = REPORT if REPORT in names else max(names, key=names.count)
    return [one for one in sets if one["panel"] == panel]


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the names of the folders, or if some are the same, their paths from the folder that has all."""
    paths = [folder.resolve() for folder in folders]
    names = [path.name for path in paths]
    if len(set(names)) < len(set(paths)):
        names = [os.path.relpath(path, os.path.commonpath(paths)) for path in paths]
    return names

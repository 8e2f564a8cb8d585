"""The page of a results file on a GPU, which `run.py` writes at its end.

python -m benchmarks.gpu.table benchmarks/results/gpu/h200/repeat.json    # of a file that is there
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import read_text

PEAK = {"H100": 989, "H200": 989}  # TFLOP/s in bfloat16, dense


def percent(rates: Sequence[float | None]) -> str:
    """Their mean; a rate is `None` where every episode ended in an error."""
    known = [rate for rate in rates if rate is not None]
    if known:
        return f"{100 * sum(known) / len(known):.1f}"
    return "n/a" if rates else ""


def lines_of(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return a table in Markdown; nothing without rows."""
    body = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return ["", f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), *body] if body else []


def table(content: Mapping[str, Any]) -> str:
    """Return Markdown, of whatever there is."""
    gpus = ", ".join(f"{gpu['name']} ({gpu['gb']} GB)" for gpu in content["machine"].get("gpus", [])) or "no GPU"
    made = f"{content['minutes']} minutes" if "minutes" in content else content.get("started", "")
    made = "shrunk: numbers mean nothing" if content.get("shrink") else made
    lines = [f"{gpus}, torch {content['machine'].get('versions', {}).get('torch')}; {made}"]
    parts = content["parts"]
    rows = []
    for name, part in parts.items():
        ended = "out of time" if part.get("timed_out") else f"exit code {part.get('exit')}"
        rows.append((name, part.get("seconds", ""), part.get("limit", ""), part.get("why", ended)))
    rows += [(name, "", "", f"skipped: {reason}") for name, reason in content.get("skipped", {}).items()]
    lines += lines_of(("part", "seconds", "limit", "ended"), rows)
    lines += tests(parts.get("tests", {}).get("findings", []))
    for name, part in parts.items():
        if name.startswith("phases"):
            lines += speed(name, part.get("findings", []), peak_of(content["machine"]))
    return "\n".join([*lines, *repeats(content), *runs(parts)]) + "\n"


def tests(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for found in findings:
        values = {k: v for k, v in found.items() if k not in ("test", "outcome", "seconds", "reason")}
        told = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        reason = found.get("reason", "")
        told = told or (reason if isinstance(reason, str) else reason[-1] if reason else "")
        rows.append((found["test"], found["outcome"], found["seconds"], told))
    return lines_of(("test", "outcome", "seconds", "values"), rows)


def peak_of(machine: Mapping[str, Any]) -> float | None:
    """Return the TFLOP/s that the first GPU has at most; `None` of one that is not known."""
    names = [gpu["name"] for gpu in machine.get("gpus", []) if isinstance(gpu, dict)]
    return next((peak for name in names[:1] for known, peak in PEAK.items() if known in name), None)


def speed(name: str, findings: Sequence[Mapping[str, Any]], peak: float | None) -> list[str]:
    """Return the table of `phases.py`."""
    batch = next((found for found in findings if found.get("about") == "batch"), {})
    unique = batch["unique_tokens"] / batch["tokens"] if "unique_tokens" in batch else None
    rows = []
    for row in findings:
        if "layout" not in row:
            continue
        start = (row["attention"], row["layout"], "yes" if row["gradient_checkpointing"] else "no")
        if "error" in row:
            rows.append((*start, row["error"], *[""] * 6))
            continue
        update, tflop = row["update"]["tokens_per_second"], row["update"].get("tflop_per_second", "")
        share = f"{100 * tflop / peak:.1f}" if peak and tflop else ""
        rows.append((*start, f"{row['logps']['tokens_per_second']:,}", f"{update:,}"))
        rows[-1] += (f"{round(update * unique):,}" if unique else "", tflop, share)
        rows[-1] += (row.get("peak_gb", ""), row["first_seconds"])
    titles = ("attention", "layout", "checkpointing", "log-probs, tokens/s", "update, tokens/s")
    titles += ("update, unique tokens/s", "TFLOP/s", "% of peak", "peak GB", "first, s")
    found = lines_of(titles, rows)
    return ["", f"{name}: tokens of step samples", *found] if found else []


def repeats(content: Mapping[str, Any]) -> list[str]:
    """Return the table of `repeat`: how long two runs are equal, by kind."""
    rows = [
        (pair, kind, f"{number} of {equal['of']}")
        for pair, equal in content.get("equal until", {}).items()
        for kind, number in equal.items()
        if kind != "of"
    ]
    return lines_of(("pair", "equal", "iterations"), rows)


def runs(parts: Mapping[str, Any]) -> list[str]:
    """Return the table of runs; one that plays its panel at several temperatures has a row for each."""
    rows = []
    for name, part in parts.items():
        found = part.get("findings", [])
        if "-seed" not in name or not found:
            continue
        steps = [line for line in found if "success_rate" in line]
        rates = [line["success_rate"] for line in steps]
        each = [sum(line.get(phase) or 0 for phase in ("rollout", "logps", "update")) for line in steps]
        seconds = f"{sum(each) / len(each):.1f}" if each else ""
        played = [line for line in found if "panel" in line]
        temperatures = list(dict.fromkeys(line.get("temperature") for line in played)) or [None]
        for temperature in temperatures:
            panels = [line["panel"] for line in played if line.get("temperature") == temperature]
            cells = [percent(some) for some in (panels[:1], panels[-1:], rates[:3], rates[-3:])]
            at = f", panel at {temperature:g}" if len(temperatures) > 1 else ""
            rows.append((f"{name}{at}", len(steps), *cells, seconds))
    titles = (
        "run",
        "iterations",
        "first panel, %",
        "last panel, %",
        "training, first 3, %",
        "last 3, %",
        "s/iteration",
    )
    return lines_of(titles, rows)


def main() -> None:
    print(table(json.loads(read_text(Path(sys.argv[1])))), end="")


if __name__ == "__main__":
    main()

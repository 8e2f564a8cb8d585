"""The table of `benchmarks/gpu/run.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def percent(rates: Sequence[float | None]) -> str:
    """Their mean; a rate is `None` where every episode ended in an error."""
    known = [rate for rate in rates if rate is not None]
    if known:
        return f"{100 * sum(known) / len(known):.1f}"
    return "n/a" if rates else ""


def table(content: Mapping[str, Any]) -> str:
    """Markdown, of whatever there is."""
    gpus = ", ".join(f"{gpu['name']} ({gpu['gb']} GB)" for gpu in content["machine"].get("gpus", [])) or "no GPU"
    made = "shrunk: numbers mean nothing" if content["shrink"] else f"{content['minutes']} minutes"
    lines = [f"{gpus}, torch {content['machine'].get('versions', {}).get('torch')}; {made}", ""]
    parts = content["parts"]
    lines += ["| part | seconds | limit | ended |", "|---|---|---|---|"]
    for name, part in parts.items():
        ended = "out of time" if part.get("timed_out") else f"exit code {part.get('exit')}"
        lines.append(f"| {name} | {part.get('seconds', '')} | {part.get('limit', '')} | {part.get('why', ended)} |")
    tests = parts.get("tests", {}).get("findings", [])
    if tests:
        lines += ["", "| test | outcome | seconds | values |", "|---|---|---|---|"]
    for found in tests:
        values = {k: v for k, v in found.items() if k not in ("test", "outcome", "seconds", "reason")}
        told = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        reason = found.get("reason", "")
        told = told or (reason if isinstance(reason, str) else reason[-1] if reason else "")
        lines.append(f"| {found['test']} | {found['outcome']} | {found['seconds']} | {told} |")
    rows = [found for found in parts.get("phases", {}).get("findings", []) if "layout" in found]
    if rows:
        lines += [
            "",
            "| attention | layout | checkpointing | log-probs, tokens/s | update, tokens/s | TFLOP/s | peak GB | "
            "first, s |",
            "|---|---|---|---|---|---|---|---|",
        ]
    for row in rows:
        start = f"| {row['attention']} | {row['layout']} | {'yes' if row['gradient_checkpointing'] else 'no'} |"
        if "error" in row:
            lines.append(f"{start} {row['error']} | | | | |")
            continue
        lines.append(
            f"{start} {row['logps']['tokens_per_second']:,} | {row['update']['tokens_per_second']:,} | "
            f"{row['update']['tflop_per_second']} | {row.get('peak_gb', '')} | {row['first_seconds']} |"
        )
    runs = {name: part["findings"] for name, part in parts.items() if "-seed" in name and part.get("findings")}
    if runs:
        lines += [
            "",
            "| run | iterations | panel before, % | after, % | training, first 3, % | last 3, % | s/iteration |",
            "|---|---|---|---|---|---|---|",
        ]
    for name, found in runs.items():
        panels = [line["panel"] for line in found if "panel" in line]
        steps = [line for line in found if "success_rate" in line]
        rates = [line["success_rate"] for line in steps]
        cells = [percent(some) for some in (panels[:1], panels[1:][-1:], rates[:3], rates[-3:])]
        each = [sum(line.get(phase) or 0 for phase in ("rollout", "logps", "update")) for line in steps]
        cells.append(f"{sum(each) / len(each):.1f}" if each else "")
        lines.append(f"| {name} | {len(steps)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"

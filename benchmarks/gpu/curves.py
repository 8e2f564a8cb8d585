"""Draw the learning curves of a pretrained model: benchmarks/results/gpu/pretrained.png and .svg.

    python -m benchmarks.gpu.curves

Reads what `pretrained.py` wrote on a GPU.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT
from benchmarks.paper import plots

RESULTS = ROOT / "benchmarks/results/gpu"
COLOURS = {"g2po": "black", "g2po λ 0.5": "tab:blue", "gigpo": "tab:orange", "grpo": "tab:red"}
NAMES = {"g2po": "G2PO", "g2po λ 0.5": "G2PO, λ 0.5", "gigpo": "GiGPO", "grpo": "GRPO"}
WINDOW = 3  # iterations, as in the number that is reported


def runs(path: Path, stage: str) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Return the findings of a stage's runs by arm and seed."""
    content, found = json.loads(path.read_text()), defaultdict(dict)
    for name, run in content["runs"].items():
        if run["stage"] == stage:
            found[run["arm"]][run["seed"]] = content["parts"][name]["findings"]
    return dict(found)


def success(findings: list[dict[str, Any]]) -> list[float]:
    """Return the success of the training episodes by iteration."""
    return [line["success_rate"] for line in findings if "success_rate" in line]


def panel(findings: list[dict[str, Any]], temperature: float) -> dict[int, float]:
    """Return the held-out success by iteration."""
    return {line["step"]: line["panel"] for line in findings if line.get("temperature") == temperature}


def draw() -> plots.Figure:
    made = plots.Plot(figsize=(11, 3.8), layout="constrained")
    left, right = made.subplots(1, 2)
    for axes in (left, right):
        axes.set(xlabel="iteration")
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for arm, seeds in runs(RESULTS / "h200/smollm2.json", "smollm2").items():
        for seed, findings in seeds.items():
            for temperature, style in ((1.0, "-"), (0.4, ":")):
                at = panel(findings, temperature)
                label = f"{NAMES[arm]}, temperature {temperature:g}" if seed == min(seeds) else None
                values = [100 * value for value in at.values()]
                left.plot(list(at), values, style, color=COLOURS[arm], marker="o", markersize=3, label=label)
    left.set(ylabel="held-out success (%)", title="ALFWorld, generated games: two seeds each", ylim=(0, None))
    for arm, seeds in runs(RESULTS / "h200/treasure-and-pilot.json", "treasure").items():
        for seed, findings in seeds.items():
            curve = success(findings)
            smooth = 100 * np.convolve(curve, np.ones(WINDOW) / WINDOW, mode="valid")
            label = NAMES[arm] if seed == min(seeds) else None
            right.plot(np.arange(WINDOW, len(curve) + 1), smooth, color=COLOURS[arm], linewidth=1.2, label=label)
            right.plot(len(curve), smooth[-1], "o", markersize=3, color=COLOURS[arm])
    right.axhline(80, color="grey", linewidth=0.8)
    right.set(ylabel="training success, 3 iterations (%)", title="Treasure: three seeds each", ylim=(0, 100))
    for axes in (left, right):
        axes.legend(fontsize=8, loc="lower right")
    return made


if __name__ == "__main__":
    for path in plots.save(draw(), RESULTS, "pretrained"):
        print(path.relative_to(ROOT))

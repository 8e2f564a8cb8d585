"""Methods on a GPU against G2PO, by Dunnett's test with seeds as blocks; and learning curves of a pretrained model.

    python -m benchmarks.gpu.methods [benchmarks/results/gpu/h200/methods.json.gz]
    python -m benchmarks.gpu.methods --draw      # benchmarks/results/gpu/pretrained.png

Training success is the mean of the first iterations that all runs have, at most 30. Held-out success is that of each
run's last panels.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks import common, figures
from benchmarks.learning.statistics import Comparison, dunnett, smallest_effect

RESULTS = common.RESULTS / "gpu"
PLANNED = 30  # iterations
REFERENCE = "g2po"
MEASURES = ("training", "held-out at 1.0", "held-out at 0.4")
COLOURS = {"g2po": "black", "g2po λ 0.5": "tab:blue", "gigpo": "tab:orange", "grpo": "tab:red"}
WINDOW = 3  # iterations of a point of a curve, as in the number that is reported
Numbers = dict[tuple[str, int], float]
Findings = list[dict[str, Any]]


def success(findings: Findings) -> list[float]:
    """Return the success of the training episodes by iteration."""
    return [line["success_rate"] for line in findings if "success_rate" in line]


def panel(findings: Findings, temperature: float) -> dict[int, float]:
    """Return the held-out success by iteration."""
    return {line["step"]: line["panel"] for line in findings if line.get("temperature") == temperature}


def iterations(content: Mapping[str, Any]) -> int:
    """Return the number of iterations that are compared."""
    return min(PLANNED, *(len(success(part["findings"])) for part in content["parts"].values()))


def numbers(content: Mapping[str, Any], number: int | None = None) -> dict[str, Numbers]:
    """Return each measure in percent, by arm and seed. `number`: of iterations; default: those that all runs have."""
    number, found = number or iterations(content), {name: {} for name in MEASURES}
    for name, run in content["runs"].items():
        lines, key = content["parts"][name]["findings"], (run["arm"], run["seed"])
        found["training"][key] = 100 * float(np.mean(success(lines)[:number]))
        for temperature in (1.0, 0.4):
            panels = panel(lines, temperature)
            found[f"held-out at {temperature}"][key] = 100 * panels[max(panels)]
    return found


def comparison(content: Mapping[str, Any], measure: str) -> Comparison:
    """Return the comparison with G2PO, in points."""
    return dunnett(numbers(content)[measure], REFERENCE)


def runs(path: Path, stage: str) -> dict[str, dict[int, Findings]]:
    """Return the findings of a stage's runs by arm and seed."""
    content, found = json.loads(common.read_text(path)), defaultdict(dict)
    for name, run in content["runs"].items():
        if run["stage"] == stage:
            found[run["arm"]][run["seed"]] = content["parts"][name]["findings"]
    return dict(found)


def draw() -> Figure:
    """Draw held-out success on ALFWorld, and training success on Treasure."""
    made = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = made.subplots(1, 2)
    for arm, seeds in runs(RESULTS / "h200/smollm2.json", "smollm2").items():
        for seed, findings in seeds.items():
            for temperature, style in ((1.0, "-"), (0.4, ":")):
                at = panel(findings, temperature)
                label = f"{arm}, temperature {temperature:g}" if seed == min(seeds) else None
                values = [100 * value for value in at.values()]
                left.plot(list(at), values, style, color=COLOURS[arm], marker="o", markersize=3, label=label)
    for arm, seeds in runs(RESULTS / "h200/treasure-and-pilot.json", "treasure").items():
        for seed, findings in seeds.items():
            smooth = 100 * np.convolve(success(findings), np.ones(WINDOW) / WINDOW, mode="valid")
            label, at = arm if seed == min(seeds) else None, np.arange(len(smooth)) + WINDOW
            right.plot(at, smooth, color=COLOURS[arm], linewidth=1.2, label=label)
            right.plot(at[-1], smooth[-1], "o", markersize=3, color=COLOURS[arm])
    right.axhline(80, color="grey", linewidth=0.8)
    left.set(ylabel="held-out success (%)", title="ALFWorld, generated games: two seeds each", ylim=(0, None))
    right.set(ylabel="training success, 3 iterations (%)", title="Treasure: three seeds each", ylim=(0, 100))
    for axes in (left, right):
        figures.finish(axes)
        axes.set(xlabel="iteration")
        axes.legend(fontsize=8, loc="lower right")
    return made


def main() -> None:
    words = sys.argv[1:] or [RESULTS / "h200/methods.json"]
    if words == ["--draw"]:
        print(figures.save(draw(), RESULTS, "pretrained"))
        return
    content = json.loads(common.read_text(Path(words[0])))
    print(f"{iterations(content)} iterations\n")
    for measure, values in numbers(content).items():
        found = comparison(content, measure)
        arms, seeds = list(dict.fromkeys(arm for arm, _ in values)), sorted({seed for _, seed in values})
        smallest = smallest_effect(found.noise, len(seeds), len(arms) - 1)
        print(f"{measure}: noise of a run {found.noise:.2f}, found with a power of 0.8: {smallest:.1f} points")
        for arm in arms:
            line = f"{arm:12} {np.mean([values[arm, seed] for seed in seeds]):5.1f}  "
            line += ", ".join(f"{values[arm, seed]:.1f}" for seed in seeds)
            if arm != REFERENCE:
                one = found.differences[arm]
                line += f"   {one.mean:+.1f} [{one.interval[0]:+.1f}, {one.interval[1]:+.1f}], p {one.p:.4f}"
            print(line)


if __name__ == "__main__":
    main()

"""The table of `pretrained.py --stages smollm2-methods`: methods against G2PO by Dunnett's test, seeds as blocks.

    python -m benchmarks.gpu.methods [benchmarks/results/gpu/h200/methods.json]

Training success is the mean of the first iterations that all runs have, at most 30. Held-out success is that of each
run's last panels.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.gpu import curves
from benchmarks.learning.comparison_statistics import Comparison, dunnett, smallest_effect

PLANNED = 30  # iterations
REFERENCE = "g2po"
MEASURES = ("training", "held-out at 1.0", "held-out at 0.4")
Numbers = dict[tuple[str, int], float]


def iterations(content: Mapping[str, Any]) -> int:
    """Return the number of iterations that are compared."""
    return min(PLANNED, *(len(curves.success(part["findings"])) for part in content["parts"].values()))


def numbers(content: Mapping[str, Any], number: int | None = None) -> dict[str, Numbers]:
    """Return each measure in percent, by arm and seed. `number`: of iterations; default: those that all runs have."""
    number, found = number or iterations(content), {name: {} for name in MEASURES}
    for name, run in content["runs"].items():
        lines, key = content["parts"][name]["findings"], (run["arm"], run["seed"])
        found["training"][key] = 100 * float(np.mean(curves.success(lines)[:number]))
        for temperature in (1.0, 0.4):
            panels = curves.panel(lines, temperature)
            found[f"held-out at {temperature}"][key] = 100 * panels[max(panels)]
    return found


def comparison(content: Mapping[str, Any], measure: str) -> Comparison:
    """Return the comparison with G2PO, in points."""
    return dunnett(numbers(content)[measure], REFERENCE)


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else common.ROOT / "benchmarks/results/gpu/h200/methods.json"
    with open(path) as file:
        content = json.load(file)
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

"""What do lambda values change, without a language model? The task of tabular.py, G2PO by λ.

    python -m benchmarks.credit.tabular_lambda [--seeds 20] [--jobs 2] [--parts default length turns …]

Unit steps of length 1 unless said otherwise; every run is paired with that of the same house at lambda 1. A run's area
under the learning curve is one line of OUTPUT/runs.jsonl.gz. Prints and writes the table (OUTPUT/table.md): mean
areas, and differences to lambda 1 with 95 % bootstrap intervals over houses.
"""

import argparse
import gzip
import json
import os
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.common import RESULTS, command
from benchmarks.credit.tabular import DEFAULT, SWEEPS, interval, run

LAMBDAS = [1.0, 0.9, 0.5, 0.0]
PARTS = ["default", "length", "key", "turns", "group_size", "slip", "idle"]


def settings(part: str) -> list[tuple[str, dict]]:
    """(name, what is not as in tabular.py's default)."""
    if part == "default":
        return [("default", {})]
    if part == "length":
        return [(f"length {size:g}", {"size": size}) for size in (0.3, 3.0, 10.0)]
    return [(f"{part} {value}", {part: value}) for value in SWEEPS[part] if value != DEFAULT[part]]


def area(setting: str, value_lambda: float, seed: int, changed: dict) -> dict:
    """Mean success over a run's iterations, with the run's name."""
    options = {"size": 1.0, **changed}
    curve = run("g2po", seed, "unit", options.pop("size"), value_lambda=value_lambda, **options)
    name = {"setting": setting, "method": "g2po", "value_lambda": value_lambda, "seed": seed}
    return {**name, "area": round(float(np.mean(curve)), 5)}


def table(runs: list[dict]) -> str:
    """Markdown: a row a setting, a column a lambda; differences are to lambda 1 in the same houses."""
    areas: dict[str, dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for one in runs:
        areas[one["setting"]][one["value_lambda"]][one["seed"]] = one["area"]
    heads = " | ".join(f"λ = {value} − λ = 1" for value in LAMBDAS[1:])
    lines = [f"| setting | houses | λ = 1 | {heads} |", "|---" * 6 + "|"]
    for setting, of in areas.items():
        cells = [setting, str(len(of[1.0])), f"{np.mean(list(of[1.0].values())):.3f}"]
        cells += [difference(of[value], of[1.0]) for value in LAMBDAS[1:]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def difference(one: dict[int, float], other: dict[int, float]) -> str:
    """Mean of the paired differences, half of its 95 % interval, and in how many houses it is ahead."""
    pairs = [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
    if len(pairs) < 2:
        return "–"
    low, high = interval(pairs)
    return f"{np.mean(pairs):+.3f} ± {(high - low) / 2:.3f}, {sum(d > 0 for d in pairs)}/{len(pairs)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "credit_lambda")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs) as pool:
        jobs = [
            pool.submit(area, setting, value_lambda, seed, changed)
            for part in options.parts
            for setting, changed in settings(part)
            for value_lambda in LAMBDAS
            for seed in range(options.seeds)
        ]
        runs = [job.result() for job in jobs]
    options.output.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(one) + "\n" for one in runs)
    (options.output / "runs.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    text = table(runs)
    (options.output / "table.md").write_text(text + "\n")
    print(f"{command()}\n\n{text}")


if __name__ == "__main__":
    main()

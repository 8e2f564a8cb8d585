"""What do lambda values change, without a language model? The task of tabular.py, G2PO and its ablations by λ.

    python -m benchmarks.credit.tabular_lambda [--seeds 20] [--jobs 2] [--parts default length sweeps …] [--minutes M]
    python -m benchmarks.credit.tabular_lambda --report

Unit steps of length 1 unless said otherwise; every run is paired with that of the same house at lambda 1. A run's area
under the learning curve is one line of RESULTS/runs.jsonl, and what is there is not run again. Prints and writes the
table (RESULTS/table.md): mean areas, and differences to lambda 1 with 95 % bootstrap intervals over houses.
"""

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from benchmarks.common import command
from benchmarks.credit.tabular import DEFAULT, SWEEPS, interval, run

RESULTS = Path(__file__).with_name("results") / "credit_lambda"
METHODS = ["g2po", "g2po without A_EC", "g2po without A_NC", "g2po without aggregation"]
LAMBDAS = [1.0, 0.9, 0.5, 0.0]
SWEPT = ["key", "turns", "group_size", "slip", "idle"]


def settings(parts: list[str]) -> list[tuple[str, dict]]:
    """(name, what is not as in tabular.py's default), the default first."""
    all_of = {
        "default": [("default", {})],
        "length": [(f"length {size:g}", {"size": size}) for size in (0.3, 3.0, 10.0)],
    }
    for name in SWEPT:
        all_of[name] = [(f"{name} {value}", {name: value}) for value in SWEEPS[name] if value != DEFAULT[name]]
    return [setting for part in parts for setting in all_of[part]]


def area(method: str, value_lambda: float, seed: int, options: dict) -> float:
    """Mean success over a run's iterations."""
    changed = {name: value for name, value in options.items() if name != "size"}
    return float(np.mean(run(method, seed, "unit", options.get("size", 1.0), value_lambda=value_lambda, **changed)))


def load(results: Path) -> dict[tuple, float]:
    """(setting, method, lambda, seed) -> area."""
    path = results / "runs.jsonl"
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:  # killed, or the disk was full, in the middle of a line: that run is played again
        path.write_text(whole)
    lines = [json.loads(line) for line in whole.splitlines()]
    return {(e["setting"], e["method"], e["value_lambda"], e["seed"]): e["area"] for e in lines}


def table(areas: dict[tuple, float], names: list[str]) -> str:
    """Markdown: a row a setting and method, a column a lambda; differences are to lambda 1 in the same houses."""
    heads = " | ".join(f"λ = {value} − λ = 1" for value in LAMBDAS[1:])
    lines = [f"| setting | method | houses | λ = 1 | {heads} |", "|---" * 7 + "|"]
    for name in names:
        for method in METHODS:
            of = {v: {s: a for (n, m, w, s), a in areas.items() if (n, m, w) == (name, method, v)} for v in LAMBDAS}
            if not of[1.0]:
                continue
            cells = [name, method, str(len(of[1.0])), f"{np.mean(list(of[1.0].values())):.3f}"]
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
    parts = ["default", "length", *SWEPT]
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing after so many minutes")
    parser.add_argument("--report", action="store_true", help="play nothing: write the table of what is there")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    areas, started = load(options.results), time.monotonic()
    wanted = [
        (name, method, value_lambda, seed, changed)
        for name, changed in settings(options.parts)
        for seed in range(options.seeds)
        for method in options.methods
        for value_lambda in LAMBDAS
        if (name, method, value_lambda, seed) not in areas
    ]
    if not options.report and wanted:
        with ProcessPoolExecutor(options.jobs) as pool, (options.results / "runs.jsonl").open("a") as file:
            jobs = {}
            for name, method, value_lambda, seed, changed in wanted:
                jobs[pool.submit(area, method, value_lambda, seed, changed)] = (name, method, value_lambda, seed)
            for job in as_completed(jobs):
                if job.cancelled():
                    continue
                key = jobs[job]
                areas[key] = round(job.result(), 5)
                entry = dict(zip(("setting", "method", "value_lambda", "seed"), key), area=areas[key])
                file.write(json.dumps(entry) + "\n")
                file.flush()
                if time.monotonic() - started > 60 * options.minutes:
                    pool.shutdown(wait=False, cancel_futures=True)
    text = table(areas, [name for name, _ in settings(parts)])
    (options.results / "table.md").write_text(text + "\n")
    print(f"{command()}: {len(areas)} runs, {time.monotonic() - started:.0f} s\n\n{text}")


if __name__ == "__main__":
    main()

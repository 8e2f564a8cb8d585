"""Write the table and the curves of the comparison of methods of November 2026: 94 runs with seeds 0 to 3.

    python -m benchmarks.learning.methods [--results benchmarks/results/methods]

Two settings: *short*, the default recipe of that time, and *long* (recipes/alfworld/tiny-long.yaml: larger rooms, 30
turns). The runs are in RESULTS/runs/SETTING, each with its command, commit, versions and curves; docs/log.md has what
was fixed beforehand. New runs are made by `comparison.py`.
"""

import argparse
import json
from pathlib import Path

from benchmarks.learning.methods_report import REFERENCE, START, Runs, table, table_with_one_spread
from g2po_trl.report import plots

SETTINGS = ("short", "long")
VARIANTS = ("without A_NC", "without A_EC", "without aggregation", "lambda 0.5", "lambda 0", "lambda auto", "memory")
VARIANTS += ("memory lambda 0.5", "memory lambda auto")
RIVALS = ("ppo", "rloo", "grpo", "gigpo", "hgpo", "graphgpo", "crbc")
METHODS = (*RIVALS, REFERENCE, *(f"{REFERENCE} {variant}" for variant in VARIANTS))
TYPES = {
    "pick_and_place_simple": "Pick",
    "look_at_obj_in_light": "Look",
    "pick_clean_then_place_in_recep": "Clean",
    "pick_heat_then_place_in_recep": "Heat",
    "pick_cool_then_place_in_recep": "Cool",
    "pick_two_obj_and_place": "Pick2",
}
ABOUT = """Success in percent, mean ± standard deviation over seeds. "Minus g2po": paired by seed, with the 95 %
bootstrap interval over seeds; told apart where it and Student's interval leave out 0. The comparisons are not
corrected for their number. Held-out: 576 games, one episode each, after training."""


def load(results: Path) -> Runs:
    """Return every run, by (setting, method, seed)."""
    runs = [json.loads(path.read_text()) for path in sorted((results / "runs").glob("*/*.json"))]
    return {(run["setting"], run["method"], run["seed"]): run for run in runs}


def report(results: Path) -> str:
    """Write table.md and the curves, and return the table."""
    runs, parts = load(results), [ABOUT]
    for setting in SETTINGS:
        trained = {key: run for key, run in runs.items() if key[0] == setting and key[1] != START}
        parts.append(f"## {setting}\n\n" + "\n".join(table(runs, setting, [START, *METHODS], TYPES)))
        if together := table_with_one_spread(runs, setting, METHODS):
            parts.append("\n".join(together))
        commits = ", ".join(sorted({run["commit"][:10] for run in trained.values()}))
        hours = sum(run["seconds"] for run in trained.values()) / 3600
        parts.append(f"{len(trained)} runs, {hours:.1f} hours, commits {commits}.")
        curves = {m: [run["training"]["success"] for k, run in sorted(trained.items()) if k[1] == m] for m in METHODS}
        for name, shown in (("", (*RIVALS, REFERENCE)), ("-g2po", set(METHODS) - set(RIVALS))):
            made = plots.learning_curves(
                {m: seeds for m, seeds in curves.items() if seeds and m in shown},
                ylabel="success of training episodes, mean of 5 iterations (%)",
                bold=REFERENCE,
            )
            plots.save(made, results, f"curves-{setting}{name}")
    text = "\n\n".join(parts) + "\n"
    (results / "table.md").write_text(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parent / "results/methods"
    parser.add_argument("--results", type=Path, default=default, help="folder with runs/")
    print(report(parser.parse_args().results))


if __name__ == "__main__":
    main()

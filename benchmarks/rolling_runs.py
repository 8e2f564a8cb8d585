"""What do steps of an older policy cost? The default recipe with `rollouts_ahead: 1`, and how they are corrected.

    python benchmarks/rolling_runs.py --work WORK [--seeds 0 1 2]
    python benchmarks/rolling_runs.py --report

Arms: weights of at most 3 (TRL's), none, and weights of at most 1. The runs without rollouts ahead are those of G2PO
in `methods.py`, with the same flags and seeds. Each run is one file, results/rolling/runs/ARM-seedN.json here; an
interrupted one goes on when the command is given again. At the end, and with `--report`: table.md beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean

from recipe_runs import ROOT, RecipeRunner, code

from g2po_trl.json_text import write_json

RESULTS = ROOT / "benchmarks/results/rolling"
ON_POLICY = ROOT / "benchmarks/results/methods/runs/short"
TRAIN = ["recipes/train_alfworld.py", "--config", "recipes/alfworld/tiny.yaml", "--num_eval_games", "576"]
TRAIN += ["--eval_before", "false", "--save_total_limit", "1", "--report_to", "none", "--num_environment_workers", "1"]
ARMS = {
    "corrected": ["--rollouts_ahead", "1", "--vllm_importance_sampling_clip_max", "3.0"],
    "uncorrected": ["--rollouts_ahead", "1", "--vllm_importance_sampling_correction", "false"],
    "at-most-1": ["--rollouts_ahead", "1", "--vllm_importance_sampling_clip_max", "1.0"],
}
KEPT = {
    "success": "episode/success_rate",
    "kl": "kl",
    "mean_age": "rollout/mean_age",
    "max_age": "rollout/max_age",
    "active_fraction": "rollout/active_fraction",
    "effective_sample_size": "sampling/effective_sample_size",
    "clipped_fraction": "sampling/importance_sampling_ratio/clipped_fraction",
    "rollout_seconds": "time/rollout",
    "update_seconds": "time/update",
}


def collected(folder: Path) -> dict:
    """What is kept of a run."""
    state = max(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    entries = [entry for entry in json.loads(state.read_text())["log_history"] if KEPT["success"] in entry]
    (evaluation,) = [json.loads(line) for line in (folder / "evaluations.jsonl").open()]
    curves = {name: [round(entry[metric], 6) for entry in entries if metric in entry] for name, metric in KEPT.items()}
    return {"training": curves, "held_out": evaluation["success_rate"], "games": evaluation["episodes"]}


def report() -> str:
    """The table of what is there, also written to table.md."""
    lines = [
        "Success in percent: mean over training iterations / 576 held-out games at the end.",
        "",
        "| seed | rollouts_ahead 0 | 1, weights of at most 3 | 1, no weights | 1, weights of at most 1 |",
        "|---|---|---|---|---|",
    ]
    runs = {path.stem: json.loads(path.read_text()) for path in sorted((RESULTS / "runs").glob("*.json"))}
    for seed in sorted({run["seed"] for run in runs.values()}):
        cells = []
        before = ON_POLICY / f"g2po-seed{seed}.json"
        if before.exists():
            run = json.loads(before.read_text())
            cells.append(f"{100 * mean(run['training']['success']):.1f} / {100 * run['held_out']['success_rate']:.1f}")
        else:
            cells.append("–")
        for arm in ARMS:
            run = runs.get(f"{arm}-seed{seed}")
            told = run and f"{100 * mean(run['training']['success']):.1f} / {100 * run['held_out']:.1f}"
            cells.append(told or "–")
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    lines += [
        "",
        "Largest KL divergence of an iteration from the start, least effective sample size of the weights:",
        "",
    ]
    lines += ["| run | KL | effective sample size |", "|---|---|---|"]
    for name, run in runs.items():
        training = run["training"]
        size = f"{min(training['effective_sample_size']):.3f}" if training["effective_sample_size"] else "–"
        lines.append(f"| {name} | {max(training['kl']):.2f} | {size} |")
    text = "\n".join(lines) + "\n"
    (RESULTS / "table.md").write_text(text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="checkpoints and trajectories")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--report", action="store_true", help="write the table of what is there, play nothing")
    args = parser.parse_args()
    if not args.report and args.work is None:
        parser.error("--work is missing: name a folder for checkpoints")
    runner = RecipeRunner()
    runner.stop_on_signals()
    for seed in [] if args.report else args.seeds:
        for arm, flags in ARMS.items():
            path = RESULTS / "runs" / f"{arm}-seed{seed}.json"
            if path.exists() or runner.stopping.is_set():
                continue
            folder, command = args.work / f"{arm}-{seed}", [*TRAIN, "--seed", str(seed), *flags]
            commit, _ = code(("g2po_trl", "envs", TRAIN[0]))
            attempts = runner.run(folder, command, commit)
            if attempts is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                facts = {"arm": arm, "seed": seed, "command": command, "attempts": attempts}
                write_json(path, {**facts, **collected(folder)})
    print(report())
    return 0


if __name__ == "__main__":
    sys.exit(main())

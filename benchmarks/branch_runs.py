"""Do branches pay where wins are scarce? The tiny model in large rooms, with and without `branch_share`.

    python benchmarks/branch_runs.py --work WORK [--seeds 0 1 2 3 4] [--jobs 1]
    python benchmarks/branch_runs.py --report

recipes/alfworld/tiny-long.yaml with 18 turns, in which its start wins one game in twenty, and 60 iterations: groups
of 8, against groups of 5 and up to 3 branches. Compared at equal numbers of generated tokens, those of branches
included; steps that were played again generate none. The primary number is how many it takes until 30 % of the
episodes from the beginning are won, mean of five iterations. A plain run that does not come there counts with all it
generated, which is too little; if neither run of a seed does, they count as equal. Each run is one small file,
benchmarks/results/branch_runs/runs/ARM-seedN.json; an interrupted one goes on when the command is given again. At the
end, and with `--report`: table.md and curves.png beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from recipe_runs import ROOT, Busy, RecipeRunner, code
from scipy import stats

from g2po_trl import read_jsonl
from g2po_trl.json_text import write_json

RESULTS = ROOT / "benchmarks/results/branch_runs"
TRAIN = ["recipes/train_alfworld.py", "--config", "recipes/alfworld/tiny-long.yaml", "--max_turns", "18"]
TRAIN += ["--eval_before", "false", "--save_total_limit", "1", "--report_to", "none"]
TRAIN += ["--num_environment_workers", "1"]
ARMS = {"plain": [], "branches": ["--branch_share", "0.375"]}
WINDOW, ASKED = 5, 0.30
REPORTED = (40, 60)  # iterations
PER_ITERATION = ("success", "generated_tokens", "steps", "branches", "replayed_steps")


def collected(folder: Path) -> dict:
    """What is kept of a run: lists with a value for each iteration."""
    state = max(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    entries = [entry for entry in json.loads(state.read_text())["log_history"] if "time/rollout" in entry]
    tokens, steps = [], []
    for number in range(1, len(entries) + 1):
        path = folder / "trajectories" / f"train-{number:06d}.jsonl"
        played = [step for trajectory in read_jsonl(path) for step in trajectory.steps]
        tokens.append(sum(len(step.completion_ids) for step in played))
        steps.append(len(played))
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").open()]
    return {
        "success": [round(entry["episode/success_rate"], 6) for entry in entries],
        "generated_tokens": tokens,
        "steps": steps,
        "branches": [int(entry.get("rollout/branches", 0)) for entry in entries],
        "replayed_steps": [int(entry.get("rollout/replayed_steps", 0)) for entry in entries],
        "held_out": {str(each["step"]): round(each["success_rate"], 6) for each in evaluations},
        "games": evaluations[-1]["episodes"],
    }


def curve(run: dict) -> tuple[np.ndarray, np.ndarray]:
    """Generated tokens until each iteration's end, from the `WINDOW`th on; mean success of the last `WINDOW`."""
    tokens, success = np.cumsum(run["generated_tokens"]), np.asarray(run["success"])
    return tokens[WINDOW - 1 :], np.convolve(success, np.full(WINDOW, 1 / WINDOW), "valid")


def tokens_until(run: dict, asked: float) -> float:
    """Generated tokens until `asked` of the episodes are won; infinity if they never are."""
    tokens, success = curve(run)
    reached = np.flatnonzero(success >= asked - 1e-9)
    return float(tokens[reached[0]]) if len(reached) else float("inf")


def interval(differences: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of a mean."""
    draws = np.random.default_rng(seed).integers(len(differences), size=(10_000, len(differences)))
    low, high = np.percentile(differences[draws].mean(1), [2.5, 97.5])
    return float(low), float(high)


def iterations_of(path: Path) -> int:
    """Of a finished run."""
    return len(json.loads(path.read_text())["success"])


def summary(differences: np.ndarray, text: Callable[[float], str]) -> str:
    """A mean of paired differences with its two intervals."""
    mean, number = differences.mean(), len(differences)
    if number == 1:
        return f"{text(mean)}, one seed"
    bootstrap = ", ".join(text(end) for end in interval(differences))
    half = stats.t.ppf(0.975, number - 1) * differences.std(ddof=1) / number**0.5
    return f"{text(mean)}, bootstrap [{bootstrap}], t [{text(mean - half)}, {text(mean + half)}]"


def mean_until(run: dict, tokens: float) -> float:
    """Mean success over the first `tokens` generated tokens."""
    ends = np.cumsum(run["generated_tokens"])
    used = np.minimum(ends, tokens) - np.minimum(np.r_[0, ends[:-1]], tokens)
    return float(np.average(run["success"], weights=used))


def cut(run: dict, iterations: int) -> dict:
    """The first `iterations` of a run."""
    lists = {name: values[:iterations] for name, values in run.items() if name in PER_ITERATION}
    return {**run, **lists, "held_out": run["held_out"].get(str(iterations))}


def report() -> str:
    """The tables of what is there, also written to table.md, and the curves."""
    runs = {path.stem: json.loads(path.read_text()) for path in sorted((RESULTS / "runs").glob("*.json"))}
    text = "\n".join(line for iterations in REPORTED for line in section(runs, iterations))
    draw(runs)
    (RESULTS / "table.md").write_text(text)
    return text


def section(runs: dict[str, dict], iterations: int) -> list[str]:
    """A table of the runs' first `iterations`, and what they come to."""
    of = {arm: {run["seed"]: cut(run, iterations) for run in runs.values() if run["arm"] == arm} for arm in ARMS}
    long = [{seed for seed, run in of[arm].items() if len(run["success"]) == iterations} for arm in ARMS]
    seeds = sorted(set.intersection(*long))
    lines = [f"## {iterations} iterations", ""]
    if not seeds:
        return [*lines, "No seed has both runs yet.", ""]
    plain, branches = ([of[arm][seed] for seed in seeds] for arm in ARMS)
    most = min(sum(run["generated_tokens"]) for run in plain + branches)
    until = [np.array([tokens_until(run, ASKED) for run in arm]) for arm in (plain, branches)]
    means = [100 * np.array([mean_until(run, most) for run in arm]) for arm in (plain, branches)]
    lines += [
        f"Thousand generated tokens until {ASKED:.0%} of the first episodes of groups are won (mean of {WINDOW} "
        f"iterations), and mean success in percent over the first {most / 1e3:.0f} thousand.",
        "",
        "| seed | plain: tokens | branches: tokens | plain: success | branches: success | branches played |",
        "|---|---|---|---|---|---|",
    ]
    for row, seed in enumerate(seeds):
        cells = [f"{arm[row] / 1e3:.0f}" if np.isfinite(arm[row]) else "not reached" for arm in until]
        cells += [f"{arm[row]:.1f}" for arm in means] + [str(sum(branches[row]["branches"]))]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    came = [np.isfinite(arm) for arm in until]
    counts = ", ".join(f"{arm} {reached.sum()} of {len(seeds)}" for arm, reached in zip(ARMS, came))
    lines += ["", f"Runs that came to {ASKED:.0%}: {counts}."]
    lines += ["", "Paired, with 95 % intervals by bootstrap, and by Student's t, which is right for so few seeds:", ""]
    if any(came[0] & ~came[1]):
        lines.append("- tokens, branches by plain: a seed came there without branches alone, the criterion is not met")
    else:
        of_plain = np.where(came[0], until[0], [sum(run["generated_tokens"]) for run in plain])
        logs = np.log(np.where(came[1], until[1], of_plain) / of_plain)
        lines.append(f"- tokens, branches by plain: {summary(logs, lambda value: f'{np.exp(value):.2f}')}")
    lines.append(f"- success, branches minus plain, in points: {summary(means[1] - means[0], '{:+.1f}'.format)}")
    if all(run["held_out"] is not None for run in plain + branches):
        held_out = 100 * np.array([b["held_out"] - a["held_out"] for a, b in zip(plain, branches)])
        lines.append(
            f"- held-out success at the end, {plain[0]['games']} games: {summary(held_out, '{:+.1f}'.format)}"
        )
    return [*lines, ""]


def draw(runs: dict[str, dict]) -> None:
    """Each run's success by generated tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for arm, colour in zip(ARMS, ("tab:grey", "tab:green")):
        for number, run in enumerate(run for run in runs.values() if run["arm"] == arm):
            tokens, success = curve(run)
            axes.plot(tokens / 1e3, 100 * success, color=colour, lw=1, label=None if number else arm)
    axes.axhline(100 * ASKED, color="black", lw=0.5, ls=":")
    axes.set(xlabel="generated tokens (thousand)", ylabel=f"success (%), mean of {WINDOW} iterations")
    axes.legend()
    figure.savefig(RESULTS / "curves.png", dpi=120, bbox_inches="tight")
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="checkpoints and trajectories")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--iterations", type=int, default=60, help="of each run; shorter ones are continued")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one thread")
    parser.add_argument("--report", action="store_true", help="write the table of what is there, play nothing")
    args = parser.parse_args()
    if not args.report and args.work is None:
        parser.error("--work is missing: name a folder for checkpoints")
    (RESULTS / "runs").mkdir(parents=True, exist_ok=True)
    runner = RecipeRunner()
    runner.stop_on_signals()

    def run(seed: int, arm: str) -> None:
        path = RESULTS / "runs" / f"{arm}-seed{seed}.json"
        if runner.stopping.is_set() or path.exists() and iterations_of(path) >= args.iterations:
            return
        command = [*TRAIN, "--max_steps", str(args.iterations), "--seed", str(seed), *ARMS[arm]]
        folder = args.work / f"{arm}-{seed}"
        commit, _ = code(("g2po_trl", "envs", *TRAIN[:1], TRAIN[2]))
        try:
            attempts = runner.run(folder, command, commit)
        except Busy:
            return
        if attempts is not None:
            facts = {"arm": arm, "seed": seed, "command": command, "attempts": attempts}
            write_json(path, {**facts, **collected(folder)})

    with ThreadPoolExecutor(args.jobs) as threads:
        wanted = [] if args.report else [threads.submit(run, seed, arm) for seed in args.seeds for arm in ARMS]
    for each in wanted:
        each.result()
    print(report())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Do branches pay, without a language model? The task of credit.py, by rule, at equal numbers of new steps.

    python benchmarks/credit_branches.py [--seeds 30] [--jobs 2] [--minutes M]
    python benchmarks/credit_branches.py --report

G2PO with unit steps of length 1. *plain*: groups of 8 episodes. The others: 5 episodes from the beginning, and 3 that
a rule may make branches (those it does not are played from the beginning). A branch plays with the turns that are
left; steps that are played again to return to its state are not counted as new. Every run plays the same number of new
steps, and its area is the mean over them of the success of episodes from the beginning. A run is one line of
RESULTS/runs.jsonl, and what is there is not run again. Prints and writes RESULTS/table.md: areas, differences to plain
in the same houses with 95 % bootstrap intervals, and new steps until a tenth and 70 % of the episodes are won.
"""

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import numpy as np
from credit import DEFAULT, KEYS, house_of, interval, update
from household import REWARD, Household, Rollout, play

from g2po_trl import StateGraph, g2po
from g2po_trl.credit.branching import RULES
from g2po_trl.credit.graph import TrajectoryRecord

RESULTS = Path(__file__).with_name("results") / "credit_branches"
ARMS = ["plain", *RULES]
LAMBDAS = [1.0, 0.5, 0.0]
NEW_STEPS = 150_000
HELD_BACK = 3


def records_of(rollout: Rollout, keys: list[bytes], origins: list[tuple[int | None, int]]) -> list[TrajectoryRecord]:
    return [
        TrajectoryRecord(
            "task",
            [keys[s] for s in rollout.state[e, : rollout.length[e]]],
            [True] * int(rollout.length[e]),
            REWARD * bool(rollout.won[e]),
            "success" if rollout.won[e] else "truncated",
            parent=parent,
            start=start,
        )
        for e, (parent, start) in enumerate(origins)
    ]


def play_on(
    house: Household, logits: np.ndarray, first: Rollout, points: list[tuple[int, int]], rng: np.random.Generator
) -> Rollout:
    """Branches from (episode, position) of an earlier rollout, with the turns that are left."""
    turns = DEFAULT["turns"]
    start = np.array([first.state[episode, position] for episode, position in points], dtype=np.int64)
    left = turns - np.array([position for _, position in points], dtype=np.int64)
    more = play(house, logits, len(points), turns, DEFAULT["slip"], rng, start)
    won = more.won & (more.length <= left)
    return Rollout(more.state, more.action, np.minimum(more.length, left), won)


def run(arm: str, value_lambda: float, seed: int) -> list[tuple[int, float]]:
    """(new steps so far, success of the episodes from the beginning) of each iteration."""
    rng, house = np.random.default_rng([seed, 1]), house_of(seed, DEFAULT["idle"])
    keys, logits = KEYS["state"](house), np.zeros(house.next_state.shape)
    held_back = 0 if arm == "plain" else HELD_BACK
    groups, size = DEFAULT["groups"], DEFAULT["group_size"] - held_back
    curve: list[tuple[int, float]] = []
    steps, iteration = 0, 0
    while steps < NEW_STEPS:
        first = play(house, logits, groups * size, DEFAULT["turns"], DEFAULT["slip"], rng)
        roots = records_of(first, keys, [(None, 0)] * (groups * size))
        grouped = [roots[i : i + size] for i in range(0, len(roots), size)]
        rollouts, won = [first], first.won
        if held_back:
            rule = RULES[arm] if arm in ("least_visited", "highest_spread") else partial(RULES[arm], seed=iteration)
            points = rule(StateGraph.from_records(grouped, DEFAULT["gamma"]), held_back)
            others = [group for group in range(groups) for _ in range(held_back)]
            for episode, _ in points:
                others.remove(episode // size)
            whole = play(house, logits, len(others), DEFAULT["turns"], DEFAULT["slip"], rng)
            branches = play_on(house, logits, first, points, rng)
            rollouts, won = [first, whole, branches], np.concatenate([first.won, whole.won])
            origins = [(episode % size, position) for episode, position in points]
            branch_groups = [episode // size for episode, _ in points]
            for group, record in zip(others, records_of(whole, keys, [(None, 0)] * len(others))):
                grouped[group].append(record)
            for group, record in zip(branch_groups, records_of(branches, keys, origins)):
                grouped[group].append(record)
            order = _order(groups, size, others, branch_groups)
        graph = StateGraph.from_records(grouped, DEFAULT["gamma"], value_lambda)
        states, actions = _steps(rollouts, order if held_back else None)
        update(house, logits, states, actions, g2po(graph), "unit", 1.0)
        steps, iteration = steps + graph.num_steps, iteration + 1
        curve.append((steps, float(won.mean())))
    return curve


def _order(groups: int, size: int, others: list[int], branch_groups: list[int]) -> list[int]:
    """Episodes as the graph has them: group by group, in each the first ones, the other whole ones, the branches."""
    of_group: list[list[int]] = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
    for number, group in enumerate([*others, *branch_groups], groups * size):
        of_group[group].append(number)
    return [number for members in of_group for number in members]


def _steps(rollouts: list[Rollout], order: list[int] | None) -> tuple[np.ndarray, np.ndarray]:
    state, action, length = (
        np.concatenate([getattr(r, name) for r in rollouts]) for name in ("state", "action", "length")
    )
    if order is not None:
        state, action, length = state[order], action[order], length[order]
    taken = np.arange(state.shape[1]) < length[:, None]
    return state[taken], action[taken]


def summary(arm: str, value_lambda: float, seed: int) -> dict:
    """Area, and new steps to 10 % and 70 %; `None` where it is not reached."""
    curve = run(arm, value_lambda, seed)
    steps, success = np.array([s for s, _ in curve]), np.array([w for _, w in curve])
    new = np.diff(np.minimum(steps, NEW_STEPS), prepend=0)
    smooth = np.convolve(success, np.ones(3) / 3, mode="valid")
    reached = {level: np.flatnonzero(smooth >= level) for level in (0.1, 0.7)}
    return {
        "area": round(float((success * new).sum() / NEW_STEPS), 5),
        **{f"to {level}": int(steps[found[0] + 1]) if len(found) else None for level, found in reached.items()},
    }


def table(runs: dict[tuple, dict]) -> str:
    lines = ["| λ | rule | houses | area | − plain | steps to 10 % | from 10 to 70 % |", "|---" * 7 + "|"]
    for value_lambda in LAMBDAS:
        of = {arm: {s: r for (a, v, s), r in runs.items() if (a, v) == (arm, value_lambda)} for arm in ARMS}
        for arm in ARMS:
            found = of[arm]
            if not found:
                continue
            pairs = [found[s]["area"] - of["plain"][s]["area"] for s in sorted(found.keys() & of["plain"].keys())]
            told = "–"
            if arm != "plain" and len(pairs) > 1:
                low, high = interval(pairs)
                told = f"{np.mean(pairs):+.3f} ± {(high - low) / 2:.3f}, {sum(d > 0 for d in pairs)}/{len(pairs)}"
            first = [r["to 0.1"] for r in found.values() if r["to 0.1"] is not None]
            rise = [r["to 0.7"] - r["to 0.1"] for r in found.values() if r["to 0.7"] is not None]
            cells = [f"{value_lambda:g}", arm, len(found), f"{np.mean([r['area'] for r in found.values()]):.3f}", told]
            cells += [f"{np.median(first):,.0f}" if first else "–", f"{np.median(rise):,.0f}" if rise else "–"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def load(path: Path) -> dict[tuple, dict]:
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    lines = [json.loads(line) for line in whole.splitlines()]
    return {(e.pop("arm"), e.pop("value_lambda"), e.pop("seed")): e for e in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing after so many minutes")
    parser.add_argument("--report", action="store_true", help="play nothing: write the table of what is there")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    path, started = options.results / "runs.jsonl", time.monotonic()
    runs = load(path)
    wanted = [
        key for seed in range(options.seeds) for v in LAMBDAS for arm in ARMS if (key := (arm, v, seed)) not in runs
    ]
    if wanted and not options.report:
        with ProcessPoolExecutor(options.jobs) as pool, path.open("a") as file:
            jobs = {pool.submit(summary, *key): key for key in wanted}
            for job in as_completed(jobs):
                if job.cancelled():
                    continue
                runs[jobs[job]] = job.result()
                arm, value_lambda, seed = jobs[job]
                file.write(json.dumps({"arm": arm, "value_lambda": value_lambda, "seed": seed, **job.result()}) + "\n")
                file.flush()
                if time.monotonic() - started > 60 * options.minutes:
                    pool.shutdown(wait=False, cancel_futures=True)
    text = table(runs)
    (options.results / "table.md").write_text(text + "\n")
    command = " ".join(["python benchmarks/credit_branches.py", *sys.argv[1:]])
    print(f"{command}: {len(runs)} runs, {time.monotonic() - started:.0f} s\n\n{text}")


if __name__ == "__main__":
    main()

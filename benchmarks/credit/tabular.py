"""Credit assignment without a language model: which estimator learns a household task from one reward at the end?

    python -m benchmarks.credit.tabular --output benchmarks/results/credit [--seeds 20] [--sweeps horizon group_size …]

A softmax policy with a logit for each state and action learns by the policy gradient; the advantages are the functions
the trainer uses. Every method plays the same number of episodes, in the same houses (one a seed). Measured is the
success over all iterations, the area under the learning curve: sooner or later most methods win, and the question is
how soon.

Advantages differ in size from method to method (RLOO's are not scaled; G2PO's are a sum of three), and at one learning
rate the largest wins, whatever it points at. So two kinds of update are shown, each at several sizes: `plain`, logits
+= rate x gradient, where size counts, and `unit`, logits += length x gradient / |gradient|, where direction alone
counts, as under Adam or gradient clipping. Sweeps are `unit` steps of length 1. Prints and writes the command, the
machine, every value, and means with 95 % confidence intervals over seeds (bootstrap).
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

import numpy as np

from benchmarks import figures
from benchmarks.common import facts, write_results
from benchmarks.credit.household import REWARD, Household, play, softmax
from g2po_trl import StateGraph, TrajectoryRecord, crbc, g2po, gigpo, graphgpo, grpo, hgpo, rloo

METHODS: dict[str, Callable[[StateGraph], np.ndarray]] = {
    "g2po": g2po,
    "g2po without A_EC": partial(g2po, edge_centric=False),
    "g2po without A_NC": partial(g2po, node_centric=False),
    "g2po without aggregation": partial(g2po, aggregate=False),
    "gigpo": gigpo,
    "graphgpo": graphgpo,
    "hgpo": hgpo,
    "crbc": crbc,
    "crbc 1:1": partial(crbc, value_weight=1.0),
    "grpo": grpo,
    "rloo": rloo,
}
SWEPT = ["g2po", "gigpo", "grpo", "rloo"]
DEFAULT = {
    "turns": 30,
    "groups": 16,
    "group_size": 8,
    "iterations": 60,
    "slip": 0.0,
    "key": "state",
    "idle": 1,
    "gamma": 0.95,
}
SWEEPS = {
    "turns": [15, 20, 30, 50],
    "group_size": [2, 4, 8, 16],
    "slip": [0.0, 0.1, 0.3],
    "idle": [1, 4, 16],
    "key": ["state", "other objects unseen", "processing unseen", "place alone"],
    "w": [0.0, 0.25, 0.5, 1.0, 2.0, 4.0],
}
STEPS = {"plain": [10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0], "unit": [0.3, 1.0, 3.0, 10.0]}


def run(
    method: str, seed: int, kind: str, size: float, w: float = 1.0, value_lambda: float = 1.0, **changed
) -> list[float]:
    """Success of each iteration's episodes."""
    options = {**DEFAULT, **changed}
    rng = np.random.default_rng([seed, 1])
    house = house_of(seed, options["idle"])
    keys = KEYS[options["key"]](house)
    estimate = METHODS[method]
    if w != 1.0:
        estimate = partial(estimate, step_weight=w)
    logits = np.zeros(house.next_state.shape)
    curve = []
    for _ in range(options["iterations"]):
        episodes = options["groups"] * options["group_size"]
        rollout = play(house, logits, episodes, options["turns"], options["slip"], rng)
        curve.append(float(rollout.won.mean()))
        records = [
            TrajectoryRecord(
                "task",
                [keys[s] for s in rollout.state[e, : rollout.length[e]]],
                [True] * int(rollout.length[e]),
                REWARD * bool(rollout.won[e]),
                "success" if rollout.won[e] else "truncated",
                None,
                None,
            )
            for e in range(episodes)
        ]
        groups = [records[i : i + options["group_size"]] for i in range(0, episodes, options["group_size"])]
        graph = StateGraph.from_records(groups, options["gamma"], value_lambda)
        taken = np.arange(options["turns"]) < rollout.length[:, None]
        update(house, logits, rollout.state[taken], rollout.action[taken], estimate(graph), kind, size)
    return curve


@cache
def house_of(seed: int, idle: int) -> Household:
    return Household.random(np.random.default_rng([seed, 0]), idle=idle)


def update(house, logits, states, actions, advantages, kind, size) -> None:
    """One step of the policy gradient, mean over all steps: d log pi(a|s) / d logits = onehot(a) - pi(.|s)."""
    visited, row = np.unique(states, return_inverse=True)
    gradient, weight = np.zeros((len(visited), logits.shape[1])), np.zeros(len(visited))
    np.add.at(gradient, (row, actions), advantages)
    np.add.at(weight, row, advantages)
    gradient -= weight[:, None] * softmax(house, logits, visited)
    length = len(states) if kind == "plain" else np.linalg.norm(gradient)
    if length > 0:
        logits[visited] += size * gradient / length


def keys_by(feature: Callable[[tuple], object]) -> Callable[[Household], list[bytes]]:
    """Keys of 16 bytes for the states of a house, equal where the feature is: what the graph can tell apart."""

    def keys(house: Household) -> list[bytes]:
        numbers: dict[object, int] = {}
        return [numbers.setdefault(feature(s), len(numbers)).to_bytes(16, "little") for s in house.states]

    return cache(keys)


# The policy sees the whole state; these are what the graph merges. The second merges what does not matter, the others
# states of different worth.
KEYS = {
    "state": keys_by(lambda state: state),
    "other objects unseen": keys_by(lambda state: (state[0], state[1][0], state[2], -1 in state[1])),
    "processing unseen": keys_by(lambda state: state[:2]),
    "place alone": keys_by(lambda state: state[0]),
}


def interval(values: list[float]) -> tuple[float, float]:
    """95 % bootstrap confidence interval of the mean."""
    draws = np.random.default_rng(0).choice(values, size=(10_000, len(values))).mean(axis=1)
    return tuple(float(x) for x in np.quantile(draws, [0.025, 0.975]))


def compare(pool, methods, kind: str, sizes: list[float], seeds: int, **options) -> dict[str, dict[str, dict]]:
    """[method][size of the step]: areas under the learning curve, their mean and interval, the mean curve."""
    jobs = {
        (method, size): [pool.submit(run, method, seed, kind, size, **options) for seed in range(seeds)]
        for method in methods
        for size in sizes
    }
    result: dict[str, dict[str, dict]] = {method: {} for method in methods}
    for (method, size), runs in jobs.items():
        curves = np.array([job.result() for job in runs])
        areas = curves.mean(axis=1)
        result[method][f"{size:g}"] = {
            "area": round(float(areas.mean()), 4),
            "interval": [round(x, 4) for x in interval(areas)],
            "areas": [round(float(x), 4) for x in areas],
            "curve": [round(float(x), 4) for x in curves.mean(axis=0)],
        }
    return result


def show(title: str, result: dict[str, dict[str, dict]]) -> None:
    """Methods by sizes, means with intervals."""
    sizes = list(next(iter(result.values())))
    print(f"\n{title}\n\n{'':<25}" + "".join(f"{size:>22}" for size in sizes))
    for method, row in result.items():
        cells = [f"{row[s]['area']:.2f} [{row[s]['interval'][0]:.2f}, {row[s]['interval'][1]:.2f}]" for s in sizes]
        print(f"{method:<25}" + "".join(f"{cell:>22}" for cell in cells))
    sys.stdout.flush()


def plot(result: dict, output: Path) -> None:
    """The curves behind the first column of unit steps of length 1."""
    curves = {method: [row["1"]["curve"]] for method, row in result["unit"].items()}
    figures.save(figures.learning_curves(curves, window=3), output, "curves")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--sweep_seeds", type=int, default=10)
    parser.add_argument("--sweeps", nargs="*", choices=list(SWEEPS), default=list(SWEEPS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    started = time.time()
    result = {
        **facts("numpy"),
        "setting": DEFAULT,
        "states": [len(house_of(seed, DEFAULT["idle"]).next_state) for seed in range(options.seeds)],
        "shortest": [house_of(seed, DEFAULT["idle"]).shortest for seed in range(options.seeds)],
        "sweeps": {},
    }
    with ProcessPoolExecutor(options.jobs) as pool:
        for kind, sizes in STEPS.items():
            result[kind] = compare(pool, METHODS, kind, sizes, options.seeds)
            show(f"{kind} steps of size …: mean success over 60 iterations, {options.seeds} seeds", result[kind])
        for name in options.sweeps:
            values = {}
            for value in SWEEPS[name]:
                methods = ["g2po"] if name == "w" else SWEPT
                values[value] = compare(pool, methods, "unit", [1.0], options.sweep_seeds, **{name: value})
            by_method = {m: {str(value): swept[m]["1"] for value, swept in values.items()} for m in methods}
            result["sweeps"][name] = by_method
            show(f"{name} = …: unit steps of length 1, {options.sweep_seeds} seeds", by_method)
    result["seconds"] = round(time.time() - started, 1)
    write_results(options.output, result, "results.json.gz")
    plot(result, options.output)
    print(f"\n{result['seconds']} s; all values in {options.output / 'results.json.gz'}")


if __name__ == "__main__":
    main()

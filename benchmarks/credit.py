"""Credit assignment without a language model: which estimator learns a household task from one reward at the end?

    python benchmarks/credit.py --output benchmarks/results/credit [--seeds 20] [--sweeps horizon group_size …]

A softmax policy with a logit for each state and action learns by the policy gradient; the advantages are the functions
the trainer uses. Every method plays the same number of episodes, in the same houses (one a seed). Advantages differ in
size from method to method (RLOO's are not scaled), so each is shown at the learning rate that suits it best, of those
tried, and at every other. Measured is the success over all iterations, the area under the learning curve: sooner or
later most methods win, and the question is how soon. Prints and writes the command, the machine, every value, and
means with 95 % confidence intervals over seeds (bootstrap). Sweeps keep the learning rates found best in the default
setting.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

import numpy as np
from household import REWARD, Household, play, softmax

from g2po_trl import StateGraph, TrajectoryRecord, g2po, gigpo, grpo, rloo

METHODS: dict[str, Callable[[StateGraph], np.ndarray]] = {
    "g2po": g2po,
    "g2po without A_EC": partial(g2po, edge_centric=False),
    "g2po without A_NC": partial(g2po, node_centric=False),
    "g2po without aggregation": partial(g2po, aggregate=False),
    "gigpo": gigpo,
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
    "merged": 0.0,
    "gamma": 0.95,
}
SWEEPS = {
    "turns": [15, 20, 30, 50],
    "group_size": [2, 4, 8, 16],
    "slip": [0.0, 0.1, 0.3],
    "merged": [0.0, 0.1, 0.3, 0.6],
    "w": [0.0, 0.25, 0.5, 1.0, 2.0, 4.0],
}
LEARNING_RATES = [10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0]


def run(method: str, seed: int, learning_rate: float, w: float = 1.0, **changed) -> list[float]:
    """Success of each iteration's episodes."""
    options = {**DEFAULT, **changed}
    rng = np.random.default_rng([seed, 1])
    house = house_of(seed)
    keys = merged_keys(len(house.next_state), options["merged"], np.random.default_rng([seed, 2]))
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
            )
            for e in range(episodes)
        ]
        size = options["group_size"]
        graph = StateGraph.from_records([records[i : i + size] for i in range(0, episodes, size)], options["gamma"])
        taken = np.arange(options["turns"]) < rollout.length[:, None]
        update(house, logits, rollout.state[taken], rollout.action[taken], estimate(graph), learning_rate)
    return curve


@cache
def house_of(seed: int) -> Household:
    return Household.random(np.random.default_rng([seed, 0]))


def update(house, logits, states, actions, advantages, learning_rate) -> None:
    """One step of the policy gradient, mean over all steps: d log pi(a|s) / d logits = onehot(a) - pi(.|s)."""
    visited, row = np.unique(states, return_inverse=True)
    gradient, weight = np.zeros((len(visited), logits.shape[1])), np.zeros(len(visited))
    np.add.at(gradient, (row, actions), advantages)
    np.add.at(weight, row, advantages)
    gradient -= weight[:, None] * softmax(house, logits, visited)
    logits[visited] += learning_rate * gradient / len(states)


def merged_keys(number: int, share: float, rng: np.random.Generator) -> list[bytes]:
    """A key of 16 bytes for each state; a share of the states wrongly has the key of another."""
    keys = np.arange(number)
    wrong = rng.permutation(number)[: int(share * number)]
    keys[wrong] = rng.integers(number, size=len(wrong))
    return [int(key).to_bytes(16, "little") for key in keys]


def interval(values: list[float]) -> tuple[float, float]:
    """95 % bootstrap confidence interval of the mean."""
    draws = np.random.default_rng(0).choice(values, size=(10_000, len(values))).mean(axis=1)
    return tuple(float(x) for x in np.quantile(draws, [0.025, 0.975]))


def compare(pool, rates: dict[str, list[float]], seeds: int, **options) -> dict[str, dict]:
    """Each method at each of its learning rates over seeds; the rate with the largest mean area stands for it."""
    jobs = {
        (method, rate): [pool.submit(run, method, seed, rate, **options) for seed in range(seeds)]
        for method in rates
        for rate in rates[method]
    }
    result = {}
    for method in rates:
        curves = {rate: np.array([job.result() for job in jobs[method, rate]]) for rate in rates[method]}
        areas = {rate: curve.mean(axis=1) for rate, curve in curves.items()}
        best = max(areas, key=lambda rate: areas[rate].mean())
        result[method] = {
            "learning_rate": best,
            "area": round(float(areas[best].mean()), 4),
            "interval": [round(x, 4) for x in interval(areas[best])],
            "areas": [round(float(x), 4) for x in areas[best]],
            "last": round(float(curves[best][:, -1].mean()), 4),
            "curve": [round(float(x), 4) for x in curves[best].mean(axis=0)],
            "area_by_learning_rate": {str(rate): round(float(area.mean()), 4) for rate, area in areas.items()},
        }
    return result


def show(title: str, result: dict[str, dict]) -> None:
    print(f"\n{title}\n")
    for method, row in sorted(result.items(), key=lambda item: -item[1]["area"]):
        low, high = row["interval"]
        others = "  ".join(f"{float(rate):g}: {area:.2f}" for rate, area in row["area_by_learning_rate"].items())
        print(f"  {method:<25} {row['area']:.3f} [{low:.3f}, {high:.3f}]  last {row['last']:.2f}   by rate {others}")
    sys.stdout.flush()


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
        "command": " ".join(["python benchmarks/credit.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "setting": DEFAULT,
        "states": [len(house_of(seed).next_state) for seed in range(options.seeds)],
        "shortest": [house_of(seed).shortest for seed in range(options.seeds)],
        "sweeps": {},
    }
    with ProcessPoolExecutor(options.jobs) as pool:
        methods = compare(pool, dict.fromkeys(METHODS, LEARNING_RATES), options.seeds)
        result["methods"] = methods
        show(f"mean success over {DEFAULT['iterations']} iterations, {options.seeds} seeds", methods)
        for name in options.sweeps:
            for value in SWEEPS[name]:
                rates = {m: [methods[m]["learning_rate"]] for m in (["g2po"] if name == "w" else SWEPT)}
                swept = compare(pool, rates, options.sweep_seeds, **{name: value})
                result["sweeps"].setdefault(name, {})[str(value)] = swept
                show(f"{name} = {value}, {options.sweep_seeds} seeds", swept)
    result["seconds"] = round(time.time() - started, 1)
    (options.output / "results.json").write_text(json.dumps(result, indent=1))
    print(f"\n{result['seconds']} s; all values in {options.output / 'results.json'}")


if __name__ == "__main__":
    main()

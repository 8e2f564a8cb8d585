"""From trajectories to advantages: what an iteration's graph and estimate cost, beside the paper's released code.

    python -m benchmarks.speed.advantage_speed --output benchmarks/results/advantage_speed [--released core_g2po.py]

`--released` is the file g2po/core_g2po.py of the released code (github.com/Nala-YN/G2PO); it is read where it lies and
is no part of this project. Without it only our side is measured. Both get the same steps in memory and must give the
same advantages (ours with statistics over steps and a penalty of 0.1). Measured in one run, in turns: medians, ratios
and every value.
"""

import argparse
import importlib.util
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.common import facts, interleaved, write_results
from g2po_trl import StateGraph, Step, Trajectory, g2po

TEXT_LENGTH = 400
# name -> (groups, trajectories of a group, steps in all, tokens of a completion, repetitions). The released code
# copies an advantage to each token of a completion, up to 512 in its scripts; 1 is in its favour.
SIZES = {
    "the paper's rollout": (16, 8, 4235, 512, 15),
    "the paper's rollout, completions of 1 token": (16, 8, 4235, 1, 15),
    "64 groups of 64, completions of 1 token": (64, 64, 134_000, 1, 5),
}


def make_groups(num_groups: int, size: int, num_steps: int, seed: int = 0) -> list[list[Trajectory]]:
    """Random trajectories over a pool of observations of 400 characters, about five visits each."""
    rng = np.random.default_rng(seed)
    episodes = num_groups * size
    lengths = np.full(episodes, num_steps // episodes)
    lengths[: num_steps - lengths.sum()] += 1
    lengths += np.where(np.arange(episodes) % 2, 5, -5) * (lengths[-1] > 10) * (episodes % 2 == 0)  # unequal
    alphabet = np.array(list("abcdefghijklmnopqrstuvwxyz     "))
    groups = []
    for g in range(num_groups):
        of_group = lengths[g * size : (g + 1) * size]
        pool = ["".join(rng.choice(alphabet, TEXT_LENGTH)) for _ in range(max(2, int(of_group.sum()) // 5))]
        group = []
        for length in of_group:
            won = rng.random() < 0.5
            steps = [Step(pool[rng.integers(len(pool))], "go", valid=bool(rng.random() < 0.95)) for _ in range(length)]
            group.append(Trajectory(f"task {g}", steps, 10.0 * won, "success" if won else "failure"))
        groups.append(group)
    return groups


def ours(groups: list[list[Trajectory]]) -> np.ndarray:
    graph = StateGraph.from_groups(groups, 0.95)
    return g2po(graph, invalid_action_penalty=0.1, episode_statistics="step")


def load_released(path: Path):
    """The released module; `verl`, which it imports for a type's name alone, is stood in for."""
    sys.modules.setdefault("verl", types.SimpleNamespace(DataProto=object))
    spec = importlib.util.spec_from_file_location("released_core_g2po", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_released(module, groups: list[list[Trajectory]], completion_tokens: int):
    """The released estimator on the same steps, as its trainer calls it."""
    import torch

    flat = [
        (f"{g}", f"{g}-{t}", trajectory, step)
        for g, group in enumerate(groups)
        for t, trajectory in enumerate(group)
        for step in trajectory.steps
    ]
    index, trajectory_index = (
        np.array(column, dtype=object) for column in ([f[0] for f in flat], [f[1] for f in flat])
    )
    rewards = np.array([trajectory.reward for _, _, trajectory, _ in flat])
    valid = np.array([step.valid for *_, step in flat])
    batch = types.SimpleNamespace(
        batch={"responses": torch.zeros(len(flat), completion_tokens)},
        non_tensor_batch={
            "episode_rewards": rewards,
            "anchor_obs": np.array([step.observation for *_, step in flat], dtype=object),
            "traj_uid": trajectory_index,
            "uid": index,
        },
    )
    mask = torch.ones(len(flat), completion_tokens)
    # The reward of a step as its trainer hands it over: the episode's, less the penalty of an invalid completion.
    scores = torch.zeros(len(flat), completion_tokens)
    scores[:, -1] = torch.tensor(rewards - 0.1 * ~valid)

    def estimate() -> np.ndarray:
        values, node, next_node = module.compute_group_aggregation_values(batch)
        advantages, _ = module.compute_g2po_outcome_advantage(
            token_level_rewards=scores.clone(),
            step_rewards=torch.tensor(values),
            response_mask=mask,
            index=index,
            traj_index=trajectory_index,
            group_idx=node,
            next_group_idx=next_node,
            is_action_valid=valid,
            mode="mean_std_norm",
        )
        return advantages[:, 0].numpy()

    return estimate


def seconds(function, *args, at_least: float = 0.2) -> float:
    """Mean time of a call, over as many as take `at_least` seconds: what else the machine does then hits all alike."""
    started, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - started < at_least:
        function(*args)
        calls += 1
    return (time.perf_counter() - started) / calls


def timed(function: Callable[..., object], *arguments: object) -> Callable[[int], float]:
    """Return an arm of `interleaved`: the seconds of a call."""
    return lambda _repetition: seconds(function, *arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--released", type=Path, help="g2po/core_g2po.py of the released code")
    parser.add_argument("--repetitions", type=int, help="default: 15 or 5, by size")
    args = parser.parse_args()
    module = load_released(args.released) if args.released else None
    results = {**facts("numpy"), "sizes": {}}
    for name, (num_groups, size, num_steps, completion_tokens, repetitions) in SIZES.items():
        groups = make_groups(num_groups, size, num_steps)
        entry = {"steps": num_steps, "trajectories": num_groups * size, "completion_tokens": completion_tokens}
        arms = {"ours_seconds": timed(ours, groups)}
        if module:
            released = make_released(module, groups, completion_tokens)
            entry["largest_difference"] = float(np.abs(ours(groups) - released()).max())
            arms["released_seconds"] = timed(released)
        entry |= interleaved(arms, args.repetitions or repetitions)
        middle = {arm: f"{1000 * median(entry[arm]):.1f} ms" for arm in arms}
        print(f"{name}: {middle}, advantages differ by {entry.get('largest_difference')}", flush=True)
        results["sizes"][name] = entry
    write_results(args.output, results)


if __name__ == "__main__":
    main()

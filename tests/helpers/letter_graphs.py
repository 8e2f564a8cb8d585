"""Trajectories and graphs of letters, and every estimator by name."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from g2po_trl import StateGraph, Step, Trajectory, crbc, g2po, gigpo, graphgpo, hgpo, rewardflow, rloo
from g2po_trl.credit.estimators.registry import ESTIMATORS as ROWS

GOLDEN_ADVANTAGES = Path(__file__).parents[3] / "shared" / "golden" / "g2po_advantages.json"
RELEASED = {"invalid_action_penalty": 0.1, "episode_statistics": "step"}
ESTIMATORS = {
    **{name: row.function for name, row in ROWS.items()},
    "g2po released": lambda graph: g2po(graph, **RELEASED),
    "g2po unscaled": lambda graph: g2po(graph, step_weight=0.5, scale_by_std=False),
    "g2po without A_NC": lambda graph: g2po(graph, node_centric=False),
    "g2po without A_EC": lambda graph: g2po(graph, edge_centric=False),
    "g2po without aggregation": lambda graph: g2po(graph, aggregate=False),
    "gigpo released": lambda graph: gigpo(graph, **RELEASED),
    "rloo with penalty": lambda graph: rloo(graph, invalid_action_penalty=0.1),
    "graphgpo with step statistics": lambda graph: graphgpo(graph, **RELEASED),
    "rewardflow with step statistics": lambda graph: rewardflow(graph, **RELEASED),
    "hgpo unscaled, long history": lambda graph: hgpo(graph, False, 0.1, history_length=5, depth_exponent=2.0),
    "crbc with step statistics": lambda graph: crbc(graph, least_std=0.0, **RELEASED),
}


def episode(keys: Sequence[str], reward: float, task="t", outcome=None, invalid=()) -> Trajectory:
    """One step for each letter of `keys`."""
    steps = [Step(key, "go", valid=place not in invalid) for place, key in enumerate(keys)]
    return Trajectory(task, steps, reward, outcome or ("success" if reward > 0 else "failure"))


HAND = [episode("hk", 8.0), episode("h", 0.0)]


def graph_of(*groups: list[Trajectory], gamma: float = 0.5) -> StateGraph:
    return StateGraph.from_groups(groups, gamma=gamma)


def random_groups(rng: np.random.Generator, num_groups: int = 3, group_size: int = 5) -> list[list[Trajectory]]:
    def random_episode(task):
        keys = "".join(rng.choice(list("abcdef"), size=rng.integers(1, 12)))
        reward = float(rng.choice([0.0, 10.0, 3.7]))
        return episode(keys, reward, task, invalid=set(rng.integers(0, 12, size=3).tolist()))

    return [[random_episode(f"task {number}") for _ in range(group_size)] for number in range(num_groups)]


def random_walks(seed: int, num_groups: int = 3) -> list[list[Trajectory]]:
    """Loops, self-loops, ends of several worths, and a share of errors that enter nothing."""
    rng = random.Random(seed)

    def walk(task):
        keys = "".join(rng.choices("abcdef", k=rng.randint(1, 12)))
        reward = rng.choice([0.0, 10.0, rng.uniform(-5, 5)])
        return episode(keys, reward, task, rng.choice(["success", "failure", "truncated", "error"]))

    return [[walk(f"task {g}") for _ in range(rng.randint(1, 6))] for g in range(rng.randint(1, num_groups))]


def golden_graph(case: dict, value_lambda: float = 1.0) -> StateGraph:
    def recorded(task, trajectory):
        steps = trajectory["steps"]
        invalid = [place for place, step in enumerate(steps) if not step["valid"]]
        return episode([step["obs"] for step in steps], trajectory["reward"], task, invalid=invalid)

    groups = [[recorded(group["name"], one) for one in group["trajectories"]] for group in case["groups"]]
    return StateGraph.from_groups(groups, case["gamma"], value_lambda)


def solved_values(groups: list[list[Trajectory]], gamma: float, value_lambda: float) -> dict[tuple[int, str], float]:
    """V of each state of each group: one linear system in all V and all G, written down equation by equation."""
    unknown: dict[tuple, int] = {}
    equations: list[tuple[dict[tuple, float], float]] = []
    for g, group in enumerate(groups):
        visits: dict[str, list[tuple]] = {}
        for t, trajectory in enumerate(group):
            if trajectory.outcome == "error":
                continue
            for j, step in enumerate(trajectory.steps):
                name = ("G", g, t, j)
                visits.setdefault(step.key, []).append(name)
                row = {name: 1.0}
                if j + 1 == len(trajectory.steps):
                    equations.append((row, gamma * trajectory.reward))
                else:
                    row["V", g, trajectory.steps[j + 1].key] = -gamma * (1 - value_lambda)
                    row["G", g, t, j + 1] = -gamma * value_lambda
                    equations.append((row, 0.0))
        for key, names in visits.items():
            equations.append(({("V", g, key): 1.0, **{name: -1 / len(names) for name in names}}, 0.0))
    for row, _ in equations:
        for name in row:
            unknown.setdefault(name, len(unknown))
    matrix, constant = np.zeros((len(equations), len(unknown))), np.zeros(len(equations))
    for number, (row, value) in enumerate(equations):
        constant[number] = value
        for name, coefficient in row.items():
            matrix[number, unknown[name]] += coefficient
    solution = np.linalg.solve(matrix, constant)
    return {name[1:]: solution[number] for name, number in unknown.items() if name[0] == "V"}

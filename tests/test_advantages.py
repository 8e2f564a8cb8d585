"""Advantages: the golden cases of both conventions, exact numbers by hand, and what must not matter."""

import json
from pathlib import Path

import numpy as np
import pytest

from g2po_trl import (
    StateGraph,
    Step,
    Trajectory,
    edge_advantage,
    episode_advantage,
    g2po,
    gigpo,
    grpo,
    node_advantage,
    rloo,
)

GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "g2po_advantages.json"
needs_golden = pytest.mark.skipif(not GOLDEN.exists(), reason="golden advantages are not beside the checkout")
RELEASED = {"invalid_action_penalty": 0.1, "episode_statistics": "step"}
ESTIMATORS = {
    "g2po": g2po,
    "g2po released": lambda graph: g2po(graph, **RELEASED),
    "g2po unscaled": lambda graph: g2po(graph, step_weight=0.5, scale_by_std=False),
    "gigpo": gigpo,
    "gigpo released": lambda graph: gigpo(graph, **RELEASED),
    "grpo": grpo,
    "rloo": rloo,
    "rloo with penalty": lambda graph: rloo(graph, invalid_action_penalty=0.1),
}


def episode(keys: str, reward: float, invalid=(), task="t", outcome=None) -> Trajectory:
    """One step for each letter of `keys`."""
    steps = [Step(key, "go", valid=place not in invalid) for place, key in enumerate(keys)]
    return Trajectory(task, steps, reward, outcome or ("success" if reward > 0 else "failure"))


def graph_of(*groups: list[Trajectory], gamma: float = 0.5) -> StateGraph:
    return StateGraph.from_groups(groups, gamma=gamma)


def random_groups(rng: np.random.Generator, num_groups: int = 3, group_size: int = 5) -> list[list[Trajectory]]:
    return [
        [
            episode(
                "".join(rng.choice(list("abcdef"), size=rng.integers(1, 12))),
                float(rng.choice([0.0, 10.0, 3.7])),
                invalid=set(rng.integers(0, 12, size=3).tolist()),
                task=f"task {number}",
            )
            for _ in range(group_size)
        ]
        for number in range(num_groups)
    ]


# --- golden cases ---------------------------------------------------------------------------------------------------


def golden_cases() -> list:
    cases = json.loads(GOLDEN.read_text())["cases"] if GOLDEN.exists() else []
    return [pytest.param(case, id=case["id"]) for case in cases]


def golden_graph(case: dict) -> StateGraph:
    groups = [
        [
            Trajectory(
                group["name"],
                [Step(step["obs"], "", valid=step["valid"]) for step in trajectory["steps"]],
                trajectory["reward"],
                "success" if trajectory["reward"] > 0 else "failure",
            )
            for trajectory in group["trajectories"]
        ]
        for group in case["groups"]
    ]
    return StateGraph.from_groups(groups, gamma=case["gamma"])


def flat(expected) -> np.ndarray:
    """The numbers of nested lists, in order."""
    return np.array([x for part in expected for x in flat(part)] if isinstance(expected, list) else [expected])


def assert_close(actual: np.ndarray, expected, name: str):
    np.testing.assert_allclose(actual, flat(expected), rtol=1e-4, atol=1e-4, err_msg=name)


@needs_golden
def test_there_are_sixty_golden_cases():
    assert len(golden_cases()) == 60


@needs_golden
@pytest.mark.parametrize("case", golden_cases())
def test_paper_convention(case):
    graph, w, scale = golden_graph(case), case["w"], case["scale_by_std"]
    computed = {
        "value": graph.values,
        "delta": graph.next_values - graph.values,
        "EP": episode_advantage(graph, scale),
        "NC": node_advantage(graph, scale),
        "EC": edge_advantage(graph, scale),
        "advantage": g2po(graph, w, scale),
        "grpo": grpo(graph, scale),
        "rloo": rloo(graph),
        "gigpo": gigpo(graph, w, scale),
    }
    for name, actual in computed.items():
        assert_close(actual, [group[name] for group in case["expected"]["paper"]], name)
    assert set(computed) == set(case["expected"]["paper"][0])


@needs_golden
@pytest.mark.parametrize("case", golden_cases())
def test_released_convention(case):
    expected = case["expected"]["released"]
    if expected is None:
        pytest.skip("the released code gives NaN for this case")
    graph = golden_graph(case)
    assert_close(graph.values, expected["value"], "value")
    actual = g2po(graph, case["w"], case["scale_by_std"], case["invalid_action_penalty"], "step")
    assert_close(actual, expected["advantage"], "advantage")

"""Credit needs numpy and xxhash alone; lists in, one number a step out, and from steps to tokens."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

from g2po_trl import Step, Trajectory
from g2po_trl.credit import StateGraph, g2po, gigpo, rloo, spread_over_tokens, step_advantages

# Returns 2.5, 5 and 0, 0; V(hall) = 1.25, V(kitchen) = 5, V(cellar) = 0. Not scaled: A_EP = ±5, A_NC = ±2.5 in the
# hall and 0 in the others, delta = 3.75, 5, -1.25, 0 with mean 1.875.
BY_HAND = [5 + 2.5 + 1.875, 5 + 0 + 3.125, -5 - 2.5 - 3.125, -5 + 0 - 1.875]
ALONE = """
import sys
from importlib.abc import MetaPathFinder

ALLOWED = sys.stdlib_module_names | {"numpy", "xxhash", "g2po_trl"}

class Nothing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED and not name.startswith("_sysconfigdata"):
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Nothing())
try:
    import torch
    print("torch was imported")
except ImportError:
    pass

import g2po_trl.credit
from g2po_trl import StateGraph, Step, Trajectory, g2po

paths = {"success": ["hall", "kitchen"], "failure": ["hall", "cellar"]}
group = [Trajectory("t", [Step(room, "go") for room in paths[end]], 10.0 * (end == "success"), end) for end in paths]
print(g2po(StateGraph.from_groups([group], gamma=0.5), scale_by_std=False).tolist())
from g2po_trl.cli import main

main(["credit", sys.argv[1]])
loaded = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
print(sorted(loaded - {"g2po_trl", "__main__"} - {name for name in loaded if name.startswith("_")}))
"""


def test_credit_runs_where_nothing_but_numpy_and_xxhash_can_be_imported(tmp_path):
    """And `g2po credit`, whole."""
    asks = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "I go."}]
    (tmp_path / "log.jsonl").write_text(json.dumps({"task_id": "t", "reward": 1, "messages": asks}))
    command, root = [sys.executable, "-c", ALONE, tmp_path / "log.jsonl"], Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == str(BY_HAND) and run.stdout.splitlines()[-1] == "['numpy', 'xxhash']"
    assert (tmp_path / "log-credit" / "credit.jsonl").is_file()


def test_step_advantages_are_those_of_the_graph_in_any_order():
    keys = [["hall", "kitchen"], ["gate"], ["hall", "cellar", "hall"], ["gate", "gate"], ["hall"]]
    rewards, groups = [10.0, 0.0, 0.0, 3.0, 10.0], ["b", ("a", 1), "b", ("a", 1), "b"]
    valid = [[True, False], [True], [True] * 3, [False, True], [True]]
    options = {"step_weight": 0.5, "invalid_action_penalty": 0.1}
    got = step_advantages(
        keys, rewards, groups, valid=valid, estimator=partial(g2po, **options), gamma=0.9, value_lambda=0.5
    )
    trajectories = [
        Trajectory("t", [Step(k, "", valid=v) for k, v in zip(*episode)], reward, "failure")
        for *episode, reward in zip(keys, valid, rewards)
    ]
    graph = StateGraph.from_groups(
        [[trajectories[i] for i in (0, 2, 4)], [trajectories[i] for i in (1, 3)]], gamma=0.9, value_lambda=0.5
    )
    expected = g2po(graph, **options)
    for episode, part in zip((0, 2, 4, 1, 3), np.split(expected, [2, 5, 6, 7])):
        np.testing.assert_array_equal(got[episode], part)
    assert step_advantages([], [], []) == []
    lists = [[[*"ab"], [*"ac"]], [1.0, 0.0], [7, 7]]
    tensors = step_advantages(lists[0], *map(torch.tensor, lists[1:]))
    np.testing.assert_array_equal(tensors, step_advantages(*lists))


def test_an_episode_without_a_result_is_compared_with_none():
    keys = [["hall", "kitchen"], ["hall", "cellar"]]
    alone = step_advantages(keys, [10.0, 0.0], [0, 0], estimator=gigpo)
    np.testing.assert_array_equal(
        np.concatenate(alone), np.concatenate(step_advantages(keys, [10.0, 0.0], [0, 0], estimator="gigpo"))
    )
    *rest, lost = step_advantages([*keys, ["hall"]], [10.0, 0.0, None], [0, 0, 0], estimator=gigpo)
    np.testing.assert_array_equal(np.concatenate(rest), np.concatenate(alone))
    assert lost.tolist() == [0.0]
    assert step_advantages([["a"], ["a"]], [4.0, 0.0], [0, 0], estimator=rloo)[0].tolist() == [4.0]


def test_each_run_of_ones_gets_its_number():
    assert spread_over_tokens([1.5, -2.0], [0, 1, 1, 0, 0, 1, 0]).tolist() == [0, 1.5, 1.5, 0, 0, -2.0, 0]
    assert spread_over_tokens([3.0], [1, 1]).tolist() == [3.0, 3.0]
    assert spread_over_tokens([3.0, 4.0], [0, 0, 0]).tolist() == [0, 0, 0], "a row that trains nothing"

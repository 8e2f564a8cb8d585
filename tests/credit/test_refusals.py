"""What graphs, estimators and keys refuse, by the field that the error names."""

from functools import partial

import numpy as np
import pytest
from letter_graphs import HAND, episode, graph_of
from refusals import refused

from g2po_trl import StateGraph, Step, Trajectory
from g2po_trl.credit import ESTIMATORS, episode_advantage, spread_over_tokens, step_advantages
from g2po_trl.credit.assignment import check_advantages
from g2po_trl.credit.state_keys import assign_keys, make_state_key, similarity_threshold

ONE = Trajectory("t", [Step("hall", "go")], 1.0, "success")
GRAPHS = [
    *((([[ONE]], {"gamma": gamma}), "gamma") for gamma in (0.0, -0.5, 1.01, float("nan"))),
    *((([[ONE]], {"value_lambda": value}), "value_lambda") for value in (-0.1, 1.5, float("nan"), "auto")),
    (([], {}), "groups"),
    (([ONE], {}), "groups[0]"),
    (([[ONE, "t"]], {}), "groups[0]"),
    ((["t"], {}), "groups[0]"),
    (([[ONE], []], {}), "groups[1]"),
    (([[episode("a", 0.0, "t"), episode("a", 0.0, "u")]], {}), "groups[0]"),
    (([[episode("a", 0.0), episode("", 0.0)]], {}), "groups[0][1].steps"),
    *((([[episode("a", reward)]], {}), "groups[0][0].reward") for reward in (float("nan"), float("inf"))),
]
OPTIONS = [
    *((name, {"episode_statistics": "token"}) for name in ("g2po", "gigpo", "grpo", "graphgpo", "crbc")),
    *(("graft", options) for options in ({"gamma": 1.0}, {"gae_lambda": 1.5})),
    *(("graphhca", options) for options in ({"gamma": 1.0}, {"floor": 0.0})),
    *(("crbc", options) for options in ({"gamma": 0.0}, {"value_weight": -1.0}, {"least_std": -1.0})),
    ("rewardflow", {"decay": 1.0}),
    ("graphgpo", {"omega": 0.0}),
    ("hgpo", {"depth_exponent": -1.0}),
]
LISTS = [
    (([["a"]], [1.0, 2.0], [0]), "number of episodes"),
    (([["a"]], [1.0], [0], [[True, True]]), "valid[0]"),
    (([["a"], [7]], [1.0, 2.0], [0, 0]), "keys[1]"),
    ((["hall", "cellar"], [1.0, 0.0], ["a", "a"]), "keys"),
    ((["", "hall"], [1.0, 0.0], ["a", "a"]), "keys"),
    (([["a"], ["b"]], [1.0, 0.0], "aa"), "groups"),
    (([["a"]], [1.0], ["a"], ["y"]), "valid"),
    (([["a"]], [1.0], ["a"], None, "gpo"), "estimator"),
    (([[]], [1.0], ["task"]), "groups[0][0].steps"),
    (([["a"]], [float("nan")], ["task"]), "groups[0][0].reward"),
]
KEYS = ["same", "similar:", "similar:0", "similar:1", "similar:nan", "similar:90%", "similar 0.9", "Similar", "", 0.9]
REFUSALS = [
    *((partial(StateGraph.from_groups, groups, **options), field) for (groups, options), field in GRAPHS),
    *((partial(ESTIMATORS[name].function, graph_of(HAND), **of), next(iter(of))) for name, of in OPTIONS),
    (partial(episode_advantage, graph_of(HAND), episode_statistics="token"), "episode_statistics"),
    *((partial(step_advantages, *arguments), field) for arguments, field in LISTS),
    *((partial(spread_over_tokens, *of), "mask") for of in (([1.0], [1, 0, 1]), ([1.0, 2.0], [0, 1, 1]))),
    *((partial(similarity_threshold, key), "state_key") for key in KEYS),
    (partial(make_state_key("files", None), ONE.steps[0]), "state_key"),
    (partial(make_state_key, None, ["case", "number"]), "state_key_ignores"),
    (partial(assign_keys, [ONE], lambda step: 7), "state_key"),
    *((partial(check_advantages, np.array(of), 2), "advantage_fn") for of in ([1.0], [1.0, np.nan])),
]


@pytest.mark.parametrize(("call", "field"), REFUSALS)
def test_what_cannot_be_is_refused_by_its_field(call, field):
    with refused(field):
        call()

"""Replaying an episode's actions: what is compared, and how a difference is named."""

from dataclasses import replace

import pytest
from returning import difference, played
from toy_environments import Countdown, Dying, Uneven


def test_rewards_and_failures_are_compared():
    task = {"turns": 3}
    (episode,) = played(Uneven, task, ["go"] * 4, max_turns=6)
    assert "reward" in difference(Uneven, task, episode).facts["difference"]
    assert difference(Dying, {"turns": 3, "reward": 13.0}, episode).level == "error"


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ({"admissible_actions": ["stay"]}, "admissible_actions is"),
        ({"state_key": "another"}, "state_key is"),
        ({}, "ended after 'go'"),
    ],
)
def test_lists_keys_and_ends_are_compared(first, told):
    (episode,) = played(Countdown, {"turns": 3}, ["go"] * 3)
    assert difference(Countdown, {"turns": 3}, episode) is None
    steps = [replace(episode.steps[0], **first), *episode.steps[1:]]
    longer = replace(episode, steps=steps + episode.steps[:1])
    assert told in difference(Countdown, {"turns": 3}, longer).facts["difference"]

"""Replaying an episode's actions: what is compared, and how a difference is named."""

from dataclasses import replace

from returning import difference, played
from toy_environments import Countdown, Dying, Uneven


def test_rewards_are_compared():
    task = {"turns": 3}
    (episode,) = played(Uneven, task, ["go"] * 4, max_turns=6)
    assert "reward" in difference(Uneven, task, episode).facts["difference"]


def test_lists_keys_ends_and_failures_are_compared():
    (episode,) = played(Countdown, {"turns": 3}, ["go"] * 3)

    def after(**fields):
        changed = replace(episode, steps=[replace(episode.steps[0], **fields)])
        found = difference(Countdown, {"turns": 3}, changed)
        return found and found.facts["difference"]

    assert after() is None
    assert "admissible_actions is" in after(admissible_actions=["stay"])
    assert "state_key is" in after(state_key="another")
    longer = replace(episode, steps=episode.steps + episode.steps[:1])
    assert "ended after 'go'" in difference(Countdown, {"turns": 3}, longer).facts["difference"]
    assert difference(Dying, {"turns": 3, "reward": 13.0}, episode) is not None

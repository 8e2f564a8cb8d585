"""How often states recur, and the numbers in keys that prevent it."""

import pytest

from g2po_trl import Step, Trajectory
from g2po_trl.check.statistics import count_in_keys, returned_share, shared_share


def played(keys, task="t", outcome="success"):
    return Trajectory(task, [Step("", "go", state_key=key) for key in keys], 1.0, outcome)


def test_share_of_steps_in_states_of_other_episodes():
    """x is visited twice by one episode, y by two, z by one with a result and one without, and in another group."""
    groups = [[played("xyxz"), played("y"), played("z", outcome="error")], [played("z")]]
    assert shared_share(groups) == 2 / 6 and shared_share(groups, lambda step: "") == 5 / 6 and shared_share([]) == 0


COUNTED = [["hall 1", "cellar 2", "hall 3"], ["hall 1"], ["hall 1", "hall 2"]]
SUMS = [[f"sum {number}" for number in numbers] for numbers in ([2, 9, 12, 20], [2, 12, 19], [2, 5, 9])]


@pytest.mark.parametrize(
    ("keys", "share", "counts"),
    [
        (COUNTED, 0, "0% of steps return to a state of their episode, and 67% would if keys had no numbers, as "),
        (SUMS, 0, None),  # of cards: reached at different turns, in a counter's place they would be left out
        ([["room 1", "room 2", "room 1"]], 1 / 2, None),  # with numbers, and one returns to them
        ([["@   G", " @  G", "  @ G", "   @G"]], 0, None),  # spaces are no numbers
        ([["hall 1"]], None, None),
    ],
)
def test_a_number_that_makes_every_state_of_an_episode_new(keys, share, counts):
    assert returned_share(map(played, keys)) == share
    found = count_in_keys(list(map(played, keys)))
    assert found == (counts and f"{counts}'hall 1' and 'hall 3'")

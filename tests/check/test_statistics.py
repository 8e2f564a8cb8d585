"""How often states recur, and the numbers in keys that prevent it."""

from g2po_trl import Step, Trajectory
from g2po_trl.check.statistics import count_in_keys, returned_share, shared_share


def test_share_of_steps_in_states_of_other_episodes():
    """x is visited twice by one episode, y by two, z by one with a result and one without, and in another group."""

    def episode(path, outcome="success"):
        return Trajectory("t", [Step(place, "go") for place in path], 1.0, outcome)

    groups = [[episode("xyxz"), episode("y"), episode("z", "error")], [episode("z")]]
    assert shared_share(groups) == 2 / 6 and shared_share(groups, lambda step: "") == 5 / 6 and shared_share([]) == 0


def test_a_number_that_makes_every_state_of_an_episode_new():
    def played(keys):
        return Trajectory("t", [Step("", "go", state_key=key) for key in keys], 1.0, "success")

    counted = [played(["hall 1", "cellar 2", "hall 3"]), played(["hall 1"]), played(["hall 1", "hall 2"])]
    assert returned_share(counted) == 0 and returned_share(counted, lambda step: step.key[:2]) == 2 / 3
    assert count_in_keys(counted) == (
        "0% of steps return to a state of their episode, and 67% would if keys had no numbers, "
        "as 'hall 1' and 'hall 3'"
    )
    rooms = [played(["room 1", "room 2", "room 1"])]
    assert count_in_keys(rooms) is None and returned_share(rooms) == 1 / 2, "rooms with numbers, to which one returns"
    assert count_in_keys([]) is count_in_keys([played(["hall 1"])]) is returned_share([]) is None
    assert count_in_keys([played(["hall", "cellar", "attic"])]) is None
    drawn = [played(["@   G", " @  G", "  @ G", "   @G"])]
    assert count_in_keys(drawn) is None, "spaces are no numbers"


def test_a_number_that_is_reached_at_different_turns_is_no_counter():
    """Sums of cards grow, and no episode returns to one: in a counter's place they would be left out of the keys."""

    def played(keys, task="t"):
        return Trajectory(task, [Step("", "draw", state_key=key) for key in keys], 1.0, "success")

    sums = [played([f"sum {number}" for number in numbers]) for numbers in ([2, 9, 12, 20], [2, 12, 19], [2, 5, 9])]
    assert returned_share(sums) == 0 and count_in_keys(sums) is None
    left = [played([f"{room}, {n} left" for n, room in enumerate("aba")][::-1], "short") for _ in range(2)]
    left += [played([f"{room}, {n} left" for n, room in enumerate("ababa")][::-1], "long") for _ in range(2)]
    assert count_in_keys(left).endswith("'a, 2 left' and 'a, 0 left'"), "other lengths count down from other turns"

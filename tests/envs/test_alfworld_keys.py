"""What tells ALFWorld's states apart, step by step on official games: the released code's rule, and `key: memory`."""

import random
from pathlib import Path

import pytest

pytest.importorskip("alfworld")

from g2po_envs.alfworld import AlfworldEnvironment, Manifest
from g2po_envs.alfworld.engine import NOTHING_HAPPENS, read_game

OFFICIAL = Path(__file__).parents[3] / "shared" / "data" / "alfworld" / "json_2.1.1" / "train"
pytestmark = pytest.mark.skipif(not OFFICIAL.is_dir(), reason=f"no official games in {OFFICIAL}")
KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)


@pytest.fixture(scope="module")
def official():
    return Manifest.scan(OFFICIAL)


def smallest(manifest, kind):
    """Id and walkthrough of the smallest game of a task type."""
    ids = (task_id for task_id, (task_type, _) in manifest.games.items() if task_type == kind)
    task_id = min(ids, key=lambda task_id: Path(manifest.path(task_id)).stat().st_size)
    return task_id, read_game(manifest.path(task_id))["walkthrough"]


def play(manifest, task_id, actions, key):
    """All observations of an episode."""
    environment = AlfworldEnvironment(manifest, key=key)
    return [environment.reset(task_id=task_id), *(environment.step(action).observation for action in actions)]


def released_keys(seen):
    """The released rule, as its environment manager has it: a history of texts with their admissible actions, failed
    actions left out; the last entry is the key, or the last two joined when the last but one says what was changed."""
    history, keys = [], []
    for observation in seen:
        if not observation.text.startswith("Nothing happens"):
            history.append(observation.text + "\nAdmissible actions:\n" + "\n".join(observation.admissible_actions))
        joined = len(history) > 1 and history[-2].startswith(("You heat", "You cool", "You clean", "You turn on"))
        keys.append(" ".join(history[-2:]) if joined else history[-1])
    return keys


def walks(environment, task_id, walkthrough, rng):
    """Action lists: the walkthrough with failed actions in it, and its beginnings with random walks after them."""
    yield [action for step in walkthrough for action in (step, "dance", "dance")]
    for length in range(len(walkthrough)):
        seen, actions = environment.reset(task_id=task_id), walkthrough[:length]
        for action in actions:
            seen = environment.step(action).observation
        for _ in range(12):
            changes = [a for a in seen.admissible_actions if a.split()[0] in ("heat", "cool", "clean", "use")]
            ways = [a for a in seen.admissible_actions if a.split()[0] == "go"]
            choices = [
                "dance",
                *5 * changes,
                *walkthrough,
                *rng.sample(ways, 5),
                *rng.sample(seen.admissible_actions, 5),
            ]
            actions.append(rng.choice(choices))
            seen = environment.step(actions[-1]).observation
        yield actions


@pytest.mark.parametrize("kind", KINDS)
def test_released_key_parts_states_as_the_released_code_does(official, kind):
    """The same two steps are in one node here and there, over several episodes of an official game."""
    task_id, walkthrough = smallest(official, kind)
    found, wanted, changed = [], [], 0
    for actions in walks(AlfworldEnvironment(official), task_id, walkthrough, random.Random(0)):
        seen = play(official, task_id, actions, "released")
        # One difference, not in these walks: there, an action that fails at the very start makes a second start state.
        found += [observation.state_key for observation in seen]
        wanted += released_keys(seen)
        # How often "turned on" and the like are said: enough for the rule to show.
        changed += sum(o.text.startswith(("You heat", "You cool", "You clean", "You turn on")) for o in seen)
    pairs = set(zip(found, wanted))
    assert len(pairs) == len(set(found)) == len(set(wanted))
    assert len(pairs) < len(found) / 2, "the walks visited hardly any state twice: nothing was tested"
    assert changed > 3 or kind in ("pick_and_place_simple", "pick_two_obj_and_place")


CHANGING = {
    "look_at_obj_in_light": "use ",
    "pick_clean_then_place_in_recep": "clean ",
    "pick_heat_then_place_in_recep": "heat ",
    "pick_cool_then_place_in_recep": "cool ",
}


def with_and_without(official, kind, key):
    """One way through a game with the change and without it: the observations of both after the step of the change."""
    task_id, walkthrough = smallest(official, kind)
    at = next(i for i, action in enumerate(walkthrough) if action.startswith(CHANGING[kind]))
    before, change = walkthrough[:at], walkthrough[at]
    ways = [a for a in play(official, task_id, before, key)[-1].admissible_actions if a.startswith("go to")]
    places = [ways[0], next(a for a in ways if a.split()[2] != ways[0].split()[2])]
    changed = play(official, task_id, [*before, change, *places, places[0]], key)[at + 1 :]
    plain = play(official, task_id, [*before, *places, places[0]], key)[at:]
    assert [o.text for o in changed[1:]] == [o.text for o in plain[1:]], "the texts alone do not tell the two apart"
    assert NOTHING_HAPPENS not in [o.text for o in changed]
    return changed, plain


@pytest.mark.parametrize("kind", CHANGING)
def test_memory_key_remembers_a_change_for_good(official, kind):
    changed, plain = with_and_without(official, kind, "memory")
    for one, other in zip(changed[1:], plain[1:]):
        assert one.text == other.text and one.state_key != other.state_key
    assert changed[1].state_key == changed[3].state_key, "the same state on the way back"


def test_memory_key_counts_the_last_of_heated_and_cooled(official):
    """Cooling undoes heating in the game's rules; cleaning undoes neither."""
    task_id, walkthrough = smallest(official, "pick_cool_then_place_in_recep")
    at = next(i for i, action in enumerate(walkthrough) if action.startswith("cool "))
    way, cool = walkthrough[: at - 1], walkthrough[at]  # the way ends before "go to fridge 1"
    thing = cool.removeprefix("cool ").split(" with ")[0]
    hot = ["go to microwave 1", f"heat {thing} with microwave 1"]
    clean = ["go to sinkbasin 1", f"clean {thing} with sinkbasin 1"]
    cold = ["go to fridge 1", cool]

    def after(*parts):
        actions = [*way, *(action for part in parts for action in part), "go to countertop 1"]
        seen = play(official, task_id, actions, "memory")
        assert NOTHING_HAPPENS not in [o.text for o in seen]
        return seen[-1].state_key

    assert after(hot, cold) == after(cold) == after(cold, hot, cold)
    assert after(hot) == after(cold, hot) != after(cold)
    assert after(clean, cold) == after(cold, clean) == after(hot, clean, cold) != after(cold)


@pytest.mark.parametrize("key", ["released", "memory"])
def test_a_failed_action_keeps_the_key_of_the_state_it_left(official, key):
    task_id, walkthrough = smallest(official, "pick_heat_then_place_in_recep")
    once = play(official, task_id, walkthrough, key)
    actions = ["dance", *(action for step in walkthrough for action in (step, "dance"))]
    failed = play(official, task_id, actions, key)
    assert [o.text for o in failed[1::2]] == [NOTHING_HAPPENS] * len(once)
    assert [o.state_key for o in failed[::2]] == [o.state_key for o in failed[1::2]] == [o.state_key for o in once]

"""ALFWorld on official games: the engine against the installed one as it is, and what tells its states apart."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("alfworld")

from g2po_envs.alfworld import TASK_TYPES, AlfworldEnvironment, Manifest
from g2po_envs.alfworld.engine import NOTHING_HAPPENS, Game, Session, read_game

OFFICIAL = Path(__file__).parents[3] / "shared" / "data" / "alfworld" / "json_2.1.1"
pytestmark = pytest.mark.skipif(not OFFICIAL.is_dir(), reason=f"no official games in {OFFICIAL}")

# Plays the command lists of stdin on textworld's own PddlEnv, nothing of ours imported. The expected side draws none
# of the commands, so that both sides play the same ones.
REFERENCE = """
import json, sys
import textworld, textworld.envs
from textworld.envs.pddl import textgen
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos

if sys.version_info >= (3, 13):  # where its `eval` does not see what it writes into `locals()`
    textgen.eval = lambda text: eval(text, {}, sys._getframe(1).f_locals["context"]["variables"])
infos = textworld.EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
env = AlfredInfos(AlfredDemangler(textworld.envs.PddlEnv(infos)))
answers = []
for path, episodes in json.loads(sys.stdin.read()):
    env.load(path)
    for commands in episodes:
        states = [env.reset()] + [env.step(command)[0] for command in commands]
        answers.append([[s.feedback, s["admissible_commands"], bool(s["won"])] for s in states])
print("ANSWERS", json.dumps(answers))
"""


def spread(number):
    """`number` official games from the smallest to a large kitchen."""
    paths = sorted(OFFICIAL.glob("*/*/*/game.tw-pddl"), key=lambda path: (path.stat().st_size, path))
    return [str(path) for path in paths[: 5 * number : 5]]


def play_here(path):
    """Commands played and what was answered: the walkthrough, then a random walk with nonsense in it."""
    data = read_game(path)
    session, rng = Session(Game(data)), random.Random(len(data["pddl_problem"]))
    episodes, answers = [], []
    for commands in (data["walkthrough"], [None] * 8):
        played, seen = [], [[session.reset(), session.admissible, session.won]]
        for command in commands:
            played.append(command or rng.choice([*session.admissible, "dance", rng.choice(session.admissible)]))
            seen.append([session.step(played[-1]), session.admissible, session.won])
        episodes.append(played)
        answers.append(seen)
    return episodes, answers


@pytest.mark.parametrize("number", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_texts_and_actions_equal_the_unmemoised_engine(number):
    paths = spread(20)[:: 20 // number]
    episodes, answers = zip(*map(play_here, paths))
    given = json.dumps(list(zip(paths, episodes)))
    done = subprocess.run([sys.executable, "-c", REFERENCE], input=given, stdout=subprocess.PIPE, text=True)
    reference = json.loads(done.stdout.partition("ANSWERS ")[2])
    assert len(reference) == 2 * number
    assert reference == sum(answers, [])


def test_sessions_on_one_game_do_not_touch_each_other():
    path, rng = spread(1)[0], random.Random(0)
    game = Game(read_game(path))
    together, scripts = [Session(game) for _ in range(4)], [[] for _ in range(4)]
    texts = [[session.reset()] for session in together]
    for _ in range(12):
        for script, session, seen in zip(scripts, together, texts):
            script.append(rng.choice(session.admissible))
            seen.append(session.step(script[-1]))
    for script, seen in zip(scripts, texts):
        alone = Session(Game(read_game(path)))
        assert [alone.reset(), *(alone.step(command) for command in script)] == seen


# -- the keys, step by step: the released code's rule, and `key: memory` ----------------------------------------------

SAID = ("You heat", "You cool", "You clean", "You turn on")  # when a thing is changed
CHANGING = {
    "look_at_obj_in_light": "use ",
    "pick_clean_then_place_in_recep": "clean ",
    "pick_heat_then_place_in_recep": "heat ",
    "pick_cool_then_place_in_recep": "cool ",
}


@pytest.fixture(scope="module")
def official():
    return Manifest.scan(OFFICIAL / "train")


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
        joined = len(history) > 1 and history[-2].startswith(SAID)
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
            ways = [a for a in seen.admissible_actions if a.startswith("go ")]
            changes = [a for a in seen.admissible_actions if a.startswith(tuple(CHANGING.values()))]
            some = [*rng.sample(ways, 5), *rng.sample(seen.admissible_actions, 5)]
            choices = ["dance", *5 * changes, *walkthrough, *some]
            actions.append(rng.choice(choices))
            seen = environment.step(actions[-1]).observation
        yield actions


@pytest.mark.parametrize("kind", TASK_TYPES)
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
        changed += sum(o.text.startswith(SAID) for o in seen)
    pairs = set(zip(found, wanted))
    assert len(pairs) == len(set(found)) == len(set(wanted))
    assert len(pairs) < len(found) / 2, "the walks visited hardly any state twice: nothing was tested"
    assert changed > 3 or kind not in CHANGING


@pytest.mark.parametrize("kind", CHANGING)
def test_memory_key_remembers_a_change_for_good(official, kind):
    """One way through a game with the change and without it."""
    task_id, walkthrough = smallest(official, kind)
    at = next(i for i, action in enumerate(walkthrough) if action.startswith(CHANGING[kind]))
    before, change = walkthrough[:at], walkthrough[at]
    ways = [a for a in play(official, task_id, before, "memory")[-1].admissible_actions if a.startswith("go to")]
    one, other = ways[0], next(a for a in ways if a.split()[2] != ways[0].split()[2])
    changed = play(official, task_id, [*before, change, one, other, one], "memory")[at + 2 :]
    plain = play(official, task_id, [*before, one, other, one], "memory")[at + 1 :]
    assert [o.text for o in changed] == [o.text for o in plain], "the texts alone do not tell the two apart"
    assert NOTHING_HAPPENS not in [o.text for o in changed]
    assert all(first.state_key != second.state_key for first, second in zip(changed, plain))
    assert changed[0].state_key == changed[2].state_key, "the same state on the way back"

"""The ALFWorld engine with shared transitions, against the installed one as it is, on official games."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("alfworld")

from g2po_envs.alfworld.engine import Game, Session, read_game

OFFICIAL = Path(__file__).parents[3] / "shared" / "data" / "alfworld" / "json_2.1.1"
needs_official_games = pytest.mark.skipif(not OFFICIAL.is_dir(), reason=f"no official games in {OFFICIAL}")

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


def play_here(path, number_of_random_commands=8):
    """Commands played and what was answered: the walkthrough, then a random walk with nonsense in it."""
    data = read_game(path)
    session = Session(Game(data))
    rng = random.Random(len(data["pddl_problem"]))
    episodes, answers = [], []
    for commands in (data["walkthrough"], [None] * number_of_random_commands):
        played, seen = [], [[session.reset(), session.admissible, session.won]]
        for command in commands:
            if command is None:
                command = rng.choice([*session.admissible, "dance", rng.choice(session.admissible)])
            played.append(command)
            seen.append([session.step(command), session.admissible, session.won])
        episodes.append(played)
        answers.append(seen)
    return episodes, answers


@needs_official_games
@pytest.mark.parametrize("number", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_texts_and_actions_equal_the_unmemoised_engine(number):
    paths = spread(20)[:: 20 // number]
    played = [play_here(path) for path in paths]
    workers = []
    for half in (0, 1):
        process = subprocess.Popen(
            [sys.executable, "-c", REFERENCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        process.stdin.write(json.dumps([(path, played[i][0]) for i, path in enumerate(paths) if i % 2 == half]))
        process.stdin.close()
        workers.append(process)
    for half, process in enumerate(workers):
        output = process.stdout.read()
        assert process.wait() == 0
        reference = json.loads(output.partition("ANSWERS ")[2])
        mine = [answers for i, (_, both) in enumerate(played) if i % 2 == half for answers in both]
        assert len(reference) == len(mine) == number
        assert reference == mine


@needs_official_games
def test_sessions_on_one_game_do_not_touch_each_other():
    path = spread(1)[0]
    game = Game(read_game(path))
    rng = random.Random(0)
    scripts = [[] for _ in range(4)]
    together = [Session(game) for _ in scripts]
    texts = [[session.reset()] for session in together]
    for _ in range(12):
        for script, session, seen in zip(scripts, together, texts):
            script.append(rng.choice(session.admissible))
            seen.append(session.step(script[-1]))
    for script, seen in zip(scripts, texts):
        alone = Session(Game(read_game(path)))
        assert [alone.reset(), *(alone.step(command) for command in script)] == seen


@needs_official_games
def test_a_game_that_cannot_be_loaded_does_not_disturb_one_that_is_played():
    data = read_game(spread(1)[0])
    session = Session(Game(data))
    session.step(data["walkthrough"][0])
    with pytest.raises(Exception):  # noqa: B017
        Game(data | {"grammar": 'grammar :: """ {} """;'})  # fails after the library took its translation
    for command in data["walkthrough"][1:]:
        session.step(command)
    assert session.won

"""Numbers of an evaluation belong to what gave them; what fails stays in the denominator."""

import json
import shutil
import sys

import pytest
from chat_server import chat_completion, chat_server
from refusals import refused
from safetensors.torch import load_file, save_file

from g2po_trl import read_jsonl
from g2po_trl.cli.commands.evaluate import main

GAME = '''
from pathlib import Path
from g2po_trl import StepResult, TextEnvironment

class Game(TextEnvironment):
    """Say "win". Broken while a file of that name lies beside it."""

    def reset(self, number, hint=""):
        if Path(__file__).with_name("broken").exists():
            raise RuntimeError("the game is broken")
        return f"Game {number}."

    def step(self, action):
        return StepResult("Over.", reward=float("win" in action), terminated=True)
'''


def strict(path):
    def refuse(name):
        raise AssertionError(f"{path} holds {name}, which is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.fixture
def game(tmp_path):
    sys.modules.pop("game", None)  # another test's
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"number": {number}}}\n' for number in range(4)))
    return tmp_path


@pytest.fixture
def server():
    """Says "win", but game 1 is too long for it."""
    pytest.importorskip("openai")

    def answer(body, headers):
        if "Game 1" in body["messages"][-1]["content"]:
            return 400, {"error": {"message": "x", "code": "context_length_exceeded"}}
        won = chat_completion("<think></think><action>win</action>")
        return 200, won if server.tells_usage else {**won, "usage": None}

    with chat_server(answer) as server:
        server.tells_usage = True
        yield server


def flags(game, *more, tasks="tasks.jsonl"):
    given = ["--environment", f"{game / 'game.py'}:Game", "--tasks", str(game / tasks), "--output", str(game / "out")]
    return [*given, "--num-environment-workers", "1", *map(str, more)]


def served(game, server, *more, **files):
    """Evaluate the server's model: its results."""
    main(flags(game, "--base-url", server.url, "--model", "m", *more, **files))
    return strict(game / "out" / "results.json")


def test_a_context_that_overflows_is_a_failure_and_tokens_that_are_not_reported_are_not_0(game, server):
    results = served(game, server)
    assert results["seeds"][0]["Succ."] == 75 and results["seeds"][0]["errors"] == 0
    assert results["failure_reasons"] == [{"context overflow": 1}]
    server.tells_usage = False
    assert served(game, server, "--overwrite")["seeds"][0]["tokens"] is None


def test_errors_are_played_again_and_too_many_end_with_code_1(game, server):
    reset = 'raise RuntimeError("the game is broken")'
    (game / "game.py").write_text(GAME.replace(reset, f"if number > 1:\n                {reset}"))
    (game / "broken").touch()
    with refused("max_error_rate"):
        served(game, server)
    row = strict(game / "out" / "results.json")["seeds"][0]
    assert (row["Succ."], row["errors"]) == (50, 50), "of those that came to a result"
    (game / "broken").unlink()
    (row,) = served(game, server)["seeds"]
    assert row == {"Succ.": 75, "turns": row["turns"], "tokens": row["tokens"], "valid": 100, "errors": 0}
    played = list(read_jsonl(game / "out" / "trajectories" / "direct-0.jsonl"))
    assert sorted(t.info["panel_index"] for t in played) == [0, 1, 2, 3], "each task once"


def test_results_are_not_those_of_other_weights_code_tasks_or_settings(game, tiny_model_dir):
    model = shutil.copytree(tiny_model_dir, game / "model")
    given = [*flags(game), "--model", str(model), "--max-completion-length", "4"]
    main(given)
    results = (game / "out" / "results.json").read_text()
    (model / "critic.safetensors").write_text("the run's, not the model's")
    main(given)
    assert (game / "out" / "results.json").read_text() == results
    prompt, tasks = game / "prompt.py", (game / "tasks.jsonl").read_text()
    prompt.write_text("from g2po_trl import PromptTemplate\nP = PromptTemplate('{observation}', 'x')\n")

    def check_refused(changed, *more):
        with refused("output") as other:
            main([*given, *more])
        assert changed in other.value.value, other.value

    for name, value in (
        ("prompt", f"{prompt}:P"),
        ("engine_options", '{"dtype": "bfloat16"}'),
        ("max_turns", "3"),
        ("generation_kwargs", '{"no_repeat_ngram_size": 2}'),
    ):
        check_refused(name, f"--{name.replace('_', '-')}", value)
    (game / "tasks.jsonl").write_text(tasks.replace("3}", '3, "hint": "left"}'))
    check_refused("tasks")
    (game / "tasks.jsonl").write_text(tasks)
    weights = load_file(model / "model.safetensors")
    next(iter(weights.values())).view(-1)[-1] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    check_refused("weights")
    with pytest.raises(ValueError, match="nosuch"):  # nothing is deleted for a model that cannot be loaded
        main([*given, "--overwrite", "--chat-template-kwargs", '{"nosuch": 1}'])
    assert (game / "out" / "results.json").read_text() == results
    (game / "out" / "settings.json").unlink()
    with refused("output"):  # somebody else's
        main([*given, "--overwrite"])


def test_keys_are_written_into_no_file(game, server):
    made = "def __init__(self, api_key):\n        pass\n\n    def reset("
    (game / "game.py").write_text(GAME.replace("def reset(", made))
    served(game, server, "--environment-options", '{"api_key": "SECRET"}')
    for name in ("settings.json", "results.json"):
        text = (game / "out" / name).read_text()
        assert "api_key" in text and "SECRET" not in text
    served(game, server, "--environment-options", '{"api_key": "SECRET-2"}')


@pytest.mark.parametrize("tasks", ['{"number": 1}\n{"numbr": 2}\n', '{"number": 1}\n{"num\n', "\n", None])
def test_bad_tasks_are_refused_before_a_model_is_asked(game, server, tasks):
    if tasks is not None:
        (game / "other.jsonl").write_text(tasks)
    with refused("Game.reset" if tasks and "numbr" in tasks else "tasks"):
        served(game, server, tasks="other.jsonl")
    assert server.asked == []

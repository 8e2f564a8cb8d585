"""Numbers of an evaluation belong to what gave them; what fails stays in the denominator; commands do not crash."""

import json
import math
import shutil
import signal
import socket
import sys
from functools import partial

import programs
import pytest
from chat_server import chat_completion, chat_server
from letter_environment import LetterEnvironment
from letter_trainer import TASKS
from peft import LoraConfig
from refusals import refused
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from g2po_trl import Step, TextEnvironment, Trajectory, load_agent, read_jsonl
from g2po_trl.cli.commands.evaluate import main
from g2po_trl.evaluation.chat_models import ServerChat
from g2po_trl.evaluation.evaluate import format_rows, seed_row
from g2po_trl.evaluation.panel import Panel
from g2po_trl.utils.errors import G2POError

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
    """Says "win", but game 1 is too long for it; wants `max_completion_tokens` or another key where a test says so."""
    pytest.importorskip("openai")

    def answer(body, headers):
        if server.key and headers["Authorization"] != f"Bearer {server.key}":
            return 401, {"error": {"message": "Incorrect API key provided"}}
        if server.newer and "max_tokens" in body:
            return 400, {"error": {"message": "'max_tokens' is not supported. Use 'max_completion_tokens' instead."}}
        if "Game 1" in body["messages"][-1]["content"]:
            return 400, {"error": {"message": "x", "code": "context_length_exceeded"}}
        won = chat_completion("<think></think><action>win</action>")
        return 200, won if server.tells_usage else {**won, "usage": None}

    with chat_server(answer) as server:
        server.newer, server.key, server.tells_usage = False, None, True
        yield server


def flags(game, *more, tasks="tasks.jsonl"):
    given = ["--environment", f"{game / 'game.py'}:Game", "--tasks", str(game / tasks), "--output", str(game / "out")]
    return [*given, "--num-environment-workers", "1", *map(str, more)]


def served(game, server, *more, **files):
    """Evaluate the server's model: its results."""
    main(flags(game, "--base-url", server.url, "--model", "m", *more, **files))
    return strict(game / "out" / "results.json")


def test_a_context_that_overflows_is_a_failure_and_tokens_that_are_not_reported_are_not_0(game, server, capsys):
    results = served(game, server)
    assert results["seeds"][0]["Succ."] == 75 and results["seeds"][0]["errors"] == 0
    assert results["failure_reasons"] == [{"context overflow": 1}]
    assert "1 of 4 episodes failed: context overflow" in capsys.readouterr().out
    server.tells_usage = False
    assert served(game, server, "--overwrite")["seeds"][0]["tokens"] is None
    assert "n/a" in capsys.readouterr().out


@pytest.mark.parametrize(("broken", "share", "success"), [("number > 1", "50%", 50), ("True", "100%", None)])
def test_errors_are_played_again_and_too_many_end_with_code_1(game, server, broken, share, success):
    reset = 'raise RuntimeError("the game is broken")'
    (game / "game.py").write_text(GAME.replace(reset, f"if {broken}:\n                {reset}"))
    (game / "broken").touch()
    with pytest.raises(G2POError, match=f"{share} of the episodes(.|\n)*the game is broken"):
        served(game, server)
    row = strict(game / "out" / "results.json")["seeds"][0]
    assert row["Succ."] == success and (row["turns"] is None) == (success is None), "of those that came to a result"
    (game / "broken").unlink()
    (row,) = served(game, server)["seeds"]
    assert row == {"Succ.": 75, "turns": row["turns"], "tokens": row["tokens"], "valid": 100, "errors": 0}
    played = list(read_jsonl(game / "out" / "trajectories" / "direct-0.jsonl"))
    assert sorted(t.info["panel_index"] for t in played) == [0, 1, 2, 3], "each task once"


def test_a_score_that_nobody_has_is_0_as_that_of_an_episode_without_one():
    panel = Panel("shop", [{}, {}, {}], TextEnvironment, columns={"Score": "score", "Other": "success_rate_by_type/x"})
    info = {"prompt_tokens": 1, "completion_tokens": 1}
    played = [Trajectory("t", [Step("a", "b")], 0.0, end, info=info) for end in ("truncated", "error", "lost")]
    row = seed_row(panel, played)
    assert row["Score"] == 0 and math.isnan(row["Other"]) and row["errors"] == pytest.approx(200 / 3)
    assert math.isnan(seed_row(panel, played[1:])["Score"])


@pytest.mark.parametrize(
    ("rows", "cells"),
    [
        ([{"All": 50.0}], ["50.0"]),
        ([{"All": 0.0}, {"All": 60.0}], ["30.0"]),
        ([{"All": 0.0}] * 3, ["0.0"]),
        ([{"All": x, "tokens": x} for x in (50.0, 60.0, 70.0)], ["60.0 ± 10.0", "60 ± 10"]),
        ([{"x": 1.0}, {"x": 1.0, "admissible": 2.0}, {"x": 1.0}], ["1.0", "n/a"]),
    ],
)
def test_rows_are_mean_and_deviation_over_three_seeds(rows, cells):
    assert [cell.strip() for cell in format_rows(rows).splitlines()[1].split("  ") if cell] == cells


def test_newer_servers_get_the_field_they_want(game, server):
    server.newer = True
    served(game, server, "--max-completion-length", 9)
    assert [body["max_completion_tokens"] for body in server.asked if "max_tokens" not in body] == [9, 9, 9, 9]


@pytest.fixture
def model(tiny_model_dir, tmp_path):
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


def test_results_are_not_those_of_other_weights_code_tasks_or_settings(game, model):
    given = [*flags(game), "--model", str(model), "--max-completion-length", "4"]
    main(given)
    results = (game / "out" / "results.json").read_text()
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
        ("chat_template_kwargs", '{"enable_thinking": false}'),
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
    main([*given, "--overwrite"])
    (game / "out" / "settings.json").unlink()
    with refused("output"):  # somebody else's
        main([*given, "--overwrite"])


def completions(path):
    fields = ("observation", "completion", "action", "valid")
    return [[[getattr(step, name) for name in fields] for step in t.steps] for t in read_jsonl(path)]


def evaluated(tmp_path, *more):
    """Evaluate the run in `out`: where its trajectories are."""
    main(["--model", str(tmp_path / "out"), "--num-environment-workers", "1", "--batch-size", "8", *more])
    (path,) = (tmp_path / "evaluations").glob("*/trajectories/direct-0.jsonl")
    return path


@pytest.mark.parametrize("kind", ["mixed precision", "half weights", "adapter", "adapter of half weights"])
def test_a_greedy_evaluation_repeats_the_runs_own(make_trainer, tiny_model_dir, tmp_path, monkeypatch, kind):
    """Completion by completion, whatever the model is and is computed in; with the run's prompts and options."""
    model, options = tiny_model_dir, {"eval_temperature": 0.0, "max_completion_length": 12}
    if kind == "mixed precision":
        options["bf16"] = True
    if kind == "half weights":
        options["model_init_kwargs"] = {"dtype": "bfloat16"}
    if kind.startswith("adapter"):
        options["peft_config"] = LoraConfig(r=8, lora_alpha=64, target_modules="all-linear")
    if kind == "adapter of half weights":  # trained in float32, TRL's default
        model = tmp_path / "half"
        AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype="bfloat16").save_pretrained(model)
        AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(model)
    options |= {"history_length": 1, "generation_kwargs": {"no_repeat_ngram_size": 2}, "stop_sequences": ["k"]}
    trainer = make_trainer(model=model, max_steps=1, eval_dataset=TASKS, learning_rate=1e-2, **options)
    trainer.train()
    trainer.evaluate()
    trainer.save_model(trainer.args.output_dir)
    monkeypatch.chdir(tmp_path)
    theirs = completions(tmp_path / "out" / "trajectories" / "eval-000001.jsonl")
    path = evaluated(tmp_path)
    assert completions(path) == theirs and any(len(steps) > 1 for steps in theirs)
    settings = strict(path.parents[1] / "settings.json")
    assert (settings["max_turns"], settings["history_length"], settings["max_completion_length"]) == (6, 1, 12)
    weights, forward = kind == "half weights", kind == "mixed precision"
    precision = {"dtype": "bfloat16" if weights else "float32", "autocast": "bfloat16" if forward else None}
    assert settings["precision"] == precision
    rows = [json.loads(line) for line in (path.parents[1] / "panels" / "panel.jsonl").open()]
    assert rows == [dict(row) for row in TASKS], "where the viewer looks for kinds of tasks"
    agent = load_agent(tmp_path / "out")
    assert agent.act(LetterEnvironment().reset(**TASKS[0])) == theirs[0][0][2], "in Python, too"
    others = [("--generation-kwargs", "{}")]
    if kind in ("mixed precision", "adapter of half weights"):
        others.append(("--engine-options", '{"dtype": "auto"}'))
    for other in others:
        assert completions(evaluated(tmp_path, "--overwrite", *other)) != theirs, "the options decide"


def test_keys_are_written_into_no_file(game, server):
    made = "def __init__(self, api_key):\n        pass\n\n    def reset("
    (game / "game.py").write_text(GAME.replace("def reset(", made))
    served(game, server, "--environment-options", '{"api_key": "SECRET"}')
    for name in ("settings.json", "results.json"):
        text = (game / "out" / name).read_text()
        assert "api_key" in text and "SECRET" not in text
    served(game, server, "--environment-options", '{"api_key": "SECRET-2"}')


def test_as_many_are_asked_together_as_batch_size_says(game, model, monkeypatch):
    """However long prompts and completions may be: memory is what the user says it is."""
    calls, flagged = [], ["--model", model, "--batch-size", 3, "--max-completion-length", 20000]

    def answer(engine, model, config, prompts, *rest):
        calls.append(len(prompts))
        return [[engine.tokenizer.eos_token_id]] * len(prompts)

    monkeypatch.setattr("g2po_trl.engines.transformers.TransformersEngine._generate", answer)
    main(flags(game, *flagged))
    assert calls == [3, 1]
    main(flags(game, *flagged, "--max-prompt-length", 20, "--overwrite"))
    assert strict(game / "out" / "results.json")["failure_reasons"] == [{"prompt too long": 4}], "as in training"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("generation_kwargs", '{"presence_penalty": 1}'),
        ("generation_kwargs", '{"structured_outputs": {"regex": "a"}}'),
        ("panel_options", '{"number": 3}'),
        ("panel_options", '{"max_turns": "3"}'),
    ],
)
def test_options_that_would_be_ignored_are_refused(game, model, field, value):
    with refused(field):
        main([*flags(game), "--model", str(model), f"--{field.replace('_', '-')}", value])


@pytest.mark.parametrize("tasks", ['{"number": 1}\n{"numbr": 2}\n', '{"number": 1}\n{"num\n', "\n", None])
def test_bad_tasks_are_refused_before_a_model_is_asked(game, server, tasks):
    if tasks is not None:
        (game / "other.jsonl").write_text(tasks)
    with refused("Game.reset" if tasks and "numbr" in tasks else "tasks"):
        served(game, server, tasks="other.jsonl")
    assert server.asked == []


def test_servers_and_models_that_cannot_be_asked(game, server, monkeypatch):
    with pytest.raises(ValueError, match="config.json"):
        main([*flags(game), "--model", str(game)])
    server.key = "right"
    with refused("base_url"):
        served(game, server)
    monkeypatch.setattr("g2po_trl.evaluation.evaluate.ServerChat", partial(ServerChat, max_retries=0))
    nowhere = flags(game, "--model", "m", "--base-url", "http://127.0.0.1:9/v1")
    with refused("base_url"):
        main([*nowhere, "--overwrite"])
    monkeypatch.setenv("MY_KEY", "right")
    served(game, server, "--key-variable", "MY_KEY")  # where nothing was played, nothing is in the way
    with refused("output") as other:
        main(nowhere)
    assert other.value.value.keys() == {"base_url"}


def test_ctrl_c_ends_requests_to_a_silent_server(game):
    pytest.importorskip("openai")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        asked = flags(game, "--base-url", url, "--model", "m")
        process = programs.start("-m", "g2po_trl", "evaluate", *asked, stdout=game / "log")
        silent.settimeout(120)
        connection, _ = silent.accept()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        connection.close()

"""What an evaluation takes from a run.json that is whole, incomplete, edited or moved."""

import functools
import json
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from imported_files import forget
from refusals import refused

from g2po_trl import PromptTemplate
from g2po_trl.cli.commands.evaluate import read as options_of
from g2po_trl.environments.loading import load
from g2po_trl.environments.setup import agent_factory
from g2po_trl.evaluation.evaluate import identity, load_panel
from g2po_trl.evaluation.options import EvaluateOptions, describe_settings, run_settings
from g2po_trl.runs.output_dir import RunFolder
from g2po_trl.runs.run_json import describe_object, describe_prompt
from g2po_trl.utils.json import write_json_lines

PLAY = {"max_turns": 3, "history_length": 1, "max_prompt_length": None, "max_completion_length": 9, "top_k": 0}
PLAY |= {"stop_sequences": None, "chat_template_kwargs": None, "repetition_penalty": 1.0, "min_p": None}
PLAY |= {"environment_reset_timeout": 7.0, "environment_step_timeout": 8.0, "environment_variables": None}
PLAY |= {"temperature": 0.7, "top_p": 0.9, "environment_load_timeout": 9.0}
RUN = {"trainer": {}, "play": PLAY, "prompt": {"first": "x"}, "environment": {"import": "games:Game"}}


def without(run, name):
    return {key: value for key, value in run.items() if key != name}


def evaluation_of(model, **given):
    """The options of an evaluation of a run's folder, as the command makes them, but errors are raised."""
    given = {"model": str(model), **given}
    return EvaluateOptions(**{**run_settings(given), **given})


@pytest.fixture
def written(tmp_path):
    """Write run.json, with one evaluation set."""

    def write(run):
        (tmp_path / "run.json").write_text(json.dumps(run))
        write_json_lines(tmp_path / "panels" / "eval.jsonl", [{}])
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("run", "field"),
    [
        (without(RUN, "play"), "play"),
        (RUN | {"play": "none"}, "play"),
        (RUN | {"environment": {}}, "environment"),
        (RUN | {"environment": {"import": "game.py:Game", "args": [3]}}, "environment"),
        (RUN | {"environment": {"import": "moved.py:Game"}}, "environment"),
        (RUN | {"play": PLAY | {"temperature": "hot"}}, "temperature"),
        (RUN | {"play": PLAY | {"max_turns": True}}, "max_turns"),
    ],
)
def test_a_runs_description_that_is_wrong_is_refused(written, run, field):
    with refused(field):
        evaluation_of(written(run))


@pytest.mark.parametrize("name", ["temperature", "min_p", "max_turns"])
def test_what_a_run_of_an_earlier_version_lacks_has_its_default(written, name):
    args, _ = options_of(["--model", str(written(RUN | {"play": without(PLAY, name)}))])
    assert getattr(args, name) == next(field.default for field in fields(EvaluateOptions) if field.name == name)
    assert args.max_completion_length == 9


def test_the_panel_of_a_run_is_the_one_that_is_named_or_the_only_one(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    with refused("tasks"):
        evaluation_of(tmp_path)
    assert evaluation_of(tmp_path, tasks=Path("mine.jsonl")).tasks == Path("mine.jsonl")
    write_json_lines(tmp_path / "panels" / "seen.jsonl", [{}])
    assert evaluation_of(tmp_path).tasks == tmp_path / "panels" / "seen.jsonl"
    write_json_lines(tmp_path / "panels" / "unseen.jsonl", [{}])
    for panel in (None, "eval"):
        with refused("panel"):
            evaluation_of(tmp_path, panel=panel)
    args = evaluation_of(tmp_path, panel="unseen")
    assert (args.panel, args.tasks) == ("unseen", tmp_path / "panels" / "unseen.jsonl")


@pytest.fixture
def treasure(tmp_path, monkeypatch):
    """A run in `run`, of an environment beside it."""
    monkeypatch.chdir(tmp_path)
    source = "from g2po_trl import TextEnvironment\nclass Game(TextEnvironment): ...\nclass Other: ...\n"
    (tmp_path / "game.py").write_text(source)
    write_json_lines(tmp_path / "run" / "panels" / "eval.jsonl", [{}])
    run = RUN | {"environment": {"import": f"{tmp_path / 'game.py'}:Game", "kwargs": {"size": 3}}}
    run["play"] = PLAY | {
        "max_prompt_length": 900,
        "generation_kwargs": {"no_repeat_ngram_size": 2},
        "max_episode_seconds": 5.0,
    }
    (tmp_path / "run" / "run.json").write_text(json.dumps(run))
    return run


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {"max_episode_seconds": 5.0, "environment_step_timeout": 8.0, "environment_variables": ["A_KEY"]}),
        ("", {"generation_kwargs": {"no_repeat_ngram_size": 2, "structured_outputs": {"regex": "<a>.*</a>"}}}),
        ("--generation-kwargs {}", {"generation_kwargs": {}}),  # flags win
        ("--temperature 0.1 --stop-sequences x", {"temperature": 0.1, "stop_sequences": ["x"], "top_p": 0.9}),
        # Another agent has its own prompts and lengths, and completions of another form.
        ("--agent react", {"generation_kwargs": {"no_repeat_ngram_size": 2}, "max_turns": None, "prompt": None}),
        ("--agent react", {"environment_variables": ["A_KEY"], "max_completion_length": 512}),
        ("--model m --run run --base-url http://x", {"max_prompt_length": None, "max_turns": 3}),
        ("--environment alfworld", {"prompt": None, "tasks": None, "temperature": 0.4}),
    ],
)
def test_what_decides_how_a_run_plays_is_taken_from_it(treasure, given, expected):
    play = {"vllm_structured_outputs_regex": "<a>.*</a>", "environment_variables": ["A_KEY"]}
    Path("run/run.json").write_text(json.dumps(treasure | {"play": treasure["play"] | play}))
    args = options_of(["--model", "run", *given.split()])[0]
    assert {name: getattr(args, name) for name in expected} == expected
    Path("run/run.json").write_text('{"started": "by another program"}')
    assert options_of(["--model", "run", "--environment", "alfworld"])[0].temperature == 0.4, "no run"


def test_options_of_the_environment_that_are_not_given_stay_the_runs(treasure):
    args, of_run = options_of(["--model", "run", "--environment-options", '{"api_key": "SECRET"}'])
    assert args.environment_options == {"size": 3, "api_key": "SECRET"}
    assert "SECRET" not in describe_settings(args, of_run)


@pytest.mark.parametrize("name", ["game.py:Game", "./game.py:Game", "game.py", "other/game.py", "other.game:Game"])
def test_the_runs_environment_has_several_names_and_anothers_of_the_same_name_is_not_it(treasure, tmp_path, name):
    (tmp_path / "other").mkdir()
    shutil.copy("game.py", "other")
    write_json_lines(tmp_path / "other" / "tasks.jsonl", [{"seed": 1}])
    args, of_run = options_of(["--model", "run", "--environment", name])
    told, is_own = describe_settings(args, of_run), not name.startswith("other")
    assert (args.max_turns, args.environment_options) == ((3, {"size": 3}) if is_own else (None, {}))
    assert ("is not the environment of" in told) == (not is_own)
    places = {"other/game.py": tmp_path / "other" / "tasks.jsonl", "other.game:Game": None}
    assert args.tasks == places.get(name, tmp_path / "run" / "panels" / "eval.jsonl")


def test_a_line_says_what_is_not_taken_from_a_run(treasure):
    def told(*given):
        return describe_settings(*options_of(["--model", "run", *given]))

    assert f"{Path('run').resolve()}, but for: none" in told()
    assert told("--temperature", "0").endswith("but for: temperature")
    assert int(told("--agent", "react").split()[0]) < int(told().split()[0]), "its prompts are its own"
    assert describe_settings(*options_of(["--model", "m", "--environment", "game.py:Other"])) is None, "no run"


@pytest.fixture
def moved(tmp_path, monkeypatch):
    """A project with runs of an environment (x) and of an agent, which was moved."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    project, place = tmp_path / "project", tmp_path / "other" / "place"
    project.mkdir()
    (project / "game.py").write_text(
        "from g2po_trl import TextEnvironment\nclass Game(TextEnvironment): ...\n"
        "def read(text, prompt_end=''): ...\ndef solve(task, client): return 1.0\n"
    )
    (project / "words.txt").write_text("a b")
    game, read, solve = (load(f"{project}/game.py:{name}") for name in ("Game", "read", "solve"))
    prompt = describe_prompt(PromptTemplate("{observation}", "x", parse_completion=read))
    played = functools.partial(game, size=3, words=str(project / "words.txt"))
    monkeypatch.chdir(project)
    for name, environment in (("x", played), ("agent", agent_factory(solve, 3, read))):
        described = RUN | {"prompt": prompt, "environment": describe_object(environment)}
        RunFolder(project / "runs" / name, False).write_run(described, {"eval": [{}]})
    place.parent.mkdir()
    project.rename(place)
    forget()
    return place


def test_a_project_that_was_moved_is_evaluated_as_it_was_trained(moved):
    args = evaluation_of(moved / "runs" / "x")
    assert args.environment == f"{moved}/game.py:Game"
    assert args.environment_options == {"size": 3, "words": str(moved / "words.txt")}
    assert args.prompt["parse_completion"] == {"import": f"{moved}/game.py:read"}
    assert (args.max_turns, args.tasks) == (3, moved / "runs" / "x" / "panels" / "eval.jsonl")
    args = evaluation_of(moved / "runs" / "agent")
    assert args.environment_options["agent"] == {"import": f"{moved}/game.py:solve"}


def test_an_environment_that_was_moved_is_asked_for_and_the_runs_settings_stay(moved):
    place = f"{moved}/games/game.py"
    (moved / "games").mkdir()
    (moved / "game.py").rename(place)
    for run, asked in (("x", {"environment": place}), ("agent", {"agent": place})):
        with refused("environment"):
            evaluation_of(moved / "runs" / run)
        forget()
        args = evaluation_of(moved / "runs" / run, **asked)
        assert (args.max_turns, args.tasks) == (3, moved / "runs" / run / "panels/eval.jsonl")
        if run == "x":
            assert args.environment_options["size"] == 3 and args.environment == f"{place}:Game"
        else:
            assert args.environment_options["agent"] == {"import": f"{place}:solve"}


def test_an_evaluation_is_the_same_wherever_its_project_is(moved, tmp_path):
    def identity_in(folder, run):
        forget()
        args = evaluation_of(folder / "model", run=folder / "runs" / run)
        panel = load_panel(args)
        return identity(args, panel)

    (moved / "model").mkdir()
    (moved / "model" / "config.json").write_text("{}")
    third = shutil.copytree(moved, tmp_path / "third")
    first, second = ([identity_in(folder, run) for run in ("x", "agent")] for folder in (moved, third))
    assert first == second and first[0] != first[1] and str(tmp_path) not in str(first)

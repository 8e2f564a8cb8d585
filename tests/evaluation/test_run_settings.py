"""What an evaluation takes from a run.json that is whole, incomplete, edited or moved."""

import functools
import json
import shutil
import sys
from pathlib import Path

import pytest
from imported_files import forget
from refusals import refused

from g2po_trl import PromptTemplate
from g2po_trl.cli.commands.evaluate import read as options_of
from g2po_trl.environments.loading import load
from g2po_trl.evaluation.evaluate import identity, load_panel
from g2po_trl.evaluation.options import EvaluateOptions, run_settings
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
        (RUN | {"environment": {}}, "environment"),
        (RUN | {"environment": {"import": "moved.py:Game"}}, "environment"),
        (RUN | {"play": PLAY | {"temperature": "hot"}}, "temperature"),
        (RUN | {"play": PLAY | {"max_turns": True}}, "max_turns"),
    ],
)
def test_a_runs_description_that_is_wrong_is_refused(written, run, field):
    with refused(field):
        evaluation_of(written(run))


def test_what_a_run_of_an_earlier_version_lacks_has_its_default(written):
    args, _ = options_of(["--model", str(written(RUN | {"play": without(PLAY, "temperature")}))])
    assert (args.temperature, args.max_completion_length) == (0.4, 9)


def test_the_panel_of_a_run_is_the_one_that_is_named_or_the_only_one(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    with refused("tasks"):
        evaluation_of(tmp_path)
    write_json_lines(tmp_path / "panels" / "seen.jsonl", [{}])
    assert evaluation_of(tmp_path).tasks == tmp_path / "panels" / "seen.jsonl"
    write_json_lines(tmp_path / "panels" / "unseen.jsonl", [{}])
    with refused("panel"):
        evaluation_of(tmp_path)
    assert evaluation_of(tmp_path, panel="unseen").tasks == tmp_path / "panels" / "unseen.jsonl"


@pytest.fixture
def treasure(tmp_path, monkeypatch):
    """A run in `run`, of an environment beside it."""
    monkeypatch.chdir(tmp_path)
    source = "from g2po_trl import TextEnvironment\nclass Game(TextEnvironment): ...\n"
    (tmp_path / "game.py").write_text(source)
    write_json_lines(tmp_path / "run" / "panels" / "eval.jsonl", [{}])
    more = {"max_prompt_length": 900, "max_episode_seconds": 5.0, "environment_variables": ["A_KEY"]}
    more |= {"generation_kwargs": {"no_repeat_ngram_size": 2}, "vllm_structured_outputs_regex": "<a>.*</a>"}
    game = {"import": f"{tmp_path / 'game.py'}:Game", "kwargs": {"size": 3}}
    (tmp_path / "run" / "run.json").write_text(json.dumps(RUN | {"environment": game, "play": PLAY | more}))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {"max_episode_seconds": 5.0, "environment_step_timeout": 8.0}),
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
    args = options_of(["--model", "run", *given.split()])[0]
    assert {name: getattr(args, name) for name in expected} == expected
    Path("run/run.json").write_text('{"started": "by another program"}')
    assert options_of(["--model", "run", "--environment", "alfworld"])[0].temperature == 0.4, "no run"


def test_a_project_that_was_moved_is_evaluated_as_it_was_trained(tmp_path, monkeypatch):
    """And by settings that are equal wherever the project is, so that the evaluation can be resumed."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    project, place = tmp_path / "project", tmp_path / "place"
    (project / "model").mkdir(parents=True)
    (project / "model" / "config.json").write_text("{}")
    source = (
        "from g2po_trl import TextEnvironment\nclass Game(TextEnvironment): ...\ndef read(text, prompt_end=''): ...\n"
    )
    (project / "game.py").write_text(source)
    (project / "words.txt").write_text("a b")
    game, read = (load(f"{project}/game.py:{name}") for name in ("Game", "read"))
    prompt = describe_prompt(PromptTemplate("{observation}", "x", parse_completion=read))
    described = describe_object(functools.partial(game, size=3, words=str(project / "words.txt")))
    monkeypatch.chdir(project)
    run = RUN | {"prompt": prompt, "environment": described}
    RunFolder(project / "runs" / "x", False).write_run(run, {"eval": [{}]})
    project.rename(place)
    identities = []
    for folder in (place, shutil.copytree(place, tmp_path / "third")):
        forget()
        args = evaluation_of(folder / "model", run=folder / "runs" / "x")
        assert args.environment == f"{folder}/game.py:Game"
        assert args.environment_options == {"size": 3, "words": str(folder / "words.txt")}
        assert args.prompt["parse_completion"] == {"import": f"{folder}/game.py:read"}
        assert (args.max_turns, args.tasks) == (3, folder / "runs" / "x" / "panels" / "eval.jsonl")
        identities.append(identity(args, load_panel(args)[0]))
    assert identities[0] == identities[1] and str(tmp_path) not in str(identities)

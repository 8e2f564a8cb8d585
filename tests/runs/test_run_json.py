"""`run.json`: what is written into it, and what evaluation takes from one that is whole, incomplete or edited."""

import functools
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from g2po_envs.sokoban import SOKOBAN_COMPACT_PROMPT
from g2po_trl import AgentCommand, PromptTemplate
from g2po_trl.environments.adapters.agent import agent_factory
from g2po_trl.environments.adapters.openenv import RemoteEnvironment
from g2po_trl.environments.loading import load
from g2po_trl.evaluation.arguments import parse
from g2po_trl.evaluation.chat_models import ChatSettings
from g2po_trl.evaluation.evaluate import identity, load_panel, make_agent
from g2po_trl.evaluation.run_defaults import describe_run_settings
from g2po_trl.runs.output_dir import RunFolder
from g2po_trl.runs.run_json import describe_object, describe_prompt, identity_of, load_object, load_prompt
from g2po_trl.utils.json import write_json_lines

PLAY = {
    **{"max_turns": 3, "history_length": 1, "max_prompt_length": None, "max_completion_length": 9, "top_k": 0},
    **{"stop_sequences": None, "chat_template_kwargs": None, "repetition_penalty": 1.0, "min_p": None},
    **{"environment_reset_timeout": 7.0, "environment_step_timeout": 8.0, "environment_variables": None},
    **{"temperature": 0.7, "top_p": 0.9, "environment_load_timeout": 9.0},
}
RUN = {"trainer": {}, "play": PLAY, "prompt": {"first": "x"}, "environment": {"import": "game.py:Game"}}


def without(run, name):
    return {key: value for key, value in run.items() if key != name}


@pytest.mark.parametrize(
    ("run", "message"),
    [
        *((RUN | {"play": without(PLAY, name)}, rf"play\.{name} is missing in .*run\.json: it was edited, or")
          for name in ("temperature", "min_p", "repetition_penalty", "max_turns", "stop_sequences",
                       "chat_template_kwargs")),
        (without(RUN, "play"), r"play is missing in .*run\.json: .* or move the file away"),
        (without(RUN, "prompt"), r"prompt is missing in"),
        (RUN | {"play": "none"}, r"play is 'none' in"),
        (RUN | {"play": PLAY | {"temperature": "hot"}}, r"play\.temperature is 'hot' in .* \(float or int\)"),
        (RUN | {"play": PLAY | {"max_turns": True}}, r"play\.max_turns is True in .* \(int\)"),
        (RUN | {"environment": {}}, r"environment\.import is missing in"),
        (RUN | {"environment": {"import": "game.py:Game", "args": [3]}}, r"environment\.args is \[3\] in"),
        ([RUN], r"run\.json holds no description of a run: restore it"),
    ],
)  # fmt: skip
def test_a_runs_description_that_lacks_something_is_one_line(tmp_path, capsys, run, message):
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(SystemExit):
        parse(["--model", str(tmp_path)])
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.search(message, told), told


def test_what_a_runs_description_lacks_without_harm_is_as_for_any_model(tmp_path):
    limits = [f"environment_{what}_timeout" for what in ("reset", "step", "load")]
    of_workers = [*limits, "environment_variables"]
    for play, expected in ((PLAY, [7.0, 8.0, 9.0, []]), ({**PLAY}, [120.0, 60.0, None, []])):
        if expected[0] == 120:
            [play.pop(name) for name in of_workers]
        (tmp_path / "run.json").write_text(json.dumps(RUN | {"play": play}))
        write_json_lines(tmp_path / "panels" / "eval.jsonl", [{}])
        args = parse(["--model", str(tmp_path)])
        assert [getattr(args, name) for name in of_workers] == expected
        assert (args.temperature, args.top_p, args.max_tokens, args.max_turns) == (0.7, 0.9, 9, 3)
    (tmp_path / "run.json").write_text('{"started": "by another program"}')
    args = parse(["--model", str(tmp_path), "--environment", "alfworld"])
    assert (args.temperature, args.prompt) == (0.4, None)


def test_the_panel_of_a_run_is_the_one_that_is_named_or_the_only_one(tmp_path, capsys):
    (tmp_path / "run.json").write_text(json.dumps(RUN))

    def refused(*more):
        with pytest.raises(SystemExit):
            parse(["--model", str(tmp_path), *more])
        return capsys.readouterr().err.splitlines()[-1]

    assert "had no evaluation tasks" in (told := refused()) and "pass --tasks FILE" in told
    assert parse(["--model", str(tmp_path), "--tasks", "mine.jsonl"]).tasks == Path("mine.jsonl")
    write_json_lines(tmp_path / "panels" / "seen.jsonl", [{}])
    assert parse(["--model", str(tmp_path)]).tasks == tmp_path / "panels" / "seen.jsonl"
    write_json_lines(tmp_path / "panels" / "unseen.jsonl", [{}])
    assert "has the panels seen, unseen: choose one with --panel" in refused()
    assert "--panel is 'eval'" in (told := refused("--panel", "eval")) and "has seen, unseen" in told
    args = parse(["--model", str(tmp_path), "--panel", "unseen"])
    assert (args.panel, args.tasks) == ("unseen", tmp_path / "panels" / "unseen.jsonl")


@pytest.fixture
def treasure(tmp_path, monkeypatch):
    """A run in `run`, of an environment beside it."""
    monkeypatch.chdir(tmp_path)
    source = "from g2po_trl import TextEnvironment\nclass Game(TextEnvironment): ...\nclass Other: ...\n"
    (tmp_path / "game.py").write_text(source)
    write_json_lines(tmp_path / "run" / "panels" / "eval.jsonl", [{}])
    run = RUN | {"environment": {"import": f"{tmp_path / 'game.py'}:Game", "kwargs": {"size": 3}}}
    run["play"] = PLAY | {"generation_kwargs": {"no_repeat_ngram_size": 2}, "environment_episode_timeout": 5.0}
    (tmp_path / "run" / "run.json").write_text(json.dumps(run))
    return run


def test_everything_that_decides_how_a_run_plays_is_taken_from_it(treasure):
    from g2po_trl.runs.run_json import _PLAY

    args = parse(["--model", "run"])
    assert args.generation_kwargs == {"no_repeat_ngram_size": 2} and args.environment_episode_timeout == 5.0
    read = set(_PLAY) | {"dtype", "autocast"}
    other = {"max_completion_length", "stop_sequences", "vllm_structured_outputs_regex", "max_observation_characters"}
    assert read - other <= {name.removeprefix("trained_") for name in vars(args)}
    treasure["play"]["vllm_structured_outputs_regex"] = "<a>.*</a>"
    Path("run/run.json").write_text(json.dumps(treasure))
    args = parse(["--model", "run"])
    assert args.generation_kwargs == {"no_repeat_ngram_size": 2, "structured_outputs": {"regex": "<a>.*</a>"}}
    react = parse(["--model", "run", "--agent", "react"])
    assert react.generation_kwargs == {"no_repeat_ngram_size": 2}, "another agent's completions have another form"
    del treasure["play"]["generation_kwargs"], treasure["play"]["vllm_structured_outputs_regex"]
    treasure["trainer"] = {"generation_kwargs": {"typical_p": 0.9}}
    Path("run/run.json").write_text(json.dumps(treasure))
    assert parse(["--model", "run"]).generation_kwargs == {"typical_p": 0.9}, "of a run that was written before"
    assert parse(["--model", "run", "--generation-kwargs", "{}"]).generation_kwargs == {}, "flags win"


@pytest.mark.parametrize("name", ["game.py:Game", "game:Game", "./game.py:Game", "game.py"])
def test_the_runs_environment_has_several_names(treasure, name):
    args = parse(["--model", "run", "--environment", name, "--tasks", "tasks.jsonl"])
    assert (args.max_turns, args.max_tokens, args.environment_options) == (3, 9, {"size": 3})
    told = describe_run_settings(args)
    assert "--max-turns 3" in told and "its prompt" in told and "other than" not in told


@pytest.fixture
def moved(tmp_path, monkeypatch):
    """A run in runs/x of its project, which was moved."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    project, place = tmp_path / "project", tmp_path / "other" / "place"
    project.mkdir()
    source = (
        "from g2po_trl import TextEnvironment\nclass Game(TextEnvironment): ...\ndef read(text, prompt_end=''): ..."
    )
    (project / "game.py").write_text(source + "\ndef solve(task, client): return 1.0\n")
    (project / "words.txt").write_text("a b")
    game, read = (load(f"{project}/game.py:{name}") for name in ("Game", "read"))
    template = describe_prompt(PromptTemplate("{observation}", "x", parse_completion=read))
    agent = describe_object(agent_factory(load(f"{project}/game.py:solve"), 3))
    played = describe_object(functools.partial(game, size=3, words=str(project / "words.txt")))
    monkeypatch.chdir(project)
    for name, environment in (("x", played), ("agent", agent)):
        described = RUN | {"prompt": template, "environment": environment}
        RunFolder(project / "runs" / name, False).write_run(described, {"eval": [{}]})
    assert str(tmp_path) not in (project / "runs" / "x" / "run.json").read_text()
    assert parse(["--model", "runs/x"]).environment == f"{project}/game.py:Game"
    place.parent.mkdir()
    project.rename(place)
    return place


def test_a_project_that_was_moved_is_evaluated_as_it_was_trained(moved):
    args = parse(["--model", str(moved / "runs" / "x")])
    assert args.environment == f"{moved}/game.py:Game"
    assert args.environment_options == {"size": 3, "words": str(moved / "words.txt")}
    assert args.prompt["parse_completion"] == {"import": f"{moved}/game.py:read"}
    assert (args.max_turns, args.tasks) == (3, moved / "runs" / "x" / "panels" / "eval.jsonl")
    args = parse(["--model", str(moved / "runs" / "agent")])
    assert args.environment_options["agent"] == {"import": f"{moved}/game.py:solve"}


def test_an_environment_that_was_moved_is_named_and_the_runs_settings_stay(moved, capsys):
    file = moved / "runs" / "x" / "run.json"
    (moved / "games").mkdir()
    (moved / "game.py").rename(moved / "games" / "game.py")
    with pytest.raises(ValueError, match=r"the run's environment is /.*/game.py:Game, and there is no such file"):
        load_panel(parse(["--model", str(file.parent)]))
    args = parse(["--model", str(file.parent), "--environment", f"{moved}/games/game.py"])
    assert (args.max_turns, args.tasks) == (3, file.with_name("panels") / "eval.jsonl")
    assert args.environment_options["size"] == 3 and args.environment == f"{moved}/games/game.py:Game"
    assert args.prompt["parse_completion"] == {"import": f"{moved}/games/game.py:read"}
    with pytest.raises(SystemExit):
        parse(["--model", str(moved / "runs" / "agent")])
    assert "the run's agent is" in (told := capsys.readouterr().err) and "pass --agent FILE.py:NAME" in told
    agent = parse(["--model", str(moved / "runs" / "agent"), "--agent", f"{moved}/games/game.py"])
    assert (agent.max_turns, agent.max_tokens) == (3, 9) and agent.tasks == moved / "runs/agent/panels/eval.jsonl"


def test_an_evaluation_is_the_same_wherever_its_project_is(moved, tmp_path):
    folders = [moved, tmp_path / "third"]
    shutil.copytree(*folders)
    about = []
    for folder in folders:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        for run in ("x", "agent"):
            args = parse(["--model", str(folder / "model"), "--run", str(folder / "runs" / run)])
            panel = load_panel(args)
            about.append(identity(args, panel, make_agent(args, panel), ChatSettings(0.0, 1.0)))
    assert about[:2] == about[2:] and about[0] != about[1] and str(tmp_path) not in str(about)
    (folders[1] / "words.txt").write_text("c")
    args = parse(["--model", str(folder / "model"), "--run", str(folder / "runs" / "x")])
    panel = load_panel(args)
    assert identity(args, panel, make_agent(args, panel), ChatSettings(0.0, 1.0)) != about[0]


def test_what_is_taken_from_a_run_is_told_in_a_line(treasure):
    told = describe_run_settings(parse(["--model", "run"]))
    assert told == (
        f"From {Path('run').resolve()}: --temperature 0.7, --top-p 0.9, "
        '--generation-kwargs {"no_repeat_ngram_size": 2}, --max-turns 3, --history-length 1, --max-tokens 9, '
        "--environment-episode-timeout 5.0, its prompt"
    )
    told = describe_run_settings(parse(["--model", "run", "--temperature", "0", "--history-length", "4"]))
    assert "other than the run: --temperature 0.0 (the run: 0.7), --history-length 4 (the run: 1)" in told
    other = ["--environment", "game.py:Other", "--tasks", "t.jsonl"]
    assert "game.py:Other is not the environment of" in describe_run_settings(parse(["--model", "run", *other]))
    assert describe_run_settings(parse(["--model", "m", *other])) is None, "no run"


def test_arguments_of_an_environment_are_described_by_name():
    """Evaluation takes `--environment-options` by name, and would lose what has none."""
    described = describe_object(functools.partial(RemoteEnvironment, ["http://there:8000"], timeout=5.0))
    assert described["kwargs"] == {"base_urls": ["http://there:8000"], "timeout": 5.0} and "args" not in described
    assert describe_object(functools.partial(Path, "x"))["args"] == ["x"]


def test_what_cannot_be_written_down_is_not():
    assert describe_object(lambda: None) is None
    assert describe_object(functools.partial(Path, object())) is None
    described = describe_object(functools.partial(functools.partial(ChatSettings, top_p=0.5), temperature=0.0))
    assert described == {
        "import": "g2po_trl.evaluation.chat_models:ChatSettings",
        "kwargs": {"top_p": 0.5, "temperature": 0.0},
    }
    assert load_object(json.loads(json.dumps(described)))() == ChatSettings(0.0, 0.5)


def test_a_prompt_of_another_version_is_refused_with_the_field_and_the_remedy():
    described = {"first": "{observation}", "later": "{history}", "parse_reply": None}
    with pytest.raises(
        ValueError, match="another version of g2po_trl .*'parse_reply'.*: pass --prompt module:TEMPLATE"
    ):
        load_prompt(described)


def test_what_a_prompt_shows_of_an_observation_is_found_again():
    described = json.loads(json.dumps(describe_prompt(SOKOBAN_COMPACT_PROMPT)))
    (message,) = load_prompt(described).messages("# #\nyou+1+1", admissible_actions=["up"])
    assert message["content"] == "up\nyou+1+1"
    described = describe_prompt(replace(SOKOBAN_COMPACT_PROMPT, show_observation=lambda text: text[:5]))
    with pytest.raises(ValueError, match="has a show_observation that cannot be imported"):
        load_prompt(described)


def test_a_prompt_of_a_subclass_is_found_again_or_refused(tmp_path):
    """Its fields alone would be a prompt that the model was not trained with."""
    code = "from dataclasses import dataclass\nfrom g2po_trl import PromptTemplate\n\n\n@dataclass(frozen=True)\n"
    code += "class Loud(PromptTemplate):\n    end: str = '!'\n    def messages(self, observation, **more):\n"
    code += "        return super().messages(observation.upper() + self.end, **more)\n"
    code += "\n\nclass Counted(Loud):\n    def __init__(self, *texts):\n"
    code += "        super().__init__(*texts)\n        object.__setattr__(self, 'n', 0)\n"
    (tmp_path / "prompt_of_this_test.py").write_text(code)
    loud = load(f"{tmp_path}/prompt_of_this_test.py:Loud")("{observation}", "x", end="?")
    described = json.loads(json.dumps(describe_prompt(loud)))
    assert load_prompt(described) == loud and load_prompt(described).messages("hall")[0]["content"] == "HALL?"

    class Local(PromptTemplate):
        pass

    counted = load(f"{tmp_path}/prompt_of_this_test.py:Counted")
    for template in (Local("{observation}", "x"), counted("{observation}", "x")):
        with pytest.raises(ValueError, match="has a class that cannot be imported .*pass --prompt module:TEMPLATE"):
            load_prompt(json.loads(json.dumps(describe_prompt(template))))


def test_a_name_of_the_current_folder_is_found_from_any_other(tmp_path, monkeypatch):
    """Workers get the search path: an entry for "the current folder" would be another folder for them."""
    (tmp_path / "a_game_of_this_test.py").write_text("class Game: ...")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path[:])
    assert load("a_game_of_this_test:Game").__name__ == "Game"
    assert str(tmp_path) in sys.path and "" not in sys.path[:1]


def test_agents_are_described_by_their_names(tmp_path, monkeypatch):
    """A lambda and an `AgentCommand` by the variable of their module; without a name, turns and panels are known."""
    (tmp_path / "agents_of_this_test.py").write_text(
        "from g2po_trl import AgentCommand\nsolve = AgentCommand('true', verify=lambda task: 1.0)\n"
        "quick = lambda task, client: 1.0\ndef walk(task, client): return 1.0\ndef make(): return lambda t, c: 0.0\n"
        "def reward(task): return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import agents_of_this_test as made

    def described(agent, **options):
        return describe_object(agent_factory(agent, 3, **options))

    def identity(agent):
        return identity_of({"environment": described(agent)})

    for agent, name in ((made.solve, "solve"), (made.quick, "quick"), (made.walk, "walk")):
        run = described(agent)
        assert run["kwargs"] == {"agent": {"import": f"{tmp_path}/agents_of_this_test.py:{name}"}, "max_turns": 3}
        assert load_object(run).keywords["agent"] is agent
        assert identity(agent)["environment options"]["kwargs"]["agent"] == {"import": name}
    for agent in (made.make(), AgentCommand("true", verify=made.reward)):
        assert described(agent, state_key=made.make())["kwargs"] == {"agent": None, "max_turns": 3, "state_key": None}
        assert identity(agent)["environment options"]["kwargs"]["agent"] is None

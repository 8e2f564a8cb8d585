"""`run.json`: what is written into it."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from g2po_envs.adapters.openenv import RemoteEnvironment
from g2po_envs.sokoban import SOKOBAN_COMPACT_PROMPT
from g2po_trl import AgentCommand, PromptTemplate
from g2po_trl.engines.sampling import Sampling
from g2po_trl.environments.loading import load
from g2po_trl.environments.setup import agent_factory
from g2po_trl.runs.run_json import describe_object, describe_prompt, identity_of, load_object, load_prompt


@pytest.mark.parametrize(
    ("bound", "kwargs"),
    [
        (partial(RemoteEnvironment, ["there"]), {"base_urls": ["there"]}),  # as `--environment-options` takes it
        (partial(Sampling, np.float64(0.5), 1.0), {"temperature": 0.5, "top_p": 1.0}),
        (partial(partial(Sampling, 0.5), stop_sequences=("a",)), {"temperature": 0.5, "stop_sequences": ["a"]}),
    ],
)
def test_arguments_are_described_by_name_as_plain_data(bound, kwargs):
    described = json.loads(json.dumps(describe_object(bound)))
    assert described["kwargs"] == load_object(described).keywords == kwargs and "args" not in described


def test_what_cannot_be_written_down_is_not():
    assert describe_object(lambda: None) is describe_object(partial(Path, object())) is None
    assert describe_object(partial(Path, Path("x")))["args"] == ["x"]


LOCAL = describe_prompt(replace(SOKOBAN_COMPACT_PROMPT, show_observation=lambda text: text[:5]))
OLDER = {"first": "{observation}", "later": "{history}", "parse_reply": None}


@pytest.mark.parametrize(("described", "field"), [(LOCAL, "prompt.show_observation"), (OLDER, "prompt")])
def test_a_prompt_that_cannot_be_found_again_is_refused(described, field):
    with refused(field):
        load_prompt(described)


SUBCLASSES = """
from dataclasses import dataclass
from g2po_trl import PromptTemplate

@dataclass(frozen=True)
class Loud(PromptTemplate):
    end: str = '!'
    def messages(self, observation, **more):
        return super().messages(observation.upper() + self.end, **more)

class Counted(Loud):
    def __init__(self, *texts):
        super().__init__(*texts)
        object.__setattr__(self, 'n', 0)
"""


def read_again(template):
    return load_prompt(json.loads(json.dumps(describe_prompt(template))))


def test_a_prompt_with_functions_or_of_a_subclass_is_found_again_or_refused(tmp_path):
    """Its fields alone would be a prompt that the model was not trained with."""
    (tmp_path / "prompt_of_this_test.py").write_text(SUBCLASSES)
    loud = load(f"{tmp_path}/prompt_of_this_test.py:Loud")("{observation}", "x", end="?")
    assert read_again(SOKOBAN_COMPACT_PROMPT) == SOKOBAN_COMPACT_PROMPT
    assert read_again(loud) == loud and read_again(loud).messages("hall")[0]["content"] == "HALL?"

    class Local(PromptTemplate):
        pass

    counted = load(f"{tmp_path}/prompt_of_this_test.py:Counted")
    for template in (Local("{observation}", "x"), counted("{observation}", "x")):
        with refused("prompt.class"):
            read_again(template)


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
        return identity_of({"environment": described(agent)}, ())

    for agent, name in ((made.solve, "solve"), (made.quick, "quick"), (made.walk, "walk")):
        run = described(agent)
        assert run["kwargs"] == {"agent": {"import": f"{tmp_path}/agents_of_this_test.py:{name}"}, "max_turns": 3}
        assert load_object(run).keywords["agent"] is agent
        assert identity(agent)["environment options"]["kwargs"]["agent"] == {"import": name}
    for agent in (made.make(), AgentCommand("true", verify=made.reward)):
        assert described(agent, state_key=made.make())["kwargs"] == {"agent": None, "max_turns": 3, "state_key": None}
        assert identity(agent)["environment options"]["kwargs"]["agent"] is None

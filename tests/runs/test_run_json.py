"""`run.json`: what is written into it."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from refusals import refused

from g2po_envs.adapters.openenv import RemoteEnvironment
from g2po_envs.sokoban import SOKOBAN_COMPACT_PROMPT
from g2po_trl import PromptTemplate
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


SUBCLASS = """
from dataclasses import dataclass
from g2po_trl import PromptTemplate

@dataclass(frozen=True)
class Loud(PromptTemplate):
    end: str = '!'
    def messages(self, observation, **more):
        return super().messages(observation.upper() + self.end, **more)
"""


def read_again(template):
    return load_prompt(json.loads(json.dumps(describe_prompt(template))))


def test_a_prompt_with_functions_or_of_a_subclass_is_found_again_or_refused(tmp_path):
    """Its fields alone would be a prompt that the model was not trained with."""
    (tmp_path / "prompt_of_this_test.py").write_text(SUBCLASS)
    loud = load(f"{tmp_path}/prompt_of_this_test.py:Loud")("{observation}", "x", end="?")
    assert read_again(SOKOBAN_COMPACT_PROMPT) == SOKOBAN_COMPACT_PROMPT
    assert read_again(loud) == loud and read_again(loud).messages("hall")[0]["content"] == "HALL?"

    class Local(PromptTemplate):
        pass

    with refused("prompt.class"):
        read_again(Local("{observation}", "x"))
    with refused("prompt.show_observation"):
        read_again(replace(SOKOBAN_COMPACT_PROMPT, show_observation=lambda text: text[:5]))


def test_agents_are_described_by_their_names(tmp_path, monkeypatch):
    """A lambda and an `AgentCommand` by the variable of their module; without a name, turns are known."""
    (tmp_path / "agents_of_this_test.py").write_text(
        "from g2po_trl import AgentCommand\nsolve = AgentCommand('true', verify=lambda task: 1.0)\n"
        "quick = lambda task, client: 1.0\ndef walk(task, client): return 1.0\ndef make(): return lambda t, c: 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import agents_of_this_test as made

    def described(agent):
        return describe_object(agent_factory(agent, 3))

    for agent, name in ((made.solve, "solve"), (made.quick, "quick"), (made.walk, "walk")):
        run = described(agent)
        assert run["kwargs"] == {"agent": {"import": f"{tmp_path}/agents_of_this_test.py:{name}"}, "max_turns": 3}
        assert load_object(run).keywords["agent"] is agent
        identity = identity_of({"environment": run}, ())["environment options"]["kwargs"]
        assert identity["agent"] == {"import": name}
    assert described(made.make())["kwargs"] == {"agent": None, "max_turns": 3}

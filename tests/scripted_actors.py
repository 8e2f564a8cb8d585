"""Who answers in tests of the rollout: no model."""

from contextlib import nullcontext
from dataclasses import dataclass

from g2po_trl.rollout.generation import Engine


class ScriptedEngine(Engine):
    """`answer(prompts) -> replies`."""

    def __init__(self, tokenizer, answer):
        super().__init__(tokenizer, [tokenizer.eos_token_id])
        self.answer = answer

    def generate(self, prompts, sampling, seeds=None):
        return self.answer(prompts)


@dataclass
class ScriptedActor:
    """`act(live episodes) -> steps`."""

    act: callable
    is_collective = False

    def rollout(self):
        return nullcontext()

    def session(self, sampling, seeds, stats):
        return self

    def close(self):
        pass

    def prepare(self, live):
        pass

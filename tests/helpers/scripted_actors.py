"""Who answers in tests of the rollout: no model."""

import random
from contextlib import nullcontext
from dataclasses import dataclass, field

from g2po_trl import PromptTemplate
from g2po_trl.engines.base import Completion, Engine
from g2po_trl.prompts.template import parse_plain
from g2po_trl.rollout.actor import PromptActor

TEMPLATE = PromptTemplate("{task}|{observation}", "{task}|{history}|{observation}", parse_completion=parse_plain)


class ScriptedEngine(Engine):
    """`answer(prompts) -> completions`."""

    def __init__(self, tokenizer, answer):
        super().__init__(tokenizer, [tokenizer.eos_token_id])
        self.answer = answer

    def generate(self, prompts, sampling, seeds=None):
        return self.answer(prompts)


class ScriptedStream(ScriptedEngine):
    """The same one by one, in any order."""

    streams = takes_seeds = True

    def __init__(self, tokenizer, answer, order=0):
        super().__init__(tokenizer, answer)
        self.asked, self.seeds, self.random = {}, {}, random.Random(order)

    def submit(self, key, prompt, sampling, seed=None):
        assert key not in self.asked, "it has not answered the last one"
        self.asked[key], self.seeds[tuple(prompt)] = prompt, seed

    def poll(self, timeout):
        if not self.asked or self.random.random() < 0.3:
            return {}
        key = self.random.choice(list(self.asked))
        return {key: self.answer([self.asked.pop(key)])[0]}


@dataclass
class ScriptedActor:
    """`act(live episodes) -> steps`."""

    act: callable
    asked: list = field(default_factory=list)
    is_collective = False
    streams = False

    def rollout(self):
        return nullcontext()

    def session(self, sampling, seeds, stats):
        return self

    def close(self):
        pass

    @property
    def waiting(self):
        return len(self.asked)

    def ask(self, episodes):
        self.asked += episodes

    def receive_steps(self, timeout):
        asked, self.asked = self.asked, []
        return list(zip(asked, self.act(asked))) if asked else []


def make_actor(encode, kind=ScriptedStream, **options):
    def answer(prompts):
        return [Completion(encode.tokenizer("go")["input_ids"], [-0.5]) for _ in prompts]

    return PromptActor(kind(encode.tokenizer, answer, **options), encode, TEMPLATE)

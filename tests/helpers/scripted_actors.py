"""Who answers in tests of the rollout: no model."""

import random
from dataclasses import replace

from g2po_trl import EnvironmentPool, EpisodeLimits, Player, PoolLimits, PromptTemplate
from g2po_trl.engines.base import Completion, Engine
from g2po_trl.evaluation.text_actor import TextActor
from g2po_trl.prompts.template import parse_plain
from g2po_trl.rollout.actor import PromptActor

TEMPLATE = PromptTemplate("{task}|{observation}", "{task}|{history}|{observation}", parse_completion=parse_plain)
WITH_ACTIONS = replace(TEMPLATE, first=f"{TEMPLATE.first}|{{actions}}", later=f"{TEMPLATE.later}|{{actions}}")


class ScriptedEngine(Engine):
    """`answer(prompts) -> completions`. With `cuts`, they end where their sampling says."""

    returns_logprobs = True

    def __init__(self, tokenizer, answer=None, cuts=False):
        super().__init__(tokenizer, [tokenizer.eos_token_id])
        self.answer, self.cuts = answer, cuts

    def generate(self, prompts, sampling, seeds=None):
        made = self.answer(prompts)
        return [self.cut(completion, sampling) for completion in made] if self.cuts else made


class ScriptedStream(ScriptedEngine):
    """The same one by one, in any order."""

    streams = takes_seeds = True
    idle = 0.3  # of the polls

    def __init__(self, tokenizer, answer=None, cuts=False, order=0):
        super().__init__(tokenizer, answer, cuts)
        self.asked, self.seeds, self.random = {}, {}, random.Random(order)

    def submit(self, key, prompt, sampling, seed=None):
        assert key not in self.asked, "it has not answered the last one"
        self.asked[key], self.seeds[tuple(prompt)] = (prompt, sampling, seed), seed

    def poll(self, timeout):
        if not self.asked or self.random.random() < self.idle:
            return {}
        key = self.random.choice(list(self.asked))
        return {key: self.complete(key, *self.asked.pop(key))}

    def complete(self, key, prompt, sampling, seed):
        return self.generate([prompt], sampling)[0]


CALL = '<tool_call>\n{"name": "turn", "arguments": {"digit": 1}}\n</tool_call>'
WORDS = ("a", "n", "mok", "so it is", CALL, f"I try. {CALL}")


class SeededEngine(ScriptedStream):
    """Its completions follow from prompt and seed alone, as vLLM's do."""

    idle = 0.0

    def complete(self, key, prompt, sampling, seed):
        words = random.Random(f"{prompt} {sampling.temperature} {seed}").choice(WORDS)
        ids = self.tokenizer(f"{words}<|im_end|>")["input_ids"]
        return self.cut(Completion(ids, [-1.0] * len(ids)), sampling)


def play_scripted(kind, encode, tasks, environment, write, max_turns=4, **options):
    """Play by an engine of this class that writes `write(prompt's text)` as far as it may.

    Returns trajectories, statistics, and the prompts of each call of the engine.
    """
    calls = []

    def generate(prompts):
        calls.append(prompts)
        texts = [write(encode.tokenizer.decode(prompt)) for prompt in prompts]
        return [Completion(encode.tokenizer(text)["input_ids"]) for text in texts]

    engine = kind(encode.tokenizer, generate, cuts=True)
    with EnvironmentPool(environment, PoolLimits(1)) as pool:
        actor = PromptActor(engine, encode, **{"template": WITH_ACTIONS, **options})
        trajectories, stats = Player(pool, actor, EpisodeLimits(max_turns)).play(tasks)
    return trajectories, stats, calls


class ScriptedActor(TextActor):
    """`act(live episodes) -> steps`."""

    def __init__(self, act):
        self.answer = act

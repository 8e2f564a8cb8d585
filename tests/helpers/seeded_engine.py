"""An engine whose completions follow from prompt and seed alone, as vLLM's do, from no model at all."""

import random

from g2po_trl.engines.base import Completion, Engine

CALL = '<tool_call>\n{"name": "turn", "arguments": {"digit": 1}}\n</tool_call>'
WORDS = ("a", "n", "mok", "so it is", CALL, f"I try. {CALL}")


class SeededEngine(Engine):
    streams = takes_seeds = True

    def __init__(self, tokenizer):
        super().__init__(tokenizer, [tokenizer.eos_token_id])
        self.asked, self.order = {}, random.Random(0)

    def submit(self, key, prompt, sampling, seed=None):
        self.asked[key] = prompt, sampling, seed

    def poll(self, timeout):
        if not self.asked:
            return {}
        key = self.order.choice(list(self.asked))
        prompt, sampling, seed = self.asked.pop(key)
        words = random.Random(f"{prompt} {sampling.temperature} {seed}").choice(WORDS)
        ids = self.tokenizer(f"{words}<|im_end|>")["input_ids"]
        return {key: self.cut(Completion(ids, [-1.0] * len(ids)), sampling)}

"""An engine as vLLM's are to the trainer: completions one by one, with log-probabilities, from no model at all."""

import random
from contextlib import contextmanager

from g2po_trl.engines.base import Completion, Engine


class LettersEngine(Engine):
    """Says a letter that follows from the rollout, the episode and the prompt, whatever the number of ranks."""

    streams = takes_seeds = True

    def __init__(self, parts):
        super().__init__(parts.tokenizer, parts.stop_token_ids)
        self.parts, self.asked, self.rollouts = parts, {}, 0

    @classmethod
    def of_trainer(cls, parts):
        return cls(parts)

    @contextmanager
    def _open(self):
        self.rollouts += 1
        yield
        self.asked.clear()

    def submit(self, key, prompt, sampling, seed=None):
        args = self.parts.args
        rows = args.per_device_train_batch_size * args.steps_per_generation
        episode = self.parts.accelerator.process_index * rows + key
        self.asked[key] = random.Random(f"{self.rollouts} {episode} {prompt}")

    def poll(self, timeout):
        key, chosen = self.asked.popitem()
        words = chosen.choice("amnopqz") + "go" * chosen.randint(0, 2)
        ids = self.tokenizer(words)["input_ids"]
        return {key: Completion(ids, [-5.0 - chosen.random() / 10 for _ in ids])}

"""An engine as vLLM's are to the trainer: replies one by one, with log-probabilities, from no model at all."""

import random
import time
from contextlib import contextmanager

from g2po_trl.rollout.generation import Engine, Reply


class LettersEngine(Engine):
    """Says a letter that follows from the rollout, the episode and the prompt, whatever the number of ranks.

    Some episodes wait until others have been learned from, if they can be.
    """

    streams = takes_seeds = True

    def __init__(self, trainer):
        super().__init__(trainer.processing_class, [trainer.processing_class.eos_token_id])
        self.trainer, self.asked, self.rollouts, self.deadline = trainer, {}, 0, 0.0

    @contextmanager
    def _open(self):
        self.rollouts += 1
        self.deadline = time.monotonic() + 20
        yield
        self.asked.clear()

    def submit(self, key, prompt, sampling, seed=None):
        args = self.trainer.args
        rows = args.per_device_train_batch_size * args.steps_per_generation
        episode = self.trainer.accelerator.process_index * rows + key
        self.asked[key] = random.Random(f"{self.rollouts} {episode} {prompt}")

    def poll(self, timeout):
        free = [key for key in self.asked if not self.is_held(key)]
        if not free and self.must_wait():
            time.sleep(0.001)
            return {}
        key = (free or list(self.asked))[-1]
        chosen = self.asked.pop(key)
        words = chosen.choice("amnopqz") + "go" * chosen.randint(0, 2)
        ids = self.tokenizer(words)["input_ids"]
        return {key: Reply(ids, [-5.0 - chosen.random() / 10 for _ in ids])}

    def is_held(self, key):
        return key < self.trainer.args.num_generations  # the first group

    def must_wait(self):
        """While nothing was learned; in the first rollout, nothing can be in a layout that was not compared yet."""
        playing = self.trainer.while_playing
        learns = playing is not None and (self.rollouts > 1 or self.trainer.update.layout.kind == "padded")
        return learns and playing.early._load.micro_batches == 0 and time.monotonic() < self.deadline

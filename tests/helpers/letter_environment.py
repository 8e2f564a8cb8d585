"""A game of two turns that a random model of 0.1 M parameters can learn: say a token that starts with a..m, twice.

The second room depends on what was said in the first, so that a group's graph has shared nodes and branches.
"""

import os
import signal
import time
from dataclasses import replace

from g2po_trl import Observation, PromptTemplate, StepResult, TextEnvironment
from g2po_trl.prompts.template import ParsedCompletion


def parse_letter(completion, prompt_end=""):
    return ParsedCompletion(completion[:1], completion[:1].isalpha())


LETTER_PROMPT = PromptTemplate(
    first="{task} {observation}", later="{task} {history} {observation}", parse_completion=parse_letter
)


class LetterEnvironment(TextEnvironment):
    def reset(self, seed):
        self.rooms, self.good = [f"hall {seed}"], 0
        return Observation(self.rooms[0], task="go")

    def step(self, action):
        right = "a" <= action.lower()[:1] <= "m"
        self.good += right
        self.rooms.append("kitchen" if right else "cellar")
        done = len(self.rooms) > 2
        return StepResult(self.rooms[-1], reward=10.0 * (done and self.good == 2), terminated=done)


class ScoredLetterEnvironment(LetterEnvironment):
    def step(self, action):
        result = super().step(action)
        scores = {"score": (1 + self.good) / 3, "score_corrected": (1 + self.good) / 6, "scores": "no number"}
        return replace(result, info=scores if result.terminated else {})


class LongLetterEnvironment(LetterEnvironment):
    """Ends after 1 to 6 steps, by what is said: episodes of unequal length."""

    def step(self, action):
        self.rooms.append(f"room {len(self.rooms)}")
        right = "a" <= action.lower()[:1] <= "m"
        done = right or len(self.rooms) > 6
        return StepResult(self.rooms[-1], reward=10.0 * right, terminated=done)


class SuicidalEnvironment(LetterEnvironment):
    """Its process is killed in the second step of one task."""

    def reset(self, seed):
        self.seed = seed
        return super().reset(seed)

    def step(self, action):
        if self.seed == 1 and len(self.rooms) == 2:
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class WordyLetterEnvironment(LetterEnvironment):
    """The goal of every other task is too long for a short prompt."""

    def reset(self, seed):
        return replace(super().reset(seed), task="go " * (200 * (seed % 2) + 1))


class RaisingEnvironment(LetterEnvironment):
    def step(self, action):
        raise RuntimeError("the door is stuck")


class NanRewardEnvironment(LetterEnvironment):
    def step(self, action):
        return StepResult("hall", reward=float("nan"), terminated=True)


class NoneEnvironment(LetterEnvironment):
    def reset(self, seed):
        return None


class NumberEnvironment(LetterEnvironment):
    def reset(self, seed):
        return 5

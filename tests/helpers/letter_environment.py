"""A game of two turns that a random model of 0.1 M parameters can learn: say a token that starts with a..m, twice.

The second room depends on what was said in the first, so that a group's graph has shared nodes and branches.
"""

import os
import signal
import time

import numpy as np

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


class LongLetterEnvironment(LetterEnvironment):
    """Ends after 1 to 6 steps, by what is said: episodes of unequal length."""

    def step(self, action):
        self.rooms.append(f"room {len(self.rooms)}")
        right = "a" <= action.lower()[:1] <= "m"
        done = right or len(self.rooms) > 6
        return StepResult(self.rooms[-1], reward=10.0 * right, terminated=done)


class SuicidalEnvironment(LetterEnvironment):
    """Its process is killed in the second step of one task."""

    def step(self, action):
        if self.rooms[0] == "hall 1" and len(self.rooms) == 2:
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def drawing(seed, width=24, height=16):
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


class DrawnLetterEnvironment(LetterEnvironment):
    """The letter game, whose rooms are drawings: those of the second turn are larger."""

    prompt_template = LETTER_PROMPT

    def reset(self, seed):
        seen = super().reset(seed)
        return Observation("a hall", task=seen.task, images=[drawing(seed)])

    def step(self, action):
        result = super().step(action)
        room = len(result.observation)
        images = [drawing(room, 32, 24)] * (not result.terminated)
        return StepResult(Observation("a room", images=images), result.reward, result.terminated)

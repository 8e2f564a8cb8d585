"""Gymnasium environments of text, small, and registered as a user's own are. `gymnasium.make` imports this module."""

import random
import string

import gymnasium
import numpy as np
from gymnasium.spaces import Text


class Letters(gymnasium.Env):
    """Say a letter of the first half of the alphabet twice. What follows depends on the first letter."""

    observation_space = Text(100, charset=string.printable)
    action_space = Text(1, charset=string.ascii_lowercase)

    def __init__(self, word="hall"):
        self.word = word

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options, self.number = options, int(self.np_random.integers(1000))
        self.said = ""
        return f"{self.word} {self.number}", {"can": ["a", "z"]}

    def step(self, action):
        self.said += action
        over, right = len(self.said) == 2, all(letter <= "m" for letter in self.said)
        info = {"can": ["a", "z"], "is_success": over and right, "score": "none", "turns": np.int64(1)}
        info |= {"places": np.arange(3), "generator": self.np_random}
        return ("kitchen" if action <= "m" else "cellar"), 10.0 * (over and right), over, False, info


class Dice(Letters):
    """Draws from Python's own generator, as many games do, and never ends by itself."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return str(random.random()), {}

    def step(self, action):
        return str(random.random()), 0.0, False, False, {}


gymnasium.register("Letters-v0", Letters, disable_env_checker=True)
gymnasium.register("Dice-v0", Dice, max_episode_steps=3, disable_env_checker=True)

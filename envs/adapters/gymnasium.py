"""Gymnasium environments with text observations and actions, or with numbered actions and text rendering.

    environment_factory = partial(GymnasiumEnvironment, "my_game:MyTextGame-v0")
    environment_factory = partial(
        GymnasiumEnvironment,
        "FrozenLake-v1",
        make_options={"render_mode": "ansi", "is_slippery": False},
        action_names=["left", "down", "right", "up"],
    )

A dataset row is `{"seed": 1}`; its other columns go to the environment as the `options` of its `reset`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from g2po_trl.environments.contract import Observation, StepResult, TextEnvironment
from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.extras import import_extra
from g2po_trl.utils.json import to_plain
from g2po_trl.utils.options import require

from .common import PrivateRandomState, plain_info

_COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)  # Gymnasium marks the player's position so


class GymnasiumEnvironment(TextEnvironment):
    """A Gymnasium environment as a `TextEnvironment`.

    Text spaces and numbered actions work unchanged. For other spaces, override `read_observation` or `read_action`.

    Args:
        env_id: passed to `gymnasium.make`. `"module:Name-v0"` imports the module that registers the environment;
            worker processes need this for environments of your own.
        make_options: keyword arguments of `gymnasium.make`.
        action_names: names of the actions of a `Discrete` space, in order. `None`: their numbers.
        actions_in_info: the entry of Gymnasium's `info` that lists the admissible actions, for `Text` spaces.
        task: the goal in words; prompts repeat it at every step.
        any_text: accept every text, even if the `Text` space excludes its length or its characters.

    Raises:
        ImportError: if gymnasium is not installed.
        G2POError: if the environment does not exist, or its spaces need the methods named above.
    """

    def __init__(
        self,
        env_id: str,
        make_options: Mapping[str, Any] | None = None,
        action_names: Sequence[str] | None = None,
        actions_in_info: str | None = None,
        task: str | None = None,
        any_text: bool = False,
    ):
        self.gymnasium = import_extra("gymnasium")
        self.env_id, self.task = env_id, task
        self.actions_in_info, self.any_text = actions_in_info, any_text
        self.randomness = PrivateRandomState()
        try:
            with self.randomness.active(0):
                self.env = self.gymnasium.make(env_id, **(make_options or {}))
        except self.gymnasium.error.UnregisteredEnv as error:
            remedy = f"for your own, name the module that registers it, 'my_module:{env_id.rpartition(':')[2]}'"
            raise G2POError(f"env_id is {env_id!r}, which is not registered ({error}): {remedy}", "env_id") from error
        self._check_spaces()
        self.action_names = self._named_actions(action_names)
        self._last: Observation | None = None

    def reset(self, seed: int | None = 0, **options: Any) -> Observation:
        """Start a task.

        Args:
            seed: seed of the environment and its spaces. `None` (a row without a seed): 0.
            **options: passed as Gymnasium's `options`, except `task_id` and `task_type`.
        """
        seed = seed or 0
        options = {k: v for k, v in options.items() if k not in ("task_id", "task_type") and v is not None}
        with self.randomness.active(seed):
            self.env.action_space.seed(seed)
            self.env.observation_space.seed(seed)
            observation, info = self.env.reset(seed=seed, options=options or None)
            self._last = self._observed(observation, info)
        return self._last

    def step(self, action: str) -> StepResult:
        """Play an action. An invalid action returns an error as observation and does not reach the environment."""
        try:
            played = self.read_action(action)
        except ValueError as error:
            key = self._last.text if self._last.state_key is None else self._last.state_key
            refused = replace(self._last, text=f"{error}\n{self._last.text}", state_key=key)
            return StepResult(refused, info={"invalid_action": True})
        with self.randomness.active():
            observation, reward, terminated, truncated, info = self.env.step(played)
            self._last = seen = self._observed(observation, info)
        facts = plain_info(info)
        success = facts.get("success", facts.pop("is_success", None))
        if success is not None:
            facts["success"] = bool(success)
        terminated = bool(terminated)
        return StepResult(seen, float(reward), terminated, bool(truncated) and not terminated, facts)

    def close(self) -> None:
        self.env.close()

    def read_observation(self, observation: Any, info: Mapping[str, Any]) -> Observation | str:
        """Return a text observation unchanged; otherwise the rendered text, with the observation as state key."""
        if isinstance(observation, str):
            return observation
        drawn = self.env.render()
        if not isinstance(drawn, str):
            raise TypeError(f"{self.env_id} renders {type(drawn).__name__}, not text: override read_observation")
        return Observation(_COLOURED.sub(r"<\1>", drawn), state_key=json.dumps(to_plain(observation)))

    def read_action(self, action: str) -> Any:
        """Return the element of the action space that a text names.

        Raises:
            G2POError: if there is none. The agent sees the message as its next observation.
        """
        space = self.env.action_space
        if self.action_names is not None:
            if action.strip() in self.action_names:
                return self.action_names.index(action.strip()) + int(space.start)
            known = f"The actions are: {', '.join(self.action_names)}."
        elif self.any_text or space.contains(action):
            return action
        else:
            alphabet = "".join(sorted(space.character_set))
            known = f"An action has {space.min_length} to {space.max_length} of the characters {alphabet!r}."
        raise G2POError(f"There is no such action. {known}", "action", action)

    def _observed(self, observation: Any, info: Mapping[str, Any]) -> Observation:
        seen = self.read_observation(observation, info)
        seen = Observation(seen) if isinstance(seen, str) else seen
        if seen.admissible_actions is None:
            seen = replace(seen, admissible_actions=self._admissible(info))
        return replace(seen, task=self.task) if seen.task is None else seen

    def _admissible(self, info: Mapping[str, Any]) -> list[str] | None:
        if self.action_names is None:
            actions = None if self.actions_in_info is None else info[self.actions_in_info]
            return None if actions is None else list(actions)
        mask = info.get("action_mask")  # e.g. of Taxi-v4
        return [name for i, name in enumerate(self.action_names) if mask is None or mask[i]]

    def _named_actions(self, names: Sequence[str] | None) -> list[str] | None:
        space = self.env.action_space
        number = int(space.n) if isinstance(space, self.gymnasium.spaces.Discrete) else 0
        if names is None:
            return [str(int(space.start) + place) for place in range(number)] or None
        require(
            len(names) == number, "action_names", list(names), f"name all actions of a Discrete space, not {space}"
        )
        return list(names)

    def _check_spaces(self) -> None:
        """Refuse a space without a text form, unless the class of the environment gives it one."""
        spaces, env = self.gymnasium.spaces, self.env
        fine = {
            "observation": isinstance(env.observation_space, spaces.Text) or env.render_mode == "ansi",
            "action": isinstance(env.action_space, (spaces.Text, spaces.Discrete)),
        }
        for name, has_text in fine.items():
            method = f"read_{name}"
            own = getattr(type(self), method) is not getattr(GymnasiumEnvironment, method)
            remedy = f'pass make_options={{"render_mode": "ansi"}}, or override {method}'
            require(has_text or own, f"{name}_space", getattr(env, f"{name}_space"), f"it has no text form; {remedy}")

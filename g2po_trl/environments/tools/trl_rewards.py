"""TRL's arguments `reward_funcs` and `tools` for environment workers.

`GRPOTrainer` calls a reward function once per batch, with lists. Here it is called in the worker when an episode ends,
with lists of one, because the environments whose state it reads are there.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...prompts.conversation import Message
from ...utils.options import is_of_kind, require
from ..contract import TextEnvironment
from ..several import environments_of, mixed, player_of
from ..validation import check_call, unwrap_factory

NOT_TOOLS = ("reset", "get_reward", "close")
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # as in TRL


class TRLEnvironment:
    """Tool methods of an environment, functions as tools, and reward functions, combined as in `GRPOTrainer`.

    The sum of reward functions, weighted, is added to `get_reward()`. Raises `G2POError` without either, or a tool.
    """

    def __init__(
        self,
        environment_factory: Callable[[], Any] | None,
        reward_funcs: Sequence[Callable] = (),
        reward_weights: Sequence[float] | None = None,
        tools: Sequence[Callable] = (),
    ):
        self.environment = None if environment_factory is None else environment_factory()
        self.reward_funcs = named_functions(reward_funcs)
        self.reward_weights = [1.0] * len(reward_funcs) if reward_weights is None else reward_weights
        self.has_get_reward = callable(getattr(self.environment, "get_reward", None))
        self.tools = {tool.__name__: tool for tool in tools}
        self.tools |= {name: getattr(self.environment, name) for name in class_tools(type(self.environment))}
        name = "tools" if self.environment is None else type(self.environment).__name__
        remedy = "add a method that returns the reward of an episode, or pass reward_funcs to the trainer"
        require(self.has_get_reward or bool(reward_funcs), f"get_reward of {name}", None, remedy)
        remedy = "add one; all public methods except reset, get_reward and close are tools"
        require(bool(self.tools), f"the tools of {name}", [], remedy)

    def reset(self, **row: Any) -> Any:
        """Return what the environment's `reset` returns; `None` without one."""
        self.columns = row
        return None if self.environment is None else self.environment.reset(**row)

    def reward(
        self, prompt: list[Message], completion: list[Message], wait: Callable[[Any], Any]
    ) -> tuple[float, dict[str, float]]:
        """Return an episode's reward and, if it has several parts, each by name; `wait` awaits what they return."""
        given = {name: [value] for name, value in self.columns.items() if name not in _NOT_COLUMNS}
        given |= {} if self.environment is None else {"environments": [self.environment]}
        total, parts = 0.0, {}
        for (name, function), weight in zip(self.reward_funcs.items(), self.reward_weights):
            returned = wait(function(prompts=[prompt], completions=[completion], **given))
            rewards = [*returned] if isinstance(returned, Iterable) else []
            fits = len(rewards) == 1 and (rewards[0] is None or hasattr(rewards[0], "__float__"))
            require(fits, name, returned, "return a list with one number, or None, for one completion")
            if rewards[0] is not None and not math.isnan(rewards[0]):
                parts[name] = float(rewards[0])
                total += weight * parts[name]
        if self.has_get_reward:
            name, returned = type(self.environment).__name__, wait(self.environment.get_reward())
            require(hasattr(returned, "__float__"), f"get_reward of {name}", returned, "return a number")
            parts[name] = float(returned)
            total += parts[name]
        require(bool(parts), "reward_funcs", [*self.reward_funcs], "all returned None: one must return a number")
        return total, parts if len(self.reward_funcs) + self.has_get_reward > 1 else {}

    def close(self) -> Any:
        return self.environment.close() if callable(getattr(self.environment, "close", None)) else None


def class_tools(environment_class: type) -> list[str]:
    """Return the names of a class's tools: all public methods but the reserved ones. Properties are not read."""
    names = [name for name, _ in inspect.getmembers(environment_class, inspect.isfunction)]
    return [name for name in names if not name.startswith("_") and name not in NOT_TOOLS]


def with_rewards(
    environment_factory: Callable | None, reward_funcs: Any, reward_weights: Sequence[float] | None, tools: Any
) -> Callable | None:
    """Return the environment factory, or each of several, with the trainer's `reward_funcs` and `tools` if given."""
    functions, tools = _as_list(reward_funcs), _as_list(tools)
    if reward_weights is not None:
        weights = reward_weights if isinstance(reward_weights, (list, tuple)) else ()
        fits = len(weights) == len(functions) > 0 and all(is_of_kind(weight, float) for weight in weights)
        require(fits, "reward_weights", reward_weights, "give a list with a number for each of reward_funcs, or none")
    if environments := environments_of(environment_factory):
        arguments = (reward_funcs, reward_weights, tools)
        return mixed({name: with_rewards(factory, *arguments) for name, factory in environments.items()})
    if not tools and (not functions or not callable(environment_factory)):
        return environment_factory
    made = environment_factory and unwrap_factory(environment_factory)
    pays = isinstance(made, type) and issubclass(made, TextEnvironment)
    remedy = "leave it out with a TextEnvironment, whose own steps return rewards"
    require(not pays, "reward_funcs" if functions else "tools", functions or tools, remedy)
    fits = all(callable(function) and not hasattr(function, "forward") for function in functions)
    remedy = "they are called in environment workers; in place of a reward model, pass a function that asks a server"
    require(fits, "reward_funcs", functions, remedy)
    are_named = len(named_functions(functions)) == len(functions)
    require(are_named, "reward_funcs", functions, "give each a __name__ of its own")
    keywords = {"reward_funcs": functions, "reward_weights": reward_weights, "tools": tools}
    given = {name: value for name, value in keywords.items() if value}
    return functools.partial(TRLEnvironment, environment_factory=environment_factory, **given)


def bound_environment(environment_factory: Callable) -> tuple[Callable | None, Sequence[Callable]]:
    """Return the environment's class or function, `None` if there is none, and the `tools` of `with_rewards`."""
    made = unwrap_factory(environment_factory)
    if made is not TRLEnvironment:
        return made, ()
    inner, tools = environment_factory.keywords["environment_factory"], environment_factory.keywords.get("tools", ())
    return inner and unwrap_factory(inner), tools


def check_reward_columns(environment_factory: Callable, task: Mapping[str, Any]) -> None:
    """Refuse (`G2POError`) a reward function that cannot be called with the columns of a task."""
    environment_factory, _ = player_of(environment_factory, task)
    if unwrap_factory(environment_factory) is TRLEnvironment:
        keywords, remedy = environment_factory.keywords, "add the column, give the argument a default, or add **kwargs"
        own = [] if keywords["environment_factory"] is None else ["environments"]
        given = ["prompts", "completions", *own, *(name for name in task if name not in _NOT_COLUMNS)]
        for function in keywords.get("reward_funcs", ()):
            check_call(function, "reward_funcs", given, f"reward_funcs: {function}", remedy)


def named_functions(functions: Iterable[Callable]) -> dict[str, Callable]:
    """Return functions by name."""
    return {getattr(function, "__name__", type(function).__name__): function for function in functions}


def _as_list(given: Any) -> list:
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]

"""Environments in TRL's own style under `G2POTrainer`: a class with `reset`, tool methods and `get_reward`.

    class Safe:
        def reset(self, code: int, **row) -> str | None: ...
        def turn(self, digit: int) -> str:                  # every public method is a tool
            '''Turn the dial. …'''
        def get_reward(self) -> float: ...

What `GRPOTrainer(environment_factory=Safe)` takes trains here unchanged: a reply with tool calls is a step, the tools'
answer is the next observation, and the first reply without a call ends the episode, which then pays `get_reward()`.
So does the last turn: an episode that is out of turns is paid for what it has reached, as in TRL.

`reset`, tools, `get_reward` and `close` may be `async`: an environment has one event loop all its life, so that what
`reset` opened lives in its tools. What a tool raises is its answer to the model, but for `BrokenEnvironmentError` and
a lost connection (`ConnectionError`): the environment is at fault then, and its episode is an error.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import pkgutil
import random
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...prompts.template import DEFAULT_PROMPT, PromptTemplate
from ...prompts.tool_calls import HOW_TO_CALL, OPEN_CALL, TOOL_PROMPT, read_calls
from ..contract import Observation, StepResult, TextEnvironment

_NOT_TOOLS = ("reset", "get_reward", "close")


class BrokenEnvironmentError(RuntimeError):
    """Raise this in a tool if the environment failed, not the call: the episode ends as an error."""


def is_tool_environment(environment_factory: Callable) -> bool:
    """Is it a class in TRL's style: `reset` and no `step`? Of a plain function nothing is known: wrap it yourself."""
    made = unwrapped(environment_factory)
    return inspect.isclass(made) and callable(getattr(made, "reset", None)) and not hasattr(made, "step")


def text_environment_factory(environment_factory: Callable[[], Any], max_turns: int) -> Callable[[], TextEnvironment]:
    """Return a factory of `TextEnvironment`s: tool-based classes are wrapped, other factories are returned unchanged.

    Tools are described once, here. In each worker, that would import torch.

    Args:
        environment_factory: a class with tool methods, or any factory of a `TextEnvironment`.
        max_turns: completions per episode: the trainer's `max_turns`.

    Raises:
        ValueError: if a tool cannot be described, because it lacks a docstring or the type of an argument.
    """
    if not is_tool_environment(environment_factory):
        return environment_factory
    described = describe_tools(dict(_class_tools(unwrapped(environment_factory))))
    return functools.partial(ToolEnvironment, environment_factory, max_turns, described)


def unwrapped(environment_factory: Callable) -> Callable:
    """What a factory calls in the end: a class or a function."""
    while isinstance(environment_factory, functools.partial):
        environment_factory = environment_factory.func
    return environment_factory


def _tool_names(environment_class: type) -> list[str]:
    return [name for name in dir(environment_class) if not name.startswith("_") and name not in _NOT_TOOLS]


def _class_tools(environment_class: type) -> Iterator[tuple[str, Callable]]:
    """The tools of a class without an instance: methods are bound to nothing, for their description alone."""
    for name in _tool_names(environment_class):
        defined, found = inspect.getattr_static(environment_class, name), getattr(environment_class, name)
        if callable(found):
            yield name, types.MethodType(found, object()) if inspect.isfunction(defined) else found


class ToolEnvironment(TextEnvironment):
    """Wraps an environment with tool methods and `get_reward`, as TRL's `environment_factory` takes it.

    The trainer wraps such classes itself; use this for those made by a function.

    Args:
        environment_factory: makes the environment.
        max_turns: completions per episode: the trainer's `max_turns`. The last one ends the episode, which then
            returns `get_reward()`.
        described: the description of the tools in the prompt, from `describe_tools`. `None`: generated here, which
            imports transformers and torch.

    Raises:
        TypeError: if the environment has no `get_reward`, or no tool.
    """

    prompt_template = "g2po_trl.prompts.tool_calls:TOOL_PROMPT"  # by its name: rooms import in one direction

    def __init__(self, environment_factory: Callable[[], Any], max_turns: int, described: str | None = None):
        self._loop = asyncio.Runner()
        self.inner, self.max_turns = environment_factory(), max_turns
        name = type(self.inner).__name__
        if not callable(getattr(self.inner, "get_reward", None)):
            raise TypeError(f"{name} has no get_reward: add this method, which returns the reward of an episode")
        methods = {method: getattr(self.inner, method) for method in _tool_names(type(self.inner))}
        self.tools = {method: tool for method, tool in methods.items() if callable(tool)}
        if not self.tools:
            raise TypeError(
                f"{name} has no tool: add one; all public methods except reset, get_reward and close are tools"
            )
        self.described = describe_tools(self.tools) if described is None else described
        self._told = HOW_TO_CALL.format(tools=self.described)

    def reset(self, **row) -> Observation:
        """Start a task. The row's `prompt` (a text, or chat messages) and the functions are told at every step."""
        self._turns = 0
        prompt = row.get("prompt") or ""
        if not isinstance(prompt, str):
            prompt = "\n\n".join(_text(message["content"]) for message in prompt)
        begun = self._await(self.inner.reset(**row))
        return Observation("" if begun is None else _text(begun), task="\n\n".join(filter(None, [self._told, prompt])))

    def step(self, action: str) -> StepResult:
        """Make the calls of a reply, or end the episode."""
        self._turns += 1
        calls_something = OPEN_CALL in action
        answer = self._call_all(action) if calls_something else ""
        last = self._turns >= self.max_turns
        if calls_something and not last:
            return StepResult(answer)
        reward = float(self._await(self.inner.get_reward()))
        return StepResult(
            answer, reward, terminated=True, info={"success": reward > 0, "out_of_turns": calls_something}
        )

    def close(self) -> None:
        """Close the environment, then its event loop."""
        try:
            if callable(getattr(self.inner, "close", None)):
                self._await(self.inner.close())
        finally:
            self._loop.close()

    def _await(self, value: Any) -> Any:
        return self._loop.run(_awaited(value)) if inspect.isawaitable(value) else value

    def _call_all(self, action: str) -> str:
        try:
            calls = read_calls(action)
        except ValueError as error:
            return _error(f"the call cannot be read: {error}")
        return "\n".join(self._call(name, arguments) for name, arguments in calls)

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """What a tool raises is its answer, as in TRL, unless it says that the environment is at fault."""
        if name not in self.tools:
            return _error(f"there is no function {name!r}; there are {', '.join(self.tools)}")
        try:
            return _text(self._await(self.tools[name](**arguments)))
        except (BrokenEnvironmentError, ConnectionError):
            raise
        except Exception as error:
            return _error(str(error) or type(error).__name__)


def describe_tools(tools: Mapping[str, Callable]) -> str:
    """Name, purpose and arguments of each tool as a line of JSON.

    Raises:
        ValueError: for one that lacks a docstring or the type of an argument.
    """
    from transformers.utils import get_json_schema

    lines = []
    for name, tool in tools.items():
        try:
            lines.append(json.dumps(get_json_schema(tool)["function"]))
        except Exception as error:
            raise ValueError(
                f"the tool {name} cannot be described to the model ({error}): give each argument a type, and a "
                "docstring that says what the tool does, with a line for each argument under Args"
            ) from error
    return "\n".join(lines)


def random_call(described: str, chance: random.Random) -> str:
    """A call of some tool, each argument with some value of its type: what a player who knows nothing would say.

    Args:
        described: the tools, from `describe_tools`.
    """
    tool = json.loads(chance.choice(described.splitlines()))
    arguments = {name: _some_value(about, chance) for name, about in tool["parameters"].get("properties", {}).items()}
    call = json.dumps({"name": tool["name"], "arguments": arguments}, ensure_ascii=False)
    return f"{OPEN_CALL}{call}</tool_call>"


def _some_value(about: Mapping[str, Any], chance: random.Random) -> Any:
    if about.get("enum"):
        return chance.choice(about["enum"])
    kind = about.get("type", "string")
    kind = chance.choice(kind) if isinstance(kind, list) else kind
    return {
        "integer": chance.randrange(10),
        "number": float(chance.randrange(10)),
        "boolean": chance.random() < 0.5,
        "array": [],
        "object": {},
        "null": None,
    }.get(kind, chance.choice("abcdefgh"))


async def _awaited(value: Any) -> Any:
    return await value


def _text(content: Any) -> str:
    """A text, the parts of a list of content blocks (of an image its kind alone), or the text of any other value."""
    if isinstance(content, list) and content and all(map(_is_block, content)):
        return "\n".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content)
    return str(content)


def _is_block(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return "text" in part if kind == "text" else kind in ("image", "image_url", "audio", "video")


def _error(message: str) -> str:
    return json.dumps({"error": message}, ensure_ascii=False)


def prompt_of(environment_factory: Callable) -> PromptTemplate:
    """The template of an environment for which none was chosen: its class's `prompt_template`, or where it has none,
    `TOOL_PROMPT` for a class in TRL's style and `DEFAULT_PROMPT` for others. Of a plain function nothing is known.

    Raises:
        ValueError: when its `prompt_template` is no template.
    """
    made = unwrapped(environment_factory)
    own = getattr(made, "prompt_template", None) if isinstance(made, type) else None
    if own is None:
        return TOOL_PROMPT if is_tool_environment(environment_factory) else DEFAULT_PROMPT
    try:
        template = pkgutil.resolve_name(own) if isinstance(own, str) else own
    except (ImportError, AttributeError, ValueError):
        template = None
    if not isinstance(template, PromptTemplate):
        raise ValueError(
            f"prompt_template of {made.__name__} is {own!r}: make it a PromptTemplate, or module:NAME of one"
        )
    return template

"""Environments in TRL's own style under `G2POTrainer`: a class with `reset`, tool methods and `get_reward`.

    class Safe:
        def reset(self, code: int, **row) -> str | None: ...
        def turn(self, digit: int) -> str:                  # every public method is a tool
            '''Turn the dial. …'''
        def get_reward(self) -> float: ...

What `GRPOTrainer(environment_factory=Safe)` takes trains here unchanged: a reply with tool calls is a step, the tools'
answer is the next observation, and the first reply without a call ends the episode, which then pays `get_reward()`.
So does the last turn: an episode that is out of turns is paid for what it has reached, as in TRL.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .environment import Observation, StepResult, TextEnvironment
from .prompting import ParsedReply, PromptTemplate

_NOT_TOOLS = ("reset", "get_reward", "close")
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_OPEN = "<tool_call>"
_HOW_TO_CALL = (
    "You can call these functions:\n{tools}\n\n"
    'Call one by writing <tool_call>{{"name": …, "arguments": {{…}}}}</tool_call>. A reply without a call ends the '
    "task."
)


def is_tool_environment(environment_factory: Callable) -> bool:
    """Is it a class in TRL's style: `reset` and no `step`? Of a plain function nothing is known: wrap it yourself."""
    while isinstance(environment_factory, functools.partial):
        environment_factory = environment_factory.func
    return (
        inspect.isclass(environment_factory)
        and callable(getattr(environment_factory, "reset", None))
        and not hasattr(environment_factory, "step")
    )


def parse_tool_calls(reply: str, prompt_end: str = "") -> ParsedReply:
    """A reply's tool calls as the action; the whole reply when it makes none. Invalid: a call that is no JSON."""
    if _OPEN not in reply:
        return ParsedReply(reply.strip(), bool(reply.strip()))
    calls = "".join(f"{_OPEN}{call.strip()}</tool_call>" for call in _CALL.findall(reply))
    try:
        read_calls(calls)
    except ValueError:
        return ParsedReply(calls or reply.strip(), False)
    return ParsedReply(calls, True)


TOOL_PROMPT = PromptTemplate(
    first="{task}\n\n{observation}",
    later=(
        "{task}\n\nReplies so far: {steps_taken}. The last {history_length}:\n{history}\n\n"
        "The answer to your last call:\n{observation}"
    ),
    history_entry="{observation}\nYou: {action}",
    parse_reply=parse_tool_calls,
)


def read_calls(action: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of each call.

    Raises:
        ValueError: when there is none, or one that is not `{"name": …, "arguments": {…}}`.
    """
    calls = []
    for text in _CALL.findall(action):
        call = json.loads(text)
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise ValueError(f"a call has no name: {text.strip()}")
        arguments = call.get("arguments") or {}
        if not isinstance(arguments, Mapping):
            raise ValueError(f"arguments are no object: {text.strip()}")
        calls.append((call["name"], dict(arguments)))
    if not calls:
        raise ValueError("no complete <tool_call>…</tool_call>")
    return calls


class ToolEnvironment(TextEnvironment):
    """A `TextEnvironment` around an environment in TRL's style.

    Args:
        environment_factory: makes it.
        max_turns: replies of an episode; the last one is paid whatever it says. The trainer's `max_turns`.

    Raises:
        TypeError: when it has no `get_reward`, or no tool.
    """

    def __init__(self, environment_factory: Callable[[], Any], max_turns: int):
        self.inner, self.max_turns = environment_factory(), max_turns
        name = type(self.inner).__name__
        if not callable(getattr(self.inner, "get_reward", None)):
            raise TypeError(f"{name} has no get_reward: add it, it says what an episode is worth when it has ended")
        self.tools = {
            method: getattr(self.inner, method)
            for method in dir(type(self.inner))
            if not method.startswith("_") and method not in _NOT_TOOLS and callable(getattr(self.inner, method))
        }
        if not self.tools:
            raise TypeError(f"{name} has no tool: every public method but reset, get_reward and close is one")
        self._told = _HOW_TO_CALL.format(tools=_schemas(self.tools))

    def reset(self, **row) -> Observation:
        """Start a task. The row's `prompt` (a text, or chat messages) and the functions are told at every step."""
        self._turns = 0
        prompt = row.get("prompt") or ""
        if not isinstance(prompt, str):
            prompt = "\n\n".join(_text(message["content"]) for message in prompt)
        begun = _await(self.inner.reset(**row))
        return Observation("" if begun is None else _text(begun), task="\n\n".join(filter(None, [self._told, prompt])))

    def step(self, action: str) -> StepResult:
        """Make the calls of a reply, or end the episode."""
        self._turns += 1
        calls_something = _OPEN in action
        answer = self._call_all(action) if calls_something else ""
        last = self._turns >= self.max_turns
        if calls_something and not last:
            return StepResult(answer)
        reward = float(_await(self.inner.get_reward()))
        return StepResult(
            answer, reward, terminated=True, info={"success": reward > 0, "out_of_turns": calls_something}
        )

    def close(self) -> None:
        if callable(getattr(self.inner, "close", None)):
            self.inner.close()

    def _call_all(self, action: str) -> str:
        try:
            calls = read_calls(action)
        except ValueError as error:
            return _error(f"the call cannot be read: {error}")
        return "\n".join(self._call(name, arguments) for name, arguments in calls)

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """What a tool raises is its answer, as in TRL."""
        if name not in self.tools:
            return _error(f"there is no function {name!r}; there are {', '.join(self.tools)}")
        try:
            return _text(_await(self.tools[name](**arguments)))
        except Exception as error:
            return _error(str(error) or type(error).__name__)


def _schemas(tools: Mapping[str, Callable]) -> str:
    from transformers.utils import get_json_schema

    return "\n".join(json.dumps(get_json_schema(tool)["function"]) for tool in tools.values())


def _await(value: Any) -> Any:
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _text(content: Any) -> str:
    """A text, or the texts of a list of content blocks."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "\n".join(part["text"] for part in content if isinstance(part, Mapping) and part.get("type") == "text")
    return str(content)


def _error(message: str) -> str:
    return json.dumps({"error": message}, ensure_ascii=False)

"""Environments in TRL's own style under `G2POTrainer`: a class with `reset`, tool methods and `get_reward`.

    class Safe:
        def reset(self, code: int, **row) -> str | None: ...
        def turn(self, digit: int) -> str:                  # every public method is a tool
            '''Turn the dial. …'''
        def get_reward(self) -> float: ...

A completion with calls is a step, their results are the next observation, and a completion without a call, the last
turn or another limit ends the episode, whose reward is asked for then. Methods may be `async`; they share one event
loop per environment. The model sees an exception of a tool as its result, except those of the environment (`causes`),
which end the episode as an error. If `get_reward` finds that a process or a file has gone, the model broke it.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...prompts.conversation import (
    ChatRequest,
    ChatResponse,
    Message,
    as_text,
    joined_content,
    normalize_messages,
    read_parts,
)
from ...prompts.state_keys import request_key
from ...prompts.tool_calls import HOW_TO_CALL, OPEN_CALL, TOOL_PROMPT, read_calls
from ...utils.errors import G2POError
from ...utils.images import PLACE
from ..causes import has_gone, in_words, inner, is_of_environment
from ..contract import Observation, StepResult, TextEnvironment
from ..several import row_of
from ..validation import EnvironmentContractError, unwrap_factory
from .trl_rewards import TRLEnvironment, bound_environment, class_tools

_BLOCKS = ("text", "image", "image_url", "audio", "video")  # as in TRL
_PAY = "\0"  # an action that no model writes, an empty one may be: a limit has ended the episode


def is_tool_environment(environment_factory: Callable) -> bool:
    """Return whether it is a tool-based class: `reset` and no `step`. Plain functions never count; wrap them."""
    made = unwrap_factory(environment_factory)
    return inspect.isclass(made) and callable(getattr(made, "reset", None)) and not hasattr(made, "step")


def tool_environment_factory(environment_factory: Callable, max_turns: int, in_window: bool) -> Callable:
    """Return the factory of a tool-based class's environment, with its tools described: workers do without torch."""
    made, tools = bound_environment(environment_factory)
    playable = functools.partial(ToolEnvironment if in_window else ChatToolEnvironment, environment_factory, max_turns)
    if made is not None and not inspect.isclass(made):  # what a function makes is known in the worker
        return playable
    described = {tool.__name__: tool for tool in tools}
    for name in class_tools(made) if made else ():  # bound to any object: enough for a schema
        described[name] = inspect.getattr_static(made, name).__get__(object(), made)
    return functools.partial(playable, describe_tools(described))


class ToolEnvironment(TextEnvironment):
    """Wraps an environment with tool methods and `get_reward`, as TRL's `environment_factory` takes it.

    The trainer wraps classes itself; use this for environments constructed by a function.

    Args:
        environment_factory: constructs the environment.
        max_turns: completions per episode: the trainer's `max_turns`. The last one ends the episode.
        tool_schemas: the tools' schemas in the prompt, from `describe_tools`. `None`: generated here, with torch.

    Raises:
        G2POError: if there is no source of rewards, or the environment has no tool.
    """

    prompt_template = TOOL_PROMPT

    def __init__(self, environment_factory: Callable[[], Any], max_turns: int, tool_schemas: str | None = None):
        self._loop = asyncio.Runner()
        has_rewards = unwrap_factory(environment_factory) is TRLEnvironment
        self.rewarded = environment_factory() if has_rewards else TRLEnvironment(environment_factory)
        self.inner, self.tools, self.max_turns = self.rewarded.environment, self.rewarded.tools, max_turns
        self.tool_schemas = describe_tools(self.tools) if tool_schemas is None else tool_schemas

    def reset(self, **row) -> Observation:
        """Start a task. The tool schemas and the row's `prompt` (text or chat messages) are repeated at every step."""
        first = self._start(row)
        texts = [HOW_TO_CALL.format(tools=self.tool_schemas), *(message["content"] for message in self._prompt)]
        return _observation([first], task="\n\n".join(filter(None, texts)))

    def reset_row(self, row: Mapping[str, Any]) -> Observation:
        """Start a task of a run with several environments: reward functions get the columns of all, as in TRL."""
        first = self.reset(**row_of(self.inner, row))
        self.rewarded.columns = row
        return first

    def step(self, action: str) -> StepResult:
        """Run the calls of a completion, or end the episode, also one that a limit has ended."""
        if action == _PAY:
            return self._end("", has_calls=False)
        message, has_calls = {"role": "assistant", "content": action}, OPEN_CALL in action
        calls, unread = [], []
        try:
            calls = [{"name": name, "arguments": arguments} for name, arguments in read_calls(action)]
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        except ValueError as error:
            unread = [_result("", {"error": f"the call cannot be read: {error}"})] if has_calls else []
        seen = _observation(self._run(message, calls) + unread)
        is_over = not has_calls or self._turns >= self.max_turns
        return self._end(seen, has_calls) if is_over else StepResult(seen, info={"pays_at_end": _PAY})

    def close(self) -> None:
        """Close the environment, then its event loop."""
        try:
            self._await(self.rewarded.close())
        finally:
            self._loop.close()

    def _start(self, row: dict[str, Any]) -> Message:
        """Start a task: the row's `prompt` becomes messages. Return what `reset` returned, as a message."""
        self._turns, self._completion = 0, []
        prompt = row.get("prompt") or ""
        self._prompt = normalize_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        first = self._await(self.rewarded.reset(**row))
        return {"role": "user", **_content("" if first is None else first, "reset")}

    def _run(self, message: Message, calls: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Record a completion and return the results of its calls, in this order."""
        self._turns += 1
        results = [self._call(call["name"], call["arguments"]) for call in calls]
        self._completion += [message, *results]
        return results

    def _end(self, seen: Observation | str, has_calls: bool) -> StepResult:
        """Return the end of an episode, with its reward."""
        try:
            reward, parts = self.rewarded.reward(self._prompt, self._completion, self._await)
            info = {f"score_{name}": part for name, part in parts.items()}
        except Exception as error:
            if not has_gone(error):
                raise
            reward, info = 0.0, {"failure_reason": f"environment broken: get_reward raised {in_words(error)}"}
        said = getattr(self.inner, "success", None)  # rewards for the format alone are above 0, too
        success = reward > 0 if said is None or callable(said) or "failure_reason" in info else bool(said)
        return StepResult(seen, reward, True, info={"success": success, "out_of_turns": has_calls, **info})

    def _await(self, value: Any) -> Any:
        return self._loop.run(awaited(value)) if inspect.isawaitable(value) else value

    def _call(self, name: str, arguments: dict[str, Any]) -> Message:
        """Return a tool's result, or its exception, in TRL's words; errors of the environment propagate."""
        try:
            if name not in self.tools:
                raise G2POError(f"Tool {name} not found.")
            given = copy.deepcopy(arguments)  # a tool may change them, and the history has what the model wrote
            return _result(name, self._await(self.tools[name](**given)))
        except (Exception, SystemExit) as error:  # `exit()`, in code that the model wrote
            if is_of_environment(error, wrapped=False):
                raise
            return _result(name, {"error": "\n".join(map(str, inner(error)))})


class ChatToolEnvironment(ToolEnvironment):
    """Wraps an environment with tool methods, as `ToolEnvironment`, as a conversation like TRL's own rollout.

    An observation is a chat request: the row's `prompt` and what `reset` returned, then completions and results.
    """

    def reset(self, **row) -> Observation:
        first = self._start(row)
        self._prompt[-1] |= joined_content([self._prompt[-1], first], "")
        return self._request(self._prompt)

    def step(self, action: str) -> StepResult:
        """Call the tools of a response (`ChatResponse.read`), or end the episode without calls or out of turns."""
        if action == _PAY:
            return super().step(action)
        response = ChatResponse.read(action)
        if not response.tool_calls or self._turns + 1 >= self.max_turns:
            self._run(response.message(), [])
            return self._end("", bool(response.tool_calls))
        calls = [call["function"] for call in response.tool_calls]
        calls.sort(key=lambda call: inspect.iscoroutinefunction(self.tools.get(call["name"])))  # as TRL
        return StepResult(self._request(self._run(response.message(), calls)), info={"pays_at_end": _PAY})

    def _request(self, new: Sequence[Message]) -> Observation:
        tools = [{"type": "function", "function": json.loads(line)} for line in self.tool_schemas.splitlines()]
        messages = [*self._prompt, *self._completion]
        request = ChatRequest(messages, tools, shorten=True, task=len(self._prompt), needs_answer=True)
        return Observation(as_text(new), state_key=request_key(messages, tools), request=request)


def _result(name: str, returned: Any) -> Message:
    return {"role": "tool", "name": name, **_content(returned, name)}


def _content(returned: Any, name: str) -> dict[str, Any]:
    """Return what a method returned as a message's content: the texts and images of blocks, as in TRL, or its text."""
    parts = returned if isinstance(returned, list) else []
    if not parts or not all(isinstance(part, Mapping) and part.get("type") in _BLOCKS for part in parts):
        return {"content": str(returned)}
    try:
        text, images = read_parts(returned, name, opens_files=True)
    except G2POError as error:
        raise EnvironmentContractError(str(error), name, returned) from error
    return {"content": text, **({"images": images} if images else {})}


def _observation(messages: Sequence[Message], **fields: Any) -> Observation:
    """Return messages as an observation, its images before the text."""
    shown = joined_content(messages, "\n")
    text = shown["content"].replace(PLACE, "").strip("\n") if "images" in shown else shown["content"]
    return Observation(text, images=shown.get("images", ()), **fields)


def describe_tools(tools: Mapping[str, Callable]) -> str:
    """Return each tool's JSON schema, one a line. Raises `G2POError` for a tool without a docstring or types."""
    from transformers.utils import get_json_schema

    lines = []
    for name, tool in tools.items():
        try:
            lines.append(json.dumps(get_json_schema(tool)["function"]))
        except Exception as error:
            remedy = "give each argument a type, and a line under Args in a docstring that describes the tool"
            raise G2POError(f"the tool {name} cannot be described ({error}): {remedy}", name, tool) from error
    return "\n".join(lines)


async def awaited(value: Any) -> Any:
    """Return the result of an awaitable; `asyncio.run` requires a coroutine such as this."""
    return await value

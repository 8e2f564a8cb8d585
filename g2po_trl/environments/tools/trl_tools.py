"""Environments in TRL's own style under `G2POTrainer`: a class with `reset`, tool methods and `get_reward`.

    class Safe:
        def reset(self, code: int, **row) -> str | None: ...
        def turn(self, digit: int) -> str:                  # every public method is a tool
            '''Turn the dial. …'''
        def get_reward(self) -> float: ...

Classes for `GRPOTrainer(environment_factory=Safe)` train unchanged: a completion with tool calls is a step, the
results of the tools are the next observation, and the first completion without a call ends the episode, whose reward
is `get_reward()`. The last turn also ends it: an episode out of turns gets `get_reward()`, as in TRL. Episodes are
conversations (`ChatToolEnvironment`) or, with a wording of their own, prompts with the last steps (`ToolEnvironment`).
`trl_rewards` adds TRL's `reward_funcs` and `tools`.

`reset`, tools, `get_reward` and `close` may be `async` and share one event loop per environment. The model sees an
exception of a tool as its result, except those of the environment (`causes`), as `BrokenEnvironmentError`, which end
the episode as an error. If `get_reward` finds that a process or a file has gone, the model broke it: a failure.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...prompts.conversation import ChatRequest, ChatResponse, Message, as_text, joined_content, normalize_messages
from ...prompts.state_keys import request_key
from ...prompts.template import DEFAULT_PROMPT, PromptTemplate
from ...prompts.tool_calls import HOW_TO_CALL, OPEN_CALL, TOOL_PROMPT, read_calls
from ...utils.errors import G2POError
from ..causes import BrokenEnvironmentError as BrokenEnvironmentError
from ..causes import has_gone, in_words, is_of_environment, message_of
from ..contract import Observation, StepResult, TextEnvironment
from ..episode_limits import EpisodeLimits
from ..several import PromptTemplates, environments_of, for_each
from ..validation import unwrap_factory
from .tool_content import Shown, content_of
from .trl_rewards import TRLEnvironment, bound_environment, class_tools


def is_tool_environment(environment_factory: Callable) -> bool:
    """Return whether it is a tool-based class: `reset` and no `step`. Plain functions never count; wrap them."""
    made = unwrap_factory(environment_factory)
    if made is TRLEnvironment:
        return True
    return inspect.isclass(made) and callable(getattr(made, "reset", None)) and not hasattr(made, "step")


def text_environment_factory(
    environment_factory: Callable[[], Any],
    limits: EpisodeLimits,
    history: str | None = "window",
    prompt_template: PromptTemplate | None = None,
) -> Callable[[], TextEnvironment]:
    """Return a factory of `TextEnvironment`s with these limits.

    Tool-based classes are wrapped. The tools are described here, since describing them in each worker would import
    torch.

    Args:
        environment_factory: a class with tool methods, or any factory of a `TextEnvironment`.
        limits: limits of an episode; with several environments, also of each.
        history: `"window"`: tools are described in prose, in prompts with the last steps. `"conversation"`:
            observations are chat requests, with tools as the chat template writes them. `None`: with several
            environments, the `default_history` of each.
        prompt_template: with several environments, the result of `prompt_template_of`.

    Raises:
        G2POError: if a tool cannot be described, because it lacks a docstring or the type of an argument.
    """
    if environments_of(environment_factory):

        def playable(name: str, one: Callable) -> Callable:
            wording = prompt_template and prompt_template.of(name)
            own = default_history(one, None if wording == default_prompt_template(one) else wording)
            return text_environment_factory(one, limits.by(name), history or own)

        return for_each(environment_factory, playable)
    if taken := getattr(unwrap_factory(environment_factory), "takes_limits", ()):
        return functools.partial(environment_factory, **{name: getattr(limits, name) for name in taken})
    if not is_tool_environment(environment_factory):
        return environment_factory
    max_turns = limits.max_turns
    made, tools = bound_environment(environment_factory)
    wrapper = ToolEnvironment if history == "window" else ChatToolEnvironment
    if made is not None and not inspect.isclass(made):  # what a function makes is known in the worker
        return functools.partial(wrapper, environment_factory, max_turns)
    described = {tool.__name__: tool for tool in tools} | ({} if made is None else _unbound_tools(made))
    return functools.partial(wrapper, environment_factory, max_turns, describe_tools(described))


def _unbound_tools(environment_class: type) -> dict[str, Callable]:
    """Return a class's tools by name, bound to a dummy object: enough for their schemas."""
    found = {name: getattr(environment_class, name) for name in class_tools(environment_class)}
    return {
        name: types.MethodType(tool, object())
        if inspect.isfunction(inspect.getattr_static(environment_class, name))
        else tool
        for name, tool in found.items()
    }


class ToolEnvironment(TextEnvironment):
    """Wraps an environment with tool methods and `get_reward`, as TRL's `environment_factory` takes it.

    The trainer wraps classes itself; use this for environments constructed by a function.

    Args:
        environment_factory: constructs the environment.
        max_turns: completions per episode: the trainer's `max_turns`. The last one ends the episode, which then
            returns `get_reward()`.
        tool_schemas: the tools' schemas in the prompt, from `describe_tools`. `None`: generated here, which imports
            transformers and torch.

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
        self._instructions = HOW_TO_CALL.format(tools=self.tool_schemas)

    def reset(self, **row) -> Observation:
        """Start a task. The tool schemas and the row's `prompt` (text or chat messages) are repeated at every step."""
        first = self._start(row)
        prompt = "\n\n".join(message["content"] for message in self._prompt)
        task = "\n\n".join(filter(None, [self._instructions, prompt]))
        return first.observation(task=task)

    def step(self, action: str) -> StepResult:
        """Run the calls of a completion, or end the episode."""
        self._turns += 1
        has_calls = OPEN_CALL in action
        self._completion.append({"role": "assistant", "content": action})
        results = self._call_all(action) if has_calls else ""
        last = self._turns >= self.max_turns
        if has_calls and not last:
            return StepResult(results.observation() if results.images else results)
        return self._end(results, has_calls, self._prompt, self._completion)

    def close(self) -> None:
        """Close the environment, then its event loop."""
        try:
            self._await(self.rewarded.close())
        finally:
            self._loop.close()

    def _start(self, row: dict[str, Any]) -> Shown:
        """Start a task: the row's `prompt` becomes messages. Return the text of what `reset` returned."""
        self._turns, self._completion = 0, []
        prompt = row.get("prompt") or [{"role": "user", "content": ""}]
        self._prompt = normalize_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        first = self._await(self.rewarded.reset(**row))
        return Shown() if first is None else content_of(first, "reset")

    def _end(self, text: str, has_calls: bool, prompt: list[Message], completion: list[Message]) -> StepResult:
        """Return the end of an episode, with its reward."""
        try:
            reward, parts = self._await(self.rewarded.reward(prompt, completion))
        except Exception as error:
            if not has_gone(error):
                raise
            info = {"success": False, "failure_reason": f"environment broken: get_reward raised {in_words(error)}"}
            return StepResult(text, terminated=True, info={**info, "out_of_turns": has_calls})
        info = {f"score_{name}": part for name, part in parts.items()}
        said = getattr(self.inner, "success", None)  # rewards for the format alone are above 0, too
        success = reward > 0 if said is None or callable(said) else bool(said)
        return StepResult(text, reward, True, info={"success": success, "out_of_turns": has_calls, **info})

    def _await(self, value: Any) -> Any:
        return self._loop.run(awaited(value)) if inspect.isawaitable(value) else value

    def _call_all(self, action: str) -> Shown:
        try:
            calls = read_calls(action)
        except ValueError as error:
            return Shown(_error(f"the call cannot be read: {error}"))
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        self._completion[-1]["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        results = [self._call(name, arguments) for name, arguments in calls]
        self._completion += [
            {"role": "tool", "name": name, "content": result} for (name, _), result in zip(calls, results)
        ]
        return Shown.of(results)

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return a tool's result, or its exception as text, as in TRL; errors of the environment propagate."""
        if name not in self.tools:
            return _error(f"there is no function {name!r}; there are {', '.join(self.tools)}")
        try:
            return content_of(self._await(self.tools[name](**arguments)), name)
        except (Exception, SystemExit) as error:  # `exit()`, in code that the model wrote
            if is_of_environment(error, wrapped=False):
                raise
            return _error(message_of(error) or type(error).__name__)


class ChatToolEnvironment(ToolEnvironment):
    """Wraps an environment with tool methods as a conversation, message by message as in TRL's own rollout.

    An observation is a chat request: the row's `prompt` and what `reset` returned, then completions and results of
    tools. The model gets the tools through its chat template. The arguments are those of `ToolEnvironment`.
    """

    def reset(self, **row) -> Observation:
        first = self._start(row)
        self._prompt[-1] |= joined_content([self._prompt[-1], first.message("user")], "")
        return self._observation(self._prompt)

    def step(self, action: str) -> StepResult:
        """Call the tools of a response, or end the episode if there are none or it is out of turns.

        Args:
            action: a `ChatResponse` (`to_action`). Any other text becomes the content of a response.
        """
        self._turns += 1
        response = ChatResponse.read(action)
        calls, last = response.tool_calls, self._turns >= self.max_turns
        if calls and not last:
            results = self._results(calls)
            self._completion += [response.message(), *results]
            return StepResult(self._observation(results))
        return self._end("", bool(calls), self._prompt, [*self._completion, response.message()])

    def _observation(self, new: Sequence[Message]) -> Observation:
        tools = [{"type": "function", "function": json.loads(line)} for line in self.tool_schemas.splitlines()]
        messages = [*self._prompt, *self._completion]
        request = ChatRequest(messages, tools, shorten=True, task=len(self._prompt), needs_answer=True)
        return Observation(as_text(new), state_key=request_key(messages, tools), request=request)

    def _results(self, calls: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return the results as tool messages, in TRL's order: of plain methods, then of `async` ones."""
        functions = [call["function"] for call in calls]
        later = [inspect.iscoroutinefunction(self.tools.get(function["name"])) for function in functions]
        results: list[Message] = []
        for is_async in (False, True):
            for function, is_later in zip(functions, later):
                if is_later == is_async:
                    result = Shown.of([self._result(function["name"], function["arguments"])])
                    results.append(result.message("tool", name=function["name"]))
        return results

    def _result(self, name: str, arguments: Any) -> str:
        """Return a tool's result as text; an exception has the text that TRL gives it."""
        try:
            if name not in self.tools:
                raise G2POError(f"Tool {name} not found.")
            return content_of(self._await(self.tools[name](**arguments)), name)
        except (Exception, SystemExit) as error:  # `exit()`, in code that the model wrote
            if is_of_environment(error, wrapped=False):
                raise
            return str({"error": message_of(error)})


def describe_tools(tools: Mapping[str, Callable]) -> str:
    """Return each tool's JSON schema, one a line. Raises `G2POError` for a tool without a docstring or types."""
    from transformers.utils import get_json_schema

    lines = []
    for name, tool in tools.items():
        try:
            lines.append(json.dumps(get_json_schema(tool)["function"]))
        except Exception as error:
            raise G2POError(
                f"the tool {name} cannot be described to the model ({error}): give each argument a type, and a "
                "docstring that describes the tool, with a line for each argument under Args"
            ) from error
    return "\n".join(lines)


async def awaited(value: Any) -> Any:
    """Return the result of an awaitable; `asyncio.run` requires a coroutine such as this."""
    return await value


def _error(message: str) -> str:
    return json.dumps({"error": message}, ensure_ascii=False)


def played_as(
    environment_factory: Callable[[], Any],
    limits: EpisodeLimits,
    prompt_template: Any = None,
    history: str | None = None,
) -> tuple[Callable[[], TextEnvironment], PromptTemplate, str | None]:
    """Return the factory, the wording of prompts and the history with which an environment is trained.

    Args:
        environment_factory: as passed to the trainer.
        limits: limits of an episode.
        prompt_template: as passed to the trainer.
        history: `G2POConfig.history`.
    """
    history = history or default_history(environment_factory, prompt_template)
    template = prompt_template_of(environment_factory, prompt_template)
    return text_environment_factory(environment_factory, limits, history, template), template, history


def default_history(environment_factory: Callable, prompt_template: PromptTemplate | None) -> str | None:
    """Return `"conversation"` for a class with tool methods, unless it or the caller has a wording of its own.

    `None` for several environments, each of which has its own.
    """
    if environments_of(environment_factory):
        return None
    worded = prompt_template is not None or default_prompt_template(environment_factory) is not TOOL_PROMPT
    return "conversation" if is_tool_environment(environment_factory) and not worded else "window"


def prompt_template_of(environment_factory: Callable, given: Any = None) -> PromptTemplate:
    """Return the wording of prompts: the given one, or the environment's default.

    Args:
        environment_factory: as passed to the trainer.
        given: a template; with several environments, the template of all, or a dictionary by name with those of some.

    Raises:
        G2POError: for a value that is not a template, or the name of an environment that does not exist.
    """
    environments = environments_of(environment_factory)
    named = given if isinstance(given, Mapping) else {}
    for name, one in (named or {"prompt_template": given}).items():
        if one is not None and not isinstance(one, PromptTemplate):
            raise G2POError(f"prompt_template is {one!r} ({name}): pass a PromptTemplate")
        if named and name not in environments:
            known = ", ".join(environments) or "none: a single environment has no name"
            raise G2POError(f"prompt_template has {name!r}, which is no environment of this run: {known}")
    if not environments:
        return default_prompt_template(environment_factory) if given is None else given
    if isinstance(given, PromptTemplates):
        return given
    of_all = None if named else given
    return PromptTemplates.of_environments(
        {name: named.get(name) or of_all or default_prompt_template(one) for name, one in environments.items()}
    )


def default_prompt_template(environment_factory: Callable) -> PromptTemplate:
    """Return the environment class's `prompt_template`.

    If it has none: `TOOL_PROMPT` for a tool-based class, otherwise (also for plain functions) `DEFAULT_PROMPT`.

    Raises:
        G2POError: if the attribute is not a `PromptTemplate`.
    """
    made, _ = bound_environment(environment_factory)
    own = getattr(made, "prompt_template", None) if isinstance(made, type) else None
    if own is None:
        return TOOL_PROMPT if is_tool_environment(environment_factory) else DEFAULT_PROMPT
    if not isinstance(own, PromptTemplate):
        raise G2POError(f"prompt_template of {made.__name__} is {own!r}: set it to a PromptTemplate")
    return own

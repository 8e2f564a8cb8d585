"""Agents that call a model through OpenAI's, Anthropic's or Google's protocols, unchanged, as environments.

An agent runs in a thread of its worker. Each of its requests is an observation, the model's response the action that
answers it, and what the agent returns the reward of the last step. Requests that arrive together are answered in their
order of arrival. It can be replayed only if it sends the same requests for the same task and responses: no current
time, and no random numbers except from its own seeded generator. `docs/agents.md` describes how an episode ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from ..environments.causes import in_words, is_of_environment
from ..environments.contract import Observation, StepResult, TextEnvironment
from ..environments.loading import load, resolve_agent_name
from ..environments.tools.trl_tools import awaited
from ..environments.validation import EnvironmentContractError
from ..prompts.conversation import ChatResponse, Message, as_text, since_last_completion
from ..prompts.state_keys import request_key, state_key_text, workspace_key
from ..utils.extras import import_extra
from ..utils.options import require
from ..utils.show import show
from .dialects.request import MODEL
from .endpoint import running_endpoint
from .session import AgentEnd, AgentError, Call, Session
from .workspace import Workspace

LONGEST_TEXT = 1_000_000  # characters of an observation's text; its request, which prompts are made of, is whole
END_SECONDS = 1.0  # for which an agent is waited for after its episode
STRAY_SECONDS = 30.0  # that an agent may run on after its episode, e.g. for a last tool; then its worker is replaced
_TASK_COLUMNS = ("task", "question", "prompt", "instruction")
_FIELDS = ("reward", "success", "info")


@dataclasses.dataclass(frozen=True)
class AgentClient:
    """An agent's access to the model: address (up to `/v1`), key and name, for libraries of OpenAI's protocols.

    `openai()`, `async_openai()`, `anthropic()`, `async_anthropic()` and `gemini()` pass options to clients without a
    time limit. The key is valid during the episode only, which may make `max_turns` calls.
    """

    base_url: str
    api_key: str = dataclasses.field(repr=False)
    model: str
    session: Session = dataclasses.field(repr=False)
    max_turns: int

    _doc = "The address for libraries of Anthropic's and Google's protocols."
    anthropic_url = gemini_url = property(lambda self: self.base_url.removesuffix("/v1"), doc=_doc)

    def works_on(self, workspace: Workspace) -> None:
        """Use the workspace's files and the new messages as the state of each request (`workspace_key`)."""
        self.session.workspace = workspace

    def at_end(self, function: Callable[[], Any]) -> None:
        """Register a function that is called when the episode ends, for any reason, for example to close a browser."""
        self.session.at_end(function)

    def _client(self, name: str, **options: Any) -> Any:
        module = import_extra(name.lower().removeprefix("async"))
        transport = module.DefaultAsyncHttpxClient if name.startswith("Async") else module.DefaultHttpxClient
        http_client = transport(trust_env=False, verify=False)  # loopback has no certificates and no proxies
        url = self.anthropic_url if name.endswith("Anthropic") else self.base_url
        given = {"timeout": None, "http_client": http_client, "base_url": url, "api_key": self.api_key}
        return getattr(module, name)(**{**given, **options})

    def gemini(self, **options: Any) -> Any:
        """Return a client of google-genai, which has its async methods as `aio`."""
        plain = {"trust_env": False, "verify": False}
        http = {"base_url": self.gemini_url, "client_args": plain, "async_client_args": plain}
        given = {"api_key": self.api_key, "vertexai": False, "http_options": http}
        return import_extra("google.genai").Client(**{**given, **options})

    openai = functools.partialmethod(_client, "OpenAI")
    async_openai = functools.partialmethod(_client, "AsyncOpenAI")
    anthropic = functools.partialmethod(_client, "Anthropic")
    async_anthropic = functools.partialmethod(_client, "AsyncAnthropic")


class AgentEnvironment(TextEnvironment):
    """Runs an agent whose requests are answered by the model that is trained.

    Args:
        agent: function of a row of the dataset and an `AgentClient`, sync or async, or its name, `file.py:function`.
            It returns a reward (`True` is 1), `(reward, success)`, `(reward, success, info)`, or a dict of these.
        max_turns, max_requests: completions per episode, and requests, refused ones included: the trainer's.
        state_key: function from the messages of a request to its state key, text or JSON data. `None`: `request_key`,
            or `workspace_key` if the agent has a workspace (`AgentClient.works_on`).
    """

    runs_agent, takes_limits = True, ("max_turns", "max_requests")

    def __init__(
        self,
        agent: Callable[[dict[str, Any], AgentClient], Any] | str,
        max_turns: int,
        state_key: Callable[[list[Message]], Any] | None = None,
        max_requests: int | None = None,
    ):
        self.agent = load(resolve_agent_name(agent)) if isinstance(agent, str) else agent
        require(callable(self.agent), "agent", agent, "pass a function agent(task, client)")
        self.max_turns, self.state_key, self.max_requests = max_turns, state_key, max_requests
        self._session: Session | None = None
        self._thread: threading.Thread | None = None
        self._call: Call | None = None

    def reset(self, /, **task) -> Observation:
        """Start the agent, and wait for its first request. Raises what it raises before, and for none at all."""
        self.close()
        self._files: tuple[str | None, int] = None, 0  # of the workspace, and messages of the first request with them
        endpoint = running_endpoint()
        self._session = session = endpoint.open_session(max_turns=self.max_turns, max_requests=self.max_requests)
        client = AgentClient(endpoint.base_url, session.key, MODEL, session, self.max_turns)
        self._thread = threading.Thread(target=_run, args=(self.agent, task, client), daemon=True, name="agent")
        self._thread.start()
        event = session.next()
        if isinstance(event, AgentEnd):
            self.close()
            if isinstance(event.error, Exception):
                raise event.error
            if event.error is not None:  # SystemExit would end the worker
                raise RuntimeError(f"the agent raised {_describe(event.error)}") from event.error
            why = session.refused or ["ask by the client's base_url and api_key, and switch off caches of answers"]
            raise EnvironmentContractError(f"it returned {show(event.value)} without calling the model: {why[-1]}")
        words = (task.get(column) for column in _TASK_COLUMNS)
        return self._observe(event, next((text for text in words if isinstance(text, str)), None))

    def step(self, action: str) -> StepResult:
        """Answer the request, and wait for the next one or for the agent's end. `action`: see `ChatResponse.read`."""
        call, self._call = self._call, None
        self._session.answer(call, ChatResponse.read(action))
        event = self._session.next()
        is_over = isinstance(event, AgentEnd)
        return self._result(event) if is_over else StepResult(self._observe(event), info=self._facts())

    def end_episode(self) -> None:
        """End the session of an episode that the trainer has ended. The agent is waited for before the next one."""
        if self._session is not None:
            running_endpoint().close_session(self._session)
        if self._thread is not None:
            _strays.append((self._thread, time.monotonic()))

    def needs_new_worker(self) -> bool:
        """Return whether an agent of an ended episode still runs in this process, which then has to be replaced."""
        _strays[:] = [(thread, since) for thread, since in _strays if thread.is_alive()]
        unusable = any(time.monotonic() - since > STRAY_SECONDS for _, since in _strays)
        if unusable:
            print(f"an agent ran for {STRAY_SECONDS:g} s after its episode: its worker is replaced", file=sys.stderr)
        return unusable

    def _observe(self, call: Call, task: str | None = None) -> Observation:
        self._call, workspace = call, self._session.workspace
        messages, tools = call.request.chat.messages, call.request.chat.tools
        if self.state_key is not None:
            key = state_key_text(self.state_key(messages))
        elif workspace is not None:
            files, folder = workspace.state(), workspace.folder
            if files != self._files[0]:
                self._files = files, len(messages)
            key = workspace_key(files, messages, tools, str(folder), str(folder.parent), self._files[1])
        else:
            key = request_key(messages, tools)
        text = as_text(since_last_completion(messages))[:LONGEST_TEXT]
        return Observation(text, key, task=task, request=call.request.chat)

    def _result(self, end: AgentEnd) -> StepResult:
        """Return the last step's result. An agent that returned no reward violates its contract."""
        error, unanswered = end.error, self._session.unanswered()
        facts = self._facts(unanswered_requests=unanswered)
        self.close()
        if error is None:
            reward, info = read_return_value(end.value)
            return StepResult("The agent returned.", reward, terminated=True, info={**facts, **info})
        shown, limit = _describe(error), getattr(error, "limit", None)
        if unanswered and limit is None and not self._session.out_of_turns:
            why = f"the agent gave a request up and raised {shown}: set no time limit for requests, and cancel none"
            raise EnvironmentContractError(why) from error
        if is_of_environment(error):
            raise error
        if self._session.out_of_turns:
            return StepResult("The agent is out of turns.", truncated=True, info={**facts, "agent_error": shown})
        frames = "".join(traceback.format_exception(error))
        info = {"success": False, "failure_reason": f"{limit or 'agent error'}: {shown}", "traceback": frames[-2000:]}
        info |= getattr(error, "info", {})
        return StepResult("The agent raised an exception.", terminated=True, info={**facts, **info})

    def _facts(self, **facts: Any) -> dict[str, Any]:
        session = self._session
        facts |= {"ignored_fields": sorted(session.ignored), "out_of_turns": bool(session.out_of_turns)}
        facts |= {"refused_requests": len(session.refused), "refusal": "".join(session.refused[-1:])}
        return {name: fact for name, fact in facts.items() if fact}

    def close(self) -> None:
        """End the session and its agent, or note an agent that does not end."""
        self.end_episode()
        thread, self._call, self._thread = self._thread, None, None
        if thread is not None:
            thread.join(END_SECONDS)


AGENT_ENVIRONMENT = f"{AgentEnvironment.__module__}:{AgentEnvironment.__qualname__}"  # in `run.json`
_strays: list[tuple[threading.Thread, float]] = []  # agents of ended episodes, and since when


def _run(agent: Callable, task: dict[str, Any], client: AgentClient) -> None:
    try:
        end = AgentEnd(result_of(agent(task, client)))
    except BaseException as error:  # SystemExit would end this thread without a word
        end = AgentEnd(error=error)
    client.session.end(end)


def result_of(value: Any) -> Any:
    """Return what a function returned, awaited if it is async."""
    return asyncio.run(awaited(value)) if inspect.isawaitable(value) else value


def read_return_value(value: Any) -> tuple[Any, dict[str, Any]]:
    """Return the reward and info in an agent's return value. `validate_step` checks them."""
    if isinstance(value, (list, tuple)) and 2 <= len(value) <= len(_FIELDS):
        value = dict(zip(_FIELDS, value))
    fields = value if isinstance(value, Mapping) else {"reward": value}
    reward, success, info = (fields.get(name) for name in _FIELDS)
    if reward is None or set(fields) - set(_FIELDS) or not isinstance(info, (Mapping, type(None))):
        forms = "a reward (a number), (reward, success), (reward, success, info), or a dict with these"
        raise EnvironmentContractError(f"the agent returned {show(value)}: return {forms}")
    reward = reward.item() if getattr(reward, "ndim", None) == 0 else reward  # of numpy, torch
    outcome = {} if success is None else {"success": success}
    return float(reward) if isinstance(reward, bool) else reward, {**(info or {}), **outcome}


def _describe(error: BaseException) -> str:
    text = str(error).strip() if isinstance(error, AgentError) else in_words(error)
    return text.partition("\n")[0][:300]

"""OpenEnv: remote servers as `TextEnvironment`s, and environments as server applications."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import urlsplit

from g2po_trl.environments.contract import Observation, StepResult, TextEnvironment
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.pool.limits import PoolLimits
from g2po_trl.environments.pool.pool import EnvironmentFailure, EnvironmentPool
from g2po_trl.environments.setup import text_environment_factory
from g2po_trl.environments.tools.trl_tools import is_tool_environment
from g2po_trl.environments.validation import factory_name
from g2po_trl.prompts.conversation import ChatRequest, Message, read_parts
from g2po_trl.prompts.images import content_blocks
from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.extras import import_extra
from g2po_trl.utils.masking import withheld_variables

# Open sessions of this process by server: the least loaded server is used first.
_SESSIONS: Counter[str] = Counter()
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# What a server may begin to send when it is full, or cannot make an environment, in place of an observation.
_NO_SESSION = ("CAPACITY_REACHED", "FACTORY_ERROR")
# Fields of the protocol, and facts for the trainer, which the model does not see.
_NOT_SHOWN = frozenset({"done", "info", "metadata", "reward", "terminated", "truncated"})
_OURS = _NOT_SHOWN | {"admissible_actions", "images", "request", "state_key", "task", "text"}  # of `g2po serve`
_TASK_FIELDS = frozenset(
    {"goal", "instruction", "instructions", "objective", "problem", "problem_description", "task", "task_description"}
)
_QUESTIONS = frozenset({"prompt", "question"})  # tasks beside other fields; without them the news


def read_observation(fields: Mapping[str, Any]) -> Observation:
    """Return the `Observation` in a server's response.

    From `g2po serve` it has all fields. From other servers, `task` is the field with a name such as `goal` or
    `instruction`, and `text` contains all other fields with a value, as `name: value` if there are several.

    Raises:
        G2POError: if no field contains a text.
    """
    if _is_ours(fields):
        texts = {name: fields.get(name) for name in ("text", "state_key", "admissible_actions", "task")}
        request = fields.get("request")
        request = None if request is None else ChatRequest(**request)
        # As parts of a message, of which images are never files of this machine.
        images = [{"type": "image", "image": image} for image in fields.get("images") or ()]
        return Observation(**texts, images=tuple(read_parts(images, "images")[1]), request=request)
    if not _has_text(fields):
        raise G2POError(
            f"the server's observation has the fields {', '.join(fields)} and no text among them: pass a function as "
            "read_observation"
        )
    shown = {name: value for name, value in _given(fields).items() if name not in _NOT_SHOWN}
    texts = {name: value for name, value in shown.items() if isinstance(value, str)}
    news = {name: value for name, value in shown.items() if not (name in texts and name in _TASK_FIELDS | _QUESTIONS)}
    names = _TASK_FIELDS | _QUESTIONS if news else _TASK_FIELDS
    task = "\n\n".join(text for name, text in texts.items() if name in names)
    return Observation(_in_words(news or texts), task=task or None)


def _is_ours(fields: Mapping[str, Any]) -> bool:
    return "admissible_actions" in fields and isinstance(fields.get("text"), str) and fields.keys() <= _OURS


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value; 0 and `False` count as values."""
    return {name: value for name, value in fields.items() if value is not None and value not in ("", [], {})}


def _has_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_text(part) for name, part in value.items() if name not in _NOT_SHOWN)
    return any(map(_has_text, value)) if isinstance(value, (list, tuple)) else isinstance(value, str)


def _in_words(value: Any) -> str:
    """Return JSON data as readable text: strings unchanged, fields and rows in lines."""
    if isinstance(value, Mapping):
        parts = {name: _in_words(part) for name, part in _given(value).items()}
        if len(parts) == 1 and _has_text(value):
            return next(iter(parts.values()))
        return "\n".join(f"{name}:{chr(10) if chr(10) in text else ' '}{text}" for name, text in parts.items())
    if isinstance(value, (list, tuple)) and any(
        isinstance(part, (Mapping, list)) or "\n" in str(part) for part in value
    ):
        return "\n".join(map(_in_words, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class RemoteEnvironment(TextEnvironment):
    """An environment on an OpenEnv server.

    Each `reset` uses the server with the fewest sessions of this process. If a server is full or cannot be reached,
    the next one is tried; if the connection is lost during an episode, the episode ends as an error.

    Args:
        base_urls: servers of the same environment, e.g. `["http://127.0.0.1:8000"]`.
        make_action: turns the action's text into the fields of the server's action. `None`: `{"text": action}`, as
            `g2po serve` expects it.
        read_observation: turns the fields of the server's observation into an `Observation`. By default a task that
            changes during an episode is shown in the text.
        timeout: seconds to wait for a response.

    Raises:
        G2POError: if `base_urls` is empty.
        ImportError: if openenv is not installed.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        make_action: Callable[[str], dict[str, Any]] | None = None,
        read_observation: Callable[[Mapping[str, Any]], Observation] = read_observation,
        timeout: float = 60.0,
    ):
        if isinstance(base_urls, str) or not base_urls:
            raise G2POError(f"base_urls is {base_urls!r}: pass a list of servers, e.g. ['http://127.0.0.1:8000']")
        import_extra("openenv")
        self.base_urls = list(base_urls)
        self.make_action = make_action or (lambda action: {"text": action})
        self.read_observation = read_observation
        self.timeout = timeout
        self._client: Any = None
        self._url: str | None = None
        self._avoid: set[str] = set()  # servers that failed last
        self._task: str | None = None

    def reset(self, **task) -> Observation:
        """Start a task on the first server that takes it; the row becomes the arguments of its `reset`.

        Raises:
            ConnectionError: if all servers are full or cannot be reached.
        """
        errors = []
        for _ in range(len(self.base_urls) + (self._client is not None)):  # that connection may have ended since
            try:
                if self._client is None:
                    self._connect()
                fields = self._client.reset(**task).observation
                self._avoid.clear()
                return self._observe(fields, first=True)
            except (*_connection_errors(), RuntimeError) as error:
                if isinstance(error, RuntimeError) and not any(code in str(error) for code in _NO_SESSION):
                    raise
                errors.append(f"{self._url}: {error!r}")
                self._drop(failed=True)
        tried = "; ".join(errors)
        if "CAPACITY_REACHED" in tried:
            raise ConnectionError(
                f"no server has room ({tried}): start more, or raise their limit (max_concurrent_envs; --max-sessions)"
            )
        raise ConnectionError(f"no server can be reached ({tried}): start one with `g2po serve`")

    def step(self, action: str) -> StepResult:
        """Play an action on the server.

        Raises:
            ConnectionError: if the connection is lost.
        """
        if self._client is None:
            raise RuntimeError("call reset before step")
        try:
            response = self._client.step(self.make_action(action))
        except _connection_errors() as error:
            url = self._url
            self._drop(failed=True)
            raise ConnectionError(f"{url} disconnected during an episode: {error!r}") from error
        fields = response.observation
        truncated = bool(fields.get("truncated", False))
        terminated = fields.get("terminated")  # servers other than `g2po serve` send `done` only
        info = fields.get("info")
        info = (info if isinstance(info, Mapping) else None) or response.metadata or {}
        return StepResult(
            self._observe(fields),
            float(response.reward or 0.0),
            terminated=bool(response.done) and not truncated if terminated is None else bool(terminated),
            truncated=truncated,
            info=dict(info),
        )

    def close(self) -> None:
        self._drop(failed=False)

    def _observe(self, fields: Mapping[str, Any], first: bool = False) -> Observation:
        seen = self.read_observation(fields)
        if self.read_observation is not read_observation or _is_ours(fields):
            return seen
        if first:
            self._task = seen.task
        elif seen.task not in (None, self._task):
            seen = replace(seen, text=f"{seen.task}\n\n{seen.text}")
        return seen

    def _connect(self) -> None:
        from openenv.core.generic_client import GenericEnvClient

        start = os.getpid() % len(self.base_urls)  # so that workers start at different servers
        order = self.base_urls[start:] + self.base_urls[:start]
        self._url = min(order, key=lambda url: (url in self._avoid, _SESSIONS[url]))
        _SESSIONS[self._url] += 1
        self._client = GenericEnvClient(self._url, message_timeout_s=self.timeout).sync()
        self._client.connect()

    def _drop(self, failed: bool) -> None:
        if self._client is None:
            return
        client, self._client = self._client, None
        _SESSIONS[self._url] -= 1
        if failed:
            self._avoid.add(self._url)
        with contextlib.suppress(Exception):
            client.close()


def _connection_errors() -> tuple[type[BaseException], ...]:
    from websockets.exceptions import WebSocketException

    return (ConnectionError, OSError, TimeoutError, WebSocketException)


def make_app(
    environment_factory: Callable[[], TextEnvironment],
    max_sessions: int = 64,
    environment_variables: Sequence[str] = (),
    max_turns: int | None = None,
    host: str | None = None,
):
    """Return a FastAPI application that serves an environment over OpenEnv, with one worker process per session.

    Requests of web pages are rejected: a browser would let any open page play, and read the responses.

    Args:
        environment_factory: as passed to the trainer.
        max_sessions: maximum number of concurrent sessions; the server rejects more.
        environment_variables: see `EnvironmentPool`.
        max_turns: the trainer's `max_turns`; required for tool-based classes, others ignore it.
        host: the address it will listen on. A loopback address accepts requests under its own names only. `None`:
            unknown.

    Raises:
        G2POError: if one of the variables is not set, or `max_turns` is missing.
    """
    withheld_variables(environment_variables)
    if is_tool_environment(environment_factory) and (max_turns is None or max_turns < 1):
        raise G2POError(
            f"max_turns is {max_turns}: {factory_name(environment_factory)} is a tool-based class, which returns its "
            "reward in the last turn; pass the trainer's max_turns"
        )
    environment_factory = text_environment_factory(
        environment_factory, EpisodeLimits(max_turns or EpisodeLimits.max_turns)
    )
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, State
    from openenv.core.env_server.types import Observation as ServerObservation

    class TextAction(Action):
        text: str

    class TextObservation(ServerObservation):
        text: str
        state_key: str | None = None
        admissible_actions: list[str] | None = None
        task: str | None = None
        request: dict[str, Any] | None = None
        images: list[str] = []  # noqa: RUF012  (pydantic copies it)
        terminated: bool = False
        truncated: bool = False
        info: dict[str, Any] = {}  # noqa: RUF012  (pydantic copies it)

    class Served(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.pool: EnvironmentPool | None = None

        def reset(self, seed: int | None = None, episode_id: str | None = None, **task: Any) -> TextObservation:
            named = {"seed": seed, "episode_id": episode_id}  # OpenEnv's parameters may also be columns of the task
            task |= {name: value for name, value in named.items() if value is not None}
            if self.pool is None:
                self.pool = EnvironmentPool(
                    environment_factory, PoolLimits(1, environment_variables=list(environment_variables))
                )
            (first,) = self.pool.reset([task])
            return TextObservation(**_as_json(_or_raise(first)))

        def step(self, action: TextAction, timeout_s: float | None = None, **kwargs: Any) -> TextObservation:
            if self.pool is None:
                raise RuntimeError("call reset before step")
            result = _or_raise(self.pool.step({0: action.text})[0])
            return TextObservation(
                **_as_json(result.observation),
                reward=result.reward,
                done=result.terminated or result.truncated,
                terminated=result.terminated,
                truncated=result.truncated,
                info=result.info,
            )

        @property
        def state(self) -> State:
            return State()

        def close(self) -> None:
            if self.pool is not None:
                self.pool.close()

    app = create_fastapi_app(Served, TextAction, TextObservation, max_concurrent_envs=max_sessions)
    app.add_middleware(RejectBrowserRequests, names=_LOOPBACK if host in _LOOPBACK else None)
    return app


def _as_json(seen: Observation) -> dict[str, Any]:
    if seen.request is None:
        return {**asdict(seen), "images": [image.data_url for image in seen.images]}
    messages = [_in_parts(message) for message in seen.request.messages]
    return {**asdict(seen), "images": [], "request": {**vars(seen.request), "messages": messages}}


def _in_parts(message: Message) -> Message:
    """Return a message whose images are data URLs in its content."""
    if "images" not in message:
        return message
    images, blocks = iter(message["images"]), content_blocks(message)
    parts = [{**block, "image": next(images).data_url} if block["type"] == "image" else block for block in blocks]
    return {name: part for name, part in message.items() if name != "images"} | {"content": parts}


class RejectBrowserRequests:
    """ASGI middleware that rejects HTTP and WebSocket requests of web pages with 403.

    Args:
        app: the application.
        names: accepted host names, since a page's domain can resolve to this machine. `None`: any.
    """

    def __init__(self, app: Callable, names: Sequence[str] | None):
        self.app, self.names = app, names

    async def __call__(self, scope: dict[str, Any], receive: Callable, send: Callable) -> None:
        headers = dict(scope.get("headers", ()))
        host = urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}").hostname
        foreign = self.names is not None and host not in self.names
        if scope["type"] == "lifespan" or not (b"origin" in headers or foreign):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # closing before accepting sends 403
        else:
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"not for web pages"})


def _or_raise(result):
    if isinstance(result, EnvironmentFailure):
        raise RuntimeError(f"{result.kind}: {result.message}")
    return result

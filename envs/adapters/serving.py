"""The server of `g2po serve`: an environment over OpenEnv, each session in its own worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from g2po_trl.environments.contract import Observation, TextEnvironment
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.pool.limits import PoolLimits
from g2po_trl.environments.pool.pool import EnvironmentFailure, EnvironmentPool
from g2po_trl.environments.setup import played_as
from g2po_trl.environments.tools.trl_tools import is_tool_environment
from g2po_trl.prompts.conversation import Message
from g2po_trl.prompts.images import content_blocks
from g2po_trl.utils.masking import withheld_variables
from g2po_trl.utils.options import require

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
    needs_turns = is_tool_environment(environment_factory)
    remedy = "a tool-based class returns its reward in the last turn: pass the trainer's max_turns"
    require(not needs_turns or (max_turns or 0) > 0, "max_turns", max_turns, remedy)
    limits = EpisodeLimits(max_turns or EpisodeLimits.max_turns)
    environment_factory, _, _ = played_as(environment_factory, limits, history="window")
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

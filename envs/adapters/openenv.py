"""Environments on OpenEnv servers as `TextEnvironment`s. `serving` is the server of `g2po serve`."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from g2po_trl.environments.contract import Observation, StepResult, TextEnvironment
from g2po_trl.prompts.conversation import ChatRequest, read_parts
from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.extras import import_extra
from g2po_trl.utils.options import require

# Open sessions of this process by server: the least loaded server is used first.
_SESSIONS: Counter[str] = Counter()
# What a server may begin to send when it is full, or cannot make an environment, in place of an observation.
_NO_SESSION = ("CAPACITY_REACHED", "FACTORY_ERROR")


def read_observation(fields: Mapping[str, Any]) -> Observation:
    """Return the `Observation` in a response of `g2po serve`, or of another server with a field `text`.

    Raises:
        G2POError: if there is no field `text`, or an image is no data URL.
    """
    if not isinstance(fields.get("text"), str):
        raise G2POError(
            f"the server's observation has the fields {', '.join(fields)}: pass a function as read_observation, which "
            "makes an Observation of them",
            "read_observation",
            list(fields),
        )
    texts = {name: fields.get(name) for name in ("text", "state_key", "admissible_actions", "task")}
    request = fields.get("request")
    # As parts of a message, of which images are never files of this machine.
    images = [{"type": "image", "image": image} for image in fields.get("images") or ()]
    request = None if request is None else ChatRequest(**request)
    return Observation(**texts, images=tuple(read_parts(images, "images")[1]), request=request)


class RemoteEnvironment(TextEnvironment):
    """An environment on an OpenEnv server.

    Each `reset` uses the server with the fewest sessions of this process. If a server is full or cannot be reached,
    the next one is tried; if the connection is lost during an episode, the episode ends as an error.

    Args:
        base_urls: servers of the same environment, e.g. `["http://127.0.0.1:8000"]`.
        make_action: turns the action's text into the fields of the server's action. `None`: `{"text": action}`, as
            `g2po serve` expects it.
        read_observation: turns the fields of the server's observation into an `Observation`. Servers other than
            `g2po serve` need it, unless their field `text` is all that the model has to see.
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
        fits = bool(base_urls) and not isinstance(base_urls, str)
        require(fits, "base_urls", base_urls, "pass a list of servers, e.g. ['http://127.0.0.1:8000']")
        import_extra("openenv")
        self.base_urls = list(base_urls)
        self.make_action = make_action or (lambda action: {"text": action})
        self.read_observation = read_observation
        self.timeout = timeout
        self._client: Any = None
        self._url: str | None = None
        self._avoid: set[str] = set()  # servers that failed last

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
                return self.read_observation(fields)
            except (*_connection_errors(), RuntimeError) as error:
                if isinstance(error, RuntimeError) and not any(code in str(error) for code in _NO_SESSION):
                    raise
                errors.append(f"{self._url}: {error!r}")
                self._drop(failed=True)
        tried = "; ".join(errors)
        raise ConnectionError(
            f"no server can be reached or has room ({tried}): start more with `g2po serve`, or raise --max-sessions"
        )

    def step(self, action: str) -> StepResult:
        """Play an action on the server.

        Raises:
            ConnectionError: if the connection is lost.
        """
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
            self.read_observation(fields),
            float(response.reward or 0.0),
            terminated=bool(response.done) and not truncated if terminated is None else bool(terminated),
            truncated=truncated,
            info=dict(info),
        )

    def close(self) -> None:
        self._drop(failed=False)

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

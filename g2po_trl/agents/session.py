"""The session of an agent's episode: its requests in their order of arrival, their answers, and the agent's end.

A request repeats an earlier one if their bodies are equal and its client marks it (`x-stainless-retry-count`), as
`openai` and `anthropic` do: it gets the same answer. It is no step, and neither is one whose client has left before.
"""

from __future__ import annotations

import contextlib
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..prompts.conversation import ChatResponse
from .dialects.request import AgentRequest, Completion, RefusedRequestError
from .workspace import Workspace

MAX_REFUSED = 100  # requests beyond those of all turns; then the agent is not waited for
_ended = partial(RefusedRequestError, "the episode has ended: send no more requests", None, "episode_ended", 404)


@dataclass(frozen=True)
class AgentEnd:
    """The end of an agent: the value it returned, or the exception it raised."""

    value: Any = None
    error: BaseException | None = None


@dataclass(eq=False)
class Call:
    """A request in its session. `digest`: of its route and body."""

    request: AgentRequest
    digest: bytes
    clients: int = 0  # that wait for the answer
    is_delivered: bool = False
    answer: Future[Completion | RefusedRequestError] = field(default_factory=Future)


class AgentError(RuntimeError):
    """An agent failed. `limit` names a limit that it exceeded, `info` is the episode's."""

    def __init__(self, message: str, limit: str | None = None):
        super().__init__(message)
        self.info, self.limit = {}, limit


class Session:
    """The requests of one episode, in their order of arrival, and its end.

    After `max_turns` completions, requests are refused; after `max_requests`, refused ones included, it ends.
    """

    def __init__(self, max_turns: float = math.inf, max_requests: float | None = None) -> None:
        self.max_turns, self.max_requests = max_turns, max_requests or max_turns + MAX_REFUSED
        self.key = f"sk-g2po-{secrets.token_urlsafe(24)}"
        self.refused: list[str] = []  # why requests could not be read
        self.ignored: set[str] = set()  # fields of requests that the trainer decides otherwise
        self.workspace: Workspace | None = None  # whose files are part of the states
        self.closed, self.out_of_turns = False, 0  # requests after the last turn
        self._events: queue.SimpleQueue[Call | AgentEnd] = queue.SimpleQueue()
        self._calls: list[Call] = []
        self.answered: list[tuple[AgentRequest, Completion]] = []
        self._requests, self._own_seconds, self._waits_since = 0, 0.0, None
        self._at_end, self._lock = contextlib.ExitStack(), threading.Lock()

    def open(self, request: AgentRequest, digest: bytes, is_retry: bool = False) -> Call:
        """Return the call of a request, answered if it is refused, or the call that it repeats."""
        with self._lock:
            earlier = (one for one in reversed(self._calls) if is_retry and one.digest == digest)
            if (call := next(earlier, None)) is None:
                call = Call(request, digest)
                if refusal := self._counted():
                    call.answer.set_result(refusal)
                else:
                    self._calls.append(call)
                    self.ignored.update(request.ignored)
            call.clients += 1
            if call.clients == 1:
                self._events.put(call)
            return call

    def refuse(self, why: str) -> None:
        """Note a request that cannot be read."""
        with self._lock:
            self.refused.append(why)
            self._counted()

    def _counted(self) -> RefusedRequestError | None:
        """Count a request; return its answer if it is one too many. Far too many end the episode."""
        self._requests += 1
        if self.closed:
            return _ended()
        why, code = f"the agent has made its {self.max_turns} calls (max_turns)", "turn_limit"
        if self._requests > self.max_requests:
            why, code = f"more than max_requests={self.max_requests}", "request_limit"
            self.end(AgentEnd(error=AgentError(why, "request limit")))
        elif len(self.answered) < self.max_turns:
            return None
        else:
            self.out_of_turns += 1
        return RefusedRequestError(f"the episode is over: {why}", code=code, status=404)

    def next(self) -> Call | AgentEnd:
        """Wait for the next request whose client waits for its answer, or for the end of the agent."""
        self._waits_since = time.monotonic()
        try:
            while not isinstance(event := self._events.get(), AgentEnd):
                with self._lock:
                    if not event.clients or event.answer.done():
                        continue
                    if len(self.answered) < self.max_turns:
                        return event
                    event.answer.set_result(self._counted())  # it has waited during the last turn
            return event
        finally:
            self._own_seconds, self._waits_since = self.own_seconds(), None

    def answer(self, call: Call, response: ChatResponse) -> None:
        """Answer a request by the model's response."""
        with self._lock:
            before = sum(len(completion.response.tool_calls) for _, completion in self.answered)
            calls = tuple({**call, "id": f"call_{n}"} for n, call in enumerate(response.tool_calls, before + 1))
            completion = Completion(replace(response, tool_calls=calls), len(self.answered) + 1)
            self.answered.append((call.request, completion))
            call.answer.set_result(completion)

    def end(self, end: AgentEnd) -> None:
        """Report the end of the agent."""
        self._events.put(end)

    def unanswered(self) -> int:
        """Return the number of requests whose clients have left before the answer, or wait."""
        with self._lock:
            return sum(not call.is_delivered for call in self._calls)

    def at_end(self, function: Callable[[], Any]) -> None:
        """Have a function called when the episode ends; at once if it has ended."""
        with self._lock:
            if not self.closed:
                self._at_end.callback(function)
                return
        function()

    def close(self) -> None:
        """End the session: all requests that wait, and all that come, are answered by errors."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            for call in self._calls:
                if not call.answer.done():
                    call.answer.set_result(_ended())
        with contextlib.suppress(Exception):
            self._at_end.close()

    def own_seconds(self) -> float:
        """Return the seconds in which the agent was waited for: it did not wait for an answer."""
        since = self._waits_since
        return self._own_seconds + (0.0 if since is None else time.monotonic() - since)

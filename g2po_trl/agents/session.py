"""The session of an agent's episode: its requests in their order of arrival, their answers, and the agent's end.

A request waits in its session until the trainer's model has answered it. A repeated request gets the same answer, and
is not a second step. A request repeats another one if it has the same body, and

- its client marks it, by the same `Idempotency-Key` or by an `x-stainless-retry-count` above 0, as `openai` does, or
- the client of the other request closed its connection before the answer.

Equal requests without such a mark are separate steps. A request is given up (`Session.given_up`) if its client
disconnects before the answer and does not repeat it. The client may have reached a time limit, which hides the model's
answer; or the agent has ended without the answer (`Call.unread`), for example if it cancels side requests when it is
done. If the agent continues after its client has disconnected, the request is given up.
"""

from __future__ import annotations

import contextlib
import math
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..prompts.conversation import ChatResponse
from .dialects.request import AgentRequest, Completion, RefusedRequestError
from .workspace import Workspace

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # every client of HTTP/1.1 skips it
_PROBE_MS = 50
PATIENCE = 2.0  # seconds that every client waits for an answer; the shortest default is 5, of httpx


@dataclass(frozen=True)
class AgentEnd:
    """The end of an agent: the value it returned, or the exception it raised."""

    value: Any = None
    error: BaseException | None = None


@dataclass(eq=False)
class Call:
    """A request in its session, with the digest of its body."""

    request: AgentRequest
    digest: bytes
    name: str | None  # the client's, of the request (`Idempotency-Key`)
    is_retry: bool  # its client says that it repeats one
    connections: list[socket.socket]  # of clients that wait for the answer
    ends: float = math.inf  # when the client gives it up, if it says so, as `openai` does
    delivered: bool = False
    beside_another: bool = False  # which was answered while this one waited
    unread: bool | None = None  # its agent has ended too soon for a time limit: it did not wait for the answer
    patience: float = field(default_factory=lambda: PATIENCE)  # seconds that its client waits: so long for another
    arrived: float = field(default_factory=time.monotonic)
    answer: Completion | RefusedRequestError | None = None
    answered: threading.Event = field(default_factory=threading.Event)

    def is_lost(self) -> bool:
        """Return whether all clients that waited for the answer have gone without it."""
        return not self.delivered and all(map(is_closed, self.connections))


class TooManyRequestsError(RuntimeError):
    """An agent has made more requests than its episode may have."""

    limit = "request limit"


class Session:
    """The requests of one episode, in their order of arrival, and its end, at the latest after `max_requests`."""

    def __init__(self, max_requests: int | None = None) -> None:
        self.max_requests, self._requests = max_requests, 0
        self.key = f"sk-g2po-{secrets.token_urlsafe(24)}"
        self.refused: list[str] = []  # why requests could not be read
        self.ignored: set[str] = set()  # fields of requests that the trainer decides otherwise
        self.workspace: Workspace | None = None  # whose files are part of the states
        self.closed = False
        self._events: queue.SimpleQueue[Call | AgentEnd] = queue.SimpleQueue()
        self._calls: list[Call] = []
        self._lost: list[Call] = []  # whose clients had gone before their turn
        self._responses = self._tool_calls = 0
        self._waiting, self._own_seconds, self._since = 0, 0.0, time.monotonic()
        self._at_end: list[Callable[[], Any]] = []
        self._lock = threading.Lock()

    def open(self, call: Call) -> Call:
        """Add a request; return it, or the one that it repeats. Raises `RefusedRequestError` after the last one."""
        with self._lock:
            if self.closed:
                raise episode_ended()
            if (earlier := self._repeated(call)) is not None:
                earlier.connections += call.connections
                earlier.arrived, earlier.ends, earlier.unread = call.arrived, call.ends, None
                return earlier
            self._goes_on()
            self._count_request()
            answered = [(one.request, one.answer) for one in self._calls if isinstance(one.answer, Completion)]
            try:
                call.request = call.request.whole(answered)
            except RefusedRequestError as error:
                self.refused.append(str(error))
                raise
            self._calls.append(call)
            self.ignored.update(call.request.ignored)
            self._count(+1)
        self._events.put(call)
        return call

    def refuse(self, why: str) -> None:
        """Note a request that cannot be read."""
        with self._lock:
            self.refused.append(why)
            with contextlib.suppress(RefusedRequestError):  # it is refused as it is
                self._count_request()

    def _count_request(self) -> None:
        """Count a request; beyond the last one, end the episode. Raises `RefusedRequestError` then."""
        self._requests += 1
        if self.max_requests is None or self._requests <= self.max_requests:
            return
        what = f"more than max_requests={self.max_requests}"
        if self._requests == self.max_requests + 1:
            self._events.put(AgentEnd(error=TooManyRequestsError(what)))
        raise RefusedRequestError(f"the episode is over: {what}", code="request_limit", status=404)

    def _repeated(self, call: Call) -> Call | None:
        """Return the call that another one repeats.

        Equal calls may wait beside each other, and may be answered already: one whose clients have gone comes first.
        """
        same = [one for one in reversed(self._calls) if one.digest == call.digest]
        if named := [one for one in same if one.name is not None and one.name == call.name]:
            return named[0]
        if gone := [one for one in same if one.is_lost()]:
            return gone[0]
        for lost in self._lost:
            if lost.digest == call.digest:  # before its turn: it is new
                self._lost.remove(lost)
                return None
        return same[0] if call.is_retry and same else None

    def next(self) -> Call | AgentEnd:
        """Wait for the next request whose client is there, or for the end of the agent."""
        while True:
            event = self._events.get()
            if isinstance(event, AgentEnd):
                return event
            with self._lock:
                if not event.is_lost():
                    return event
                self._calls.remove(event)  # if it is sent again, it is new
                self._lost += [] if event in self._lost else [event]
                self._answer(event, episode_ended())

    def answer(self, call: Call, response: ChatResponse | RefusedRequestError) -> None:
        with self._lock:
            if isinstance(response, RefusedRequestError):
                self._answer(call, response)
                return
            self._responses += 1
            self._answer(call, Completion(response, self._responses, self._tool_calls))
            self._tool_calls += len(response.tool_calls)

    def delivers(self, call: Call, connection: socket.socket) -> bool:
        """Return whether a client is there for the answer; from now on it may have it, and ask the same again."""
        with self._lock:
            if is_closed(connection):  # bytes to a client that has gone would seem to arrive
                return False
            call.delivered = True
            self._goes_on()
            for other in self._calls:
                other.patience = max(other.patience, time.monotonic() - call.arrived)
            return True

    def _goes_on(self) -> None:
        """Note that the agent has not ended: what its clients have left until now, they have given up."""
        for call in [*self._lost, *self._calls]:
            if call.unread is None and call.is_lost():
                call.unread = False

    def leave(self) -> None:
        """Note which requests an agent leaves unread when it ends; a program may still have to be verified then."""
        with self._lock:
            now = time.monotonic()
            for call in [*self._lost, *self._calls]:
                if call.unread is None:
                    call.unread = now < call.ends and now - call.arrived < call.patience

    def end(self, end: AgentEnd) -> None:
        """Report the end of the agent."""
        self.leave()
        with self._lock:  # an agent in one thread has given up what is not answered now
            self._lost += [call for call in self._calls if call.answer is None and not call.beside_another]
        self._events.put(end)

    def given_up(self) -> list[Call]:
        """Return the requests whose clients have gone before the answer, and have not asked again."""
        with self._lock:
            return list(dict.fromkeys([*self._lost, *(call for call in self._calls if call.is_lost())]))

    def at_end(self, function: Callable[[], Any]) -> None:
        """Have a function called when the episode ends; at once if it has ended."""
        with self._lock:
            if not self.closed:
                self._at_end.append(function)
                return
        function()

    def close(self) -> None:
        """End the session: all requests that wait, and all that come, are answered by errors."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            for call in self._calls:
                if call.answer is None:
                    self._answer(call, episode_ended())
        for function in reversed(self._at_end):
            with contextlib.suppress(Exception):
                function()

    def own_seconds(self) -> float:
        """Return the seconds in which the agent did not wait for an answer."""
        with self._lock:
            return self._own_seconds + (0.0 if self._waiting else time.monotonic() - self._since)

    def _answer(self, call: Call, answer: Completion | RefusedRequestError) -> None:
        call.answer = answer
        for other in self._calls:
            other.beside_another |= other.answer is None
        self._count(-1)
        call.answered.set()

    def _count(self, change: int) -> None:
        """Count the requests that wait; called before and after those in which the agent waits for none."""
        now = time.monotonic()
        if not self._waiting:
            self._own_seconds += now - self._since
        self._waiting += change
        self._since = now


def episode_ended() -> RefusedRequestError:
    """Return the answer to requests of an episode that is over."""
    return RefusedRequestError("the episode has ended: send no more requests", code="episode_ended", status=404)


def is_closed(connection: socket.socket) -> bool:
    """Return whether the other side has gone. One that has only ended its sending still reads.

    Both look the same until something is sent, which a program that has gone rejects.
    """
    try:
        if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            return False
        connection.send(CONTINUE, socket.MSG_DONTWAIT)
        poll = select.poll()
        poll.register(connection, 0)  # errors and hang-up
        return bool(poll.poll(_PROBE_MS))
    except BlockingIOError:
        return False
    except (OSError, ValueError):  # reset, or closed here
        return True

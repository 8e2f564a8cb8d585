"""Exceptions of tools and agents: how they are named, and who caused them, the model or its environment.

| An exception | whose |
| --- | --- |
| `BrokenEnvironmentError`, `UnusableWorkerError`, a violated contract | the environment's |
| `ConnectionError`, no route to a host, `TimeoutError` of a connection, `httpx.ConnectError` and the like | the same |
| HTTP statuses 429, 502, 503 and 504, gRPC's UNAVAILABLE | the same |
| an unknown host name | the model's |
| `BrokenPipeError` and other `ConnectionError`s of pipes: the model ended the process, e.g. by `exit` | the model's |
| all others, as `EOFError`, `ValueError` of a closed file, errors of `subprocess` | the model's |
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from .validation import EnvironmentContractError, UnusableWorkerError

# Packages whose code runs for a connection: to a service that is set, or to any host. And for a pipe to a process.
_SERVICES = frozenset("anthropic grpc openai redis".split())
_NETWORK = _SERVICES.union(
    "aiohttp h11 http httpcore httpx httplib2 requests socket ssl urllib urllib3 websocket websockets".split()
)
_PROCESS = frozenset("asyncio.subprocess multiprocessing pexpect pty ptyprocess subprocess".split())
# Names of the classes of these packages, subclasses included, for a connection that is not made, cut, or too slow.
_OF_CONNECTIONS = frozenset(
    "APIConnectionError ChunkedEncodingError ClientConnectionError ClientPayloadError ConnectionClosed "
    "ConnectionError IncompleteRead NetworkError NewConnectionError ProxyError RemoteProtocolError ServerTimeoutError "
    "Timeout TimeoutError TimeoutException WebSocketConnectionClosedException WebSocketTimeoutException".split()
)
_BUSY = ("UNAVAILABLE", "DEADLINE_EXCEEDED", 429, 502, 503, 504)  # of gRPC and HTTP; 500 may be of the request
_UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ETIMEDOUT})
_CLOSED = frozenset({errno.EBADF, errno.EIO, errno.ESRCH})


class BrokenEnvironmentError(RuntimeError):
    """Raise this in a tool or an agent if the environment failed, not the model: the episode ends as an error."""


def is_of_environment(error: BaseException | None, wrapped: bool = True) -> bool:
    """Return whether an exception is the environment's failure, also one inside a group.

    `wrapped`: also if other code has wrapped it; else if a network library has. Of these, some raise their exception
    without `from`, and some with `from None`. One that raises an exception again, while it handles a later one, makes
    a circle of them.
    """
    for one in _chain(error, wrapped):
        if isinstance(one, (BrokenEnvironmentError, EnvironmentContractError, UnusableWorkerError)) or _is_cut(one):
            return True
    return False


def is_of_time(error: BaseException | None) -> bool:
    """Return whether an exception says that a time limit was reached or that something was cancelled."""
    names = ("Timeout", "Cancelled")
    return any(name in cls.__name__ for one in _chain(error, True) for cls in type(one).__mro__ for name in names)


def has_gone(error: BaseException) -> bool:
    """Return whether an exception says that a process or a file has gone which the model could end."""
    if _is_cut(error):
        return False
    closed = isinstance(error, ValueError) and "closed file" in str(error)
    ended = isinstance(error, (ConnectionError, EOFError)) or type(error).__name__ == "EOF"  # pexpect's
    return closed or ended or getattr(error, "errno", None) in _CLOSED


def inner(error: BaseException) -> list[BaseException]:
    """Return the exceptions inside a group and its groups; of another exception the exception itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for one in error.exceptions for leaf in inner(one)]


def in_words(error: BaseException) -> str:
    """Return an exception in one line: its type and its message's first line; of a group, the exceptions inside."""
    return "; ".join(": ".join([type(one).__name__, *str(one).strip().splitlines()[:1]]) for one in inner(error))


def message_of(error: BaseException) -> str:
    """Return the message of an exception, of a group those of the exceptions inside."""
    return "\n".join(str(one) for one in inner(error))


def _chain(error: BaseException | None, wrapped: bool) -> Iterator[BaseException]:
    chain, seen = [error], set()
    while chain:
        error = chain.pop()
        if error is None or id(error) in seen:
            continue
        yield error
        seen.add(id(error))
        if wrapped or _package(type(error).__module__) in _NETWORK:
            chain.append(error.__cause__ or error.__context__)
        chain += error.exceptions if isinstance(error, BaseExceptionGroup) else ()


def _is_cut(error: BaseException) -> bool:
    """Return whether an exception is one of a connection to a service."""
    if isinstance(error, BrokenPipeError):
        return _passed(error.__traceback__, _NETWORK)
    if isinstance(error, ConnectionError):
        return not _passed(error.__traceback__, _PROCESS)
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    if isinstance(error, TimeoutError):
        traces = [one.__traceback__ for one in (error, error.__cause__) if one is not None]  # asyncio's have a cause
        if str(error) == "timed out" or any(_passed(trace, _NETWORK) for trace in traces):
            return True
    if isinstance(error, OSError) and error.errno in _UNREACHABLE:
        return True
    package = _package(type(error).__module__)
    if package not in _NETWORK or (package not in _SERVICES and _is_unknown_host(error)):
        return False
    return _is_busy(error) or any(cls.__name__ in _OF_CONNECTIONS for cls in type(error).__mro__)


def _is_unknown_host(error: BaseException) -> bool:
    """Return whether a connection failed because the host name, perhaps invented by the model, is unknown."""
    return any(isinstance(one, socket.gaierror) and not _is_cut(one) for one in _chain(error, False))


def _is_busy(error: Any) -> bool:
    """Return whether an exception is the answer of a service that is overloaded or down."""
    places = (error, getattr(error, "response", None))
    statuses = [getattr(place, name, None) for place in places for name in ("code", "status", "status_code")]
    called = [getattr(one(), "name", None) if callable(one) else one for one in statuses]
    return any(one in _BUSY for one in called)


def _passed(trace: TracebackType | None, packages: frozenset[str]) -> bool:
    """Return whether an exception passed code of these packages, or of objects of their classes."""
    while trace is not None:
        frame = trace.tb_frame
        modules = frame.f_globals.get("__name__", ""), type(frame.f_locals.get("self")).__module__
        if any(module in packages or _package(module) in packages for module in modules):
            return True
        trace = trace.tb_next
    return False


def _package(module: str) -> str:
    return module.partition(".")[0]

"""Exceptions of tools and agents: how they are named, and who caused them, the model or its environment.

The environment's are `BrokenEnvironmentError`, a violated contract, `ConnectionError` and `TimeoutError`, what network
libraries raise for a connection (`_OF_CONNECTIONS`), and HTTP statuses of a service that is overloaded or down. All
others are the model's, also a broken pipe to a process, which the model ends by `exit`, and an unknown host name.
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterator, Mapping

from .validation import EnvironmentContractError

_OF_CONNECTIONS = {  # module -> classes of connections not made, cut or too slow; a game may have such names
    "aiohttp": ("ClientConnectionError", "ClientPayloadError", "ServerTimeoutError"),
    "anthropic": ("APIConnectionError",),
    "httpx": ("NetworkError", "TimeoutException", "RemoteProtocolError", "ProxyError"),
    "openai": ("APIConnectionError",),
    "requests.exceptions": ("ConnectionError", "Timeout", "ChunkedEncodingError"),
    "websocket": ("WebSocketConnectionClosedException", "WebSocketTimeoutException"),
    "websockets": ("ConnectionClosed",),
}


class BrokenEnvironmentError(RuntimeError):
    """Raise this in a tool or an agent if the environment failed, not the model: the episode ends as an error."""


_OF_ENVIRONMENT = (BrokenEnvironmentError, EnvironmentContractError, ConnectionError, TimeoutError)


def is_of_environment(error: BaseException, wrapped: bool = True) -> bool:
    """Return whether an exception is the environment's failure, also one inside a group.

    `wrapped`: also if other code has raised another exception in its place.
    """
    of_environment = (*_OF_ENVIRONMENT, *_loaded(_OF_CONNECTIONS))
    for part in inner(error):
        chain = _chain(part)
        places = (part, getattr(part, "reason", None), getattr(part, "response", None))
        status = {getattr(place, name, None) for place in places for name in ("code", "status_code")}
        is_cut = any(isinstance(one, of_environment) for one in (*places, *(chain if wrapped else ())))
        is_unknown_host = any(isinstance(one, socket.gaierror) and one.errno != socket.EAI_AGAIN for one in chain)
        if (is_cut and not is_unknown_host and not isinstance(part, BrokenPipeError)) or any(map(_is_busy, status)):
            return True
    return False


def _is_busy(status: object) -> bool:
    """Return whether an HTTP status says that a service is overloaded or down."""
    return isinstance(status, int) and (status == 429 or 500 <= status < 600)


def has_gone(error: BaseException) -> bool:
    """Return whether an exception says that a process or a file has gone which the model could end."""
    is_closed = isinstance(error, ValueError) and "closed file" in str(error)
    is_closed |= getattr(error, "errno", None) in (errno.EBADF, errno.EIO, errno.ESRCH)
    return is_closed or isinstance(error, (BrokenPipeError, EOFError, *_loaded({"pexpect": ("EOF",)})))


def inner(error: BaseException) -> list[BaseException]:
    """Return the exceptions inside a group and its groups; of another exception the exception itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for one in error.exceptions for leaf in inner(one)]


def in_words(error: BaseException) -> str:
    """Return an exception in one line: its type and its message's first line; of a group, the exceptions inside."""
    return "; ".join(": ".join([type(one).__name__, *str(one).strip().splitlines()[:1]]) for one in inner(error))


def _loaded(classes: Mapping[str, tuple[str, ...]]) -> Iterator[type]:
    """Yield the classes whose modules have been imported."""
    for module, names in classes.items():
        if module in sys.modules:
            yield from (getattr(sys.modules[module], name) for name in names)


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an exception and those in whose place it was raised, which may be a circle."""
    chain: list[BaseException] = []
    while error is not None and not any(error is one for one in chain):
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain

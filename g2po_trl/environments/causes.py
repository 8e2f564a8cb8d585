"""Exceptions in words, with the line of the user's code, and who caused them, the model or its environment.

The environment's are `BrokenEnvironmentError`, a violated contract, `ConnectionError` and `TimeoutError`, a network
that is not reached, what libraries raise for a connection (`_OF_CONNECTIONS`), and HTTP statuses of a service that is
overloaded or down. All others are the model's, also a broken pipe to a process, which the model ends by `exit`, and an
unknown host name.
"""

from __future__ import annotations

import errno
import re
import socket
import sysconfig
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .validation import EnvironmentContractError

if TYPE_CHECKING:
    from .pool.pool import EnvironmentFailure

_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_FRAME = re.compile(r'^[ |]*File "(.+)", line (\d+), in ', re.MULTILINE)  # also in the traceback of a group
# Exceptions for connections not made, cut or too slow, as package.Class; a game may have classes with such names.
_OF_CONNECTIONS = frozenset(
    "aiohttp.ClientConnectionError aiohttp.ClientPayloadError aiohttp.ServerTimeoutError anthropic.APIConnectionError "
    "httpx.NetworkError httpx.TimeoutException httpx.RemoteProtocolError httpx.ProxyError openai.APIConnectionError "
    "requests.ConnectionError requests.Timeout requests.RetryError requests.ChunkedEncodingError "
    "websockets.ConnectionClosed websocket.WebSocketConnectionClosedException "
    "websocket.WebSocketTimeoutException".split()
)
_UNREACHED = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, socket.EAI_AGAIN)


class BrokenEnvironmentError(RuntimeError):
    """Raise this in a tool or an agent if the environment failed, not the model: the episode ends as an error."""


_OF_ENVIRONMENT = (BrokenEnvironmentError, EnvironmentContractError, ConnectionError, TimeoutError)


def is_of_environment(error: BaseException, wrapped: bool = True) -> bool:
    """Return whether an exception is the environment's failure, also one inside a group.

    `wrapped`: also if other code has raised another exception in its place.
    """
    for part in inner(error):
        chain, raised = [], part
        while raised is not None and not any(raised is one for one in chain):  # `raise error from error` is a circle
            chain.append(raised)
            raised = raised.__cause__ or raised.__context__
        raised = chain if wrapped else [part]
        places = [*raised, *(getattr(one, name, None) for one in raised for name in ("reason", "response"))]
        status = {getattr(place, name, None) for place in places for name in ("code", "status_code")}
        if any(isinstance(code, int) and (code in (408, 429) or 500 <= code < 600) for code in status):
            return True  # overloaded or down
        is_cut = any(isinstance(one, _OF_ENVIRONMENT) or _names(one) & _OF_CONNECTIONS for one in places)
        is_cut |= any(getattr(one, "errno", None) in _UNREACHED for one in places)
        is_unknown_host = any(isinstance(one, socket.gaierror) and one.errno != socket.EAI_AGAIN for one in chain)
        if is_cut and not is_unknown_host and not isinstance(part, BrokenPipeError):
            return True
    return False


def has_gone(error: BaseException) -> bool:
    """Return whether an exception says that a process or a file has gone which the model could end."""
    is_closed = isinstance(error, ValueError) and "closed file" in str(error)
    is_closed |= getattr(error, "errno", None) in (errno.EBADF, errno.EIO, errno.ESRCH)
    return is_closed or isinstance(error, (BrokenPipeError, EOFError)) or "pexpect.EOF" in _names(error)


def inner(error: BaseException) -> list[BaseException]:
    """Return the exceptions inside a group and its groups; of another exception the exception itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for one in error.exceptions for leaf in inner(one)]


def in_words(error: BaseException) -> str:
    """Return an exception in one line: its type and its message's first line; of a group, the exceptions inside."""
    return "; ".join(": ".join([type(one).__name__, *str(one).strip().splitlines()[:1]]) for one in inner(error))


def where_raised(error: BaseException | str) -> str:
    """Return `, FILE, line N` of the last line of the user's code in an exception or in a traceback's text, or ""."""
    text = error if isinstance(error, str) else "".join(traceback.format_exception(error))
    ours = [f"{Path(find_spec(name).origin).resolve().parent}/" for name in ("g2po_trl", "g2po_envs")]
    for file, line in reversed(_FRAME.findall(text)):
        if Path(file).is_file() and not file.startswith((*_LIBRARIES, *ours)):
            return f", {file.removeprefix(f'{Path.cwd()}/')}, line {line}"
    return ""


def describe_failure(failure: EnvironmentFailure) -> str:
    """Return the predicate of a sentence about a failure, e.g. "times out: …"."""
    message = failure.message.rpartition("\nslot ")[0]
    if failure.kind == "exception":
        return f"raised {message.strip().splitlines()[-1]}{where_raised(message)}"
    return {"timeout": "times out: ", "crash": "crashes: "}.get(failure.kind, "") + " ".join(message.split())


def _names(value: object) -> set[str]:
    """Return `package.Class` of an object's classes."""
    return {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(value).__mro__}

"""State keys of chat requests: which requests of a task belong to the same state."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..utils.images import Picture
from ..utils.json import to_json
from ..utils.options import require
from .conversation import Message, as_text, canonical, pictures_of, since_last_completion, without_ids

MAX_SHORT = 64  # characters of new messages that are the same in many states, such as "OK" and "Nothing happens."

_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?"
_DATES = (
    rf"\d{{4}}[-/]\d{{2}}[-/]\d{{2}}(?:[T ]{_CLOCK})?",
    rf"(?:{_DAY},? )?{_MONTH} +\d{{1,2}}(?: {_CLOCK})?(?: [A-Z]{{3,5}}(?= \d{{4}}))?(?:,? \d{{4}})?",
    rf"{_DAY},? \d{{1,2}} {_MONTH} \d{{4}}",
)
_IDS = (r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", "0x[0-9a-fA-F]{4,}", r"(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{6,64}")
_LABELS = r"\b(?:p?pids?|pgid|(?:chunk|session|process|thread)[ _-]?id)\W{1,4}"  # of ids that are new in each run
_PATH_END = r"[^\s'\"`:,;)\]]+"
_NOISE = {  # what differs between two runs of the same commands, by the mark that stands for it
    "<path>": re.compile(rf"(?:/private)?(?:/var/folders|/var/tmp|/tmp)/{_PATH_END}"),
    r"\1<id>": re.compile(rf"(?i)({_LABELS})(?:[0-9a-f]{{6,}}|\d+(?:, \d+)*)\b"),
    "<id>": re.compile(rf"\b(?:{'|'.join(_IDS)})\b"),
    "<date>": re.compile(rf"\b(?:{'|'.join(_DATES)})\b"),
    "<time>": re.compile(rf"(?<![\w:.])(?=\d+:\d+:\d\d){_CLOCK}"),
    "<seconds>": re.compile(
        r"(?<![\w.])\d+(?:\.\d+)? ?(?:ns|us|µs|ms|s|secs?|seconds?|minutes?)\b|(?:(?<=_ms: )|(?<=_ms\": ))\d+"
    ),
}


def request_key(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Return the default state key of a request as JSON: its new messages, and a digest of system message and tools.

    The new messages are those since the last completion, or all, without ids of calls. If they have at most
    `MAX_SHORT` characters, as in many states, the key also has the model's calls, or else its text, that they answer.
    A result that has its call's id does not name the tool: which one was called is the action that led to the state.
    """
    system, news = _parts(messages)
    asked = [{"asked": _digest_of(system, tools)}] if system or tools else []
    known = [without_ids({n: part for n, part in m.items() if n != "name" or "tool_call_id" not in m}) for m in news]
    return json.dumps([*known, *asked], ensure_ascii=False, sort_keys=True)


def workspace_key(
    files: str, messages: Sequence[Message], tools: Any, folder: str, temporary: str = "", since: int | None = None
) -> str:
    """Return the state key of a request of an agent that works on files: files, new messages, system message, tools.

    `files` is a digest of those in `folder`; `temporary` is a folder of this episode alone; `since` is the number of
    messages of its first request with these files (`None`: this one). Short messages are combined with what they
    answer, as in `request_key`, unless the files have changed. Texts are `without_noise`.
    """
    system, news = _parts(_marked(list(messages), folder, temporary), len(messages) if since is None else since)
    key = {"files": files, "news": as_text(news), "asked": _digest_of(system, tools, folder, temporary)}
    return json.dumps(key, ensure_ascii=False)


def _parts(messages: Sequence[Message], since: int = 0) -> tuple[list[Message], list[Message]]:
    """Return the first system messages, and the new messages; after `since`, short ones with what they answer."""
    system = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    news = since_last_completion(messages)
    answered = messages[len(messages) - len(news) - 1] if 0 < len(news) < len(messages) else None
    if answered is None:
        return system, list(messages[len(system) :])
    is_short = sum(len(message["content"]) for message in news) <= MAX_SHORT
    if is_short and len(messages) > since and not pictures_of(news):
        news = [{**answered, "content": ""} if answered.get("tool_calls") else answered, *news]
    return system, news


def is_workspace_key(key: str) -> bool:
    """Return whether a state key has files in it (`workspace_key`)."""
    return key.startswith('{"files": ')


def normalised_key(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Return the default state key of a request without details that never recur (`without_noise`)."""
    return request_key(_marked(list(messages)), _marked(list(tools or ())))


def _marked(value: Any, folder: str = "", temporary: str = "") -> Any:
    """Return JSON data with marks in its texts, see `without_noise`."""
    if isinstance(value, str):
        return value if isinstance(value, Picture) else without_noise(value, folder, temporary)
    if isinstance(value, Mapping):
        return {name: _marked(part, folder, temporary) for name, part in value.items()}
    return [_marked(part, folder, temporary) for part in value] if isinstance(value, list) else value


def without_noise(text: str, folder: str = "", temporary: str = "") -> str:
    """Return a text with marks for times, dates, durations, ids, and paths (also in `temporary`); `folder` is "."."""
    text = text.replace(folder, ".") if folder else text
    text = re.sub(f"{re.escape(temporary)}{_PATH_END}", "<path>", text) if temporary else text
    for mark, pattern in _NOISE.items():
        text = pattern.sub(mark, text)
    return text


def _digest_of(system: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *folders: str) -> str:
    """Return a digest that consists of letters, since keys may be compared without their numbers."""
    state = hashlib.blake2b(canonical([message["content"] for message in system]), digest_size=8)
    state.update(_canonical_tools(to_json(list(tools or ())), folders))
    return "".join(chr(ord("a") + int(digit, 16)) for digit in state.hexdigest())


@functools.lru_cache(16)
def _canonical_tools(tools: str, folders: tuple[str, ...]) -> bytes:
    """Return tools, in one order and with marks, as bytes for a digest. Most requests have those of another."""
    read = json.loads(tools)
    return b"".join(sorted(map(canonical, _marked(read, *folders) if folders else read)))


def state_key_text(key: Any) -> str:
    """Return a function's key as text. `None` is refused: it would merge all states that the function ignores."""
    require(key is not None, "state_key", None, "the function returned it: return a text or JSON data of the state")
    return key if isinstance(key, str) else to_json(key, sort_keys=True)

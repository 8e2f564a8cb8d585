"""State keys of chat requests: which requests of a task belong to the same state."""

from __future__ import annotations

import hashlib
import itertools
import json
import marshal
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..utils.errors import G2POError
from ..utils.images import Picture
from ..utils.json import to_json
from .conversation import Message, as_text, canonical, since_last_completion, without_ids

_UNCHANGED = re.compile(r"\W*(nothing (happens|happened|changes|changed)|no (change|effect))\W*", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+")
_LONGEST_SIGN = 4  # characters without a word, "[]"; longer ones may be drawings
# A text of these words alone, such as a tool's result, says little.
_FILLERS = frozenset(
    "0 a ack acknowledged an and any bash been chunk code command completed content continue count data did done "
    "empty error errors executed execution exit exited false finished from has id is it last logs message nil no "
    "none not noted null observation of ok okay or original output process produce ran response result results "
    "return returncode returned seconds shell snippet status stderr stdout succeeded success successful "
    "successfully sure system thank thanks the time token tool true undefined value void wall was with without yes "
    "you your".split()
)

_TOOLS: dict[bytes, bytes] = {}  # tools as a digest reads them, of the last lists
_MOST_TOOLS = 16

_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_CLOCK = r"\d{1,2}:\d{2}:\d{2}(?:[.,]\d+)?(?:Z|[+-]\d{2}:?\d{2})?"
_DATES = (
    rf"\d{{4}}[-/]\d{{2}}[-/]\d{{2}}(?:[T ]{_CLOCK})?",
    rf"(?:{_DAY},? )?{_MONTH} +\d{{1,2}}(?: {_CLOCK})?(?: [A-Z]{{3,5}})?(?:,? \d{{4}})?",
    rf"{_DAY},? \d{{1,2}} {_MONTH} \d{{4}}",
)
_IDS = (r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", "0x[0-9a-fA-F]{4,}", r"(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{6,64}")
_PATH_END = r"[^\s'\"`:,;)\]]+"
# What differs between two runs of the same commands, by the mark that stands for it.
_NOISE = {
    "<path>": re.compile(rf"(?:/private)?(?:/var/folders|/var/tmp|/tmp)/{_PATH_END}"),
    "<id>": re.compile(rf"\b(?:{'|'.join(_IDS)})\b"),
    "<date>": re.compile(rf"\b(?:{'|'.join(_DATES)})\b"),
    "<time>": re.compile(rf"(?<![\w:.]){_CLOCK}"),
    "<seconds>": re.compile(
        r"(?<![\w.])\d+(?:\.\d+)? ?(?:ns|us|µs|ms|s|secs?|seconds?|minutes?)\b|(?:(?<=_ms: )|(?<=_ms\": ))\d+"
    ),
}


def request_key(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Return the default state key of a request as JSON: its new messages, and a digest of system message and tools.

    The new messages are those since the last completion, without ids of calls; if there are none, the whole
    conversation. Short messages (`says_little`) are the same in many states: the key then also contains the model's
    calls, or else its text, that they answer, and the messages before these. After "Nothing happens", the state is the
    previous one.

    A result that names its call by an id does not name the tool: which tool was called is the action that led to the
    state.
    """
    system = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    asked = [{"asked": _digest_of(system, tools)}] if system or tools else []
    if not since_last_completion(messages):
        return "\n".join([as_text(messages), *map(json.dumps, asked)])
    known = _known(messages, len(system))
    said = [without_ids({n: part for n, part in m.items() if n != "name" or "tool_call_id" not in m}) for m in known]
    return json.dumps([*said, *asked], ensure_ascii=False, sort_keys=True)


def _known(messages: Sequence[Message], begins: int, until: int = 0) -> list[Message]:
    """Return the new messages, preceded by those they answer if they are short.

    At most, it goes back to the new messages at the end of the first `until`. The task begins after `begins` messages.
    """
    known: list[Message] = []
    end = len(messages)
    while True:
        news = since_last_completion(messages[:end])
        begin = end - len(news)
        # An image says something; its hash is a word.
        shown = [[message["content"], *message.get("images", ())] for message in news if message["role"] != "system"]
        text = "\n".join(part for parts in shown for part in parts)
        unchanged = begin > 0 and end > until and says_unchanged(text)
        if not unchanged:
            known = [*(news if begin else news[begins:]), *known]
        if not begin or end <= until or not (unchanged or says_little(text)):
            return known
        end = begin - 1
        if not unchanged:
            answered = messages[end]
            known = [{**answered, "content": ""} if answered.get("tool_calls") else answered, *known]


def workspace_key(
    files: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    folder: str,
    temporary: str = "",
    since: int | None = None,
) -> str:
    """Return the state key of a request of an agent that works on files: files, new messages, system message, tools.

    Short messages are combined with what they answer, as in `request_key`, back to the request at which the files
    have changed.

    In texts, times, ids and paths of temporary folders are replaced by marks (`without_noise`): they never recur.

    Args:
        files: digest of the files.
        messages: messages of the request.
        tools: tools of the request.
        folder: path of the files.
        temporary: path of a folder that only this episode uses.
        since: number of messages of the episode's first request with these files. `None`: this one.
    """
    messages = _marked(list(messages), folder, temporary)
    system = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    until = len(messages) if since is None else since
    is_whole = not since_last_completion(messages)
    news = messages[len(system) :] if is_whole else _known(messages, len(system), until)
    asked = _digest_of(system, tools, folder, temporary)
    key = {"files": files, "news": as_text(news), "asked": asked}
    return json.dumps(key, ensure_ascii=False)


def is_workspace_key(key: str) -> bool:
    """Return whether a state key has files in it (`workspace_key`)."""
    return key.startswith('{"files": ')


def normalised_key(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Return the default state key of a request without details that never recur (`without_noise`).

    To use it for agents and logs, pass `g2po_trl.prompts.state_keys:normalised_key`.
    """
    return request_key(_marked(list(messages)), _marked(list(tools or ())))


def _marked(value: Any, folder: str = "", temporary: str = "") -> Any:
    """Return JSON data with marks in its texts, see `without_noise`."""
    if isinstance(value, Picture):
        return value
    if isinstance(value, str):
        return without_noise(value, folder, temporary)
    if isinstance(value, Mapping):
        return {name: _marked(part, folder, temporary) for name, part in value.items()}
    return [_marked(part, folder, temporary) for part in value] if isinstance(value, list) else value


def without_noise(text: str, folder: str = "", temporary: str = "") -> str:
    """Return a text with marks in place of times, dates, durations, ids, and temporary paths.

    `folder` becomes ".", and a path in the folder `temporary` is a temporary one.
    """
    text = text.replace(folder, ".") if folder else text
    text = re.sub(f"{re.escape(temporary)}{_PATH_END}", "<path>", text) if temporary else text
    for mark, pattern in _NOISE.items():
        text = pattern.sub(mark, text)
    return text


def _digest_of(system: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *folders: str) -> str:
    """Return a digest that consists of letters, since keys may be compared without their numbers.

    `folders`: the tools have marks, see `without_noise`.
    """
    state = hashlib.blake2b(canonical([message["content"] for message in system]), digest_size=8)
    state.update(_canonical_tools(tools or (), folders))
    return "".join(chr(ord("a") + int(digit, 16)) for digit in state.hexdigest())


def _canonical_tools(tools: Sequence[Mapping[str, Any]], folders: tuple[str, ...]) -> bytes:
    """Return tools, in one order, as bytes for a digest. They are long, and most requests have those of another."""
    try:
        known = marshal.dumps((list(tools), folders), 2)
    except ValueError:  # it writes plain data alone
        known = None
    if (text := _TOOLS.get(known)) is None:
        text = b"".join(sorted(map(canonical, _marked(list(tools), *folders) if folders else tools)))
        if known is not None:
            if len(_TOOLS) >= _MOST_TOOLS:
                del _TOOLS[next(iter(_TOOLS))]
            _TOOLS[known] = text
    return text


def state_key_text(key: Any) -> str:
    """Return a function's key as text. `None` is refused: it would merge all states that the function ignores."""
    if key is None:
        raise G2POError("state_key returned None; return a text or JSON data that is equal for equal states")
    return key if isinstance(key, str) else to_json(key, sort_keys=True)


def says_little(text: str) -> bool:
    """Return whether a text says little about a state by itself, as "", "OK", "null", "[]" and `{"success": true}`."""
    words = set(_WORD.findall(text.lower()))
    if not words:
        return len(text.strip()) <= _LONGEST_SIGN
    return words <= _FILLERS and words != {"0"}


def says_unchanged(text: str) -> bool:
    """Return whether a text says that nothing has changed, as "Nothing happens."."""
    return _UNCHANGED.fullmatch(text) is not None

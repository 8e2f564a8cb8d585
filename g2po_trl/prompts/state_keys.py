"""State keys of chat requests: which requests of a task are asked in the same state."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..utils.errors import G2POError
from ..utils.json import to_json
from .conversation import Message, as_text, canonical, since_last_completion, without_ids

_UNCHANGED = re.compile(r"\W*(nothing (happens|happened|changes|changed)|no (change|effect))\W*", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+")
_LONGEST_SIGN = 4  # characters without a word, "[]"; longer ones may be drawings
# A text of these words alone, such as a tool's result, says little.
_FILLERS = frozenset(
    "0 a ack acknowledged an and any been code command completed content continue data did done empty error errors "
    "executed execution exit false finished from has is it last logs message nil no none not noted null observation "
    "of ok okay or output produce ran response result results return returncode returned snippet status stderr stdout "
    "succeeded success successful successfully sure thank thanks the tool true undefined value void was with without "
    "yes you your".split()
)

_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_CLOCK = r"\d{1,2}:\d{2}:\d{2}(?:[.,]\d+)?(?:Z|[+-]\d{2}:?\d{2})?"
_DATES = (
    rf"\d{{4}}[-/]\d{{2}}[-/]\d{{2}}(?:[T ]{_CLOCK})?",
    rf"(?:{_DAY},? )?{_MONTH} +\d{{1,2}}(?: {_CLOCK})?(?: [A-Z]{{3,5}})?(?:,? \d{{4}})?",
    rf"{_DAY},? \d{{1,2}} {_MONTH} \d{{4}}",
)
_IDS = (r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", "0x[0-9a-fA-F]{4,}", r"(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{6,64}")
# What differs between two runs of the same commands, by the mark that stands for it.
_NOISE = {
    "<path>": re.compile(r"(?:/private)?(?:/var/folders|/var/tmp|/tmp)/[^\s'\"`:,;)\]]+"),
    "<id>": re.compile(rf"\b(?:{'|'.join(_IDS)})\b"),
    "<date>": re.compile(rf"\b(?:{'|'.join(_DATES)})\b"),
    "<time>": re.compile(rf"(?<![\w:.]){_CLOCK}"),
    "<seconds>": re.compile(r"(?<![\w.])\d+(?:\.\d+)? ?(?:ns|us|µs|ms|s|secs?|seconds?|minutes?)\b"),
}


def request_key(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Return the default state key of a request as JSON: the news, and who is asked.

    The news are the messages since the last completion, without ids of calls; if there are none, the whole
    conversation. News that say little (`says_little`) are the same in many states: what they answer stands before
    them, the model's calls or else its text, and before it the news that it answered in turn. After "Nothing happens"
    the state is the one before. Who is asked is a digest of the system message and the tools, if there are any.

    A result that names its call by an id does not name the tool: which tool was called is the action that led to the
    state.
    """
    system = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    asked = [{"asked": _digest_of(system, tools)}] if system or tools else []
    if not since_last_completion(messages):
        return "\n".join([as_text(messages), *map(json.dumps, asked)])
    key: list[Message] = []
    end = len(messages)
    while True:
        news = since_last_completion(messages[:end])
        begin = end - len(news)
        text = "\n".join(message["content"] for message in news if message["role"] != "system")
        unchanged = begin > 0 and says_unchanged(text)
        if not unchanged:
            key = [*(news if begin else news[len(system) :]), *key]
        if not begin or not (unchanged or says_little(text)):
            break
        end = begin - 1
        if not unchanged:
            answered = messages[end]
            key = [{**answered, "content": ""} if answered.get("tool_calls") else answered, *key]
    said = [without_ids({n: part for n, part in m.items() if n != "name" or "tool_call_id" not in m}) for m in key]
    return json.dumps([*said, *asked], ensure_ascii=False, sort_keys=True)


def workspace_key(
    files: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, folder: str
) -> str:
    """Return the state key of a request of an agent that works on files: these, the news, and who is asked.

    In texts, times, ids and paths of temporary folders are replaced by marks (`without_noise`): they never recur.

    Args:
        files: digest of the files.
        messages: of the request.
        tools: of the request.
        folder: path of the files.
    """
    system = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    news = since_last_completion(messages) or messages
    if len(news) == len(messages):
        news = news[len(system) :]
    marked = [{**message, "content": without_noise(message["content"], folder)} for message in system]
    named = json.loads(without_noise(json.dumps(list(tools or ())), folder))
    key = {"files": files, "news": without_noise(as_text(news), folder), "asked": _digest_of(marked, named)}
    return json.dumps(key, ensure_ascii=False)


def without_noise(text: str, folder: str = "") -> str:
    """Return a text with marks in place of times, dates, durations, ids, and temporary paths; `folder` becomes "."."""
    text = text.replace(folder, ".") if folder else text
    for mark, pattern in _NOISE.items():
        text = pattern.sub(mark, text)
    return text


def _digest_of(system: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return a digest of letters alone, since keys may be compared without their numbers."""
    state = hashlib.blake2b(canonical([message["content"] for message in system]), digest_size=8)
    for tool in sorted(map(canonical, tools or ())):
        state.update(tool)
    return "".join(chr(ord("a") + int(digit, 16)) for digit in state.hexdigest())


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

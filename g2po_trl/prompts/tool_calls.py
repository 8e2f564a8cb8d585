"""Tool calls: how a model is shown tools, and how its calls are read: by its chat template, or in words."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..utils.json import to_json
from .conversation import Message, plain
from .template import ParsedCompletion, PromptTemplate
from .tokenization import get_chat_template, get_tokenizer

Tools = list[dict[str, Any]] | None
_ODD_TEXT = '\n  it\'s "a\\b"\n'  # an argument that some forms do not write as they read it
# What most of Gemma 4's templates print for null outside of texts, and no reader of JSON takes.
_NONE = re.compile(r'(<\|"\|>.*?<\|"\|>|"(?:\\.|[^"\\])*+")|\bNone\b(?!\s*:)', re.DOTALL)
# Its end is outside of JSON's strings, whose texts may have such a tag; without whole strings, the first one.
CALL = re.compile(r'<tool_call>((?:"(?:[^"\\]|\\.)*+"|[^"<]++|<)*?|.*?)</tool_call>', re.DOTALL)
OPEN_CALL = "<tool_call>"
HOW_TO_CALL = (
    "You can call these functions:\n{tools}\n\n"
    'Call one by writing <tool_call>{{"name": …, "arguments": {{…}}}}</tool_call>. A reply without a call ends the '
    "task."
)


def read_calls(action: str) -> list[tuple[str, dict[str, Any]]]:
    """Return name and arguments of each call in an action. Raises `ValueError` if there is none, or an invalid one."""
    if OPEN_CALL in CALL.sub("", action) or not (texts := CALL.findall(action)):
        raise ValueError("no complete <tool_call>…</tool_call>")
    with suppress(RecursionError):
        calls = [check_call(json.loads(text, parse_constant=check_call)) for text in texts]
        return [(call["name"], call["arguments"]) for call in calls]
    raise ValueError("a call is nested too deeply")


def check_call(call: Any) -> dict[str, Any]:
    """Return a call's name and arguments. Raises `ValueError` for others: what is not read would be dropped."""
    is_call = isinstance(call, dict) and isinstance(call.get("name"), str) and not set(call) - {"name", "arguments"}
    if not is_call or not isinstance(call.get("arguments"), (dict, type(None))):
        raise ValueError(f"a call is a name and an object of arguments, and not {str(call):.200}")
    return {"name": call["name"], "arguments": call.get("arguments") or {}}


def split_thought(completion: str, prompt_end: str = "") -> tuple[str, str | None]:
    """Return a completion's thought, and the answer after it, `None` if the thought is not finished.

    A thought that the prompt or the completion opens ends where its tags are balanced. Without one that is opened, it
    ends at the last `</think>` outside of calls, whose arguments may have such texts.
    """
    begun = completion.lstrip().startswith("<think>")
    depth = int(prompt_end.rstrip().endswith("<think>") and not begun)
    if not (depth or begun):
        calls = [call.span() for call in CALL.finditer(completion)]
        ends = re.finditer("</think>", completion)
        outside = [end for end in ends if not any(first <= end.start() < last for first, last in calls)]
        thought, answer = outside[-1].span() if outside else (0, 0)
        return completion[:thought], completion[answer:]
    for tag in re.finditer("</?think>", completion):
        depth += -1 if tag[0].startswith("</") else 1
        if depth == 0:
            return completion[: tag.start()].lstrip().removeprefix("<think>"), completion[tag.end() :]
    return completion.lstrip().removeprefix("<think>"), None


def parse_tool_calls(completion: str, prompt_end: str = "") -> ParsedCompletion:
    """Return the tool calls after a completion's thought as the action, or the whole completion if it makes no call.

    A call that is not valid JSON, and a thought that is not finished, make the completion invalid.
    """
    _, answer = split_thought(completion, prompt_end)
    if answer is None:
        return ParsedCompletion(CALL.sub("", completion).replace(OPEN_CALL, "").strip(), False)
    answer, valid = answer.strip(), False
    calls = "".join(f"{OPEN_CALL}{call.strip()}</tool_call>" for call in CALL.findall(answer))
    with suppress(ValueError):
        valid = bool(read_calls(answer) if OPEN_CALL in answer else answer)
    return ParsedCompletion(calls or answer, valid)


def call_in(template: PromptTemplate, action: str, valid: bool) -> str | None:
    """Return how a completion used the tools that its prompt describes in words, see `Step.call`."""
    if template.parse_completion is not parse_tool_calls:
        return None
    return "none" if OPEN_CALL not in action else "readable" if valid else "unreadable"


TOOL_PROMPT = PromptTemplate(
    first="{task}\n\n{observation}",
    later=(
        "{task}\n\nReplies so far: {steps_taken}. The last {history_length}:\n{history}\n\n"
        "The answer to your last call:\n{observation}"
    ),
    history_entry="{observation}\nYou: {action}",
    parse_completion=parse_tool_calls,
)


def make_tool_format(processing_class) -> ProseTools:
    """Return the native format if the chat template renders calls and their results, and its calls can be read.

    They are read by the tokenizer's response template, by TRL's for this chat template, or as JSON in `<tool_call>`.
    """
    from ..utils.trl_compat import add_response_schema, supports_tool_calling  # with torch, which is slow to import

    own = copy.copy(get_tokenizer(processing_class))  # the user's stays as it is
    own.chat_template, is_supported = get_chat_template(processing_class), False
    with suppress(Exception):  # templates raise errors of any class
        is_supported = supports_tool_calling(processing_class)
    if is_supported and not own.response_template:
        with suppress(ValueError):  # not among TRL's templates
            add_response_schema(own)
    native = NativeTools(own) if is_supported else None
    can_be_read = native and (own.response_template or native.comes_back("probe", ("a", True)))
    return native if can_be_read else ProseTools(own)


class ProseTools:
    """Tools described in the system message; calls and results as text, `<tool_call>{"name": …, …}</tool_call>`.

    `own` is the model's tokenizer, which tells whether the prompt opens a thought.
    """

    native = False

    def __init__(self, own=None):
        self.own = own

    def render(self, messages: Sequence[Message], tools: Tools) -> tuple[list[Message], Tools]:
        """Return the messages and tools as the chat template takes them."""
        rendered = [_as_prose(message) for message in messages]
        if tools:
            instructions = HOW_TO_CALL.format(tools="\n".join(to_json(tool.get("function", tool)) for tool in tools))
            system = [] if rendered[0]["role"] != "system" else [rendered.pop(0)["content"]]
            content = "\n\n".join(filter(None, [*system, instructions]))
            rendered.insert(0, {"role": "system", "content": content})
        return rendered, None

    def parse(self, text: str, ids: Sequence[int], prompt_ids: Sequence[int], tools: Tools) -> tuple[Message, bool]:
        """Return the assistant's message in a completion, and whether its tool calls could be read.

        `text` and `ids` are the part of the completion that is shown; `tools` are the request's.
        """
        thought, answer = split_thought(text, self._end_of(prompt_ids))
        answer = text if answer is None and not tools else answer  # such an agent may read the tags itself
        reasoning = {} if answer == text else {"reasoning_content": thought.removeprefix("<think>").strip()}
        message: Message = {"role": "assistant", "content": (answer or "").strip(), **reasoning}
        if not tools or OPEN_CALL not in message["content"]:
            return message, not tools or answer is not None
        try:
            functions = [{"name": name, "arguments": given} for name, given in read_calls(message["content"])]
            calls = plain([{"type": "function", "function": function} for function in functions], "a call")
        except ValueError:
            return message, False
        return message | {"content": CALL.sub("", message["content"]).strip(), "tool_calls": calls}, True

    def _end_of(self, prompt_ids: Sequence[int]) -> str:
        return "" if self.own is None else self.own.decode(prompt_ids[-8:])


class NativeTools(ProseTools):
    """Tools that the chat template renders; completions are read by TRL's `parse_response`, or without it as prose.

    Tools are described in prose if a call of them, such as `get-weather`, does not come back as it was written.
    """

    native = True

    def __init__(self, own):
        super().__init__(own)
        read_by = copy.deepcopy(own.response_template)
        field = read_by.get("fields", {}).get("tool_calls", {}) if isinstance(read_by, dict) else {}
        values = field.get("content_args", {})
        if values.get("value_parser") == {"name": "text"}:  # it strips the spaces before a line of code
            pattern = values["tag_pattern"].replace(r"\s*(?P<value>.*?)\s*", r"\n?(?P<value>.*?)\n?")
            field["content_args"], own.response_template = {"tag_pattern": pattern}, read_by
        self._json, self._reader = (values, copy.copy(own)) if '<|"|>' in str(values) else (None, own)
        if self._json:
            field["content"], self._reader.response_template = "text", read_by
        patterns = [field.get(of) or field.get(f"{of}_pattern") or "" for of in ("open", "close")]
        literals = [re.match(r"(?:\(\?:)?(<(?:[^\\()\[|]|\\\W)*)", pattern) for pattern in patterns]
        self._tags = [re.sub(r"\\(\W)", r"\1", literal[1]) for literal in literals if literal]  # of calls
        parts = [*patterns, field["content_args"]["tag_pattern"]] if field.get("content") == "xml-inline" else []
        self._parts = [re.compile(part, re.DOTALL) for part in parts]  # opening, closing, argument
        self.comes_back = functools.lru_cache(1000)(self._comes_back)

    def render(self, messages: Sequence[Message], tools: Tools) -> tuple[list[Message], Tools]:
        return super().render(messages, tools) if self._needs_prose(tools) else (list(messages), tools or None)

    def parse(self, text: str, ids: Sequence[int], prompt_ids: Sequence[int], tools: Tools) -> tuple[Message, bool]:
        if not self._needs_prose(tools):
            return self._read(text, ids, prompt_ids, tools)
        message, valid = super().parse(text, ids, prompt_ids, tools)
        return message, valid and not any(tag in message["content"] for tag in self._tags)  # of a call of its own form

    def _read(self, text: str, ids: Sequence[int], prompt_ids: Sequence[int], tools: Tools) -> tuple[Message, bool]:
        from ..utils.trl_compat import parse_content, parse_response

        if not self.own.response_template or not ids:
            return super().parse(text, ids, prompt_ids, tools)
        written = self.own.decode(ids)
        shown = split_thought(written, self._end_of(prompt_ids))[1]
        try:
            if "<|channel|>" in self.own.chat_template:
                read = read_harmony(written)
            else:  # types change what JSON says, and are needed where all values are texts
                types = tools if self._parts else None
                read = parse_response(self._reader, list(ids), prefix=list(prompt_ids), tools=types)
            calls = list(read.get("tool_calls") or ())
            for function in [call["function"] for call in calls if self._json]:
                body = _NONE.sub(lambda found: found[1] or "null", function["arguments"])
                function["arguments"] = parse_content(body, "json", self._json)
            calls = plain(calls, "a call")
            if tools and shown is None:
                raise ValueError("the thought is not finished")
            calls = [call | {"function": check_call(call["function"])} for call in calls]
        except (ValueError, RecursionError):
            return self._in_json(text, ids, prompt_ids, tools)
        if calls and not tools:  # the agent asked for a text, and reads nothing else
            return super().parse(text, ids, prompt_ids, tools)
        message: Message = {"role": "assistant", "content": read.get("content") or ""}
        if thought := (read.get("reasoning_content") or "").removesuffix(self.own.eos_token or ""):
            message["reasoning_content"] = thought
        around = message["content"] if calls else shown  # TRL leaves special tokens out of a call that is not read
        names = "|".join(re.escape(str(tool.get("function", tool).get("name"))) for tool in tools or ())
        tags = self._tags or re.findall(rf'"name":\s*"(?:{names})"', around or "")  # Llama's calls have no tags
        if tools and (not self._are_whole(calls, shown) or any(tag in around for tag in tags)):
            return self._in_json(text, ids, prompt_ids, tools)
        return message | ({"tool_calls": calls} if calls else {}), True

    def _in_json(self, text: str, ids: Sequence[int], prompt_ids: Sequence[int], tools: Tools) -> tuple[Message, bool]:
        """Return calls that TRL does not read, whose arguments have a closing tag; or the text, invalid with tools."""
        message, valid = super().parse(text, ids, prompt_ids, tools)
        is_call = valid and "tool_calls" in message
        return (message, True) if is_call else ({"role": "assistant", "content": text.strip()}, not tools)

    def _are_whole(self, calls: Sequence, shown: str) -> bool:
        """Return whether these are all calls and their bodies are arguments; TRL skips what it cannot read of them."""
        if not self._parts:
            return True
        opening, closing, argument = self._parts
        begun = list(opening.finditer(shown))
        ended = [closing.search(shown, one.end()) for one in begun]
        left = [argument.sub("", shown[one.end() : end.start()]) for one, end in zip(begun, ended) if end]
        are_read = [re.fullmatch(r"[\s,]*(</function>)?\s*", body) for body in left]
        return all(are_read) and len(calls) == len(begun) == len(left)

    def _needs_prose(self, tools: Tools) -> bool:
        for function in (tool.get("function", tool) for tool in tools or ()):
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            properties = properties if isinstance(properties, dict) else {}
            arguments = [(str(name), _has_type(one)) for name, one in properties.items()]
            if not self.comes_back(str(function.get("name")), *arguments):
                return True
        return False

    def _comes_back(self, name: str, *arguments: tuple[str, bool]) -> bool:
        """Return whether a call is read as the chat template writes it; of each argument, whether it has a type."""
        properties = {argument: {"type": "string"} if has_type else {} for argument, has_type in arguments}
        parameters = {"type": "object", "properties": {"null": {"type": ["string", "null"]}} | properties}
        tools = [{"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}]
        given = {argument: _ODD_TEXT if has_type else 7 for argument, has_type in arguments}
        call = {"type": "function", "function": {"name": name, "arguments": {"null": None} | given}}
        asked = [{"role": "user", "content": "x"}]
        with suppress(Exception):  # templates raise errors of any class
            text = functools.partial(self.own.apply_chat_template, tools=tools, tokenize=False)
            whole = text([*asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
            starts = (text(asked, add_generation_prompt=True), text(asked), "")
            start = next(one for one in starts if whole.startswith(one))
            parts = self.own([whole[len(start) :], start], add_special_tokens=False)["input_ids"]
            return self._read(whole[len(start) :], *parts, tools)[0].get("tool_calls") == [call]
        return False


def _has_type(schema: Any) -> bool:
    """Return whether an argument has one type, or `null`: in some forms, it alone tells `7` from a text."""
    parts = (schema.get("anyOf") or schema.get("oneOf") or [schema]) if isinstance(schema, dict) else []
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    kinds = [kind for one in kinds for kind in (one if isinstance(one, list) else [one]) if kind != "null"]
    return len(kinds) == 1 and kinds[0] is not None


def read_harmony(written: str) -> Message:
    """Return the message in a completion of gpt-oss, whose headers name channel and recipient in any order."""
    message: Message = {"content": "", "tool_calls": []}
    for part in re.split(r"<\|start\|>assistant", written):
        header, _, text = part.rpartition("<|message|>")
        text = re.split(r"<\|(?:call|end|return)\|>", text)[0]
        if called := re.search(r"to=functions\.([^\s<]+)", header):
            function = {"name": called[1], "arguments": json.loads(text)}
            message["tool_calls"].append({"type": "function", "function": function})
        else:
            message["reasoning_content" if "analysis" in header else "content"] = text
    if not (message["content"] or message["tool_calls"]) and "reasoning_content" in message:
        raise ValueError("the thought is not finished")
    return message


def _as_prose(message: Message) -> Message:
    images = {"images": message["images"]} if "images" in message else {}
    if message["role"] == "tool":
        return {"role": "user", "content": message["content"], **images}
    calls = [f"{OPEN_CALL}{to_json(call['function'])}</tool_call>" for call in message.get("tool_calls", ())]
    return {"role": message["role"], "content": "\n".join(filter(None, [message["content"], *calls])), **images}

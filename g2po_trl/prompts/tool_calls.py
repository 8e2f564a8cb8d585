"""Tool calls in text, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, and the prompt that asks for them."""

from __future__ import annotations

import json
import re
from typing import Any

from .template import ParsedCompletion, PromptTemplate

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
    try:
        calls = [check_call(json.loads(text, parse_constant=check_call)) for text in texts]
    except RecursionError as error:
        raise ValueError("a call is nested too deeply") from error
    return [(call["name"], call["arguments"]) for call in calls]


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
    completion = answer.strip()
    if OPEN_CALL not in completion:
        return ParsedCompletion(completion, bool(completion))
    calls = "".join(f"{OPEN_CALL}{call.strip()}</tool_call>" for call in CALL.findall(completion))
    try:
        read_calls(completion)
    except ValueError:
        return ParsedCompletion(calls or completion, False)
    return ParsedCompletion(calls, True)


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

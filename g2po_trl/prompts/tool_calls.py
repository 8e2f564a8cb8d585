"""Prompt template and parser of tool calls, for environments in TRL's style."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .template import ParsedCompletion, PromptTemplate

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
OPEN_CALL = "<tool_call>"
HOW_TO_CALL = (
    "You can call these functions:\n{tools}\n\n"
    'Call one by writing <tool_call>{{"name": …, "arguments": {{…}}}}</tool_call>. A reply without a call ends the '
    "task."
)


def read_calls(action: str) -> list[tuple[str, dict[str, Any]]]:
    """Return name and arguments of each call in an action. Raises `ValueError` if there is none, or an invalid one."""
    calls = []
    for text in CALL.findall(action):
        try:
            call = json.loads(text)
        except RecursionError as error:
            raise ValueError("a call is nested too deeply") from error
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise ValueError(f"a call has no name: {text.strip()}")
        arguments = call.get("arguments") or {}
        if not isinstance(arguments, Mapping):
            raise ValueError(f"arguments are not an object: {text.strip()}")
        calls.append((call["name"], dict(arguments)))
    if not calls:
        raise ValueError("no complete <tool_call>…</tool_call>")
    return calls


def parse_tool_calls(completion: str, prompt_end: str = "") -> ParsedCompletion:
    """Return the tool calls of a completion as the action, or the whole completion if it makes no call.

    A call that is not valid JSON makes the completion invalid. Calls inside a finished thought are ignored.
    """
    completion = completion.rpartition("</think>")[2]
    if OPEN_CALL not in completion:
        return ParsedCompletion(completion.strip(), bool(completion.strip()))
    calls = "".join(f"{OPEN_CALL}{call.strip()}</tool_call>" for call in CALL.findall(completion))
    try:
        read_calls(calls)
    except ValueError:
        return ParsedCompletion(calls or completion.strip(), False)
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

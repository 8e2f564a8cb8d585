"""The prompt of environments whose action is the whole reply or the calls in it; and whose prompt is which."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

from ..environments.tools import CALL, OPEN_CALL, is_tool_environment, read_calls, unwrapped
from .prompting import DEFAULT_PROMPT, ParsedReply, PromptTemplate


def parse_tool_calls(reply: str, prompt_end: str = "") -> ParsedReply:
    """A reply's tool calls as the action; the whole reply when it makes none. Invalid: a call that is no JSON.

    A thought that was ended is left out: calls it quotes are not made.
    """
    reply = reply.rpartition("</think>")[2]
    if OPEN_CALL not in reply:
        return ParsedReply(reply.strip(), bool(reply.strip()))
    calls = "".join(f"{OPEN_CALL}{call.strip()}</tool_call>" for call in CALL.findall(reply))
    try:
        read_calls(calls)
    except ValueError:
        return ParsedReply(calls or reply.strip(), False)
    return ParsedReply(calls, True)


TOOL_PROMPT = PromptTemplate(
    first="{task}\n\n{observation}",
    later=(
        "{task}\n\nReplies so far: {steps_taken}. The last {history_length}:\n{history}\n\n"
        "The answer to your last call:\n{observation}"
    ),
    history_entry="{observation}\nYou: {action}",
    parse_reply=parse_tool_calls,
)


def prompt_of(environment_factory: Callable) -> PromptTemplate:
    """The template of an environment for which none was chosen: its class's `prompt_template`, or where it has none,
    `TOOL_PROMPT` for a class in TRL's style and `DEFAULT_PROMPT` for others. Of a plain function nothing is known.

    Raises:
        ValueError: when its `prompt_template` is no template.
    """
    made = unwrapped(environment_factory)
    own = getattr(made, "prompt_template", None) if isinstance(made, type) else None
    if own is None:
        return TOOL_PROMPT if is_tool_environment(environment_factory) else DEFAULT_PROMPT
    try:
        template = pkgutil.resolve_name(own) if isinstance(own, str) else own
    except (ImportError, AttributeError, ValueError):
        template = None
    if not isinstance(template, PromptTemplate):
        raise ValueError(
            f"prompt_template of {made.__name__} is {own!r}: make it a PromptTemplate, or module:NAME of one"
        )
    return template

"""The prompt of environments in TRL's style (`environments.tools`): replies call tools."""

from __future__ import annotations

from ..environments.tools import CALL, OPEN_CALL, read_calls
from .prompting import ParsedReply, PromptTemplate


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

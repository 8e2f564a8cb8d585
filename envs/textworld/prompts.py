"""Prompts of TextWorld."""

from __future__ import annotations

from g2po_trl.prompts.template import PromptTemplate

_ALWAYS = """You are playing a text game. {task}
First reason about the situation step by step, inside <think> </think> tags. Then pick one of the commands and write \
it, exactly as listed, inside <action> </action> tags.

"""

TEXTWORLD_PROMPT = PromptTemplate(
    first=_ALWAYS + "What you see now: {observation}\n\nCommands:\n{actions}",
    later=_ALWAYS
    + """You have given {steps_taken} command(s). The last {history_length}, and what you saw before each:
{history}

What you see now: {observation}

Commands:
{actions}""",
    history_entry="Saw: {observation}\nCommand: {action}",
    turn="What you see now: {observation}\n\nCommands:\n{actions}",
)

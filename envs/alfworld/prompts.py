"""Prompts of ALFWorld: one wording for language models of any size, and one with few words for tiny models.

Both have the paper's slots (task, steps taken, the last observations and actions, current step, observation,
admissible actions) and the same completion, `<think>…</think>` and then `<action>…</action>`; the compact one is for
models that know the completion's format from training. Completions are parsed as in the released code.
"""

from __future__ import annotations

import re

from g2po_trl.prompts.template import FALLBACK_CHARACTERS, ParsedCompletion, PromptTemplate


def parse_as_released(
    completion: str, prompt_end: str = "", fallback_characters: int = FALLBACK_CHARACTERS
) -> ParsedCompletion:
    """Parse `<think>…</think><action>…</action>` by the rule of the paper's released code.

    The action is in lower case, and reaches from the first `<action>` to the first `</action>`, even inside the
    thought; without one, the last `fallback_characters` are played. A completion is invalid if a tag is missing or if
    it contains CJK characters.
    """
    text = completion.lower()
    start, end = text.find("<action>"), text.find("</action>")
    found = start >= 0 and end >= 0
    action = text[start + len("<action>") : end] if found else text[-fallback_characters:]
    prompt = prompt_end.rstrip()
    opened, closed = "<think>" in completion or prompt.endswith("<think>"), "</think>" in completion
    thought = prompt.endswith("</think>") or (opened and closed)
    return ParsedCompletion(action.strip(), found and thought and not re.search("[一-鿿]", completion))


# What prompts have in common comes first: it passes through the model once.
_ALWAYS = """You are an agent in a house simulated in text (ALFRED). You solve household tasks by acting in it.
Decide on your next action. First reason about the situation step by step, inside <think> </think> tags. Then pick \
one of the admissible actions and write it, exactly as listed, inside <action> </action> tags.

"""

ALFWORLD_PROMPT = PromptTemplate(
    first=_ALWAYS
    + """What you see now: {observation}

Actions admissible now:
{actions}""",
    later=_ALWAYS
    + """Your task is to: {task}.

You have taken {steps_taken} step(s) so far. Your last {history_length} observation(s) and the actions you took then:
{history}

You are now at step {current_step}. What you see now: {observation}

Actions admissible now:
{actions}""",
    history_entry="Step {step}: you saw '{observation}' and you did '{action}'",
    turn="What you see now: {observation}\n\nActions admissible now:\n{actions}",
    parse_completion=parse_as_released,
    match_case=True,
)

ALFWORLD_COMPACT_PROMPT = PromptTemplate(
    first="Task: {task}\nSeen: {observation}\nActions:\n{actions}",
    later="Task: {task}\nDone:\n{history}\nSeen: {observation}\nActions:\n{actions}",
    history_entry="{observation} > {action}",
    turn="Seen: {observation}\nActions:\n{actions}",
    parse_completion=parse_as_released,
    match_case=True,
)

PROMPTS = {"full": ALFWORLD_PROMPT, "compact": ALFWORLD_COMPACT_PROMPT}

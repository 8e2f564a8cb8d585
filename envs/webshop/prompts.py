"""Prompts of WebShop: one wording for language models of any size, and one with few words for tiny models.

Completions are parsed as in the released code.
"""

from __future__ import annotations

from g2po_envs.alfworld.prompts import parse_as_released
from g2po_trl.prompts.template import ParsedCompletion, PromptTemplate


def parse_shopping(completion: str, prompt_end: str = "") -> ParsedCompletion:
    """Parse as `parse_as_released`, but play the last 20 characters of a completion without an action."""
    return parse_as_released(completion, prompt_end, fallback_characters=20)


# What prompts have in common comes first: it passes through the model once.
_ALWAYS = """You are a shopper in an online shop. Find and buy what you are asked for.
Decide on your next action. First reason about the situation step by step, inside <think> </think> tags. Then pick \
one of the available actions and write it inside <action> </action> tags; put words of your own between the brackets \
of search.

You are asked: {task}

"""

WEBSHOP_PROMPT = PromptTemplate(
    first=_ALWAYS
    + """The page you see: {observation}

Actions available now:
{actions}""",
    later=_ALWAYS
    + """You have taken {steps_taken} step(s) so far. Your last {history_length} page(s) and the actions you took then:
{history}

You are now at step {current_step}. The page you see: {observation}

Actions available now:
{actions}""",
    history_entry="Step {step}: you saw {observation} and you did '{action}'",
    parse_completion=parse_shopping,
    match_case=True,
)

# A page shows what can be clicked: no list of actions. What was chosen does not show on it: past actions are told.
WEBSHOP_COMPACT_PROMPT = PromptTemplate(
    first="Task: {task}\nSeen: {observation}",
    later="Task: {task}\nDone:\n{history}\nSeen: {observation}",
    history_entry="{action}",
    parse_completion=parse_shopping,
    match_case=True,
)

PROMPTS = {"full": WEBSHOP_PROMPT, "compact": WEBSHOP_COMPACT_PROMPT}

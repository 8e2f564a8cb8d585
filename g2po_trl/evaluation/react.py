"""ReAct: thoughts and actions in one conversation, in g2po-trl's own words."""

from __future__ import annotations

import re
from functools import partial

from ..prompts.template import ParsedCompletion, PromptTemplate
from .panel import Panel

OBSERVED = "\nObservation:"  # ends a completion: the environment answers, not the model
_ACTION = re.compile(r"(?ims)^\s*action\s*:\s*(?:```\w*\s*\n(?P<code>.*?)\n?```|(?P<line>[^\n]*))")
_INSTRUCTIONS = """{about}

Answer each observation with a thought and one action, in this form:
Thought: what you know by now, and what should be done next
Action: {form}
Then stop: the answer to the action is shown to you."""


def react_template(panel: Panel, lists_actions: bool) -> PromptTemplate:
    """Return the prompts of ReAct ([arXiv:2210.03629](https://arxiv.org/abs/2210.03629)), for conversations."""
    seen = "Observation: {observation}" + "\nActions you can take now:\n{actions}" * lists_actions
    parse = partial(parse_react, lower_case=panel.lower_case)
    system = _INSTRUCTIONS.format(about=panel.about, form=panel.action_form)
    return PromptTemplate("Your task: {task}\n\n" + seen, seen, turn=seen, system=system, parse_completion=parse)


def parse_react(completion: str, prompt_end: str = "", lower_case: bool = False) -> ParsedCompletion:
    """Return the text between the first "Action:" and the end of its line; code in a fence as a whole.

    Reasoning, up to the last `</think>`, is ignored.
    """
    answer = completion.rpartition("</think>")[2].partition(OBSERVED)[0].strip()
    found = _ACTION.search(answer)
    action = (found["code"] or found["line"] or "").strip() if found else answer.rpartition("\n")[2]
    return ParsedCompletion(action.lower() if lower_case else action, bool(found and action))

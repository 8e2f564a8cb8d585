"""What the model reads in Sokoban: one wording for language models of any size, and one of few words for tiny ones."""

from __future__ import annotations

from g2po_trl.prompts.template import PromptTemplate, last_line

_ALWAYS = """You are playing Sokoban. {task}
First reason about the moves step by step, inside <think> </think> tags. Then pick one of the moves and write it \
inside <action> </action> tags.

"""

SOKOBAN_PROMPT = PromptTemplate(
    first=_ALWAYS + "The level:\n{observation}\n\nMoves: {actions}",
    later=_ALWAYS
    + """Your last {history_length} move(s):
{history}

The level now, after {steps_taken} move(s):
{observation}

Moves: {actions}""",
    history_entry="{action}",
)

# The line of `positions` says what the grid does: no grid, no history. It comes last: before the answer.
SOKOBAN_COMPACT_PROMPT = PromptTemplate(
    first="{actions}\n{observation}", later="{actions}\n{observation}", show_observation=last_line
)

PROMPTS = {"full": SOKOBAN_PROMPT, "compact": SOKOBAN_COMPACT_PROMPT}

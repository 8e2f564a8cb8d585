"""Prompts of AppWorld, and the parser of the model's code."""

from __future__ import annotations

import re

from g2po_trl.prompts.template import ParsedCompletion, PromptTemplate, read_after_thought

_FENCE = re.compile(r"^\s*```(?:python)?\s*\n(.*?)\n?```\s*$", re.DOTALL)


def parse_think_code(completion: str, prompt_end: str = "") -> ParsedCompletion:
    """Parse `<think>…</think><code>…</code>`; a Markdown fence around the code is removed.

    A completion is invalid if a tag is missing. Its code is run anyway, if there is any.
    """
    code, thought = read_after_thought(completion, "code", prompt_end)
    fenced = _FENCE.match(code or "")
    return ParsedCompletion((fenced.group(1) if fenced else code or "").strip(), code is not None and thought)


# What prompts have in common comes first: it passes through the model once.
_ALWAYS = """You solve tasks on somebody's behalf by writing Python against their apps, a piece at a time. Variables \
stay from piece to piece. What you print is shown to you.
- apis.api_docs.show_app_descriptions() lists the apps, apis.api_docs.show_api_descriptions(app_name=…) the functions \
of one, apis.api_docs.show_api_doc(app_name=…, api_name=…) tells how to call one.
- apis.supervisor.show_account_passwords() gives passwords; log in to an app to get its access_token.
- When the task is done: apis.supervisor.complete_task(), with answer=… if it asks for something.

Reason about the next piece inside <think> </think>, then write it inside <code> </code>.

Your task: {task}
"""

APPWORLD_PROMPT = PromptTemplate(
    first=_ALWAYS,
    later=_ALWAYS
    + """
You have run {steps_taken} piece(s). The last {history_length} and what was shown before each:
{history}

Shown after the last one: {observation}
""",
    history_entry="[{step}] {observation}\n>>> {action}",
    parse_completion=parse_think_code,
)

"""What the model reads in AppWorld, and how its code is read."""

from __future__ import annotations

import re

from g2po_trl.prompts.template import ParsedCompletion, PromptTemplate, read_after_thought

_FENCE = re.compile(r"^\s*```(?:python)?\s*\n(.*?)\n?```\s*$", re.DOTALL)


def parse_think_code(completion: str, prompt_end: str = "") -> ParsedCompletion:
    """Read `<think>…</think><code>…</code>`; a fence of Markdown around the code is taken off.

    Invalid when a tag is missing; the code is run all the same if there is some, else nothing is.
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

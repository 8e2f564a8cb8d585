"""Steps and failures as readable text: in the viewer and in tables of credit.

A step of a text environment is its observation and its action. A step that answers a chat request has messages and the
assistant's message as JSON instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..prompts.conversation import Message, as_text, message_text, since_last_completion
from ..prompts.state_keys import without_noise
from ..trajectory import Step, Trajectory

LONGEST_REASON = 200  # characters
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+([.,]\d+)*")
NOTHING = "(nothing)"  # of an empty completion, and of a request without new messages
NEWS_KEYS: dict[str, Callable[[Step], str]] = {  # state keys of a chat request of its new messages alone
    "new messages": lambda step: step.observation,
    "new messages without times, ids, paths": lambda step: without_noise(step.observation),
}


def new_messages(step: Step) -> list[Message]:
    """Return the messages since the last completion, of a step that answers a chat request; all if there are none."""
    return since_last_completion(step.messages) or list(step.messages)


def state_text(step: Step) -> str:
    """Return the state: the observation, or the new messages of a chat request without those of the system."""
    if step.messages is None:
        return step.observation
    new = new_messages(step)
    return as_text([message for message in new if message["role"] != "system"] or new) or NOTHING


def action_text(step: Step) -> str:
    """Return the action: for a chat response its calls as `name(arguments)`, or else its content."""
    answer = step.response
    if answer is None:
        return step.action
    return message_text({**answer, "content": ""}) or answer["content"] or NOTHING


def failure_kind(episode: Trajectory) -> str:
    """Return why an episode failed, in one short line that does not depend on numbers and addresses."""
    outcomes = {"truncated": "out of turns", "failure": "ended without success"}
    reason = episode.error or episode.failure_reason or outcomes.get(episode.outcome, episode.outcome)
    head = reason.partition(": ")[0]
    text = reason.strip().partition("\nslot ")[0].strip() or "unknown"
    if "Traceback (most recent call last)" in text:  # what was raised is in its last line
        text = f"{head}: {text.splitlines()[-1].strip()}"
    text = " ".join(text.split())
    return _NUMBER.sub("N", text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}…")

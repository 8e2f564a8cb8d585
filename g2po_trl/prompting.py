"""What the model reads and what its reply means: history window, chat messages, reply -> action and validity.

A prompt is rebuilt at every step as one user message: the task, the last `history_length` observations and actions,
the observation, the admissible actions. Prompts therefore stay short however long the episode, and each step is a
training sample of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class ParsedReply(NamedTuple):
    """`action` is what the environment gets to play, `valid` whether the reply had the required format."""

    action: str
    valid: bool


_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
_CJK = re.compile(r"[一-鿿]")
# Of a reply without an action, its end is played all the same: this many characters, as in the released code.
_FALLBACK_CHARACTERS = 30


def parse_think_action(reply: str, prompt_end: str = "") -> ParsedReply:
    """Read `<think>…</think><action>…</action>`.

    Invalid when a tag is missing or the reply holds CJK characters; an invalid reply is played all the same (its
    action if there is one, else its last 30 characters). `prompt_end` is the end of the prompt as the model saw it:
    some chat templates open `<think>` themselves, and then the reply need not.
    """
    action = _ACTION.search(reply)
    thought_opened = "<think>" in reply or prompt_end.rstrip().endswith("<think>")
    valid = action is not None and thought_opened and "</think>" in reply and not _CJK.search(reply)
    text = action.group(1) if action else reply[-_FALLBACK_CHARACTERS:]
    return ParsedReply(text.strip().lower(), valid)


def parse_plain(reply: str, prompt_end: str = "") -> ParsedReply:
    """The whole reply is the action; only an empty one is invalid."""
    return ParsedReply(reply.strip(), bool(reply.strip()))


@dataclass(frozen=True)
class PromptTemplate:
    """The words around an observation, and the parser of the reply they ask for.

    Args:
        first: the user message of an episode's first step. Slots: `{task}`, `{observation}`, `{actions}`.
        later: the user message of every later step. Slots: also `{steps_taken}`, `{history_length}` (entries shown),
            `{history}`, `{current_step}`.
        history_entry: one past step. Slots: `{step}`, `{observation}`, `{action}`.
        history_separator, actions_separator: what joins the entries and the admissible actions.
        system: a system message, or `None`.
        parse_reply: reply text and end of the prompt -> `ParsedReply`.
    """

    first: str
    later: str
    history_entry: str = "[Observation {step}: '{observation}', Action {step}: '{action}']"
    history_separator: str = "\n"
    actions_separator: str = "\n"
    system: str | None = None
    parse_reply: Callable[[str, str], ParsedReply] = parse_think_action

    def messages(
        self,
        observation: str,
        task: str = "",
        admissible_actions: Sequence[str] | None = None,
        history: Sequence[tuple[str, str]] = (),
        steps_taken: int = 0,
    ) -> list[dict[str, str]]:
        """Chat messages of one step. `history` holds the (observation, action) pairs to show, oldest first."""
        first_shown = steps_taken - len(history) + 1
        slots = {
            "task": task,
            "observation": observation,
            "actions": self.actions_separator.join(admissible_actions or ()),
            "steps_taken": steps_taken,
            "current_step": steps_taken + 1,
            "history_length": len(history),
            "history": self.history_separator.join(
                self.history_entry.format(step=first_shown + i, observation=past, action=action)
                for i, (past, action) in enumerate(history)
            ),
        }
        content = (self.first if steps_taken == 0 else self.later).format(**slots)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": content}]


# What prompts have in common comes first: it passes through the model once (`packing`).
DEFAULT_PROMPT = PromptTemplate(
    first=(
        "{task}\nThink inside <think> </think>, then give one action inside <action> </action>.\n\n"
        "Observation: {observation}\n\nPossible actions:\n{actions}"
    ),
    later=(
        "{task}\nThink inside <think> </think>, then give one action inside <action> </action>.\n\n"
        "Steps taken so far: {steps_taken}. The last {history_length}:\n{history}\n\n"
        "Step {current_step}. Observation: {observation}\n\nPossible actions:\n{actions}"
    ),
)


class FittedPrompt(NamedTuple):
    """Token ids of a prompt, its text, and whether something had to be left out."""

    ids: list[int]
    text: str
    truncated: bool


class PromptTooLongError(ValueError):
    """The task and the actions alone exceed `max_prompt_length`."""


def fit_prompt(
    template: PromptTemplate,
    encode: Callable[[list[dict[str, str]]], tuple[list[int], str]],
    max_length: int | None,
    observation: str,
    task: str = "",
    admissible_actions: Sequence[str] | None = None,
    history: Sequence[tuple[str, str]] = (),
    steps_taken: int = 0,
) -> FittedPrompt:
    """Encode one step's prompt within `max_length` tokens.

    Over the limit the oldest history goes first, then the middle of the observation; never the task or the actions.
    `encode` turns chat messages into (token ids, text).

    Raises:
        PromptTooLongError: when even an empty observation does not fit.
    """

    def build(text: str, shown: Sequence[tuple[str, str]]) -> tuple[list[int], str]:
        return encode(template.messages(text, task, admissible_actions, shown, steps_taken))

    shown = list(history)
    ids, text = build(observation, shown)
    if max_length is None or len(ids) <= max_length:
        return FittedPrompt(ids, text, False)
    while shown and len(ids) > max_length:
        shown.pop(0)
        ids, text = build(observation, shown)
    if len(ids) > max_length:  # the longest head and tail of the observation that fit, by bisection
        low, high = 0, len(observation)
        while low < high:
            middle = (low + high + 1) // 2
            fits = len(build(_cut_middle(observation, middle), shown)[0]) <= max_length
            low, high = (middle, high) if fits else (low, middle - 1)
        ids, text = build(_cut_middle(observation, low), shown)
    if len(ids) > max_length:
        raise PromptTooLongError(
            f"the task and the {len(admissible_actions or ())} admissible actions alone take {len(ids)} tokens, more "
            f"than max_prompt_length={max_length}: raise max_prompt_length, or shorten the prompt template"
        )
    return FittedPrompt(ids, text, True)


def _cut_middle(text: str, keep: int) -> str:
    if keep >= len(text):
        return text
    head = (keep + 1) // 2
    return f"{text[:head]} … {text[len(text) - (keep - head) :]}"

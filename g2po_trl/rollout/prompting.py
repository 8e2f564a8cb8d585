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


# Of a reply without an action, its end is played all the same: this many characters, as in the released code.
_FALLBACK_CHARACTERS = 30
_CJK = re.compile(r"[一-鿿]")


def parse_think_action(reply: str, prompt_end: str = "") -> ParsedReply:
    """Read `<think>…</think><action>…</action>`: the first action that is not part of the thought, as written.

    Invalid when a tag is missing. An invalid reply is played all the same: its action if there is one, else its last
    30 characters. `prompt_end` is the end of the prompt as the model saw it: where the chat template has opened
    `<think>`, the reply need not, and where it has closed it again (thinking switched off), an action is all it takes.
    """
    action, thought = read_after_thought(reply, "action", prompt_end)
    text = reply[-_FALLBACK_CHARACTERS:] if action is None else action
    return ParsedReply(text.strip(), action is not None and thought)


def read_after_thought(reply: str, tag: str, prompt_end: str = "") -> tuple[str | None, bool]:
    """The content of the first `<tag>…</tag>` that no thought quotes, and whether the thought was begun and ended.

    A thought may quote the tags of a thought ("inside <think> </think>, then …"): they nest. Where they do not pair
    up, the thought ends at its last `</think>`; where it never ends, the first `<tag>…</tag>` is taken all the same.
    """
    prompt = prompt_end.rstrip()
    ended = after_end = prompt.endswith("</think>")
    thoughts = depth = int(prompt.endswith("<think>"))
    unpaired = False
    outside = behind = first = None  # outside of all thoughts; behind the last `</think>`; anywhere
    tags = re.compile(rf"<think>|</think>|<{tag}>((?:(?!</?(?:think|{tag})>).)*)</{tag}>", re.DOTALL | re.IGNORECASE)
    for found in tags.finditer(reply):
        content = found.group(1)
        if content is not None:
            outside = content if outside is None and depth == 0 else outside
            behind = content if behind is None and after_end else behind
            first = content if first is None else first
            continue
        behind, after_end = None, found.group().startswith("</")
        if not after_end:
            thoughts, depth = thoughts + 1, depth + 1
        elif thoughts:
            unpaired |= depth == 0
            depth, ended = max(0, depth - 1), True
        else:  # what came before was a thought, though nothing began it
            outside = None
    chosen = behind if outside is None or (unpaired and behind is not None) else outside
    return (first if chosen is None else chosen), chosen is not None and ended


def parse_as_released(
    reply: str, prompt_end: str = "", fallback_characters: int = _FALLBACK_CHARACTERS
) -> ParsedReply:
    """Read `<think>…</think><action>…</action>` by the rule of the paper's released code.

    In lower case; from the first `<action>` to the first `</action>`, also inside the thought; invalid when a tag is
    missing or the reply holds CJK characters. Of a reply without an action the last `fallback_characters` are played.
    `prompt_end`: as in `parse_think_action`; the released code knows no template that opens or closes `<think>`.
    """
    text = reply.lower()
    start, end = text.find("<action>"), text.find("</action>")
    found = start >= 0 and end >= 0
    action = text[start + len("<action>") : end] if found else text[-fallback_characters:]
    prompt = prompt_end.rstrip()
    opened, closed = "<think>" in reply or prompt.endswith("<think>"), "</think>" in reply
    thought = prompt.endswith("</think>") or (opened and closed)
    return ParsedReply(action.strip(), found and thought and not _CJK.search(reply))


def listed_spelling(action: str, admissible_actions: Sequence[str] | None) -> str:
    """The one admissible action that differs from `action` in case alone; without one, `action` itself."""
    listed = admissible_actions or ()
    alike = {other for other in listed if other.casefold() == action.casefold()}
    return alike.pop() if action not in alike and len(alike) == 1 else action


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
        match_case: whether an action must have the letter case of the admissible one; by default the admissible action
            that differs in case alone is played.
    """

    first: str
    later: str
    history_entry: str = "[Observation {step}: '{observation}', Action {step}: '{action}']"
    history_separator: str = "\n"
    actions_separator: str = "\n"
    system: str | None = None
    parse_reply: Callable[[str, str], ParsedReply] = parse_think_action
    match_case: bool = False

    def read(self, reply: str, prompt_end: str = "", admissible_actions: Sequence[str] | None = None) -> ParsedReply:
        """The action in a reply to a prompt that listed `admissible_actions` and ended with `prompt_end`."""
        action, valid = self.parse_reply(reply, prompt_end)
        return ParsedReply(action if self.match_case else listed_spelling(action, admissible_actions), valid)

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

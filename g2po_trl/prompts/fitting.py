"""Fit a prompt into a maximum number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .template import PromptTemplate


class FittedPrompt(NamedTuple):
    """A prompt's token ids and text; `truncated`: content was removed to fit the limit."""

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
    """Return one step's prompt, shortened to at most `max_length` tokens.

    Over the limit, the oldest history is removed first, then the middle of the observation; the task and the actions
    stay. `encode` turns chat messages into (token ids, text).

    Raises:
        PromptTooLongError: if the prompt exceeds the limit even with an empty observation.
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
            fits = len(build(cut_middle(observation, middle), shown)[0]) <= max_length
            low, high = (middle, high) if fits else (low, middle - 1)
        ids, text = build(cut_middle(observation, low), shown)
    if len(ids) > max_length:
        raise PromptTooLongError(
            f"the task and the {len(admissible_actions or ())} admissible actions alone take {len(ids)} tokens, more "
            f"than max_prompt_length={max_length}: raise max_prompt_length, or shorten the prompt template"
        )
    return FittedPrompt(ids, text, True)


def cut_middle(text: str, keep: int) -> str:
    if keep >= len(text):
        return text
    head = (keep + 1) // 2
    return f"{text[:head]} … {text[len(text) - (keep - head) :]}"

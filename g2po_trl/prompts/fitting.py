"""Fit a prompt into a maximum number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..utils.errors import G2POError
from ..utils.images import Picture
from .template import PromptTemplate


class FittedPrompt(NamedTuple):
    """A prompt's token ids, text and images; `truncated`: content was removed to fit the limit."""

    ids: list[int]
    text: str
    truncated: bool
    images: Sequence[Picture] = ()


class PromptTooLongError(G2POError):
    """The task and the actions alone exceed `max_prompt_length`."""


def fit_prompt(
    template: PromptTemplate,
    encode: Callable[[list[dict[str, Any]]], tuple[list[int], str]],
    max_length: int | None,
    observation: str,
    task: str = "",
    admissible_actions: Sequence[str] | None = None,
    history: Sequence[tuple[str, str]] = (),
    steps_taken: int = 0,
    images: Sequence[Picture] = (),
) -> FittedPrompt:
    """Return one step's prompt, shortened to at most `max_length` tokens.

    Over the limit, the oldest history is removed first, then the middle of the observation; the task, the actions
    and the images stay. `encode` turns chat messages into (token ids, text).

    Raises:
        PromptTooLongError: if the prompt exceeds the limit even with an empty observation.
    """

    def build(text: str, shown: Sequence[tuple[str, str]]) -> tuple[list[int], str]:
        more = {"images": images} if images else {}
        return encode(template.messages(text, task, admissible_actions, shown, steps_taken, **more))

    shown = list(history)
    ids, text = build(observation, shown)
    if max_length is None or len(ids) <= max_length:
        return FittedPrompt(ids, text, False, images)
    while shown and len(ids) > max_length:
        shown.pop(0)
        ids, text = build(observation, shown)
    if len(ids) > max_length:

        def fits(keep: int) -> bool:
            return len(build(cut_middle(observation, keep), shown)[0]) <= max_length

        ids, text = build(cut_middle(observation, longest_that_fits(fits, len(observation))), shown)
    if len(ids) > max_length:
        raise PromptTooLongError(
            f"the task and the {len(admissible_actions or ())} admissible actions alone take {len(ids)} tokens, more "
            f"than max_prompt_length={max_length}: raise max_prompt_length, or shorten the prompt template"
            + (f"; {len(images)} images are among them: make them smaller" if images else "")
        )
    return FittedPrompt(ids, text, True, images)


def longest_that_fits(fits: Callable[[int], bool], longest: int) -> int:
    """Return the highest number of characters that fits, up to `longest`, by bisection; 0 is not tried."""
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def cut_middle(text: str, keep: int) -> str:
    """Return a text of which the first and last `keep` characters together are kept."""
    if keep >= len(text):
        return text
    head = (keep + 1) // 2
    return f"{text[:head]} … {text[len(text) - (keep - head) :]}"

"""Fit a prompt into a maximum number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..utils.errors import G2POError
from ..utils.images import Picture
from .conversation import Message
from .template import PromptTemplate


@dataclass(frozen=True)
class Prompt:
    """A prompt's token ids, text, and images in the order of their tokens; `truncated`: content was removed to fit.

    Of a conversation: the `messages` that it shows; how many of them an earlier prompt has, whose ids and completion
    this one `continues` (0: none), and then the text of the others alone.
    """

    ids: list[int]
    text: str
    images: Sequence[Picture] = ()
    truncated: bool = False
    messages: Sequence[Message] = ()
    continues: int = 0


class PromptTooLongError(G2POError):
    """The task and the actions alone exceed `max_prompt_length`."""

    reason = "prompt too long"  # for which the episode ends


def fit_prompt(
    template: PromptTemplate,
    encode: Callable[[list[dict[str, Any]]], tuple[list[int], str]],
    max_length: int | None,
    observation: str,
    history: Sequence[tuple[str, str]] = (),
    **shown: Any,
) -> Prompt:
    """Return one step's prompt, shortened to at most `max_length` tokens.

    Over the limit, the oldest history is removed first, then the middle of the observation. What else is `shown`, the
    further arguments of `PromptTemplate.messages`, stays: if it is too long alone, `PromptTooLongError` is raised.
    `encode` turns chat messages into (token ids, text).
    """

    def build(keep: int) -> Prompt:
        messages = template.messages(cut_middle(observation, keep), history=history, **shown)
        return Prompt(*encode(messages), shown.get("images", ()), truncated=True)

    prompt = build(len(observation))
    if max_length is None or len(prompt.ids) <= max_length:
        return replace(prompt, truncated=False)
    while history and len(prompt.ids) > max_length:
        history = history[1:]
        prompt = build(len(observation))
    if len(prompt.ids) > max_length:
        prompt = cut_to_fit(build, len(observation), max_length)
    if len(prompt.ids) > max_length:
        what = f"the task, the admissible actions and the images alone take {len(prompt.ids)} tokens"
        remedy = f"more than max_prompt_length={max_length}: raise it, or shorten them"
        raise PromptTooLongError(f"{what}, {remedy}", "max_prompt_length")
    return prompt


def cut_to_fit(build: Callable[[int], Prompt], length: int, max_length: int) -> Prompt:
    """Return the prompt of at most `max_length` tokens that keeps most of `length` characters; of none, any.

    `build` returns the prompt that keeps a number of characters.
    """
    keeps = range(length, 0, -1)
    return build(length - bisect_left(keeps, True, key=lambda keep: len(build(keep).ids) <= max_length))


def cut_middle(text: str, keep: int) -> str:
    """Return a text without its middle: `keep` characters in all, from its beginning and end."""
    if keep >= len(text):
        return text
    head = (keep + 1) // 2
    return f"{text[:head]} … {text[len(text) - (keep - head) :]}"

"""Fit a prompt into a maximum number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ..utils.errors import G2POError
from ..utils.images import Picture
from .template import PromptTemplate


class FittedPrompt(NamedTuple):
    """A prompt's token ids, text and images; `truncated`: content was removed to fit the limit."""

    ids: list[int]
    text: str
    truncated: bool
    images: Sequence[Picture] = ()


Prompt = TypeVar("Prompt")  # has `ids`


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
) -> FittedPrompt:
    """Return one step's prompt, shortened to at most `max_length` tokens.

    Over the limit, the oldest history is removed first, then the middle of the observation. What else is `shown`, the
    further arguments of `PromptTemplate.messages`, stays: if it is too long alone, `PromptTooLongError` is raised.
    `encode` turns chat messages into (token ids, text).
    """

    def build(keep: int) -> FittedPrompt:
        messages = template.messages(cut_middle(observation, keep), history=history, **shown)
        return FittedPrompt(*encode(messages), True, shown.get("images", ()))

    prompt = build(len(observation))
    if max_length is None or len(prompt.ids) <= max_length:
        return prompt._replace(truncated=False)
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

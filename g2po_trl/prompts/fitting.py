"""Fit a prompt into a maximum number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    images, length = shown.get("images", ()), len(observation)

    def messages(keep: int) -> list[Message]:
        return template.messages(cut_middle(observation, keep), history=history, **shown)

    def size(keep: int) -> int:
        return len(encode(without_images(messages(keep)))[0])

    prompt = Prompt(*encode(messages(length)), images)
    if max_length is None or len(prompt.ids) <= max_length:
        return prompt
    limit = max_length - len(prompt.ids) + size(length)  # of what is no image: a processor is slow
    while history and size(length) > limit:
        history = history[1:]
    prompt = Prompt(*encode(messages(longest(size, length, limit))), images, truncated=True)
    if len(prompt.ids) > max_length:
        what = f"the task, the admissible actions and the images alone take {len(prompt.ids)} tokens"
        remedy = f"more than max_prompt_length={max_length}: raise it, or shorten them"
        raise PromptTooLongError(f"{what}, {remedy}", "max_prompt_length")
    return prompt


def without_images(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the marks of their images as text."""
    return [{name: part for name, part in message.items() if name != "images"} for message in messages]


def longest(size: Callable[[int], int], length: int, limit: int) -> int:
    """Return the most characters of `length` with which `size`, a number of tokens, is within a limit; else none."""
    keeps = range(length, 0, -1)
    return length if size(length) <= limit else length - bisect_left(keeps, True, key=lambda keep: size(keep) <= limit)


def cut_middle(text: str, keep: int) -> str:
    """Return a text without its middle: `keep` characters in all, from its beginning and end."""
    if keep >= len(text):
        return text
    head = (keep + 1) // 2
    return f"{text[:head]} … {text[len(text) - (keep - head) :]}"

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
    task: str = "",
    admissible_actions: Sequence[str] | None = None,
    history: Sequence[tuple[str, str]] = (),
    steps_taken: int = 0,
    images: Sequence[Picture] = (),
) -> FittedPrompt:
    """Return one step's prompt, shortened to at most `max_length` tokens.

    Over the limit, the oldest history is removed first, then the middle of the observation; the task, the actions
    and the images stay: if they are too long alone, `PromptTooLongError` is raised. `encode` turns chat messages into
    (token ids, text). With images it is a `ChatEncoder`, whose processor runs for the whole and the shortened prompt.
    """

    def messages(keep: int) -> list[dict[str, Any]]:
        text = cut_middle(observation, keep)
        return template.messages(text, task, admissible_actions, shown, steps_taken, images)

    def build(keep: int) -> FittedPrompt:
        return FittedPrompt(*encode(messages(keep)), True, images)

    def size(keep: int) -> int:
        return encode.num_tokens(messages(keep)) if images else len(encode(messages(keep))[0])

    shown, keep = list(history), len(observation)
    prompt = build(keep)
    if max_length is None or len(prompt.ids) <= max_length:
        return prompt._replace(truncated=False)
    of_images = len(prompt.ids) - size(keep) if images else 0
    while shown and size(keep) + of_images > max_length:
        shown.pop(0)
    prompt = cut_to_fit(build, size, of_images, keep, max_length)
    if len(prompt.ids) > max_length:
        what = f"the task, {len(admissible_actions or ())} admissible actions and {len(images)} images"
        remedy = f"more than max_prompt_length={max_length}: raise it, or shorten them"
        raise PromptTooLongError(f"{what} alone take {len(prompt.ids)} tokens, {remedy}", "max_prompt_length")
    return prompt


def cut_to_fit(
    build: Callable[[int], Prompt], size: Callable[[int], int], of_images: int, keep: int, max_length: int
) -> Prompt:
    """Return the prompt of at most `max_length` tokens that keeps most characters, up to `keep`; of 0, any.

    `build` returns the prompt that keeps a number of characters, by the slow processor if there are images; `size` its
    tokens, with one in place of each image. `of_images` counts their further tokens, the same in all prompts.
    """
    room = max_length - of_images
    while True:
        if size(keep) > room:  # the highest number that fits, by bisection; 0 is not tried
            keep -= bisect_left(range(keep, 0, -1), True, key=lambda fewer: size(fewer) <= room)
        prompt = build(keep)
        if len(prompt.ids) <= max_length or not keep:
            return prompt
        room -= len(prompt.ids) - max_length  # texts beside images became other tokens


def cut_middle(text: str, keep: int) -> str:
    """Return a text without its middle: `keep` characters in all, from its beginning and end."""
    if keep >= len(text):
        return text
    head = (keep + 1) // 2
    return f"{text[:head]} … {text[len(text) - (keep - head) :]}"

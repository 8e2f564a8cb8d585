"""Render and tokenize chat messages, many prompts in one call of the tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any

from ..utils.images import Picture
from .chat_template import MARK, ChatTemplate, get_tokenizer
from .conversation import pictures_of
from .images import ImageEncoder, reads_images


class ChatEncoder:
    """Encoder of chat messages: `encoder(messages)` returns the prompt's token ids and text."""

    def __init__(
        self, processing_class, chat_template_kwargs: dict[str, Any] | None = None, chat_template: str | None = None
    ):
        self.processing_class, self.tokenizer = processing_class, get_tokenizer(processing_class)
        self.text = ChatTemplate(processing_class, chat_template_kwargs, chat_template)
        self._rendered = self._special_tokens_of(self.text.sample())
        ends = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id} & self._added.keys()
        reserved = self._rendered | ends if self._rendered else ()  # else messages write them themselves
        self.text.reserved = [self._added[number] for number in sorted(reserved)]
        self.images = ImageEncoder(processing_class) if reads_images(processing_class) else None
        self.text.reserved += [] if self.images is None else self.images.reserved

    def __call__(self, messages: list[dict[str, Any]]) -> tuple[list[int], str]:
        text = self.text(messages)
        return self.ids([text], [pictures_of(messages)])[0], text

    def ids(self, texts: Sequence[str], images: Sequence[Sequence[Picture]] = ()) -> list[list[int]]:
        """Return the token ids of each text, from one call of the tokenizer: much faster than one call per text.

        Texts are encoded in parts where `ChatTemplate` has marked that a special token's name is only text. With
        `images`, of each text, those that have any are encoded by the processor.
        """
        if not texts:
            return []
        parts = [text.split(MARK) for text in texts]
        if any(images):
            each = zip(texts, parts, images, strict=True)
            return [self.images.ids(part, shown) if shown else self.ids([text])[0] for text, part, shown in each]
        # Not verbose: the caller shortens prompts beyond the tokenizer's maximum.
        of_parts = iter(self.tokenizer(list(chain(*parts)), add_special_tokens=False, verbose=False)["input_ids"])
        return [list(chain(*islice(of_parts, len(of_text)))) for of_text in parts]

    def decode(self, ids: Sequence[int], stop_token_ids: Collection[int] = ()) -> str:
        """Return the text of a completion as it was written, without tokens that only give a turn its form.

        These tokens are end of sequence and padding, `stop_token_ids`, and special tokens that the chat template
        writes around messages. Others are text: the user's tags that were added as special tokens are kept.
        """
        ends = {*stop_token_ids, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id} & self._added.keys()
        dropped = self._rendered | {number for number in ends if self._added[number] not in self._tags}
        return self.tokenizer.decode([number for number in ids if number not in dropped])

    @cached_property
    def _added(self) -> dict[int, str]:
        """Tokens added to the vocabulary, by id, special or not."""
        tokenizer = self.tokenizer
        added = {number: token.content for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        return dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens)) | added

    @cached_property
    def _tags(self) -> set[str]:
        """Added tokens that are tags, `<name>` with `</name>`: parsers read them, also if the template writes them."""
        names = {self.tokenizer.eos_token, self.tokenizer.pad_token, self.tokenizer.bos_token}
        opened = {text for text in self._added.values() if text.startswith("<")} - names
        return {tag for text in opened if (end := f"</{text[1:]}") in opened for tag in (text, end)}

    def _special_tokens_of(self, text: str) -> set[int]:
        """Return the special tokens in a text, without tags."""
        tokenizer, added = self.tokenizer, getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        return {number for number in special.intersection(*self.ids([text])) if self._added[number] not in self._tags}

"""Render and tokenize chat messages, many prompts in one call of the tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from .chat_template import ChatTemplate, get_tokenizer

# Tags that parsers read: kept in decoded text even if the tokenizer has them as special tokens.
_TAGS = {f"<{end}{name}>" for name in ("think", "action", "code", "tool_call") for end in ("", "/")}


class ChatEncoder:
    """Encoder of chat messages: `encoder(messages)` returns the prompt's token ids and text."""

    def __init__(
        self, processing_class, chat_template_kwargs: dict[str, Any] | None = None, chat_template: str | None = None
    ):
        self.processing_class, self.tokenizer = processing_class, get_tokenizer(processing_class)
        self.text = ChatTemplate(processing_class, chat_template_kwargs, chat_template)
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {number: token.content for number, token in added.items() if token.special}
        # Special tokens to skip one by one when decoding; `None`: the tokenizer skips all of them.
        self._skipped = special.keys() - {n for n, text in special.items() if text in _TAGS}
        self._skipped = None if len(self._skipped) == len(special) else self._skipped

    def __call__(self, messages: list[dict[str, str]]) -> tuple[list[int], str]:
        text = self.text(messages)
        return self.ids([text])[0], text

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, from one call of the tokenizer: much faster than one call per text."""
        if not texts:
            return []
        # Not verbose: the caller shortens prompts beyond the tokenizer's maximum.
        return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def end_of_turn(self, stop_token_ids: Collection[int] = ()) -> int | None:
        """Return the token that ends an assistant's turn in the template, `None` if one of `stop_token_ids` does.

        Also `None` if a turn's end is no single token of the tokenizer.
        """
        tail, added = self.text.turn_end.lstrip(), getattr(self.tokenizer, "added_tokens_decoder", {})
        if any(added[number].content in tail for number in stop_token_ids if number in added):
            return None
        ends = [number for number, token in added.items() if token.content and tail.startswith(token.content)]
        return max(ends, key=lambda number: len(added[number].content), default=None)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a completion without special tokens, except the tags that parsers read."""
        if self._skipped is None:
            return self.tokenizer.decode(ids, skip_special_tokens=True)
        return self.tokenizer.decode([number for number in ids if number not in self._skipped])

"""Chat messages -> token ids, by a chat template and one batch call of the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .chat_template import ChatTemplate, tokenizer_of

# What replies are read by: kept in their text where a tokenizer has them among its special tokens.
_TAGS = {f"<{end}{name}>" for name in ("think", "action", "code", "tool_call") for end in ("", "/")}


class ChatEncoder:
    """Chat messages -> token ids and text, by the chat template of a tokenizer or processor (`ChatTemplate`)."""

    def __init__(self, processing_class, chat_template_kwargs: dict[str, Any] | None = None):
        self.tokenizer = tokenizer_of(processing_class)
        self.text = ChatTemplate(processing_class, chat_template_kwargs)
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {number: token.content for number, token in added.items() if token.special}
        # Special tokens to leave out of a reply's text one by one; `None`: the tokenizer leaves them all out.
        self._left_out = special.keys() - {n for n, text in special.items() if text in _TAGS}
        self._left_out = None if len(self._left_out) == len(special) else self._left_out

    def __call__(self, messages: list[dict[str, str]]) -> tuple[list[int], str]:
        text = self.text(messages)
        return self.ids([text])[0], text

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, from one call of the tokenizer: much faster than one call per text."""
        if not texts:
            return []
        # Not verbose: a prompt beyond the tokenizer's maximum is shortened afterwards.
        return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a reply, without special tokens other than the tags it is read by."""
        if self._left_out is None:
            return self.tokenizer.decode(ids, skip_special_tokens=True)
        return self.tokenizer.decode([number for number in ids if number not in self._left_out])

"""Chat messages -> token ids. A word passes through the tokenizer once.

What an agent reads repeats itself: instructions and task at every step, an observation when it is made and again as
history, actions as long as they are admissible. Most tokenizers take a text apart into words and merge characters
inside of them only; the token ids of a text are then those of its words, one after the other, and those of known words
are looked up. For a tokenizer of which that cannot be shown (`word_cuts`), texts are known as a whole.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from .chat_template import ChatTemplate, tokenizer_of

_KNOWN_TOKENS = 500_000  # some 20 MB of Python integers
# What replies are read by: kept in their text where a tokenizer has them among its special tokens.
_TAGS = {f"<{end}{name}>" for name in ("think", "action", "code", "tool_call") for end in ("", "/")}


class ChatEncoder:
    """Chat messages -> token ids and text, by the chat template of a tokenizer or processor (`ChatTemplate`).

    `tokens` counts the tokens of all texts encoded so far, `tokenized` those that the tokenizer had to make.
    """

    def __init__(self, processing_class, chat_template_kwargs: dict[str, Any] | None = None):
        self.tokenizer = tokenizer_of(processing_class)
        self.text = ChatTemplate(processing_class, chat_template_kwargs)
        self.cuts = word_cuts(self.tokenizer)
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {number: token.content for number, token in added.items() if token.special}
        # Special tokens to leave out of a reply's text one by one; `None`: the tokenizer leaves them all out.
        self._left_out = special.keys() - {n for n, text in special.items() if text in _TAGS}
        self._left_out = None if len(self._left_out) == len(special) else self._left_out
        self.tokens = self.tokenized = 0
        self.forget()

    def __call__(self, messages: list[dict[str, str]]) -> tuple[list[int], str]:
        text = self.text(messages)
        return self.ids([text])[0], text

    def forget(self) -> None:
        """Know no word. Once a rollout, so that what one tokenizes does not depend on those before it."""
        self._known: dict[str, list[int]] = {}
        self._known_tokens = 0

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text; what is new in them goes through the tokenizer in one call."""
        if self._known_tokens > _KNOWN_TOKENS:
            self.forget()
        known = self._known
        parts = [self.cuts.split(text) if self.cuts else [text] for text in texts]
        new = list({part: None for of_text in parts for part in of_text if part not in known})
        if new:
            made = self.tokenizer(new, add_special_tokens=False)["input_ids"]  # one call for all is much faster
            known.update(zip(new, made))
            self.tokenized += (tokenized := sum(map(len, made)))
            self._known_tokens += tokenized
        ids = [[token for part in of_text for token in known[part]] for of_text in parts]
        self.tokens += sum(map(len, ids))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a reply, without special tokens other than the tags it is read by."""
        if self._left_out is None:
            return self.tokenizer.decode(ids, skip_special_tokens=True)
        return self.tokenizer.decode([number for number in ids if number not in self._left_out])


def word_cuts(tokenizer) -> re.Pattern[str] | None:
    """Where a text may be cut so that the token ids of its parts, joined, are its own; `None` if nowhere.

    Between printable ASCII characters, before a single space or after a single newline. Pre-tokenizers are regular
    expressions on kinds of characters that look one character ahead at most, so all pairs of kinds are tried: a word
    must end at the cut whatever is on its left, or none is made before that character; and the token ids of them all
    must be those of the parts. SentencePiece's vocabularies have no words, and tokens added with `lstrip` or `rstrip`
    take the space beside them: no cuts there. A pre-tokenizer that takes whole spans for words, such as all between
    two quotes, is not found out: its prompts are then tokenized by parts, the same in play and in training.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.pre_tokenizer is None:
        return None
    kinds = string.punctuation + "asmtzASTZ059"
    # As they stand in a text, (before the cut, after it); one pair after the other they make words of two characters.
    pairs = [(left + space, right) for right in kinds for left in kinds for space in ("\n", "")]
    pairs = [(left, right if left.endswith("\n") else f" {right}") for left, right in pairs]
    text = "".join(left + right for left, right in pairs)
    if backend.normalizer is not None and backend.normalizer.normalize_str(text) != text:
        return None
    ends = {end for _, (_, end) in backend.pre_tokenizer.pre_tokenize_str(text)}
    glued, place = set(), 0
    for left, right in pairs:
        if place + len(left) not in ends:
            glued.add(right[-1])
        place += len(left) + len(right)
    after = f"(?![{re.escape(''.join(glued))}])[!-~]" if glued else "[!-~]"
    cuts = re.compile(rf"(?<=[!-~]\n)(?={after})|(?<=[!-~])(?= {after})")
    if any(_breaks(cuts, added) for added in backend.get_added_tokens_decoder().values()):
        return None
    parts = cuts.split(text)
    ids, *ids_of_parts = tokenizer([text, *parts], add_special_tokens=False, verbose=False)["input_ids"]
    return cuts if len(parts) > 1 and ids == sum(ids_of_parts, []) else None


def _breaks(cuts: re.Pattern[str], added) -> bool:
    """Whether an added token, looked for before there are words, is not found where the text is cut."""
    inside = range(2, len(added.content) + 1)
    cut_inside = any(cut.start() in inside for cut in cuts.finditer(f"a{added.content}a"))
    return added.lstrip or added.rstrip or added.single_word or cut_inside

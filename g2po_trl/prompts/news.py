"""What a text says about a state by itself: much, little, or that nothing has changed."""

from __future__ import annotations

import re

_UNCHANGED = re.compile(r"\W*(nothing (happens|happened|changes|changed)|no (change|effect))\W*", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+")
_LONGEST_SIGN = 4  # characters without a word, "[]"; longer ones may be drawings
# A text of these words alone, such as a tool's result, says little.
_FILLERS = frozenset(
    "0 a ack acknowledged an and any been code command completed content continue data did done empty error errors "
    "executed execution exit false finished from has is it last logs message nil no none not noted null observation "
    "of ok okay or output produce ran response result results return returncode returned snippet status stderr stdout "
    "succeeded success successful successfully sure thank thanks the tool true undefined value void was with without "
    "yes you your".split()
)


def says_little(text: str) -> bool:
    """Return whether a text says little about a state by itself, as "", "OK", "null", "[]" and `{"success": true}`."""
    words = set(_WORD.findall(text.lower()))
    if not words:
        return len(text.strip()) <= _LONGEST_SIGN
    return words <= _FILLERS and words != {"0"}


def says_unchanged(text: str) -> bool:
    """Return whether a text says that nothing has changed, as "Nothing happens."."""
    return _UNCHANGED.fullmatch(text) is not None

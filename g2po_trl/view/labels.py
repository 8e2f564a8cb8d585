"""Short labels of states: the words by which a state's text differs from the others of its group."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

LONGEST = 20  # characters
MARK = 12  # characters of a key in a label
_WORDS = re.compile(r"[^\W\d_][\w'’-]*(?: \d+\b)?|\d+")  # "drawer 1" is one
_SMALL = set("a an and are as at by for from in is it its of on or that the there this to was with you your".split())
_SMALL |= {"assistant", "system", "tool", "user"}  # roles of messages


def state_labels(texts: Sequence[str], keys: Sequence[str] | None = None) -> list[str]:
    """Return a label for each state: the first words of its text, except words in many texts of the group.

    A text without other words is labelled by its first words that are not function words, and a text without words by
    "". Equal labels are distinguished by the first word of each key (`None`: text) that the other keys do not have, or
    else by numbers.
    """
    words = [_words_of(text) for text in texts]
    counts = Counter(word.lower() for one in set(map(tuple, words)) for word in one)
    often = max(1, len(set(map(tuple, words))) / 3)

    def tells(word: str) -> bool:
        names_a_thing = word[-1].isdigit() and not word.isdigit()  # "drawer 1"
        return names_a_thing or (word.lower() not in _SMALL and counts[word.lower()] <= often)

    large = [[word for word in one if word.lower() not in _SMALL and not word.isdigit()] for one in words]
    labels = [_cut(list(filter(tells, one)) or some or one) for one, some in zip(words, large)]
    for label in {label for label, number in Counter(labels).items() if label and number > 1}:
        places = [place for place, other in enumerate(labels) if other == label]
        for place, mark in zip(places, _marks([(keys or texts)[place] for place in places])):
            labels[place] = f"{label} {mark}"
    return labels


def _marks(keys: Sequence[str]) -> list[str]:
    """Return marks that distinguish keys: the first word of each that no other has, or else its number."""
    words = [re.findall(r"\w+", key) for key in keys]
    holders = Counter(word for one in words for word in set(one))
    own = [next((word for word in one if holders[word] == 1), None) for one in words]
    return [f"#{n}" if word is None else f"({word[:MARK]})" for n, word in enumerate(own, 1)]


def _words_of(text: str) -> list[str]:
    """Return the words of a text, each once."""
    return list({word.lower(): word for word in reversed(_WORDS.findall(text))}.values())[::-1]


def _cut(words: Sequence[str]) -> str:
    """Return as many words as fit; if the first word does not fit, its beginning."""
    label = "".join(words[:1])
    label = label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"
    for word in words[1:]:
        if len(label) + 1 + len(word) > LONGEST:
            break
        label += f" {word}"
    return label

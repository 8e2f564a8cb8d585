"""Search with Lucene's ranking, without Java: its English analyser and BM25, with scores in its arithmetic.

It returns recorded lists of the official engine in the same order, so an agent's knowledge of the search transfers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import snowballstemmer

from .words import split_words

K1, B = 0.9, 0.4
_STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with".split()
)
_POSSESSIVE = ("'s", "\u2019s", "\uff07s")
_stem = snowballstemmer.stemmer("porter").stemWord


def analyse(text: str) -> list[str]:
    """Return a text's terms: words in lower case, without possessives and stop words, stemmed (Porter)."""
    terms = []
    for word in split_words(text.lower()):
        word = word[:-2] if word.endswith(_POSSESSIVE) else word
        if word not in _STOP_WORDS:
            terms.append(_stemmed(word))
    return terms


@lru_cache(maxsize=1 << 16)
def _stemmed(word: str) -> str:
    return word if len(word) <= 2 else _stem(word)


class SearchIndex:
    """BM25 (k1 = 0.9, b = 0.4) over documents, in Lucene's arithmetic.

    Lucene stores a document's length in one byte, exact up to 40, and a term's weight in single precision; both affect
    ties, which are frequent. Equal scores are ordered by name.

    Args:
        names: names of the documents.
        contents: their texts, in the same order.
    """

    def __init__(self, names: Sequence[str], contents: Sequence[str]):
        self.names = list(names)
        terms = [analyse(text) for text in contents]
        lengths = np.array([len(words) for words in terms], dtype=np.float64)
        mean = np.float32(lengths.sum() / max(1, len(terms)))
        kept = np.array([_kept_length(len(words)) for words in terms], dtype=np.float32)
        self._inverse = (1.0 / (np.float32(K1) * ((1 - np.float32(B)) + np.float32(B) * kept / mean))).astype(
            np.float32
        )
        postings: dict[str, list[tuple[int, int]]] = {}
        for number, words in enumerate(terms):
            for word, count in Counter(words).items():
                postings.setdefault(word, []).append((number, count))
        self._postings = {
            word: (np.array([n for n, _ in rows]), np.array([c for _, c in rows], dtype=np.float32))
            for word, rows in postings.items()
        }
        order = np.argsort(np.array(self.names, dtype=object), kind="stable")
        self._rank = np.empty(len(self.names), dtype=np.int64)
        self._rank[order] = np.arange(len(self.names))

    def search(self, query: str, limit: int = 50) -> list[str]:
        """Return the names of the best documents that share a term with the query, best first."""
        scores = np.zeros(len(self.names))
        found = np.zeros(len(self.names), dtype=bool)
        for word, times in Counter(analyse(query)).items():
            if word not in self._postings:
                continue
            documents, counts = self._postings[word]
            number = len(documents)
            idf = np.float32(np.log(1 + (len(self.names) - number + 0.5) / (number + 0.5)))
            weight = np.float32(times) * idf
            scores[documents] += weight - weight / (np.float32(1) + counts * self._inverse[documents])
            found[documents] = True
        hits = np.flatnonzero(found)
        single = scores[hits].astype(np.float32)
        best = np.lexsort((self._rank[hits], -single))[:limit]
        return [self.names[hit] for hit in hits[best]]


def _kept_length(length: int) -> int:
    """Return a length after Lucene's one-byte code (SmallFloat.intToByte4): exact below 40, then 4 bits."""
    if length < 40:
        return length
    rest = length - 24
    shift = max(0, rest.bit_length() - 4)
    return 24 + (rest >> shift << shift)

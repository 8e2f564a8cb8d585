"""Lexicographic order of sequences, and the common prefixes of neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


class PrefixOrder:
    """Sequences in lexicographic order: none before another has a longer prefix in common with it than the last.

    Attributes:
        rows: (N,) numbers of the sequences, in order.
        lengths: (N,) tokens of each sequence, by number.
    """

    def __init__(self, sequences: Sequence[np.ndarray]):
        keys = [sequence.astype(">u4").tobytes() for sequence in sequences]  # compare as the token ids do
        order = sorted(range(len(keys)), key=keys.__getitem__)
        self.rows, self.lengths = np.array(order, dtype=np.int64), np.array(list(map(len, sequences)), dtype=np.int64)
        self._places = self.rows.argsort()
        pairs = zip(order, order[1:])
        self._overlaps = np.array([0, *(common_prefix(sequences[a], sequences[b]) for a, b in pairs)])[: len(order)]

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rows in order, their lengths, and the tokens that each has in common with the one before it."""
        rows = self.rows[np.sort(self._places[rows])]
        places, overlaps = self._places[rows], np.zeros(len(rows), dtype=np.int64)
        if len(rows) > 1:  # the least of all neighbours between two
            overlaps[1:] = np.minimum.reduceat(self._overlaps[: places[-1] + 1], places[:-1] + 1)
        return rows, self.lengths[rows], overlaps

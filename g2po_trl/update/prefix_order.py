"""Lexicographic order of all ranks' sequences, and the common prefixes of neighbours.

A rank sends its sequences in order, each without the tokens that it has in common with the one before. All ranks
merge them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .packing import common_prefix, lexicographic

_NOTHING = np.zeros(0, dtype=np.int32)


@dataclass
class Ordering:
    """Sequences in lexicographic order; equal ones share a place.

    Args:
        places: (N,) place of each sequence.
        overlaps: (places,) tokens that the sequence of a place has in common with that of the place before.
    """

    places: np.ndarray
    overlaps: np.ndarray

    @classmethod
    def from_sequences(cls, sequences: Sequence[np.ndarray]) -> Ordering:
        """Return the ordering of sequences whose tokens are known."""
        order = lexicographic(sequences)
        overlaps = [0, *(common_prefix(sequences[a], sequences[b]) for a, b in zip(order, order[1:]))]
        return cls.from_neighbours(order, overlaps[: len(order)], [len(sequence) for sequence in sequences])

    @classmethod
    def from_neighbours(cls, order: Sequence[int], overlaps: Sequence[int], lengths: Sequence[int]) -> Ordering:
        """Return the ordering, given numbers of sequences in order and the tokens each shares with its predecessor."""
        order, overlaps = np.asarray(order, dtype=np.int64), np.asarray(overlaps, dtype=np.int64)
        sizes = np.asarray(lengths, dtype=np.int64)[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = overlaps[1:] < np.maximum(sizes[1:], sizes[:-1])
        places = np.empty(len(order), dtype=np.int64)
        places[order] = np.cumsum(new) - 1
        return cls(places, overlaps[new])

    def sort(self, rows: Sequence[int]) -> np.ndarray:
        """Return the rows sorted by place; equal sequences keep their order."""
        rows = np.asarray(rows, dtype=np.int64)
        return rows[np.argsort(self.places[rows], kind="stable")]

    def neighbours(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return (rows,) tokens that each row has in common with its predecessor; 0 for the first.

        Args:
            rows: sorted by `sort`.
            lengths: (N,) tokens of all sequences.
        """
        places = self.places[rows]
        if len(places) < 2:
            return np.zeros(len(places), dtype=np.int64)
        between = np.append(self.overlaps[: places[-1] + 1], np.iinfo(np.int64).max)
        smallest = np.minimum.reduceat(between, places[:-1] + 1)
        return np.append(0, np.where(places[1:] == places[:-1], lengths[rows[1:]], smallest))


@dataclass
class SortedSequences:
    """A rank's sequences in lexicographic order, without the tokens that each shares with its predecessor.

    Args:
        rows, lengths, shared: (n,) number of each sequence, its tokens, and how many of them are its predecessor's.
        tokens: the other tokens, one sequence after another.
    """

    rows: np.ndarray
    lengths: np.ndarray
    shared: np.ndarray
    tokens: np.ndarray

    @classmethod
    def from_sequences(cls, sequences: Sequence[np.ndarray]) -> SortedSequences:
        order = lexicographic(sequences)
        shared = [0, *(common_prefix(sequences[a], sequences[b]) for a, b in zip(order, order[1:]))][: len(order)]
        tokens = [_NOTHING, *(sequences[row][common:] for row, common in zip(order, shared))]
        lengths = [len(sequences[row]) for row in order]
        return cls(
            *(np.array(numbers, dtype=np.int32) for numbers in (order, lengths, shared)), np.concatenate(tokens)
        )

    def each(self, first_row: int) -> Iterator[tuple[bytes, int, np.ndarray]]:
        """Yield (sort key, number counted from `first_row`, token ids) of each sequence."""
        sequence, start = _NOTHING, 0
        for row, length, common in zip(self.rows.tolist(), self.lengths.tolist(), self.shared.tolist()):
            stop = start + length - common
            sequence, start = np.concatenate([sequence[:common], self.tokens[start:stop]]), stop
            yield sequence.astype(">u4").tobytes(), first_row + row, sequence


def order_over_ranks(sequences: Sequence[np.ndarray], gather: Callable[[Any], list[Any]]) -> Ordering:
    """Return the ordering of all ranks' sequences, numbered by rank and then as given. All ranks call it together."""
    parts = gather(SortedSequences.from_sequences(sequences))
    firsts = np.cumsum([0, *(len(part.rows) for part in parts)]).tolist()
    order, overlaps, before = [], [], _NOTHING
    lengths = np.zeros(firsts[-1], dtype=np.int64)
    merged = heapq.merge(*(part.each(first) for part, first in zip(parts, firsts)), key=lambda item: item[:2])
    for _, row, sequence in merged:
        order.append(row)
        overlaps.append(common_prefix(before, sequence))
        lengths[row], before = len(sequence), sequence
    return Ordering.from_neighbours(order, overlaps, lengths)

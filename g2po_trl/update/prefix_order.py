"""Lexicographic order of all ranks' sequences, and the common prefixes of neighbours.

Each rank sorts one range of all sequences, which the others send; the ranks then exchange only numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..utils.ranks import all_to_all

_SAMPLES = 8  # sequences of each rank from which the ranges are chosen


def sort_key(sequence: np.ndarray) -> bytes:
    """Return bytes that compare as the token ids do."""
    return sequence.astype(">u4").tobytes()


def lexicographic(sequences: Sequence[np.ndarray]) -> list[int]:
    """Return indices in lexicographic order: no earlier sequence shares a longer prefix than the predecessor."""
    return sorted(range(len(sequences)), key=lambda i: sort_key(sequences[i]))


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


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
        return cls.from_neighbours(order, _overlaps(sequences, order), [len(sequence) for sequence in sequences])

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


def _overlaps(sequences: Sequence[np.ndarray], order: Sequence[int]) -> list[int]:
    """Return the tokens that each sequence has in common with the one before it in the order; 0 for the first."""
    return [0, *(common_prefix(sequences[a], sequences[b]) for a, b in zip(order, order[1:]))][: len(order)]


def order_over_ranks(
    sequences: Sequence[np.ndarray], rank: int, gather: Callable[[Any], list[Any]], device: torch.device
) -> Ordering:
    """Return the ordering of all ranks' sequences, numbered by rank and then as given. All ranks call it together.

    Args:
        sequences: (tokens,) int32 each, those of this rank.
        rank: this process.
        gather: returns the objects of all ranks, by rank.
        device: device of the tensors that ranks exchange.
    """
    keys = [sort_key(sequence) for sequence in sequences]
    counts, samples = zip(*gather((len(keys), sorted(keys)[:: len(keys) // _SAMPLES + 1])))
    sampled = sorted(key for of_rank in samples for key in of_rank)
    bounds = [sampled[n * len(sampled) // len(counts)] for n in range(1, len(counts))] if sampled else []
    ranges: list[list[int]] = [[] for _ in counts]
    for row, key in enumerate(keys):
        ranges[bisect_right(bounds, key)].append(row)
    parts = []
    for rows in ranges:
        header = np.array([len(rows), *rows, *(len(sequences[row]) for row in rows)], dtype=np.int32)
        parts.append(np.concatenate([header, *(sequences[row] for row in rows)]))
    # The sequences of one range, in the order of their numbers; equal ones are all in the same range.
    numbers, own = np.zeros(0, dtype=np.int64), []
    first_rows = np.cumsum([0, *counts])
    for first_row, part in zip(first_rows, all_to_all(parts, rank, gather, device)):
        rows, lengths, tokens = np.split(part[1:], [part[0], 2 * part[0]])
        numbers = np.append(numbers, first_row + rows)
        own += np.split(tokens, np.cumsum(lengths))[:-1]
    order = lexicographic(own)
    found = np.array([numbers[order], [len(own[i]) for i in order], _overlaps(own, order)], dtype=np.int32)
    shares = gather((found, [own[i] for i in order[:1] + order[-1:]]))  # with the first and last sequence of each
    before = np.zeros(0, dtype=np.int32)
    for of_range, edges in shares:
        if edges:
            of_range[2, 0], before = common_prefix(before, edges[0]), edges[1]
    numbers, sizes, overlaps = np.concatenate([of_range for of_range, _ in shares], axis=1)
    lengths = np.empty(first_rows[-1], dtype=np.int64)
    lengths[numbers] = sizes
    return Ordering.from_neighbours(numbers, overlaps, lengths)

"""The lexicographic order of all ranks' sequences and what neighbours in it have in common, without their tokens.

A rank sends a hash of the first 32, 64, 96, … tokens of each of its sequences, once where several begin alike. Where
hashes are the same, so are the beginnings: all ranks then know where sequences part, to 32 tokens. At those places
alone the next 32 tokens are sent too, and where sequences part is known to the token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from .packing import common_prefix, lexicographic

_BLOCK = 32


@dataclass
class Ordering:
    """Sequences in lexicographic order; equal ones share a place.

    Args:
        places: (N,) place of each sequence.
        overlaps: (places,) how many tokens the sequence of a place has in common with that of the place before.
    """

    places: np.ndarray
    overlaps: np.ndarray

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray]) -> Ordering:
        """That of sequences at hand."""
        order = lexicographic(sequences)
        overlaps = [0, *(common_prefix(sequences[a], sequences[b]) for a, b in zip(order, order[1:]))]
        return cls.from_neighbours(order, overlaps[: len(order)], [len(sequence) for sequence in sequences])

    @classmethod
    def from_neighbours(cls, order: Sequence[int], overlaps: Sequence[int], lengths: Sequence[int]) -> Ordering:
        """From the numbers of sequences in order, and what each has in common with the one before."""
        order, overlaps = np.asarray(order, dtype=np.int64), np.asarray(overlaps, dtype=np.int64)
        sizes = np.asarray(lengths, dtype=np.int64)[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = overlaps[1:] < np.maximum(sizes[1:], sizes[:-1])
        places = np.empty(len(order), dtype=np.int64)
        places[order] = np.cumsum(new) - 1
        return cls(places, overlaps[new])

    def sort(self, rows: Sequence[int]) -> np.ndarray:
        """The rows by place; equal sequences in the order given."""
        rows = np.asarray(rows, dtype=np.int64)
        return rows[np.argsort(self.places[rows], kind="stable")]

    def neighbours(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """(rows,) tokens that each of these sorted rows has in common with the one before; 0 for the first.

        Args:
            lengths: (N,) of all sequences.
        """
        places = self.places[rows]
        if len(places) < 2:
            return np.zeros(len(places), dtype=np.int64)
        between = np.append(self.overlaps[: places[-1] + 1], np.iinfo(np.int64).max)
        smallest = np.minimum.reduceat(between, places[:-1] + 1)
        return np.append(0, np.where(places[1:] == places[:-1], lengths[rows[1:]], smallest))


@dataclass
class _Beginnings:
    """Hashes of a rank's sequences, in their order: what a sequence has in common with the one before is left out.

    Args:
        rows, lengths: (n,) number of each sequence, and its tokens.
        known: (n,) how many of its hashes are those of the sequence before.
        hashes: of each sequence the others, one after another: of its first 32, 64, … tokens, and of the whole.
    """

    rows: np.ndarray
    lengths: np.ndarray
    known: np.ndarray
    hashes: np.ndarray

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray]) -> _Beginnings:
        order, known, hashes, before = lexicographic(sequences), [], [], None
        for row in order:
            sequence = sequences[row]
            common = 0 if before is None else common_prefix(before, sequence)
            equal = before is not None and common == len(before) == len(sequence)
            known.append(_num_hashes(common) if equal else common // _BLOCK)
            digest = xxhash.xxh3_64(sequence[: known[-1] * _BLOCK].astype(np.int32).tobytes())
            for start in range(known[-1] * _BLOCK, len(sequence), _BLOCK):
                digest.update(sequence[start : start + _BLOCK].astype(np.int32).tobytes())
                hashes.append(digest.intdigest())
            before = sequence
        lengths = np.array([len(sequences[row]) for row in order], dtype=np.int32)
        return cls(
            np.array(order, dtype=np.int32),
            lengths,
            np.array(known, dtype=np.int32),
            np.array(hashes, dtype=np.uint64),
        )


def order_over_ranks(sequences: Sequence[np.ndarray], rank: int, gather: Callable[[Any], list[Any]]) -> Ordering:
    """The ordering of all ranks' sequences, numbered by rank and then as given; all ranks call it together.

    Args:
        sequences: those of this rank.
        gather: takes an object of each rank and returns them all, by rank, on each.
    """
    ranks: list[_Beginnings] = gather(_Beginnings.of(sequences))
    first_row = np.cumsum([0, *(len(beginnings.rows) for beginnings in ranks)])
    # Each hash that was sent is an edge of a prefix tree, from the beginning 32 tokens shorter (0: none).
    parents, depths, owners, ended = [], [], [], []
    for r, beginnings in enumerate(ranks):
        path: list[int] = []
        hashes, sent = beginnings.hashes.tolist(), 0
        for row, length, known in zip(*(a.tolist() for a in (beginnings.rows, beginnings.lengths, beginnings.known))):
            del path[known:]
            for depth in range(known, _num_hashes(length)):
                parents.append(path[-1] if path else 0)
                depths.append(depth)
                owners.append((r, row))
                path.append(hashes[sent])
                sent += 1
            ended.append(path[-1] if path else 0)
    hashes = np.concatenate([beginnings.hashes for beginnings in ranks])
    nodes, first, node_of = np.unique(hashes, return_index=True, return_inverse=True)
    parents = np.array(parents, dtype=np.uint64)[first]
    # Where a tree branches, which of several edges a sequence takes decides its place; to end is one of them.
    branches, count = np.unique(np.append(parents, np.unique(np.array(ended, dtype=np.uint64))), return_counts=True)
    deciding = np.isin(parents, branches[count > 1])
    edges = np.flatnonzero(deciding).tolist()
    own = [first[edge] for edge in edges if owners[first[edge]][0] == rank]
    blocks = [sequences[owners[i][1]][depths[i] * _BLOCK : (depths[i] + 1) * _BLOCK].astype(np.int32) for i in own]
    sent = gather((np.array([len(block) for block in blocks], dtype=np.uint8), np.concatenate([*blocks, _NOTHING])))
    queues = [iter(np.split(tokens, np.cumsum(sizes))) for sizes, tokens in sent]
    block_of = {edge: next(queues[owners[first[edge]][0]]) for edge in edges}

    by_tokens = sorted(edges, key=lambda edge: (int(parents[edge]), block_of[edge].astype(">u4").tobytes()))
    step_of = np.full(len(nodes), -1, dtype=np.int64)  # of a deciding edge, its place among its siblings (and others)
    step_of[by_tokens] = np.arange(len(by_tokens))
    overlap_of_step = [0] * len(by_tokens)
    for step, (before, edge) in enumerate(zip(by_tokens, by_tokens[1:]), start=1):
        if parents[before] == parents[edge]:
            overlap_of_step[step] = common_prefix(block_of[before], block_of[edge])

    # A sequence's key: its deciding edges. Keys have the order of sequences.
    steps = step_of[node_of].tolist()
    keys: list[bytes] = [b""] * first_row[-1]
    decided: list[list[tuple[int, int]]] = [[]] * first_row[-1]
    lengths = np.zeros(first_row[-1], dtype=np.int64)
    sent = 0
    for r, beginnings in enumerate(ranks):
        taken: list[tuple[int, int]] = []
        for row, length, known in zip(*(a.tolist() for a in (beginnings.rows, beginnings.lengths, beginnings.known))):
            number = first_row[r] + row
            new = _num_hashes(length) - known
            taken = [(depth, step) for depth, step in taken if depth < known]
            taken += [(known + i, step) for i, step in enumerate(steps[sent : sent + new]) if step >= 0]
            sent += new
            keys[number] = np.array([step for _, step in taken], dtype=">u4").tobytes()
            decided[number], lengths[number] = taken, length
    order = sorted(range(len(keys)), key=keys.__getitem__)
    overlaps = [0]
    for before, row in zip(order, order[1:]):
        same = common_prefix(*(np.frombuffer(keys[number], dtype=">u4") for number in (before, row)))
        if same == len(decided[row]):  # the same sequence
            overlaps.append(int(lengths[row]))
        else:
            depth, step = decided[row][same]
            ends = same == len(decided[before])
            overlaps.append(depth * _BLOCK + (0 if ends else overlap_of_step[step]))
    return Ordering.from_neighbours(order, overlaps[: len(order)], lengths)


def _num_hashes(length: int) -> int:
    return -(-length // _BLOCK)


_NOTHING = np.zeros(0, dtype=np.int32)

"""The lexicographic order of all ranks' sequences and what neighbours in it have in common, without their tokens.

A rank sends a hash of the first 32, 64, 96, … tokens of each of its sequences, once where several begin alike. Where
hashes are the same, so are the beginnings: all ranks then know where sequences part, to 32 tokens. At those places
alone the next 32 tokens are sent too, and where sequences part is known to the token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
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
    def from_sequences(cls, sequences: Sequence[np.ndarray]) -> Ordering:
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
class PrefixHashes:
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
    def from_sequences(cls, sequences: Sequence[np.ndarray]) -> PrefixHashes:
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

    def each(self) -> Iterator[tuple[int, int, int]]:
        """(row, length, known) of each sequence."""
        return zip(self.rows.tolist(), self.lengths.tolist(), self.known.tolist())


@dataclass
class PrefixTree:
    """The prefix tree of all ranks' sequences, by 32 tokens. Each hash that was sent is an edge, from the beginning
    32 tokens shorter (0: none).

    Args:
        ranks: what each has sent.
        parents: (E,) uint64, by edge. first: (E,) number of the hash that was sent first of an edge.
        edge_of: (H,) edge of each hash that was sent.
        senders, rows, depths: (H,) of each hash: its rank, the sequence's number there, tokens before it by 32.
        starts: (N + 1,) of each sequence, in the order sent, its first hash that was sent.
        deciding: edges of places where the tree branches. Which of them a sequence takes decides its place; to end is
            one of them.
    """

    ranks: Sequence[PrefixHashes]
    parents: np.ndarray
    first: np.ndarray
    edge_of: np.ndarray
    senders: np.ndarray
    rows: np.ndarray
    depths: np.ndarray
    starts: np.ndarray
    deciding: list[int]

    @classmethod
    def from_hashes(cls, ranks: Sequence[PrefixHashes]) -> PrefixTree:
        known = np.concatenate([beginnings.known for beginnings in ranks])
        sent = -(-np.concatenate([beginnings.lengths for beginnings in ranks]) // _BLOCK) - known
        starts = np.append(0, np.cumsum(sent, dtype=np.int64))
        hashes = np.concatenate([beginnings.hashes for beginnings in ranks])
        # A hash's parent is the one that was sent before; a sequence's first, one of the sequences before.
        parents = np.append(np.uint64(0), hashes)[: len(hashes)]
        ended = np.zeros(len(sent), dtype=np.uint64)
        n = 0
        for beginnings in ranks:
            path = np.zeros(0, dtype=np.uint64)
            for _, _, depth in beginnings.each():
                if sent[n]:
                    parents[starts[n]] = path[depth - 1] if depth else 0
                    path = np.concatenate([path[:depth], hashes[starts[n] : starts[n + 1]]])
                ended[n] = path[-1] if len(path) else 0
                n += 1
        _, first, edge_of = np.unique(hashes, return_index=True, return_inverse=True)
        of_edge = parents[first]
        branches, count = np.unique(np.append(of_edge, np.unique(ended)), return_counts=True)
        deciding = np.flatnonzero(np.isin(of_edge, branches[count > 1])).tolist()
        senders = np.repeat(np.arange(len(ranks), dtype=np.int32), [len(beginnings.rows) for beginnings in ranks])
        rows = np.concatenate([beginnings.rows for beginnings in ranks])
        depths = np.arange(len(hashes)) - np.repeat(starts[:-1] - known, sent)
        return cls(
            ranks, of_edge, first, edge_of, np.repeat(senders, sent), np.repeat(rows, sent), depths, starts, deciding
        )

    def deciding_tokens(self, sequences: Sequence[np.ndarray], rank: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of those deciding edges that this rank was the first to send: their numbers, and all of them."""
        sent = self.first[self.deciding]
        blocks = [
            sequences[self.rows[i]][self.depths[i] * _BLOCK : (self.depths[i] + 1) * _BLOCK].astype(np.int32)
            for i in sent[self.senders[sent] == rank].tolist()
        ]
        return np.array([len(block) for block in blocks], dtype=np.uint8), np.concatenate([*blocks, _NOTHING])

    def order(self, deciding_tokens: Sequence[tuple[np.ndarray, np.ndarray]]) -> Ordering:
        """The ordering of all sequences, numbered by rank and then as given; from `deciding_tokens` of each rank."""
        edges, parents = self.deciding, self.parents
        queues = [iter(np.split(tokens, np.cumsum(sizes))) for sizes, tokens in deciding_tokens]
        senders = self.senders[self.first[edges]].tolist()
        block_of = {edge: next(queues[sender]) for edge, sender in zip(edges, senders)}
        by_tokens = sorted(edges, key=lambda edge: (int(parents[edge]), block_of[edge].astype(">u4").tobytes()))
        # Of a deciding edge, its place among its siblings (and others).
        step_of = np.full(len(parents), -1, dtype=np.int64)
        step_of[by_tokens] = np.arange(len(by_tokens))
        overlap_of_step = [0] * len(by_tokens)
        for step, (before, edge) in enumerate(zip(by_tokens, by_tokens[1:]), start=1):
            if parents[before] == parents[edge]:
                overlap_of_step[step] = common_prefix(block_of[before], block_of[edge])

        # A sequence's key: its deciding edges. Keys have the order of sequences.
        step_of_hash = step_of[self.edge_of]
        deciding = np.flatnonzero(step_of_hash >= 0)
        steps, depths = step_of_hash[deciding].tolist(), self.depths[deciding].tolist()
        new = np.searchsorted(deciding, self.starts).tolist()
        number, first_row = 0, 0
        keys: list[list[int]] = [[]] * (len(new) - 1)
        depths_of: list[list[int]] = [[]] * len(keys)
        lengths = np.zeros(len(keys), dtype=np.int64)
        for beginnings in self.ranks:
            key: list[int] = []
            key_depths: list[int] = []
            for row, length, known in beginnings.each():
                kept = bisect_left(key_depths, known)
                key = key[:kept] + steps[new[number] : new[number + 1]]
                key_depths = key_depths[:kept] + depths[new[number] : new[number + 1]]
                keys[first_row + row], depths_of[first_row + row] = key, key_depths
                lengths[first_row + row] = length
                number += 1
            first_row += len(beginnings.rows)
        order = sorted(range(len(keys)), key=keys.__getitem__)
        overlaps = [0]
        for before, row in zip(order, order[1:]):
            key, key_before = keys[row], keys[before]
            same = next((i for i, (a, b) in enumerate(zip(key_before, key)) if a != b), min(len(key_before), len(key)))
            if same == len(key):  # the same sequence
                overlaps.append(int(lengths[row]))
            else:
                ends = same == len(key_before)
                overlaps.append(depths_of[row][same] * _BLOCK + (0 if ends else overlap_of_step[key[same]]))
        return Ordering.from_neighbours(order, overlaps[: len(order)], lengths)


def order_over_ranks(sequences: Sequence[np.ndarray], rank: int, gather: Callable[[Any], list[Any]]) -> Ordering:
    """The ordering of all ranks' sequences, numbered by rank and then as given; all ranks call it together.

    Args:
        sequences: those of this rank.
        gather: takes an object of each rank and returns them all, by rank, on each.
    """
    tree = PrefixTree.from_hashes(gather(PrefixHashes.from_sequences(sequences)))
    return tree.order(gather(tree.deciding_tokens(sequences, rank)))


def _num_hashes(length: int) -> int:
    return -(-length // _BLOCK)


_NOTHING = np.zeros(0, dtype=np.int32)

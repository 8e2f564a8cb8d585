"""Lexicographic order of all ranks' sequences and the common prefixes of neighbours, without sending their tokens.

A rank sends a hash of the first 32, 64, 96, … tokens of each of its sequences, each prefix once. Equal hashes mean
equal prefixes, so all ranks know to 32 tokens where sequences differ. At those places alone the next 32 tokens are
sent too, which gives the place to the token.
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
class PrefixHashes:
    """Hashes of a rank's sequences in lexicographic order, without those of prefixes shared with the predecessor.

    Args:
        rows, lengths: (n,) number of each sequence, and its tokens.
        known: (n,) number of its hashes that are its predecessor's.
        hashes: the other hashes of each sequence, one after another: of its first 32, 64, … tokens, and of the whole.
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
            known.append(-(-common // _BLOCK) if equal else common // _BLOCK)
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
        """Yield (row, length, known) of each sequence."""
        return zip(self.rows.tolist(), self.lengths.tolist(), self.known.tolist())


@dataclass
class PrefixTree:
    """Prefix tree of all ranks' sequences, in blocks of 32 tokens.

    Each hash that was sent is an edge, from the prefix 32 tokens shorter (0: none).

    Args:
        ranks: the hashes of each rank.
        parents: (E,) uint64, by edge.
        first: (E,) number of the first hash sent of each edge.
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
        known = np.concatenate([prefix_hashes.known for prefix_hashes in ranks])
        sent = -(-np.concatenate([prefix_hashes.lengths for prefix_hashes in ranks]) // _BLOCK) - known
        starts = np.append(0, np.cumsum(sent, dtype=np.int64))
        hashes = np.concatenate([prefix_hashes.hashes for prefix_hashes in ranks])
        # A hash's parent is the one that was sent before; a sequence's first, one of the sequences before.
        parents = np.append(np.uint64(0), hashes)[: len(hashes)]
        ended = np.zeros(len(sent), dtype=np.uint64)
        n = 0
        for prefix_hashes in ranks:
            path = np.zeros(0, dtype=np.uint64)
            for _, _, depth in prefix_hashes.each():
                if sent[n]:
                    parents[starts[n]] = path[depth - 1] if depth else 0
                    path = np.concatenate([path[:depth], hashes[starts[n] : starts[n + 1]]])
                ended[n] = path[-1] if len(path) else 0
                n += 1
        _, first, edge_of = np.unique(hashes, return_index=True, return_inverse=True)
        of_edge = parents[first]
        branches, count = np.unique(np.append(of_edge, np.unique(ended)), return_counts=True)
        deciding = np.flatnonzero(np.isin(of_edge, branches[count > 1])).tolist()
        senders = np.repeat(
            np.arange(len(ranks), dtype=np.int32), [len(prefix_hashes.rows) for prefix_hashes in ranks]
        )
        rows = np.concatenate([prefix_hashes.rows for prefix_hashes in ranks])
        depths = np.arange(len(hashes)) - np.repeat(starts[:-1] - known, sent)
        return cls(
            ranks, of_edge, first, edge_of, np.repeat(senders, sent), np.repeat(rows, sent), depths, starts, deciding
        )

    def deciding_tokens(self, sequences: Sequence[np.ndarray], rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of the deciding edges that this rank sent first: numbers of tokens, and all tokens."""
        sent = self.first[self.deciding]
        blocks = [
            sequences[self.rows[i]][self.depths[i] * _BLOCK : (self.depths[i] + 1) * _BLOCK].astype(np.int32)
            for i in sent[self.senders[sent] == rank].tolist()
        ]
        return np.array([len(block) for block in blocks], dtype=np.uint8), np.concatenate([*blocks, _NOTHING])

    def order(self, deciding_tokens: Sequence[tuple[np.ndarray, np.ndarray]]) -> Ordering:
        """Return the ordering of all sequences, numbered by rank and then as given, from all deciding tokens."""
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
        for prefix_hashes in self.ranks:
            key: list[int] = []
            key_depths: list[int] = []
            for row, length, known in prefix_hashes.each():
                kept = bisect_left(key_depths, known)
                key = key[:kept] + steps[new[number] : new[number + 1]]
                key_depths = key_depths[:kept] + depths[new[number] : new[number + 1]]
                keys[first_row + row], depths_of[first_row + row] = key, key_depths
                lengths[first_row + row] = length
                number += 1
            first_row += len(prefix_hashes.rows)
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
    """Return the ordering of all ranks' sequences, numbered by rank and then as given. All ranks call it together."""
    tree = PrefixTree.from_hashes(gather(PrefixHashes.from_sequences(sequences)))
    return tree.order(gather(tree.deciding_tokens(sequences, rank)))


_NOTHING = np.zeros(0, dtype=np.int32)

"""Trees: tokens that sequences have in common pass through the model once.

Sorted by token ids, a sequence (prompt and completion) begins like the one before it. Laid out in this order without
what it repeats, it adds a *branch* to the row:

    sequences   A B c d     A B c e f     A g         A─┬─B─c─┬─d
                                                        │     └─e─f
    row         A B c d | e f | g                       └─g
    position    0 1 2 3   3 4   1

    branch      queries     keys: its path
    1           A B c d     A B c d                   causal from the end: the last query sees all keys, the one
    2           e f         A B c e f                 before it all but the last, and so on
    3           g           A g

So every hidden state equals that of the sequence in a row of its own, and so do the loss and its gradient, up to the
order of floating-point sums. A sequence that begins with the whole one before it, like a turn of a conversation, makes
that one's branch longer. Layers other than attention fork a cache in place of branches, see `forks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .forks import Call, calls, lay_out_calls

LAYOUTS = ("shared", "padded")  # `shared` becomes `forked` for models that cannot attend by branches

_KEYS_A_TOKEN = 8  # at most, of a tree's limit of tokens: each layer keeps gathered keys for its backward pass
_MOST_FORKS = 128  # sequences of a forked row: `forks.segments` recurses once a fork


def round_up(length: int, multiple: int | None) -> int:
    """Return the least multiple that is not less; without one, the length."""
    return -(-length // (multiple or 1)) * (multiple or 1)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def measure(sequences: Sequence[np.ndarray], rows: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return rows, the tokens of each, and how many of them it has in common with the one before it."""
    overlaps = [0, *(common_prefix(sequences[a], sequences[b]) for a, b in pairwise(rows))][: len(rows)]
    return tuple(np.array(of, dtype=np.int64) for of in (rows, [len(sequences[row]) for row in rows], overlaps))


def in_order(sequences: Sequence[np.ndarray], rows: Iterable[int]) -> tuple[np.ndarray, ...]:
    """Return what `measure` does, of rows in lexicographic order: each has most in common with the one before it."""
    # Bytes of big-endian numbers compare as the token ids do.
    return measure(sequences, sorted(rows, key=lambda row: (sequences[row].astype(">u4").tobytes(), row)))


@dataclass(frozen=True)
class Tree:
    """Sequences of one row of the model, in the order of the layout."""

    rows: list[int]  # their numbers
    shared: list[int]  # how many of the first tokens of each the one before it has laid out
    num_tokens: int  # of the row; with `calls`, of all passes, padding included
    calls: list[Call] | None = None  # forward passes of a forked row


def one_each(rows: Sequence[int], lengths: Sequence[int]) -> list[Tree]:
    """Return a tree for each sequence, as padded rows have them."""
    return [Tree([row], [0], size) for row, size in zip(rows, lengths)]


def grow(
    rows: Sequence[int], lengths: Sequence[int], overlaps: Sequence[int], max_tokens: int, fork_cost: int | None = None
) -> list[Tree]:
    """Return sequences, in the order given, in trees that repeat the fewest tokens; of equal ones, the fewest trees.

    Rows, lengths and overlaps are those of `in_order`, and `fork_cost` that of forked rows. A tree has at most
    `max_tokens`; one with a longer sequence may have 1.5 times that one's.
    """
    rows, lengths, overlaps = (np.asarray(numbers, dtype=np.int64) for numbers in (rows, lengths, overlaps))
    before = np.append(0, lengths)[:-1]
    tokens, keys = np.cumsum(lengths - overlaps), np.cumsum(lengths - before * (overlaps == before))
    limits = np.where(lengths > max_tokens, (1.5 * lengths).astype(np.int64), max_tokens)
    # The least cost of the sequences before each: tokens repeated where a tree begins, and one for each tree.
    costs, first_of, first = np.zeros(len(lengths) + 1, dtype=np.int64), [], 0
    for last in range(len(lengths)):
        while lengths[first] - tokens[first] + tokens[last] > limits.max() and first < last:
            first += 1
        of = slice(first, last + 1)
        most = np.maximum.accumulate(limits[of][::-1])[::-1]  # of a tree from each of these to the last
        fits = lengths[of] - tokens[of] + tokens[last] <= most
        fits &= lengths[of] - keys[of] + keys[last] <= _KEYS_A_TOKEN * most
        fits[-1] = True
        reached = np.where(fits, costs[of] + overlaps[of], np.iinfo(np.int64).max - 1)
        first_of.append(first + int(reached.argmin()))
        costs[last + 1] = reached.min() + 1
    trees, stop = [], len(lengths)
    while stop:
        start = first_of[stop - 1]
        of = (numbers[start:stop].tolist() for numbers in (rows, overlaps, lengths))
        trees[:0] = _trees(*of, max_tokens, fork_cost)
        stop = start
    return trees


def _trees(
    rows: list[int], shared: list[int], lengths: list[int], max_tokens: int, fork_cost: int | None
) -> list[Tree]:
    """Return the tree of sequences; if forked passes with their padding do not fit, those of their halves."""
    shared = [0, *shared[1:]]
    if fork_cost is None:
        return [Tree(rows, shared, sum(lengths) - sum(shared))]
    if len(rows) <= _MOST_FORKS:
        made = calls(lengths, shared, fork_cost)
        num_tokens = sum(math.prod(call.shape) for call in made)
        if num_tokens <= max_tokens or len(rows) == 1:
            return [Tree(rows, shared, num_tokens, made)]
    parts = [(of[: len(rows) // 2], of[len(rows) // 2 :]) for of in (rows, shared, lengths)]
    return [tree for part in zip(*parts) for tree in _trees(*part, max_tokens, fork_cost)]


def lay_out(
    trees: Sequence[Tree],
    sequences: Sequence[np.ndarray],
    num_scored: Sequence[int],
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
) -> dict[str, Any]:
    """Return what the model reads of a micro-batch: one tree, or sequences that are padded, one a tree.

    `sequences` are token ids by number, and `num_scored` how many at the end of each are scored.

    Returns:
        `row_ids` (R, L), R being 1 for a tree; `scored_from` (M,), the place in the flattened rows of the hidden state
        that predicts each scored token, and `scored_ids` (M,), the token: over trees, sequences, tokens. If no token
        is scored, both have one entry (0 and -100). For a tree with several branches also `row_positions` (1, L),
        `branches`, the numbers of queries and keys of each, and `paths` (K,), the places of all their keys. For a
        forked row, `forks`: shapes and parents of its passes.
    """
    rows = [row for tree in trees for row in tree.rows]
    own, made = [sequences[row] for row in rows], {}
    if len(trees) == 1 and trees[0].calls is not None:
        ids, places = lay_out_calls(trees[0].calls, own, pad_token_id)
        made["forks"] = [(*call.shape, call.parent) for call in trees[0].calls]
    elif len(trees) == 1 and pad_to_multiple_of is None:
        ids, places, made = _lay_out_branches(own, trees[0].shared)
    else:
        width = round_up(max(map(len, own), default=1), pad_to_multiple_of)
        ids = np.full((max(len(own), 1), width), pad_token_id)
        for row, sequence in enumerate(own):
            ids[row, : len(sequence)] = sequence
        places = [row * width + np.arange(len(sequence)) for row, sequence in enumerate(own)]
    scored = [(path, of, len(of) - num_scored[row]) for path, of, row in zip(places, own, rows)]
    found_from = np.concatenate([path[first - 1 : len(of) - 1] for path, of, first in scored] or [[]])
    found_ids = np.concatenate([of[first:] for _, of, first in scored] or [[]])
    if not len(found_ids):
        found_from, found_ids = np.zeros(1), np.full(1, -100)
    made |= {"row_ids": np.atleast_2d(ids), "scored_from": found_from, "scored_ids": found_ids}
    arrays = {name: torch.from_numpy(of.astype(np.int64)) for name, of in made.items() if isinstance(of, np.ndarray)}
    return made | arrays


def _lay_out_branches(
    sequences: Sequence[np.ndarray], shared: Sequence[int]
) -> tuple[np.ndarray, list[np.ndarray], dict[str, Any]]:
    """Return token ids (N,), places of each sequence's tokens, and what several branches need; see `lay_out`."""
    stops, paths, places = [], [], []  # stops and paths of branches
    path, stop = np.zeros(0, dtype=np.int64), 0
    for sequence, common in zip(sequences, shared):
        start, stop = stop, stop + len(sequence) - common
        path = np.concatenate([path[:common], np.arange(start, stop)])
        places.append(path)
        if paths and common == len(paths[-1]):  # it continues the last branch
            paths[-1], stops[-1] = path, stop
        elif stop > start:
            paths.append(path)
            stops.append(stop)
    ids = np.concatenate([sequence[common:] for sequence, common in zip(sequences, shared)])
    if len(paths) == 1:
        return ids, places, {}
    positions = np.concatenate([np.arange(common, len(sequence)) for sequence, common in zip(sequences, shared)])
    sizes = list(zip(np.diff(stops, prepend=0).tolist(), map(len, paths)))
    return ids, places, {"branches": sizes, "row_positions": positions[None], "paths": np.concatenate(paths)}


def is_exact(layout: dict[str, Any], sequences: Sequence[np.ndarray], num_scored: Sequence[int]) -> bool:
    """Return whether each scored token of a row with several branches is predicted from its own sequence alone.

    Arguments are as of `lay_out`, and its result, for one tree. Numbers could not tell: in half precision, one wrong
    key among hundreds changes less than rounding.
    """
    ids, positions, scored = (layout[name].numpy() for name in ("row_ids", "row_positions", "scored_from"))
    queries, keys = np.array(layout["branches"]).T
    paths, stops = np.split(layout["paths"].numpy(), np.cumsum(keys)[:-1]), np.cumsum(queries)

    def path_to(place: int) -> np.ndarray:
        branch = int(np.searchsorted(stops, place, side="right"))
        return paths[branch][: len(paths[branch]) - (stops[branch] - place) + 1]

    for path, number, stop in zip(paths, queries, stops):  # each branch continues the path of its last shared token
        before, own = np.split(path, [len(path) - number])
        exact = np.array_equal(own, np.arange(stop - number, stop))
        exact &= np.array_equal(positions[0, path], np.arange(len(path)))
        if not exact or len(before) and not (before[-1] < own[0] and np.array_equal(path_to(before[-1]), before)):
            return False
    ends = scored[np.cumsum(num_scored) - 1]
    pairs = zip(ends, sequences, num_scored)
    return all(np.array_equal(ids[0, path_to(end)], sequence[:-1]) for end, sequence, number in pairs if number)

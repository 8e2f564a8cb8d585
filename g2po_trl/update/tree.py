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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .forks import Call, calls, lay_out_calls

LAYOUTS = ("shared", "padded")  # `shared` becomes `forked` for models that cannot attend by branches

_KEYS_A_TOKEN = 8  # at most, of a tree's limit of tokens: each layer keeps gathered keys for its backward pass
_MOST_FORKS = 128  # sequences of a forked row: `forks.segments` recurses once a fork


@dataclass(frozen=True)
class Tree:
    """Sequences of one row of the model.

    Args:
        rows: their numbers, in the order of the layout.
        shared: for each sequence, how many of its first tokens the one before it has laid out.
        num_tokens: tokens of the row; with `calls`, those of all passes, padding included.
        calls: forward passes of a forked row.
    """

    rows: list[int]
    shared: list[int]
    num_tokens: int
    calls: list[Call] | None = None

    @property
    def padding(self) -> int:
        """Number of the tokens that are padding, of forked passes."""
        return sum(call.padding for call in self.calls or ())


def grow(
    rows: Sequence[int],
    lengths: Sequence[int],
    overlaps: Sequence[int],
    max_tokens: int,
    fork_cost: int | None = None,
) -> list[Tree]:
    """Return sequences, in the order given, in trees that repeat the fewest tokens; of equal ones, the fewest trees.

    Args:
        rows: numbers of the sequences.
        lengths: tokens of each.
        overlaps: tokens that each has in common with the one before.
        max_tokens: maximum number of tokens of a tree; one with a longer sequence may have 1.5 times that one's.
        fork_cost: of forked rows, see `forks.fork_cost`.
    """
    rows, lengths, overlaps = (np.asarray(numbers, dtype=np.int64) for numbers in (rows, lengths, overlaps))
    before, max_tokens = np.append(0, lengths)[:-1], min(max_tokens, int(lengths.sum()))
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
        shared = [0, *overlaps[start + 1 : stop].tolist()]
        trees += _trees(
            np.asarray(rows)[start:stop].tolist(), shared, lengths[start:stop].tolist(), max_tokens, fork_cost
        )[::-1]
        stop = start
    return trees[::-1]


def _trees(
    rows: list[int], shared: list[int], lengths: list[int], max_tokens: int, fork_cost: int | None
) -> list[Tree]:
    """Return the tree of sequences; if forked passes with their padding do not fit, those of their halves."""
    if fork_cost is None:
        return [Tree(rows, shared, sum(lengths) - sum(shared))]
    if len(rows) <= _MOST_FORKS:
        made = calls(lengths, shared, fork_cost)
        positions = sum(call.positions for call in made)
        if positions <= max_tokens or len(rows) == 1:
            return [Tree(rows, shared, positions, made)]
    half = len(rows) // 2
    parts = (rows[:half], shared[:half], lengths[:half]), (rows[half:], [0, *shared[half + 1 :]], lengths[half:])
    return [tree for part in parts for tree in _trees(*part, max_tokens, fork_cost)]


def one_each(rows: Sequence[int], lengths: Sequence[int]) -> list[Tree]:
    """Return a tree for each sequence, as padded rows have them."""
    return [Tree([row], [0], size) for row, size in zip(rows, lengths)]


def lay_out(
    trees: Sequence[Tree],
    sequences: Sequence[np.ndarray],
    num_scored: Sequence[int],
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
) -> dict[str, Any]:
    """Return what the model reads of a micro-batch: one tree, or sequences that are padded.

    Args:
        trees: one tree, or several of one sequence each.
        sequences: token ids of each sequence, by its number.
        num_scored: number of tokens at the end of each sequence that are scored.
        pad_token_id: token that fills rows.
        pad_to_multiple_of: multiple of the length of padded rows.

    Returns:
        `row_ids` (R, L), R being 1 for a tree; `scored_from` (M,), the place in the flattened rows of the hidden state
        that predicts each scored token, and `scored_ids` (M,), the token: over trees, sequences, tokens. If no token
        is scored, both have one entry (0 and -100). For a tree with several branches also `row_positions` (1, L),
        `branches`, the numbers of queries and keys of each, and `paths` (K,), the places of all their keys. For a
        forked row, `forks`: shapes and parents of its passes, see `forks.hidden_states`.
    """
    own = [sequences[row] for tree in trees for row in tree.rows]
    made: dict[str, Any] = {}
    if len(trees) == 1 and trees[0].calls is not None:
        ids, places = lay_out_calls(trees[0].calls, own, pad_token_id)
        made["forks"] = [(*call.shape, call.parent) for call in trees[0].calls]
        ids = ids[None]
    elif len(trees) == 1 and pad_to_multiple_of is None:
        ids, positions, places, branches = _lay_out_branches(own, trees[0].shared)
        if len(branches) > 1:
            sizes = [(stop - start, len(path)) for start, stop, path in branches]
            paths = np.concatenate([path for _, _, path in branches])
            made |= {"branches": sizes, "row_positions": positions[None], "paths": paths}
        ids = ids[None]
    else:
        multiple = pad_to_multiple_of or 1
        width = -(-max(map(len, own), default=1) // multiple) * multiple
        ids = np.full((max(len(own), 1), width), pad_token_id, dtype=np.int64)
        for row, sequence in enumerate(own):
            ids[row, : len(sequence)] = sequence
        places = [row * width + np.arange(len(sequence)) for row, sequence in enumerate(own)]
    scored = [(path, of, num_scored[row]) for path, of, row in zip(places, own, (r for t in trees for r in t.rows))]
    found_from = [path[len(of) - number - 1 : len(of) - 1] for path, of, number in scored]
    found_ids = [of[len(of) - number :] for _, of, number in scored]
    if not sum(map(len, found_ids)):
        found_from, found_ids = [np.zeros(1)], [np.full(1, -100)]
    made |= {"row_ids": ids, "scored_from": np.concatenate(found_from), "scored_ids": np.concatenate(found_ids)}
    return {
        name: torch.from_numpy(of.astype(np.int64)) if isinstance(of, np.ndarray) else of for name, of in made.items()
    }


def _lay_out_branches(
    sequences: Sequence[np.ndarray], shared: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], list[tuple[int, int, np.ndarray]]]:
    """Return token ids (N,), positions (N,), places of each sequence, and branches: start, stop and path of each."""
    ids, positions, places, branches = [], [], [], []
    path, stop = np.zeros(0, dtype=np.int64), 0
    for sequence, common in zip(sequences, shared):
        start, continues = stop, bool(branches) and common == len(branches[-1][2])
        stop += len(sequence) - common
        path = np.concatenate([path[:common], np.arange(start, stop)])
        ids.append(sequence[common:])
        positions.append(np.arange(common, len(sequence)))
        places.append(path)
        if continues:
            branches[-1] = (branches[-1][0], stop, path)
        elif stop > start:
            branches.append((start, stop, path))
    return np.concatenate(ids), np.concatenate(positions), places, branches


def is_exact(layout: dict[str, Any], sequences: Sequence[np.ndarray], num_scored: Sequence[int]) -> bool:
    """Return whether each scored token of a row with several branches is predicted from its own sequence alone.

    That is so if each branch continues the path of its last shared token, and the last scored token of each sequence
    has its tokens before it.

    Numbers could not tell: in half precision, one wrong key among hundreds changes less than rounding.

    Args:
        layout: what `lay_out` returned.
        sequences: token ids of each sequence, in the order of the layout.
        num_scored: number of tokens at the end of each sequence that are scored.
    """
    ids, positions, scored = (layout[name].numpy() for name in ("row_ids", "row_positions", "scored_from"))
    queries, keys = np.array(layout["branches"]).T
    paths, stops = np.split(layout["paths"].numpy(), np.cumsum(keys)[:-1]), np.cumsum(queries)

    def path_to(place: int) -> np.ndarray:
        branch = int(np.searchsorted(stops, place, side="right"))
        return paths[branch][: len(paths[branch]) - (stops[branch] - place) + 1]

    for path, number, stop in zip(paths, queries, stops):
        before, own = np.split(path, [len(path) - number])
        exact = np.array_equal(own, np.arange(stop - number, stop))
        exact &= np.array_equal(positions[0, path], np.arange(len(path)))
        if not exact or len(before) and not (before[-1] < own[0] and np.array_equal(path_to(before[-1]), before)):
            return False
    ends = scored[np.cumsum(num_scored) - 1]
    pairs = zip(ends, sequences, num_scored)
    return all(np.array_equal(ids[0, path_to(end)], sequence[:-1]) for end, sequence, number in pairs if number)

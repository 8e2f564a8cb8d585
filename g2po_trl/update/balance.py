"""Plan of an update: the rank and micro-batch of each row, derived from lengths, the same on every rank.

Every rank gets the same number of micro-batches with the same number of rows in each (TRL gathers a metric per row,
and a sharded model must run the same number of forward passes everywhere); rows of mask 0 fill the gaps. No row is
dropped; rows without a gradient can be left out, and still count in every denominator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from .tree import Tree, grow, in_order, one_each, round_up

Planned = list[list[Tree]]  # a micro-batch: the trees of each rank, one of several rows or several of one row each

_BLOCKS = 8  # at least so many blocks of rows in a mini-batch, so that it has many tasks
_WHOLE = np.iinfo(np.int64).max  # overlap of a row that begins with all of the one before it, as a conversation's turn
_HALVINGS = 5  # of the range in which the limit of even trees is sought


@dataclass
class BatchingConfig:
    """Options of splitting step samples into mini-batches and micro-batches, the same on every rank."""

    num_mini_batches: int  # each call of `training_step` trains one; not used with `mini_batch_size`
    # Of a micro-batch on a rank, padding included; a longer row is one itself, or with others 1.5 times its tokens.
    max_tokens: int
    loss_type: str  # see `batch.loss_scale`
    pad_token_id: int
    pad_to_multiple_of: int | None = None  # length of padded rows
    layout: str = "padded"  # see `layout.Layout`
    fork_cost: int | None = None  # of forked rows, see `forks.fork_cost`
    owners_of: Callable[..., np.ndarray] | None = None  # for rows with images, see `images.OwnersOf`
    # What rows of one forward pass must have in common, for rows of these lengths.
    scale_of: Callable[[Sequence[int]], list] = lambda lengths: [()] * len(lengths)
    kl: bool = True  # the loss has a KL term, so that rows of advantage 0 have a gradient too
    mini_batch_size: int | None = (
        None  # most rows of a mini-batch, over all ranks; one `training_step` then trains all
    )

    @property
    def row_multiple(self) -> int | None:
        """Multiple of the length of padded rows; trees have no padding."""
        return self.pad_to_multiple_of if self.layout == "padded" else None

    def plan(
        self, sequences: Sequence[np.ndarray], kept: np.ndarray, num_ranks: int, rng: np.random.Generator
    ) -> list[list[Planned]]:
        """Return the micro-batches of each mini-batch, which balance the ranks' tokens; `rng` is the same on all.

        Rows are those of all ranks; such as have no gradient, (N,) `kept` is `False`, belong to a mini-batch, but are
        not processed.
        """
        mini_batches, size = [], self.mini_batch_size
        number = self.num_mini_batches if size is None else count_mini_batches(len(kept), size)
        for part in split_into_mini_batches(*in_order(sequences, range(len(kept))), number, rng):
            part, by_scale = part[kept[part]].tolist(), defaultdict(list)
            for row, scale in zip(part, self.scale_of([len(sequences[row]) for row in part])):
                by_scale[scale].append(row)
            planned: list[Planned] = []
            for rows in by_scale.values():
                first = len(planned) % num_ranks  # parts of few rows begin with other ranks
                for trees in self._micro_batches(rows, sequences, num_ranks):
                    planned.append(trees[-first:] + trees[:-first])
            mini_batches.append(planned or [[[] for _ in range(num_ranks)]])
        return mini_batches

    def _micro_batches(self, rows: list[int], sequences: Sequence[np.ndarray], num_ranks: int) -> list[Planned]:
        is_padded = self.layout == "padded"
        lengths = [len(sequences[row]) for row in rows]
        trees = one_each(rows, lengths) if is_padded else self._grow(in_order(sequences, rows), num_ranks)
        ranks = deal(trees, [tree.num_tokens for tree in trees], num_ranks)
        if is_padded:
            widths = [[round_up(tree.num_tokens, self.row_multiple) for tree in of_rank] for of_rank in ranks]
            bounds = plan_micro_batches(widths, self.max_tokens)
        else:
            bounds = [(step, step + 1) for step in range(max(map(len, ranks)))]
        return [[of_rank[start:stop] for of_rank in ranks] for start, stop in bounds]

    def _grow(self, ordered: tuple[np.ndarray, np.ndarray, np.ndarray], num_ranks: int) -> list[Tree]:
        """Return trees of about the smallest limit of tokens at which no rank has more of them than at the largest."""
        trees = grow(*ordered, self.max_tokens, self.fork_cost)
        number = -(-len(trees) // num_ranks) * num_ranks
        low = max(sum(tree.num_tokens for tree in trees) // max(number, 1), ordered[1].max(initial=0))
        high = self.max_tokens
        for _ in range(_HALVINGS if num_ranks > 1 and low < high else 0):
            middle = (low + high) // 2
            smaller = grow(*ordered, middle, self.fork_cost)
            low, high, trees = (middle, high, trees) if len(smaller) > number else (low, middle, smaller)
        return trees

    def metrics(
        self, lengths: np.ndarray, kept: np.ndarray, counts: Sequence[int], plan: list[list[Planned]]
    ) -> dict[str, float]:
        """Return numbers of rows and tokens, of tokens that the model processes, and the imbalance of ranks.

        Rows have (N,) `lengths` and are `kept` in the `plan`; each rank has played `counts` of them.
        """
        tokens, forwarded = np.zeros(len(counts)), 0  # laid out on each rank; on all, with padding
        for trees in (planned for part in plan for planned in part):
            for rank, of_rank in enumerate(trees):
                sizes = [tree.num_tokens for tree in of_rank]
                tokens[rank] += sum(sizes) - sum(call.padding for tree in of_rank for call in tree.calls or ())
                padded = max(len(sizes), 1) * round_up(max(sizes, default=1), self.row_multiple)
                forwarded += padded if self.layout == "padded" else sum(sizes) or 1
        kept_tokens = int(lengths[kept].sum())
        played = [int(part.sum()) for part in np.split(lengths, np.cumsum(counts)[:-1])]
        return {
            "update/step_samples": len(kept),
            "update/left_out_fraction": int((~kept).sum()) / max(len(kept), 1),
            "update/micro_batches": sum(map(len, plan)),
            "update/token_imbalance": imbalance(tokens),
            "rollout/token_imbalance": imbalance(played),
            "update/forwarded_tokens": forwarded,
            "update/repeated_token_fraction": 1 - tokens.sum() / kept_tokens if kept_tokens else 0.0,
            "update/padding_fraction": 1 - tokens.sum() / max(forwarded, 1),
        }


def count_mini_batches(num_rows: int, mini_batch_size: int) -> int:
    """Return the number of mini-batches of at most `mini_batch_size` rows each; 1 without any row."""
    return max(1, -(-num_rows // mini_batch_size))


def split_into_mini_batches(
    rows: np.ndarray, lengths: np.ndarray, overlaps: np.ndarray, num_mini_batches: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return the rows of random mini-batches of equal size, give or take one, that keep subtrees together.

    Rows, lengths and overlaps are those of `in_order`. Rows are cut where neighbours have the fewest tokens in common,
    until no part has more than an eighth of a mini-batch; conversations are not cut there. Parts are shuffled, and the
    result is cut into mini-batches, whose borders may cut a part.
    """
    if num_mini_batches == 1:
        return [rows]
    before = np.append(0, lengths)[: len(lengths)]
    overlaps = np.where((overlaps == before) & (before > 0), _WHOLE, overlaps)
    most = max(1, len(rows) // (num_mini_batches * _BLOCKS))
    blocks, left = [], [(0, len(rows))]
    while left:
        start, stop = left.pop()
        inside = overlaps[start + 1 : stop]
        if stop - start <= most or inside.min() == _WHOLE:
            blocks.append(rows[start:stop])
            continue
        cuts = start + 1 + np.flatnonzero(inside == inside.min())
        cut = int(cuts[np.abs(cuts - (start + stop) / 2).argmin()])
        left += [(start, cut), (cut, stop)]
    shuffled = [blocks[block] for block in rng.permutation(len(blocks))]
    return np.array_split(np.concatenate([rows[:0], *shuffled]), num_mini_batches)


def deal(units: Sequence[Any], tokens: Sequence[int], num_ranks: int) -> list[list[Any]]:
    """Return units by rank, longest first, distributed back and forth: sums differ by less than the longest unit."""
    ranks: list[list[Any]] = [[] for _ in range(num_ranks)]
    longest_first = sorted(zip(units, tokens), key=lambda unit: -unit[1])
    for (unit, _), rank in zip(longest_first, cycle([*range(num_ranks), *reversed(range(num_ranks))])):
        ranks[rank].append(unit)
    return ranks


def imbalance(work: Sequence[float]) -> float:
    """Return the largest work of a rank divided by the mean; 1 is balanced."""
    return max(work) * len(work) / sum(work) if sum(work) else 1.0


def plan_micro_batches(widths: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, int]]:
    """Return (start, stop) places of each micro-batch in the ranks' rows, at least one, the same on every rank.

    `widths` are padded tokens of each rank's rows. A micro-batch has at most `max_tokens` on any rank; a longer row is
    one itself.
    """
    plan, start, widest = [], 0, 0
    num_rows = max(map(len, widths), default=0)
    for position in range(num_rows):
        width = max(of_rank[position] for of_rank in widths if position < len(of_rank))
        widest = max(widest, width)
        if position > start and (position + 1 - start) * widest > max_tokens:
            plan.append((start, position))
            start, widest = position, width
    return [*plan, (start, max(num_rows, 1))]

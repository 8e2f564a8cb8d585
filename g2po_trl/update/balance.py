"""Plan of an update: the rank and micro-batch of each row, derived from lengths, the same on every rank.

Every rank gets the same number of micro-batches with the same number of rows in each (TRL gathers a metric per row,
and a sharded model must run the same number of forward passes everywhere); rows of mask 0 fill the gaps. No row is
dropped; rows without a gradient can be left out, and still count in every denominator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .prefix_order import Ordering
from .tree import Tree, grow, one_each

_BLOCKS = 8  # at least so many blocks of rows in a mini-batch, so that it has many tasks
_WHOLE = np.iinfo(np.int64).max  # overlap of a row that begins with all of the one before it, as a conversation's turn
_EVEN = 0.03  # a limit is sought until its bounds differ by this fraction


@dataclass
class RowSummary:
    """Lengths, advantages and masks of all ranks' rows, numbered by rank and then in each rank's order.

    Args:
        prompts, completions: (N,) tokens.
        advantages: (N,) float32.
        trained: (N,) bool.
        counts: number of rows that each rank played.
        with_logprobs: whether the engine returned log-probabilities.
        with_images: whether any row has an image.
    """

    prompts: np.ndarray
    completions: np.ndarray
    advantages: np.ndarray
    trained: np.ndarray
    counts: list[int]
    with_logprobs: bool
    with_images: bool = False

    @classmethod
    def concatenate(cls, parts: Sequence[RowSummary]) -> RowSummary:
        """Return the summary of all ranks' parts, by rank."""
        names = ("prompts", "completions", "advantages", "trained")
        whole = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return cls(
            **whole,
            counts=[count for part in parts for count in part.counts],
            with_logprobs=all(part.with_logprobs for part in parts if len(part)),
            with_images=any(part.with_images for part in parts),
        )

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def first(self) -> list[int]:
        """Number of each rank's first row, followed by the number of all rows."""
        return [0, *np.cumsum(self.counts).tolist()]

    def num_trained_tokens(self, rows: Sequence[int] | slice = slice(None)) -> int:
        """Return the number of completion tokens of those rows that are trained."""
        return int((self.completions * self.trained)[rows].sum())

    def with_gradient(self, kl: bool) -> np.ndarray:
        """Return (N,) bool, whether a row has a gradient.

        A row that is not trained has none. Without a KL term, a row of advantage 0 has none either, since each loss
        multiplies a token's term by the advantage of its row.
        """
        return self.trained & ((self.advantages != 0) | kl)


@dataclass
class MicroBatchPlan:
    """One micro-batch on all ranks: `trees[rank]`, one of several rows or several of one row each."""

    trees: list[list[Tree]]

    @property
    def rows(self) -> list[list[int]]:
        """`rows[rank]`, in the order of the layout."""
        return [[row for tree in trees for row in tree.rows] for trees in self.trees]

    @property
    def num_rows(self) -> int:
        """Number of rows on each rank, with those that fill gaps."""
        return max(1, *map(len, self.rows))


@dataclass
class BatchingConfig:
    """Options of splitting step samples into mini-batches and micro-batches, the same on every rank.

    Args:
        num_mini_batches: each call of `training_step` trains one. Not used with `mini_batch_size`.
        max_tokens: maximum number of tokens of a micro-batch on a rank, padding included; a longer row is a
            micro-batch of its own, or with others a tree of at most 1.5 times its tokens.
        loss_type: TRL's `loss_type`, see `loss_scale`.
        pad_to_multiple_of: multiple of the length of padded rows.
        layout: see `g2po_trl.update.layout`.
        fork_cost: of forked rows, see `forks.fork_cost`.
        owners_of: for rows with images, see `images.OwnersOf`.
        scale_of: returns for each of some row lengths what rows of a forward pass must have in common.
        kl: whether the loss has a KL term, so that rows of advantage 0 have a gradient too.
        mini_batch_size: maximum number of rows of a mini-batch, over all ranks; one call of `training_step` then
            trains all mini-batches.
    """

    num_mini_batches: int
    max_tokens: int
    loss_type: str
    pad_token_id: int
    pad_to_multiple_of: int | None = None
    layout: str = "padded"
    fork_cost: int | None = None
    owners_of: Callable[..., np.ndarray] | None = None
    scale_of: Callable[[Sequence[int]], list] | None = None
    kl: bool = True
    mini_batch_size: int | None = None

    @property
    def row_multiple(self) -> int | None:
        """Multiple of the length of padded rows; trees have no padding."""
        return self.pad_to_multiple_of if self.layout == "padded" else None

    def plan(
        self, rows: RowSummary, ordering: Ordering, rng: np.random.Generator
    ) -> tuple[list[list[MicroBatchPlan]], dict[str, float]]:
        """Return a plan that balances the tokens of all ranks' rows, in micro-batches, and its metrics.

        Args:
            rows: rows of all ranks. Rows without a gradient belong to a mini-batch, but are not processed.
            ordering: lexicographic order of the rows.
            rng: in the same state on every rank.

        Returns:
            [mini-batch][micro-batch]; and metrics: numbers of rows and tokens, number of tokens that the model
            processes, and the imbalance of ranks before and after.
        """
        kept, lengths = rows.with_gradient(self.kl), rows.prompts.astype(np.int64) + rows.completions
        number = self.num_mini_batches
        if self.mini_batch_size is not None:
            number = count_mini_batches(len(rows), self.mini_batch_size)
        order, mini_batches = ordering.sort(range(len(rows))), []
        overlaps, before = ordering.neighbours(order, lengths), np.append(0, lengths[order])[: len(order)]
        overlaps[(overlaps == before) & (before > 0)] = _WHOLE
        for part in split_into_mini_batches(order, overlaps, number, rng):
            part = part[kept[part]]
            planned = []
            for of_scale in self._by_scale(part, lengths):
                first = len(planned) % len(rows.counts)  # parts of few rows begin with other ranks
                for one in self._micro_batches(of_scale, lengths, ordering, len(rows.counts)):
                    planned.append(MicroBatchPlan(one.trees[-first:] + one.trees[:-first]))
            mini_batches.append(planned or [MicroBatchPlan([[] for _ in rows.counts])])
        return mini_batches, self._metrics(rows, lengths, kept, mini_batches)

    def _by_scale(self, part: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        """Return the rows in parts whose forward passes may have several of them."""
        parts = defaultdict(list)
        for row, scale in zip(part, [()] * len(part) if self.scale_of is None else self.scale_of(lengths[part])):
            parts[scale].append(row)
        return [np.array(rows) for rows in parts.values()]

    def _micro_batches(
        self, part: np.ndarray, lengths: np.ndarray, ordering: Ordering, num_ranks: int
    ) -> list[MicroBatchPlan]:
        if self.layout == "padded":
            ranks = _deal(part, lengths, num_ranks)
            widths = [[self._width(lengths[row]) for row in own] for own in ranks]
            return [
                MicroBatchPlan([one_each(own[start:stop], lengths[own[start:stop]].tolist()) for own in ranks])
                for start, stop in plan_micro_batches(widths, self.max_tokens)
            ]
        order = ordering.sort(part)
        of = order.tolist(), lengths[order], ordering.neighbours(order, lengths)
        trees = grow(*of, self.max_tokens, self.fork_cost)
        if num_ranks > 1:
            trees = self._even(trees, of, num_ranks)
        ranks = _deal(np.arange(len(trees)), np.array([tree.num_tokens for tree in trees]), num_ranks)
        return [
            MicroBatchPlan([[trees[tree] for tree in own[place : place + 1]] for own in ranks])
            for place in range(max(map(len, ranks)))
        ]

    def _even(self, trees: list[Tree], of: tuple, num_ranks: int) -> list[Tree]:
        """Return trees of the smallest limit of tokens at which no rank has more of them than before."""
        number = -(-len(trees) // num_ranks) * num_ranks
        low, high = sum(tree.num_tokens for tree in trees) // max(number, 1), self.max_tokens
        while high - low > max(1, _EVEN * high):
            middle = (low + high) // 2
            smaller = grow(*of, middle, self.fork_cost, longer=1.0)
            if len(smaller) > number:
                low = middle
            else:
                high, trees = middle, smaller
        return trees

    def _width(self, tokens: int) -> int:
        return -(-int(tokens) // (self.pad_to_multiple_of or 1)) * (self.pad_to_multiple_of or 1)

    def _metrics(
        self, rows: RowSummary, lengths: np.ndarray, kept: np.ndarray, mini_batches: list[list[MicroBatchPlan]]
    ) -> dict[str, float]:
        tokens, forwarded = np.zeros(len(rows.counts)), 0  # laid out on each rank; on all, with padding
        for planned in (planned for part in mini_batches for planned in part):
            for rank, trees in enumerate(planned.trees):
                own = [tree.num_tokens for tree in trees]
                tokens[rank] += sum(own) - sum(tree.padding for tree in trees)
                padded = self.layout == "padded"
                forwarded += max(len(own), 1) * self._width(max(own, default=1)) if padded else sum(own) or 1
        first, kept_tokens = rows.first, int(lengths[kept].sum())
        return {
            "update/step_samples": len(rows),
            "update/left_out_fraction": int((~kept).sum()) / max(len(rows), 1),
            "update/micro_batches": sum(map(len, mini_batches)),
            "update/token_imbalance": imbalance(tokens),
            "rollout/token_imbalance": imbalance([int(lengths[a:b].sum()) for a, b in zip(first, first[1:])]),
            "update/forwarded_tokens": forwarded,
            "update/repeated_token_fraction": 1 - tokens.sum() / kept_tokens if kept_tokens else 0.0,
            "update/padding_fraction": 1 - tokens.sum() / max(forwarded, 1),
        }


def count_mini_batches(num_rows: int, mini_batch_size: int) -> int:
    """Return the number of mini-batches of at most `mini_batch_size` rows each; 1 without any row."""
    return max(1, -(-num_rows // mini_batch_size))


def deal_rows(
    tokens: Sequence[int], num_mini_batches: int, num_ranks: int, rng: np.random.Generator
) -> list[list[list[int]]]:
    """Return random mini-batches that do not depend on the number of ranks, each distributed evenly over ranks.

    Mini-batches have equal numbers of rows, give or take one. Within a mini-batch, rows are sorted by length and
    distributed back and forth, so that ranks get equal numbers of rows (give or take one), of similar lengths at
    similar places, and sums of tokens that differ by less than the longest row.

    Args:
        tokens: number of tokens of each row, of all ranks.
        num_mini_batches: number of mini-batches.
        num_ranks: number of ranks.
        rng: in the same state on every rank.

    Returns:
        [mini-batch][rank] -> row numbers, longest first.
    """
    total = np.asarray(tokens, dtype=np.int64)
    return [_deal(part, total, num_ranks) for part in np.array_split(rng.permutation(len(total)), num_mini_batches)]


def split_into_mini_batches(
    order: np.ndarray, overlaps: np.ndarray, num_mini_batches: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return the rows of random mini-batches of equal size, give or take one, that keep subtrees together.

    Rows in lexicographic order are cut where neighbours have the fewest tokens in common, until no part has more than
    an eighth of a mini-batch; conversations are not cut there. Parts are shuffled, and the result is cut into
    mini-batches, whose borders may cut a part.

    Args:
        order: rows in lexicographic order.
        overlaps: tokens that each has in common with the one before, `_WHOLE` if it continues that one.
        num_mini_batches: number of mini-batches.
        rng: in the same state on every rank.
    """
    if num_mini_batches == 1:
        return [order]
    most = max(1, len(order) // (num_mini_batches * _BLOCKS))
    blocks, left = [], [(0, len(order))]
    while left:
        start, stop = left.pop()
        inside = overlaps[start + 1 : stop]
        if stop - start <= most or inside.min() == _WHOLE:
            blocks.append(order[start:stop])
            continue
        cuts = start + 1 + np.flatnonzero(inside == inside.min())
        cut = int(cuts[np.abs(cuts - (start + stop) / 2).argmin()])
        left += [(start, cut), (cut, stop)]
    shuffled = [blocks[block] for block in rng.permutation(len(blocks))]
    return np.array_split(np.concatenate([order[:0], *shuffled]), num_mini_batches)


def _deal(units: np.ndarray, tokens: np.ndarray, num_ranks: int) -> list[list[int]]:
    """Return units by rank, longest first, distributed back and forth."""
    longest_first = units[np.argsort(-tokens[units], kind="stable")]
    place = np.arange(len(units))
    turn, seat = place // num_ranks, place % num_ranks
    rank = np.where(turn % 2 == 0, seat, num_ranks - 1 - seat)
    return [longest_first[rank == r].tolist() for r in range(num_ranks)]


def imbalance(work: Sequence[float]) -> float:
    """Return the largest work of a rank divided by the mean; 1 is balanced."""
    return max(work) * len(work) / sum(work) if sum(work) else 1.0


def plan_micro_batches(widths: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, int]]:
    """Return where to split a mini-batch into micro-batches, the same on every rank.

    Args:
        widths: for each rank, padded tokens of its rows in the mini-batch.
        max_tokens: maximum number of padded tokens of a micro-batch on any rank; a longer row is a micro-batch itself.

    Returns:
        (start, stop) positions into the ranks' rows, covering all of them; at least one micro-batch.
    """
    plan, start, widest = [], 0, 0
    num_rows = max(map(len, widths), default=0)
    for position in range(num_rows):
        width = max(own[position] for own in widths if position < len(own))
        widest = max(widest, width)
        if position > start and (position + 1 - start) * widest > max_tokens:
            plan.append((start, position))
            start, widest = position, width
    return [*plan, (start, max(num_rows, 1))]

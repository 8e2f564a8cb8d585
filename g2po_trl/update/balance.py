"""Plan of an update: the rank and micro-batch of each row, derived from lengths, the same on every rank.

Every rank gets the same number of micro-batches with the same number of rows in each (TRL gathers a metric per row,
and a sharded model must run the same number of forward passes everywhere); rows of mask 0 fill the gaps. No row is
dropped; rows without a gradient can be left out, and still count in every denominator.

The *unit* of a plan is a row or a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .packing import SHARING, Pack, RowLength, most_tokens, pack_rows, row_width, split_packs
from .prefix_order import Ordering

_PACKS_A_RANK = (8, 4, 2, 1)  # numbers to try: more balance better, fewer share more
_NEIGHBOURS = 8  # rows that go to a mini-batch together: more share little more, and make mini-batches differ more


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
    """One micro-batch on all ranks: `packs[rank]`."""

    packs: list[list[Pack]]

    @property
    def rows(self) -> list[list[int]]:
        """`rows[rank]`, in the order of the layout."""
        return [[row for pack in packs for row in pack.rows] for packs in self.packs]

    @property
    def num_rows(self) -> int:
        """Number of rows on each rank, with those that fill gaps."""
        return max(1, *map(len, self.rows))


@dataclass
class BatchingConfig:
    """Options of splitting step samples into mini-batches and micro-batches, the same on every rank.

    Args:
        num_mini_batches: each call of `training_step` trains one. Not used with `mini_batch_size`.
        max_tokens: maximum number of padded tokens of a micro-batch on a rank; a longer row is a micro-batch of its
            own.
        loss_type: TRL's `loss_type`, see `loss_scale`.
        pad_to_multiple_of: multiple of row lengths, see `row_width`.
        layout: see `g2po_trl.update.layout`.
        row_length: length of packed rows.
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
    row_length: RowLength | None = None
    kl: bool = True
    mini_batch_size: int | None = None

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
        num_ranks, multiple, row_length = len(rows.counts), self.pad_to_multiple_of, self.row_length
        kept, lengths = rows.with_gradient(self.kl), rows.prompts.astype(np.int64) + rows.completions
        if row_length is not None:
            fits = most_tokens(self.max_tokens, multiple)
            most, longest = min(row_length.most, fits), min(row_length.longest, fits)
            row_length = replace(row_length, most=most, longest=longest)
        number, mini_batches = self.num_mini_batches, []
        if self.mini_batch_size is not None:
            number = count_mini_batches(len(rows), self.mini_batch_size)
        # Neighbours go to a mini-batch together: they share far more tokens, whatever the number of mini-batches.
        order = ordering.sort(range(len(rows)))
        for part in split_into_mini_batches(order, number, rng, _NEIGHBOURS, _continues(order, lengths, ordering)):
            part = part[kept[part]]
            packs = _plan_packs(part, lengths, ordering, self.layout, row_length, num_ranks)
            tokens = np.array([pack.num_tokens for pack in packs], dtype=np.int64)
            ranks = _deal(np.arange(len(packs)), tokens, num_ranks)
            widths = [[row_width(packs[pack].num_tokens, multiple) for pack in dealt] for dealt in ranks]
            mini_batches.append(
                [
                    MicroBatchPlan([[packs[pack] for pack in dealt[start:stop]] for dealt in ranks])
                    for start, stop in plan_micro_batches(widths, self.max_tokens)
                ]
            )
        flat = self.layout == "forked"
        return mini_batches, _metrics(rows, lengths, kept, mini_batches, multiple, flat)


def _metrics(
    rows: RowSummary,
    lengths: np.ndarray,
    kept: np.ndarray,
    mini_batches: Sequence[Sequence[MicroBatchPlan]],
    row_multiple: int | None,
    flat: bool,
) -> dict[str, float]:
    """Return the `update/*` metrics of a plan, whose rows are padded as `row_width` says, or `flat` as they are."""
    tokens, forwarded = np.zeros(len(rows.counts)), 0  # laid out on each rank; on all, with padding
    for planned in (planned for part in mini_batches for planned in part):
        widths = [[pack.num_tokens for pack in own] for own in planned.packs]
        tokens += [sum(own) for own in widths]
        if flat:
            forwarded += sum(sum(own) or 1 for own in widths)
        else:
            forwarded += sum(len(own or [1]) * row_width(max(own or [1]), row_multiple) for own in widths)
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


def _plan_packs(
    part: np.ndarray,
    lengths: np.ndarray,
    ordering: Ordering,
    layout: str,
    row_length: RowLength | None,
    num_ranks: int,
) -> list[Pack]:
    """Return the packed rows of a mini-batch."""
    if layout in SHARING:
        order = ordering.sort(part)
        overlaps = ordering.neighbours(order, lengths)
    else:
        order = part if layout == "padded" else part[np.argsort(-lengths[part], kind="stable")]
        overlaps = np.zeros(len(order), dtype=np.int64)
    order, sizes, overlaps = order.tolist(), lengths[order].tolist(), overlaps.tolist()
    packs = pack_rows(order, sizes, overlaps, layout, row_length)
    if num_ranks == 1 or layout == "padded":
        return packs
    largest = max((pack.num_tokens for pack in packs), default=0)
    evens = (sum(pack.num_tokens for pack in packs) // (number * num_ranks) for number in _PACKS_A_RANK)
    tried = [RowLength(max(1, even), fork_cost=row_length.fork_cost) for even in evens if even < largest]
    finer = [pack_rows(order, sizes, overlaps, layout, length) for length in tried]

    def busiest(packs: list[Pack]) -> float:
        tokens = np.array([pack.num_tokens for pack in packs], dtype=np.int64)
        ranks = _deal(np.arange(len(packs)), tokens, num_ranks)
        return max(sum(row_length.work(int(tokens[pack])) for pack in dealt) for dealt in ranks)

    # The slowest rank sets the pace. Without equal numbers of packs a rank would have nothing to do.
    return min((split_packs(some, lengths, num_ranks, row_length.fork_cost) for some in [packs, *finer]), key=busiest)


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
    return [
        _deal(part, total, num_ranks) for part in split_into_mini_batches(range(len(total)), num_mini_batches, rng)
    ]


def split_into_mini_batches(
    order: Sequence[int],
    num_mini_batches: int,
    rng: np.random.Generator,
    neighbours: int = 1,
    continues: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Return the rows of random mini-batches of equal size, give or take one, in blocks of `neighbours` rows.

    Neighbours are next to each other in `order`. A row that `continues` stays in the block of the row before it,
    so that blocks are longer. `rng` is in the same state on every rank.
    """
    order = np.asarray(order, dtype=np.int64)
    blocks = np.array_split(order, max(1, -(-len(order) // neighbours)))
    if continues is not None and continues.any():
        firsts = np.append(np.flatnonzero(~continues), len(order))
        ends = np.cumsum([len(block) for block in blocks])
        blocks = np.split(order, np.unique(firsts[np.searchsorted(firsts, ends)])[:-1])
    shuffled = [blocks[block] for block in rng.permutation(len(blocks))]
    return np.array_split(np.concatenate(shuffled), num_mini_batches)


def _continues(order: np.ndarray, lengths: np.ndarray, ordering: Ordering) -> np.ndarray:
    """Return for each row in order whether it begins with the whole row before it, as in a conversation."""
    before = np.append(-1, lengths[order][:-1])[: len(order)]
    return (ordering.neighbours(order, lengths) == before) & (before < lengths[order])


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

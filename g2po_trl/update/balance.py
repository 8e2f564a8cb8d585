"""Who trains which rows, and in which micro-batches: the same plan on every rank, made of lengths alone.

Several ranks plan together: every rank gets the same number of micro-batches with the same number of rows in each
(TRL gathers a metric per row, and a sharded model must run the same number of forward passes everywhere). What a rank
lacks is filled with rows of mask 0. Nothing is dropped; rows without a gradient can be left out, and still count in
every denominator.

A *unit* is what is dealt and cut: a row, or a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .packing import Pack, RowLength, best_packs, cut_into_packs, most_tokens, row_width, split_packs
from .prefix_order import Ordering

_PACKS_A_RANK = (8, 4, 2, 1)  # that are tried: more are dealt more evenly, fewer share more
_NEIGHBOURS = 8  # alike rows that go to a slice together: more share little more, and make slices less alike


@dataclass
class RowSummary:
    """What a plan needs to know of the rows of all ranks, which are numbered by rank and then as each has them.

    Args:
        prompts, replies: (N,) tokens.
        advantages: (N,) float32.
        trained: (N,) bool.
        counts: rows of each rank, as they were played.
        with_logprobs: whether the engine gave log-probabilities of them.
    """

    prompts: np.ndarray
    replies: np.ndarray
    advantages: np.ndarray
    trained: np.ndarray
    counts: list[int]
    with_logprobs: bool

    @classmethod
    def concatenate(cls, parts: Sequence[RowSummary]) -> RowSummary:
        """Of all ranks' parts, by rank."""
        names = ("prompts", "replies", "advantages", "trained")
        whole = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return cls(
            **whole,
            counts=[count for part in parts for count in part.counts],
            with_logprobs=all(part.with_logprobs for part in parts if len(part)),
        )

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def first(self) -> list[int]:
        """Number of each rank's first row, and of all of them at the end."""
        return [0, *np.cumsum(self.counts).tolist()]

    def num_trained_tokens(self, rows: Sequence[int] | slice = slice(None)) -> int:
        """Reply tokens of those rows that are trained."""
        return int((self.replies * self.trained)[rows].sum())

    def with_gradient(self, kl: bool) -> np.ndarray:
        """(N,) bool: rows whose gradient is not 0 whatever the policy is.

        A row that is not trained has none. Nor has one of advantage 0, if there is no KL term: each loss multiplies
        what the policy gives a token by the advantage of its own row.
        """
        return self.trained & ((self.advantages != 0) | kl)


@dataclass
class MicroBatchPlan:
    """One micro-batch on all ranks: `packs[rank]`."""

    packs: list[list[Pack]]

    @property
    def rows(self) -> list[list[int]]:
        """`rows[rank]`, in the order in which they are laid out."""
        return [[row for pack in packs for row in pack.rows] for packs in self.packs]

    @property
    def num_rows(self) -> int:
        """Rows that each rank has in it, with those that fill it up."""
        return max(1, *map(len, self.rows))


def plan_update(
    rows: RowSummary,
    ordering: Ordering,
    num_mini_batches: int,
    max_tokens: int,
    rng: np.random.Generator,
    layout: str = "padded",
    row_length: RowLength | None = None,
    kept: np.ndarray | None = None,
    row_multiple: int | None = None,
) -> tuple[list[list[MicroBatchPlan]], dict[str, float]]:
    """Deal all ranks' rows out anew, so that each has as much to do, and cut what it has into micro-batches.

    Args:
        max_tokens: see `plan_micro_batches`. rng: in the same state on every rank.
        layout: one of `packing.LAYOUTS`. row_length: of packed rows.
        kept: (N,) bool; the other rows have a place in a slice, and are left out of it. `None`: all are kept.
        row_multiple: rows are padded to it, see `row_width`; that padding counts towards `max_tokens`.

    Returns:
        [slice][micro-batch]; and metrics: what there is to train, how much of it passes through the model, and how
        evenly it was and is spread.
    """
    num_ranks = len(rows.counts)
    kept = np.ones(len(rows), dtype=bool) if kept is None else kept
    lengths = rows.prompts.astype(np.int64) + rows.replies
    if row_length is not None:
        row_length = replace(row_length, most=min(row_length.most, most_tokens(max_tokens, row_multiple)))
    mini_batches = []
    # Alike rows go to a slice together: far more of them is shared, whatever the number of slices.
    for part in split_into_mini_batches(ordering.sort(range(len(rows))), num_mini_batches, rng, _NEIGHBOURS):
        part = part[kept[part]]
        if layout == "padded":
            packs = [Pack([row], [0], int(lengths[row])) for row in part.tolist()]
        else:
            packs = _plan_packs(part, lengths, ordering, layout, row_length, num_ranks)
        ranks = _deal(np.arange(len(packs)), np.array([pack.num_tokens for pack in packs], dtype=np.int64), num_ranks)
        sizes = [[(row_width(packs[pack].num_tokens, row_multiple), 0) for pack in dealt] for dealt in ranks]
        mini_batches.append(
            [
                MicroBatchPlan([[packs[pack] for pack in dealt[start:stop]] for dealt in ranks])
                for start, stop in plan_micro_batches(sizes, max_tokens)
            ]
        )
    return mini_batches, _metrics(rows, lengths, kept, mini_batches, row_multiple)


def _metrics(
    rows: RowSummary,
    lengths: np.ndarray,
    kept: np.ndarray,
    mini_batches: Sequence[Sequence[MicroBatchPlan]],
    row_multiple: int | None,
) -> dict[str, float]:
    """Return the `update/*` metrics of a plan, whose rows are padded as `row_width` says."""
    tokens, forwarded = np.zeros(len(rows.counts)), 0  # laid out on each rank; on all, with padding
    for planned in (planned for part in mini_batches for planned in part):
        widths = [[pack.num_tokens for pack in own] for own in planned.packs]
        tokens += [sum(own) for own in widths]
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
    part: np.ndarray, lengths: np.ndarray, ordering: Ordering, layout: str, row_length: RowLength, num_ranks: int
) -> list[Pack]:
    """The packed rows of a slice."""
    if layout == "shared":
        order = ordering.sort(part)
        overlaps = ordering.neighbours(order, lengths)
    else:
        order = part[np.argsort(-lengths[part], kind="stable")]
        overlaps = np.zeros(len(order), dtype=np.int64)
    order, sizes, overlaps = order.tolist(), lengths[order].tolist(), overlaps.tolist()
    packs = best_packs(order, sizes, overlaps, row_length)
    if num_ranks == 1:
        return packs
    largest = max((pack.num_tokens for pack in packs), default=0)
    evens = (sum(pack.num_tokens for pack in packs) // (number * num_ranks) for number in _PACKS_A_RANK)
    finer = [cut_into_packs(order, sizes, overlaps, max(1, even)) for even in evens if even < largest]

    def busiest(packs: list[Pack]) -> float:
        tokens = np.array([pack.num_tokens for pack in packs], dtype=np.int64)
        ranks = _deal(np.arange(len(packs)), tokens, num_ranks)
        return max(sum(row_length.work(int(tokens[pack])) for pack in dealt) for dealt in ranks)

    # The slowest rank sets the pace. As many packs on each, or one has nothing to do.
    return min((split_packs(some, lengths, num_ranks) for some in [packs, *finer]), key=busiest)


def count_mini_batches(num_rows: int, mini_batch_size: int) -> int:
    """Return how many mini-batches of at most `mini_batch_size` rows a rollout is cut into; 1 without any row."""
    return max(1, -(-num_rows // mini_batch_size))


def deal_rows(
    lengths: Sequence[tuple[int, int]], num_mini_batches: int, num_ranks: int, rng: np.random.Generator
) -> list[list[list[int]]]:
    """Which rank trains which rows of which slice: the same slices whatever the number of ranks, and equal work.

    Rows go to slices by chance, in equal numbers give or take one. Within a slice they are sorted by length and dealt
    like cards, back and forth, so that ranks get as many rows (give or take one), of similar lengths at similar
    places, and sums of tokens that differ by less than the longest row: the slowest rank sets the pace.

    Args:
        lengths: (prompt, reply) tokens of the rows of all ranks.

    Returns:
        [slice][rank] -> row numbers, longest first.
    """
    total = np.array([prompt + reply for prompt, reply in lengths], dtype=np.int64)
    return [
        _deal(part, total, num_ranks) for part in split_into_mini_batches(range(len(lengths)), num_mini_batches, rng)
    ]


def split_into_mini_batches(
    order: Sequence[int], num_mini_batches: int, rng: np.random.Generator, neighbours: int = 1
) -> list[np.ndarray]:
    """Rows of each slice, in equal numbers give or take one; by chance, as many at a time as are `neighbours`."""
    order = np.asarray(order, dtype=np.int64)
    runs = np.array_split(order, max(1, -(-len(order) // neighbours)))
    return np.array_split(np.concatenate([runs[run] for run in rng.permutation(len(runs))]), num_mini_batches)


def _deal(units: np.ndarray, tokens: np.ndarray, num_ranks: int) -> list[list[int]]:
    """Units by rank, longest first: back and forth like cards."""
    longest_first = units[np.argsort(-tokens[units], kind="stable")]
    place = np.arange(len(units))
    turn, seat = place // num_ranks, place % num_ranks
    rank = np.where(turn % 2 == 0, seat, num_ranks - 1 - seat)
    return [longest_first[rank == r].tolist() for r in range(num_ranks)]


def imbalance(work: Sequence[float]) -> float:
    """The busiest rank's work by the mean rank's: 1 is even; what the others wait is this minus 1."""
    return max(work) * len(work) / sum(work) if sum(work) else 1.0


def plan_micro_batches(lengths: Sequence[Sequence[tuple[int, int]]], max_tokens: int) -> list[tuple[int, int]]:
    """Where to cut a slice, the same on every rank.

    Args:
        lengths: for each rank, (prompt, reply) tokens of its rows in the slice, longest first.
        max_tokens: padded tokens of one micro-batch on any rank; a single longer row still makes one.

    Returns:
        (start, stop) positions into the ranks' sorted rows, covering all of them; at least one micro-batch.
    """
    num_rows = max(map(len, lengths), default=0)
    plan, start = [], 0
    widest = [(0, 0)] * len(lengths)
    for position in range(num_rows):
        grown = [
            (max(p, rows[position][0]), max(c, rows[position][1])) if position < len(rows) else (p, c)
            for (p, c), rows in zip(widest, lengths)
        ]
        if position > start and (position + 1 - start) * max(p + c for p, c in grown) > max_tokens:
            plan.append((start, position))
            start = position
            grown = [rows[position] if position < len(rows) else (0, 0) for rows in lengths]
        widest = grown
    return [*plan, (start, max(num_rows, 1))]

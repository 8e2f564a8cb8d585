"""Step samples -> tensors: the rows the policy is trained on, cut into micro-batches of bounded size.

Every step of every trajectory is a row (prompt, reply, advantage). A rollout gives a number of rows that no batch size
divides, so a slice of them is cut into micro-batches by *tokens*, and two numbers keep the gradient independent of
the cut:

- `num_items_in_batch`, what TRL's token-mean losses (dapo, cispo, vespo) divide by: reply tokens of the rollout;
- `loss_scale`, what a micro-batch's loss is multiplied by for losses that average inside a micro-batch.

Several ranks plan together: every rank gets the same number of micro-batches with the same number of rows in each
(TRL gathers a metric per row, and a sharded model must run the same number of forward passes everywhere). What a rank
lacks is filled with rows of mask 0. Nothing is dropped.

The loss sees padded rows. What passes through the model is up to the layout (`packing`): those rows, or packed ones in
which each token that rows have in common stands once. A *unit* is what is dealt and cut: a row, or a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .packing import lay_out, lexicographic, make_packs, split_packs
from .trajectory import Trajectory

# How a TRL loss averages, and so how micro-batches of it add up.
ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")
MICRO_BATCH_TOKEN_MEAN_LOSSES = ("bnpo",)
TOKEN_MEAN_LOSSES = ("dapo", "cispo", "vespo")

_PACKS_A_RANK = 8
_NEIGHBOURS = 8  # alike rows that go to a slice together: more share little more, and make slices less alike


@dataclass
class StepBatch:
    """Step samples of one rank, still ragged. Row i of all three belongs together.

    Args:
        prompt_ids, completion_ids: token ids of each row, as the engine read and wrote them.
        advantages: (rows,) float32.
        trained: (rows,) bool; a row that is not trained (a reply cut off, with `mask_truncated_completions`) stays
            in the batch with mask 0.
        logprobs: log-probabilities of each row's reply under the engine that wrote it, or `None`.
    """

    prompt_ids: list[np.ndarray]
    completion_ids: list[np.ndarray]
    advantages: np.ndarray
    trained: np.ndarray
    logprobs: list[np.ndarray] | None = None

    @classmethod
    def from_trajectories(
        cls, trajectories: Sequence[Trajectory], advantages: Sequence[float], mask_truncated: bool = False
    ) -> StepBatch:
        """Rows of all steps of the trajectories that came to a result.

        Args:
            advantages: one for each step of each trajectory, in order (those that are not counted included).
            mask_truncated: do not train replies that were cut off by the length limit.

        Raises:
            ValueError: when steps and advantages do not line up, or a step carries no token ids.
        """
        steps = [(t, step) for t in trajectories for step in t.steps]
        advantages = np.asarray(advantages, dtype=np.float32)
        if advantages.shape != (len(steps),):
            raise ValueError(f"advantages have shape {advantages.shape}, the trajectories have {len(steps)} steps")
        kept = [i for i, (trajectory, _) in enumerate(steps) if trajectory.counted]
        for i in kept:
            if not steps[i][1].prompt_ids or not steps[i][1].completion_ids:
                raise ValueError(
                    f"step {i} (task {steps[i][0].task_id}) has no prompt_ids or completion_ids: step samples are "
                    "made from the token ids the engine read and wrote"
                )
        rows = [steps[i][1] for i in kept]
        with_logprobs = all(step.logprobs is not None for step in rows)
        return cls(
            [np.array(step.prompt_ids, dtype=np.int32) for step in rows],
            [np.array(step.completion_ids, dtype=np.int32) for step in rows],
            advantages[kept],
            np.array([not (mask_truncated and step.completion_truncated) for step in rows], dtype=bool),
            [np.array(step.logprobs, dtype=np.float32) for step in rows] if with_logprobs else None,
        )

    @classmethod
    def concatenate(cls, batches: Sequence[StepBatch]) -> StepBatch:
        """The rows of all of them, in order."""
        batches = [batch for batch in batches if len(batch)] or list(batches[:1])
        with_logprobs = all(batch.logprobs is not None for batch in batches)
        return cls(
            [ids for batch in batches for ids in batch.prompt_ids],
            [ids for batch in batches for ids in batch.completion_ids],
            np.concatenate([batch.advantages for batch in batches]),
            np.concatenate([batch.trained for batch in batches]),
            [row for batch in batches for row in batch.logprobs] if with_logprobs else None,
        )

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Reply tokens of all rows that are trained."""
        return self.num_trained_tokens(range(len(self)))

    def num_trained_tokens(self, rows: Sequence[int]) -> int:
        """Reply tokens of the rows that are trained."""
        return sum(len(self.completion_ids[row]) for row in rows if self.trained[row])

    def lengths(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """(prompt tokens, reply tokens) of the rows."""
        return [(len(self.prompt_ids[row]), len(self.completion_ids[row])) for row in rows]

    def collate(
        self, rows: Sequence[int], num_rows: int, pad_token_id: int, pad_to_multiple_of: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Tensors of a micro-batch: prompts padded on the left, replies on the right, filled up to `num_rows`.

        Returns:
            `prompt_ids`, `prompt_mask` (num_rows, P); `completion_ids`, `completion_mask` (num_rows, C);
            `advantages` (num_rows,); `sampling_per_token_logps` (num_rows, C) when the engine gave them.
        """
        lengths = self.lengths(rows)
        width = _round_up(max((p for p, _ in lengths), default=1), pad_to_multiple_of)
        reply_width = _round_up(max((c for _, c in lengths), default=1), pad_to_multiple_of)
        prompt_ids = torch.full((num_rows, width), pad_token_id, dtype=torch.long)
        completion_ids = torch.full((num_rows, reply_width), pad_token_id, dtype=torch.long)
        prompt_mask, completion_mask = torch.zeros_like(prompt_ids), torch.zeros_like(completion_ids)
        advantages = torch.zeros(num_rows, dtype=torch.float32)
        logprobs = None if self.logprobs is None else torch.zeros(num_rows, reply_width)
        prompt_mask[:, -1] = 1  # a filler row attends to one token: attention over nothing is undefined
        for i, row in enumerate(rows):
            prompt, reply = self.prompt_ids[row], self.completion_ids[row]
            prompt_ids[i, width - len(prompt) :] = torch.from_numpy(prompt)
            prompt_mask[i, width - len(prompt) :] = 1
            completion_ids[i, : len(reply)] = torch.from_numpy(reply)
            completion_mask[i, : len(reply)] = int(self.trained[row])
            advantages[i] = float(self.advantages[row])
            if logprobs is not None:
                logprobs[i, : len(reply)] = torch.from_numpy(self.logprobs[row])
        tensors = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": advantages,
        }
        return tensors if logprobs is None else {**tensors, "sampling_per_token_logps": logprobs}


def deal_rows(
    lengths: Sequence[tuple[int, int]], num_slices: int, num_ranks: int, rng: np.random.Generator
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
    return [_deal(part, total, num_ranks) for part in slice_rows(range(len(lengths)), num_slices, rng)]


def slice_rows(
    order: Sequence[int], num_slices: int, rng: np.random.Generator, neighbours: int = 1
) -> list[np.ndarray]:
    """Rows of each slice, in equal numbers give or take one; by chance, as many at a time as are `neighbours`."""
    order = np.asarray(order, dtype=np.int64)
    runs = np.array_split(order, max(1, -(-len(order) // neighbours)))
    return np.array_split(np.concatenate([runs[run] for run in rng.permutation(len(runs))]), num_slices)


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


def make_micro_batches(
    batches: Sequence[StepBatch],
    rank: int,
    num_slices: int,
    max_tokens: int,
    loss_type: str,
    pad_token_id: int,
    pad_to_multiple_of: int | None,
    rng: np.random.Generator,
    layout: str = "padded",
    row_tokens: int = 0,
) -> tuple[list[list[dict[str, Any]]], dict[str, float]]:
    """Deal all ranks' step samples out anew, so that each has as much to do, and cut one rank's into micro-batches.

    Args:
        batches: the step samples of each rank, as they were played.
        max_tokens: see `plan_micro_batches`. rng: in the same state on every rank.
        layout: one of `packing.LAYOUTS`. row_tokens: of a packed row.

    Returns:
        [slice][micro-batch] tensors by name, with `num_items_in_batch`, `loss_scale` and `weight` (trained tokens of
        all ranks in it), and those of `lay_out` unless the layout is padded; and metrics: what there is to train, how
        much of it passes through the model, and how evenly it was and is spread.
    """
    batch, num_ranks = StepBatch.concatenate(batches), len(batches)
    lengths = batch.lengths(range(len(batch)))
    sequences = [np.concatenate(pair) for pair in zip(batch.prompt_ids, batch.completion_ids)]
    scored = [reply * bool(trained) for (_, reply), trained in zip(lengths, batch.trained)]
    num_tokens = batch.num_tokens
    num_items = torch.tensor(num_tokens)
    slices, tokens, forwarded = [], np.zeros(num_ranks), 0
    # Alike rows go to a slice together: far more of them is shared, whatever the number of slices.
    for part in slice_rows(lexicographic(sequences), num_slices, rng, _NEIGHBOURS):
        if layout == "padded":
            packs, units, sizes = None, [[row] for row in part.tolist()], [lengths[row] for row in part]
        else:
            own = [sequences[row] for row in part]
            packs = make_packs(own, row_tokens, layout == "shared")
            # Several packs a rank, and as many on each, or they cannot be dealt evenly.
            even = sum(pack.num_tokens for pack in packs) // (_PACKS_A_RANK * num_ranks)
            if num_ranks > 1 and even < row_tokens:
                packs = make_packs(own, max(1, even), layout == "shared")
            packs = split_packs(packs, own, num_ranks)
            packs = [replace(pack, rows=part[pack.rows].tolist()) for pack in packs]
            units, sizes = [pack.rows for pack in packs], [(pack.num_tokens, 0) for pack in packs]
        ranks = _deal(np.arange(len(units)), np.array([sum(size) for size in sizes], dtype=np.int64), num_ranks)
        tokens += [sum(sum(sizes[unit]) for unit in dealt) for dealt in ranks]
        micro_batches = []
        for start, stop in plan_micro_batches([[sizes[unit] for unit in dealt] for dealt in ranks], max_tokens):
            rows = [[row for unit in dealt[start:stop] for row in units[unit]] for dealt in ranks]
            micro_batch = batch.collate(rows[rank], max(1, *map(len, rows)), pad_token_id, pad_to_multiple_of)
            if packs is not None:
                dealt = [packs[unit] for unit in ranks[rank][start:stop]]
                micro_batch |= lay_out(dealt, sequences, scored, pad_token_id, pad_to_multiple_of)
            micro_batch["num_items_in_batch"] = num_items
            micro_batch["loss_scale"] = loss_scale(
                loss_type, micro_batch, len(batch), num_tokens, num_ranks, num_slices
            )
            micro_batch["weight"] = batch.num_trained_tokens([row for dealt in rows for row in dealt])
            micro_batches.append(micro_batch)
            for dealt in ranks:
                widths = [sizes[unit] for unit in dealt[start:stop]] or [(1, 0)]
                forwarded += (len(widths) if packs else stop - start) * sum(map(max, zip(*widths)))
        slices.append(micro_batches)
    return slices, {
        "update/step_samples": len(batch),
        "update/micro_batches": sum(map(len, slices)),
        "update/token_imbalance": imbalance(tokens),
        "rollout/token_imbalance": imbalance([sum(map(sum, b.lengths(range(len(b))))) for b in batches]),
        "update/forwarded_tokens": forwarded,
        "update/repeated_token_fraction": 1 - tokens.sum() / max(sum(map(sum, lengths)), 1),
        "update/padding_fraction": 1 - tokens.sum() / max(forwarded, 1),
    }


def loss_scale(
    loss_type: str,
    micro_batch: dict[str, Any],
    total_rows: int,
    total_tokens: int,
    num_processes: int,
    num_slices: int,
) -> float:
    """What to multiply a micro-batch's loss by, so that a slice's micro-batches add up to the loss of the whole.

    A slice stands for 1/num_slices of the rollout's `total_rows` rows and `total_tokens` reply tokens over all ranks;
    ranks' gradients are averaged. Token-mean losses already divide by the rollout's tokens.

    Raises:
        ValueError: for a loss type whose averaging is not known here.
    """
    rows, mask = len(micro_batch["advantages"]), micro_batch["completion_mask"]
    if loss_type in ROW_MEAN_LOSSES:
        return rows * num_processes * num_slices / max(total_rows, 1)
    if loss_type in MICRO_BATCH_TOKEN_MEAN_LOSSES:
        return int(mask.sum()) * num_processes * num_slices / max(total_tokens, 1)
    if loss_type in TOKEN_MEAN_LOSSES:
        return 1.0
    raise ValueError(
        f"loss_type is {loss_type!r}: g2po_trl does not know how it averages. Use one of "
        f"{', '.join(TOKEN_MEAN_LOSSES + ROW_MEAN_LOSSES + MICRO_BATCH_TOKEN_MEAN_LOSSES)}."
    )


def _round_up(length: int, multiple: int | None) -> int:
    return length if not multiple else -(-length // multiple) * multiple

"""Step samples -> tensors: the rows the policy is trained on, cut into micro-batches of bounded size.

Every step of every trajectory is a row (prompt, reply, advantage). A rollout gives a number of rows that no batch size
divides, so a slice of them is cut into micro-batches by *tokens*, and two numbers keep the gradient independent of
the cut:

- `num_items_in_batch`, what TRL's token-mean losses (dapo, cispo, vespo) divide by: reply tokens of the rollout;
- `loss_scale`, what a micro-batch's loss is multiplied by for losses that average inside a micro-batch.

Several ranks plan together: every rank gets the same number of micro-batches with the same number of rows in each
(TRL gathers a metric per row, and a sharded model must run the same number of forward passes everywhere). What a rank
lacks is filled with rows of mask 0. Nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .trajectory import Trajectory

# How a TRL loss averages, and so how micro-batches of it add up.
ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")
MICRO_BATCH_TOKEN_MEAN_LOSSES = ("bnpo",)
TOKEN_MEAN_LOSSES = ("dapo", "cispo", "vespo")


@dataclass
class StepBatch:
    """Step samples of one rank, still ragged. Row i of all three belongs together.

    Args:
        prompt_ids, completion_ids: token ids of each row, as the engine read and wrote them.
        advantages: (rows,) float32.
        trained: (rows,) bool; a row that is not trained (a reply cut off, with `mask_truncated_completions`) stays
            in the batch with mask 0.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    advantages: np.ndarray
    trained: np.ndarray

    @classmethod
    def from_trajectories(
        cls, trajectories: Sequence[Trajectory], advantages: Sequence[float], untrained_unless_ends_in: set[int] = ()
    ) -> StepBatch:
        """Rows of all steps of the trajectories that did not end in an error.

        Args:
            advantages: one for each step of each trajectory, in order (those of `error` trajectories included).
            untrained_unless_ends_in: end-of-turn tokens; when given, a reply without one at its end gets mask 0.

        Raises:
            ValueError: when steps and advantages do not line up, or a step carries no token ids.
        """
        steps = [(t, step) for t in trajectories for step in t.steps]
        advantages = np.asarray(advantages, dtype=np.float32)
        if advantages.shape != (len(steps),):
            raise ValueError(f"advantages have shape {advantages.shape}, the trajectories have {len(steps)} steps")
        kept = [i for i, (trajectory, _) in enumerate(steps) if trajectory.outcome != "error"]
        for i in kept:
            if not steps[i][1].prompt_ids or not steps[i][1].completion_ids:
                raise ValueError(
                    f"step {i} (task {steps[i][0].task_id}) has no prompt_ids or completion_ids: step samples are "
                    "made from the token ids the engine read and wrote"
                )
        completions = [steps[i][1].completion_ids for i in kept]
        trained = [not untrained_unless_ends_in or ids[-1] in untrained_unless_ends_in for ids in completions]
        return cls(
            [steps[i][1].prompt_ids for i in kept], completions, advantages[kept], np.array(trained, dtype=bool)
        )

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Reply tokens that are trained."""
        return sum(len(ids) for ids, trained in zip(self.completion_ids, self.trained) if trained)

    def lengths(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """(prompt tokens, reply tokens) of the rows."""
        return [(len(self.prompt_ids[row]), len(self.completion_ids[row])) for row in rows]

    def slices(self, num_slices: int, rng: np.random.Generator) -> list[list[int]]:
        """All rows, in random order, in `num_slices` parts of equal size give or take one; longest rows first.

        Sorting inside a slice changes no gradient and keeps rows of similar length in one micro-batch.
        """
        parts = np.array_split(rng.permutation(len(self)), num_slices)
        return [sorted(part.tolist(), key=lambda row: sum(self.lengths([row])[0]), reverse=True) for part in parts]

    def collate(
        self, rows: Sequence[int], num_rows: int, pad_token_id: int, pad_to_multiple_of: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Tensors of a micro-batch: prompts padded on the left, replies on the right, filled up to `num_rows`.

        Returns:
            `prompt_ids`, `prompt_mask` (num_rows, P); `completion_ids`, `completion_mask` (num_rows, C);
            `advantages` (num_rows,).
        """
        lengths = self.lengths(rows)
        width = _round_up(max((p for p, _ in lengths), default=1), pad_to_multiple_of)
        reply_width = _round_up(max((c for _, c in lengths), default=1), pad_to_multiple_of)
        prompt_ids = torch.full((num_rows, width), pad_token_id, dtype=torch.long)
        completion_ids = torch.full((num_rows, reply_width), pad_token_id, dtype=torch.long)
        prompt_mask, completion_mask = torch.zeros_like(prompt_ids), torch.zeros_like(completion_ids)
        advantages = torch.zeros(num_rows, dtype=torch.float32)
        prompt_mask[:, -1] = 1  # a filler row attends to one token: attention over nothing is undefined
        for i, row in enumerate(rows):
            prompt, reply = self.prompt_ids[row], self.completion_ids[row]
            prompt_ids[i, width - len(prompt) :] = torch.tensor(prompt)
            prompt_mask[i, width - len(prompt) :] = 1
            completion_ids[i, : len(reply)] = torch.tensor(reply)
            completion_mask[i, : len(reply)] = int(self.trained[row])
            advantages[i] = float(self.advantages[row])
        return {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": advantages,
        }


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

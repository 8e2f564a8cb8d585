"""Step samples -> tensors: the rows the policy is trained on, in micro-batches of bounded size.

A *row* is one step of a trajectory: prompt, completion, advantage. The number of rows varies between rollouts, so a
mini-batch is split into micro-batches by *tokens*. Two numbers keep the gradient independent of the split:

- `num_items_in_batch`, by which TRL's token-mean losses (dapo, cispo, vespo) divide: the number of completion tokens
  of the rollout or, with `mini_batch_size`, of an average mini-batch, since TRL does not see these mini-batches;
- `loss_scale`, the factor of a micro-batch's loss for losses that average inside a micro-batch.

All ranks receive all rows, which are small beside a model, and make the same plan (`balance`); each makes its own
tensors.

A micro-batch contains its rows twice: padded, for TRL's loss, and as the model reads them, in which tokens that rows
have in common stand once (`tree`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..trajectory import Trajectory
from ..utils.images import Picture
from .balance import BatchingConfig, Planned
from .images import OwnersOf, images_of, keyed
from .tree import lay_out, round_up

# How a TRL loss averages, and so how its micro-batches add up.
ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")
MICRO_BATCH_TOKEN_MEAN_LOSSES = ("bnpo",)
TOKEN_MEAN_LOSSES = ("dapo", "cispo", "vespo")
LOSS_TYPES = TOKEN_MEAN_LOSSES + ROW_MEAN_LOSSES + MICRO_BATCH_TOKEN_MEAN_LOSSES


@dataclass
class StepBatch:
    """Step samples of one rank, ragged; row i of each field belongs to one sample.

    Args:
        prompt_ids, completion_ids: token ids of each row, as the engine read and generated them.
        advantages: (rows,) float32.
        trained: (rows,) bool; a row that is not trained (a truncated completion, with `mask_truncated_completions`)
            stays in the batch with mask 0.
        logprobs: log-probabilities of each row's completion under the engine that sampled it, or `None`.
        images: images of each row's prompt, in the order of their tokens; `None`: no row has any.
    """

    prompt_ids: list[np.ndarray]
    completion_ids: list[np.ndarray]
    advantages: np.ndarray
    trained: np.ndarray
    logprobs: list[np.ndarray] | None = None
    images: list[Sequence[Picture]] | None = None

    @classmethod
    def from_trajectories(
        cls, trajectories: Sequence[Trajectory], advantages: Sequence[float], mask_truncated: bool = False
    ) -> StepBatch:
        """Return the rows of all steps of the trajectories that count.

        Args:
            trajectories: trajectories of this rank.
            advantages: one per step of each trajectory, in order, including trajectories that do not count.
            mask_truncated: do not train completions truncated by the length limit.

        Raises:
            ValueError: if the number of advantages or log-probabilities does not fit, or a prompt is empty.
        """
        steps = [(trajectory, step) for trajectory in trajectories for step in trajectory.steps]
        advantages = np.asarray(advantages, dtype=np.float32)
        if advantages.shape != (len(steps),):
            raise ValueError(f"advantages has shape {advantages.shape}: pass one for each of {len(steps)} steps")
        kept = [i for i, (trajectory, _) in enumerate(steps) if trajectory.counted]
        rows = [steps[i][1] for i in kept]
        for step in rows:
            numbers = len(step.prompt_ids), len(step.completion_ids), len(step.logprobs or step.completion_ids)
            if not numbers[0] or numbers[1] != numbers[2]:
                raise ValueError(
                    f"a step has {numbers[0]} prompt tokens, {numbers[1]} completion tokens and {numbers[2]} "
                    "logprobs: there must be a prompt, and one of the latter for each token"
                )
        with_logprobs = all(step.logprobs is not None for step in rows)
        return cls(
            [np.array(step.prompt_ids, dtype=np.int32) for step in rows],
            [np.array(step.completion_ids, dtype=np.int32) for step in rows],
            advantages[kept],
            np.array([not (mask_truncated and step.completion_truncated) for step in rows], dtype=bool),
            [np.array(step.logprobs, dtype=np.float32) for step in rows] if with_logprobs else None,
            [step.shown_images for step in rows] if any(step.images or step.prompt_images for step in rows) else None,
        )

    @classmethod
    def concatenate(cls, batches: Sequence[StepBatch]) -> StepBatch:
        """Return the rows of all batches, in order."""
        with_logprobs = all(batch.logprobs is not None for batch in batches)
        with_images = any(batch.images is not None for batch in batches)
        return cls(
            [ids for batch in batches for ids in batch.prompt_ids],
            [ids for batch in batches for ids in batch.completion_ids],
            np.concatenate([batch.advantages for batch in batches]),
            np.concatenate([batch.trained for batch in batches]),
            [row for batch in batches for row in batch.logprobs] if with_logprobs else None,
            [images for batch in batches for images in batch.images_of_rows] if with_images else None,
        )

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def images_of_rows(self) -> list[Sequence[Picture]]:
        """Return `images`, with an empty list for each row if there are none."""
        return [()] * len(self) if self.images is None else self.images

    def with_gradient(self, kl: bool) -> np.ndarray:
        """Return (rows,) bool, whether a row has a gradient.

        A row that is not trained has none. Without a KL term, a row of advantage 0 has none either, since each loss
        multiplies a token's term by the advantage of its row.
        """
        return self.trained & ((self.advantages != 0) | kl)

    def num_trained_tokens(self, rows: Sequence[int] | None = None) -> int:
        """Return the number of completion tokens of those rows that are trained; default: of all."""
        rows = range(len(self)) if rows is None else rows
        return sum(len(self.completion_ids[row]) for row in rows if self.trained[row])

    def sequences(self, owners_of: OwnersOf | None = None) -> list[np.ndarray]:
        """Return the token ids of each row, prompt and completion; with `owners_of`, see `images.keyed`."""
        sequences = [np.concatenate(pair) for pair in zip(self.prompt_ids, self.completion_ids)]
        if owners_of is None or self.images is None:
            return sequences
        return [keyed(ids, images, owners_of) for ids, images in zip(sequences, self.images)]

    def lengths(self) -> np.ndarray:
        """Return (rows, 2) numbers of prompt tokens and completion tokens."""
        sizes = [(len(prompt), len(completion)) for prompt, completion in zip(self.prompt_ids, self.completion_ids)]
        return np.array(sizes, dtype=np.int64).reshape(-1, 2)

    def take(self, rows: Sequence[int]) -> StepBatch:
        """Return some rows."""
        lists = (self.prompt_ids, self.completion_ids, self.logprobs, self.images)
        prompts, completions, logprobs, images = (of and [of[row] for row in rows] for of in lists)
        return StepBatch(prompts, completions, self.advantages[rows], self.trained[rows], logprobs, images)

    def collate(
        self, rows: Sequence[int], num_rows: int, pad_token_id: int, pad_to_multiple_of: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a micro-batch: prompts padded left, completions right, filled up to `num_rows` rows.

        Returns:
            `prompt_ids`, `prompt_mask` (num_rows, P); `completion_ids`, `completion_mask` (num_rows, C);
            `advantages` (num_rows,); `sampling_per_token_logps` (num_rows, C) if the engine returned them.
        """
        prompt_width = round_up(max([1, *(len(self.prompt_ids[row]) for row in rows)]), pad_to_multiple_of)
        # At least 2: TRL's metrics take a tensor of width 1 for one value per row, and would count filler rows.
        completion_width = round_up(max([2, *(len(self.completion_ids[row]) for row in rows)]), pad_to_multiple_of)
        prompt_ids = torch.full((num_rows, prompt_width), pad_token_id, dtype=torch.long)
        completion_ids = torch.full((num_rows, completion_width), pad_token_id, dtype=torch.long)
        prompt_mask, completion_mask = torch.zeros_like(prompt_ids), torch.zeros_like(completion_ids)
        advantages = torch.zeros(num_rows, dtype=torch.float32)
        logprobs = None if self.logprobs is None else torch.zeros(num_rows, completion_width)
        prompt_mask[:, -1] = 1  # a filler row attends to one token: attention over nothing is undefined
        for i, row in enumerate(rows):
            prompt, completion = self.prompt_ids[row], self.completion_ids[row]
            prompt_ids[i, prompt_width - len(prompt) :] = torch.from_numpy(prompt)
            prompt_mask[i, prompt_width - len(prompt) :] = 1
            completion_ids[i, : len(completion)] = torch.from_numpy(completion)
            completion_mask[i, : len(completion)] = int(self.trained[row])
            advantages[i] = float(self.advantages[row])
            if logprobs is not None:
                logprobs[i, : len(completion)] = torch.from_numpy(self.logprobs[row])
        tensors = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": advantages,
        }
        return tensors if logprobs is None else {**tensors, "sampling_per_token_logps": logprobs}


def make_mini_batches(
    batches: Sequence[StepBatch], rank: int, config: BatchingConfig, rng: np.random.Generator
) -> tuple[list[list[dict[str, Any]]], dict[str, float]]:
    """Return one rank's part of the step samples that each rank played, [mini-batch][micro-batch], and metrics.

    A micro-batch has the tensors of `collate`, `lay_out` and `images_of`, and `num_items_in_batch`, `loss_scale`,
    `weight` (trained tokens of all ranks) and `rows` (numbers of its rows).
    """
    batch, num_ranks = StepBatch.concatenate(batches), len(batches)
    inputs, kept = batch.sequences(config.owners_of), batch.with_gradient(config.kl)
    plan = config.plan(inputs, kept, num_ranks, rng)
    num_tokens, sequences = batch.num_trained_tokens(), batch.sequences()
    num_items = num_tokens if config.mini_batch_size is None else num_tokens / len(plan)
    scored_lengths = [len(ids) * bool(trained) for ids, trained in zip(batch.completion_ids, batch.trained)]

    def collate(trees: Planned) -> dict[str, Any]:
        rows = [[row for tree in of_rank for row in tree.rows] for of_rank in trees]
        num_rows = max(1, *map(len, rows))
        micro_batch = batch.collate(rows[rank], num_rows, config.pad_token_id, config.pad_to_multiple_of)
        micro_batch |= lay_out(trees[rank], sequences, scored_lengths, config.pad_token_id, config.row_multiple)
        if batch.images is not None:
            micro_batch |= images_of(trees[rank], sequences, batch.images, config.owners_of)
        scale = loss_scale(config.loss_type, micro_batch, len(batch), num_tokens, num_ranks, len(plan))
        micro_batch |= {"num_items_in_batch": torch.tensor(num_items), "loss_scale": scale, "rows": rows[rank]}
        return micro_batch | {"weight": sum(map(batch.num_trained_tokens, rows))}

    mini_batches = [[collate(trees) for trees in mini_batch] for mini_batch in plan]
    return mini_batches, config.metrics(batch.lengths().sum(1), kept, list(map(len, batches)), plan)


def loss_scale(
    loss_type: str,
    micro_batch: dict[str, Any],
    total_rows: int,
    total_tokens: int,
    num_processes: int,
    num_mini_batches: int,
) -> float:
    """Return the factor of a micro-batch's loss, such that the losses of a mini-batch's micro-batches can be summed.

    `loss_type` is one of `LOSS_TYPES`. A mini-batch stands for 1/num_mini_batches of the rollout's `total_rows` rows
    and `total_tokens` completion tokens over all ranks; ranks' gradients are averaged. Token-mean losses divide by
    `num_items_in_batch` already.
    """
    rows, mask = len(micro_batch["advantages"]), micro_batch["completion_mask"]
    if loss_type in ROW_MEAN_LOSSES:
        return rows * num_processes * num_mini_batches / max(total_rows, 1)
    if loss_type in MICRO_BATCH_TOKEN_MEAN_LOSSES:
        return int(mask.sum()) * num_processes * num_mini_batches / max(total_tokens, 1)
    return 1.0

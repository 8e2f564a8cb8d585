"""Step samples -> tensors: the rows the policy is trained on, in micro-batches of bounded size.

A *row* is one step of a trajectory: prompt, completion, advantage. The number of rows varies between rollouts, so a
mini-batch is split into micro-batches by *tokens*. Two numbers keep the gradient independent of the split:

- `num_items_in_batch`, by which TRL's token-mean losses (dapo, cispo, vespo) divide: the number of completion tokens
  of the rollout or, with `mini_batch_size`, of an average mini-batch, since TRL does not see these mini-batches;
- `loss_scale`, the factor of a micro-batch's loss for losses that average inside a micro-batch.

All ranks receive all rows, which are small beside a model, and make the same plan (`balance`). A micro-batch contains
its rows twice: padded, for TRL's loss, and as the model reads them, where common tokens stand once (`tree`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..trajectory import Trajectory
from ..utils.images import Picture
from ..utils.options import require
from .balance import BatchingConfig, Planned
from .images import OwnersOf, images_of, keyed
from .tree import Tree, lay_out, round_up

# How a TRL loss averages, and so how its micro-batches add up.
ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")
MICRO_BATCH_TOKEN_MEAN_LOSSES = ("bnpo",)
TOKEN_MEAN_LOSSES = ("dapo", "cispo", "vespo")
LOSS_TYPES = TOKEN_MEAN_LOSSES + ROW_MEAN_LOSSES + MICRO_BATCH_TOKEN_MEAN_LOSSES


@dataclass
class StepBatch:
    """Step samples of one rank, ragged; row i of each field belongs to one sample."""

    prompt_ids: list[np.ndarray]  # as the engine read them
    completion_ids: list[np.ndarray]  # as it generated them
    advantages: np.ndarray  # (rows,) float32
    trained: np.ndarray  # (rows,) bool; a row that is not (truncated, with `mask_truncated_completions`) has mask 0
    logprobs: list[np.ndarray] | None = None  # of each completion under the engine that sampled it
    images: list[Sequence[Picture]] | None = (
        None  # of each prompt, in the order of their tokens; `None`: no row has any
    )

    def __post_init__(self):
        self.images = self.images or [()] * len(self)

    @classmethod
    def from_trajectories(
        cls, trajectories: Sequence[Trajectory], advantages: Sequence[float], mask_truncated: bool = False
    ) -> StepBatch:
        """Return the rows of all steps of the trajectories that count.

        `advantages` are one per step of each trajectory, in order, also of such as do not count; with
        `mask_truncated`, completions truncated by the length limit are not trained.

        Raises:
            G2POError: if the number of advantages or log-probabilities does not fit, or a prompt is empty.
        """
        steps = [(trajectory, step) for trajectory in trajectories for step in trajectory.steps]
        advantages, remedy = np.asarray(advantages, dtype=np.float32), f"pass one for each of {len(steps)} steps"
        require(advantages.shape == (len(steps),), "advantages", advantages.shape, remedy)
        kept = [i for i, (trajectory, _) in enumerate(steps) if trajectory.counted]
        rows = [steps[i][1] for i in kept]
        for step in rows:
            numbers = [len(step.prompt_ids), len(step.completion_ids), len(step.logprobs or step.completion_ids)]
            remedy = "a step has a prompt, and as many log-probabilities as tokens of the completion"
            require(numbers[0] > 0 and numbers[1] == numbers[2], "logprobs", numbers, remedy)
        with_logprobs = all(step.logprobs is not None for step in rows)
        return cls(
            [np.array(step.prompt_ids, dtype=np.int32) for step in rows],
            [np.array(step.completion_ids, dtype=np.int32) for step in rows],
            advantages[kept],
            np.array([not (mask_truncated and step.completion_truncated) for step in rows], dtype=bool),
            [np.array(step.logprobs, dtype=np.float32) for step in rows] if with_logprobs else None,
            [step.shown_images for step in rows],
        )

    @classmethod
    def concatenate(cls, batches: Sequence[StepBatch]) -> StepBatch:
        """Return the rows of all batches, in order."""

        def joined(name: str) -> list[Any]:
            return [row for batch in batches for row in getattr(batch, name)]

        return cls(
            joined("prompt_ids"),
            joined("completion_ids"),
            np.concatenate([batch.advantages for batch in batches]),
            np.concatenate([batch.trained for batch in batches]),
            joined("logprobs") if all(batch.logprobs is not None for batch in batches) else None,
            joined("images"),
        )

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def num_trained_tokens(self, rows: Sequence[int] | None = None) -> int:
        """Return the number of completion tokens of those rows that are trained; default: of all."""
        rows = range(len(self)) if rows is None else rows
        return sum(len(self.completion_ids[row]) for row in rows if self.trained[row])

    def sequences(self, owners_of: OwnersOf | None = None) -> list[np.ndarray]:
        """Return the token ids of each row, prompt and completion; with `owners_of`, see `images.keyed`."""
        sequences = [np.concatenate(pair) for pair in zip(self.prompt_ids, self.completion_ids)]
        if owners_of is None:
            return sequences
        return [keyed(ids, images, owners_of) for ids, images in zip(sequences, self.images)]

    def lengths(self) -> np.ndarray:
        """Return (rows, 2) numbers of prompt tokens and completion tokens."""
        columns = [[len(ids) for ids in of] for of in (self.prompt_ids, self.completion_ids)]
        return np.array(columns, dtype=np.int64).T

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
            `advantages` (num_rows,), by which TRL's loss multiplies every token of the row's completion;
            `sampling_per_token_logps` (num_rows, C) if the engine returned them.
        """
        prompts, completions = ([of[row] for row in rows] for of in (self.prompt_ids, self.completion_ids))
        prompt_width = round_up(max([1, *map(len, prompts)]), pad_to_multiple_of)
        # At least 2: TRL's metrics take a tensor of width 1 for one value per row, and would count filler rows.
        completion_width = round_up(max([2, *map(len, completions)]), pad_to_multiple_of)

        def padded(values: Iterable[np.ndarray], width: int, fill: float, left: bool = False) -> torch.Tensor:
            made = torch.full((num_rows, width), fill)
            for row, of in enumerate(values):
                made[row, slice(width - len(of), None) if left else slice(len(of))] = torch.from_numpy(of).to(made)
            return made

        trained = (np.full_like(self.completion_ids[row], self.trained[row]) for row in rows)
        tensors = {
            "prompt_ids": padded(prompts, prompt_width, pad_token_id, left=True),
            "prompt_mask": padded(map(np.ones_like, prompts), prompt_width, 0, left=True),
            "completion_ids": padded(completions, completion_width, pad_token_id),
            "completion_mask": padded(trained, completion_width, 0),
            "advantages": padded(self.advantages[rows, None], 1, 0.0)[:, 0],
        }
        tensors["prompt_mask"][:, -1] = 1  # a filler row attends to one token: attention over nothing is undefined
        if self.logprobs is not None:
            logprobs = (self.logprobs[row] for row in rows)
            tensors["sampling_per_token_logps"] = padded(logprobs, completion_width, 0.0)
        return tensors

    def micro_batch(self, trees: Sequence[Tree], num_rows: int, config: BatchingConfig) -> dict[str, Any]:
        """Return the rows of some trees, filled up to `num_rows`: what `collate`, `lay_out` and `images_of` return.

        `rows` are their numbers.
        """
        rows = [row for tree in trees for row in tree.rows]
        sequences = {row: np.concatenate([self.prompt_ids[row], self.completion_ids[row]]) for row in rows}
        num_scored = {row: len(self.completion_ids[row]) * bool(self.trained[row]) for row in rows}
        made = self.collate(rows, num_rows, config.pad_token_id, config.pad_to_multiple_of)
        made |= lay_out(trees, sequences, num_scored, config.pad_token_id, config.row_multiple)
        if any(self.images):
            made |= images_of(trees, sequences, self.images, config.owners_of)
        return made | {"rows": rows}


def make_mini_batches(
    batches: Sequence[StepBatch], rank: int, config: BatchingConfig, rng: np.random.Generator
) -> tuple[list[list[dict[str, Any]]], dict[str, float]]:
    """Return one rank's part of the step samples that each rank played, [mini-batch][micro-batch], and metrics.

    A micro-batch has what `StepBatch.micro_batch` returns, `num_items_in_batch`, `loss_scale`, and as `weight` the
    number of trained tokens of all ranks.
    """
    batch, num_ranks = StepBatch.concatenate(batches), len(batches)
    # Other rows have no gradient, since every term but that of the KL is multiplied by the row's advantage.
    kept = batch.trained & ((batch.advantages != 0) | config.kl)
    plan = config.plan(batch.sequences(config.owners_of), kept, num_ranks, rng)
    num_tokens = batch.num_trained_tokens()
    num_items = num_tokens if config.mini_batch_size is None else num_tokens / len(plan)

    def micro_batch_of(trees: Planned) -> dict[str, Any]:
        rows = [[row for tree in of_rank for row in tree.rows] for of_rank in trees]
        made = batch.micro_batch(trees[rank], max(1, *map(len, rows)), config)
        scale = loss_scale(config.loss_type, made, len(batch), num_tokens, num_ranks, len(plan))
        weight = sum(map(batch.num_trained_tokens, rows))
        return made | {"num_items_in_batch": torch.tensor(num_items), "loss_scale": scale, "weight": weight}

    mini_batches = [[micro_batch_of(trees) for trees in mini_batch] for mini_batch in plan]
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

    A mini-batch stands for 1/num_mini_batches of the rollout's `total_rows` rows and `total_tokens` completion tokens
    over all ranks; ranks' gradients are averaged. Token-mean losses divide by `num_items_in_batch` already.
    """
    if loss_type in TOKEN_MEAN_LOSSES:
        return 1.0
    part, total = len(micro_batch["advantages"]), total_rows
    if loss_type in MICRO_BATCH_TOKEN_MEAN_LOSSES:
        part, total = int(micro_batch["completion_mask"].sum()), total_tokens
    return part * num_processes * num_mini_batches / max(total, 1)

"""`Update`: from a rollout's step samples to micro-batches with all inputs of the loss, and their backward passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device

from ..utils.forward_pass import without_cudnn_attention
from ..utils.trl_compat import fsdp_plugin_of, set_sync_gradients
from .batch import BatchingConfig, StepBatch, make_mini_batches
from .guard import GradientGuard
from .images import images_of
from .layout import Layout
from .log_probs import Correction, LogProbs
from .prefix_order import common_prefix
from .redistribute import make_mini_batches_over_ranks
from .tree import grow, lay_out, one_each

MiniBatches = list[list[dict[str, Any]]]  # [mini-batch][micro-batch] of a rank


class Update:
    """Prepares step samples for the loss: layout, micro-batches, log-probabilities to compare with.

    Args:
        layout: layout of micro-batches in the model.
        per_token: TRL's log-probabilities of token ids, in the current layout:
            (model, ids, mask, length of completions) -> (log-probabilities, …).
        config: how samples are batched, but for what `layout` decides.
        seed: seed of the order in which samples are trained.
        beta, correction, checkpointing, old_of_engine: see `LogProbs`.
        needs_old_log_probs: see `LogProbs`; a function of the rollout's number of mini-batches.
    """

    def __init__(
        self,
        layout: Layout,
        accelerator: Accelerator,
        per_token: Callable[..., tuple],
        config: BatchingConfig,
        seed: int,
        beta: float,
        needs_old_log_probs: Callable[[int], bool],
        correction: Correction | None = None,
        checkpointing: dict[str, Any] | None = None,
        old_of_engine: bool = False,
    ):
        self.layout, self.accelerator, self.per_token = layout, accelerator, per_token
        self.config, self.seed, self.needs_old_log_probs = config, seed, needs_old_log_probs
        self.guard = GradientGuard(accelerator)
        needs_old = needs_old_log_probs(config.num_mini_batches)
        self.log_probs = LogProbs(self.score, beta, needs_old, correction, checkpointing, old_of_engine)

    def make_mini_batches(
        self, model: torch.nn.Module, local: StepBatch, step: int = 0
    ) -> tuple[MiniBatches, dict[str, float]]:
        """Return this rank's part of all ranks' step samples, in a verified layout, and `update/*` metrics."""
        if self.layout.image_inputs is not None:
            self.layout.notice_images(local.images is not None)
        mini_batches, metrics = self.split(local, step)
        while not self.verify_layout(model, mini_batches):
            mini_batches, metrics = self.split(local, step)
        return mini_batches, metrics

    def verify_layout(self, model: torch.nn.Module, mini_batches: MiniBatches) -> bool:
        """Return whether the layout gives the log-probabilities of samples alone; change it if not."""
        return self.layout.verify(model, mini_batches, self.score)

    def split(self, local: StepBatch, step: int = 0) -> tuple[MiniBatches, dict[str, float]]:
        """Return this rank's part of all ranks' step samples, the same at each call, and `update/*` metrics."""
        accelerator, config = self.accelerator, self.batching_config()
        rng = np.random.default_rng([self.seed, step, 0])  # the same on every rank
        if accelerator.num_processes == 1:
            mini_batches, metrics = make_mini_batches([local], 0, config, rng)
        else:
            gather = lambda thing: gather_object([thing])  # noqa: E731
            rank, device = accelerator.process_index, accelerator.device
            mini_batches, metrics = make_mini_batches_over_ranks(local, rank, config, rng, gather, device)
        self.log_probs.needs_old_log_probs = self.needs_old_log_probs(len(mini_batches))
        return mini_batches, metrics

    def micro_batch(self, batch: StepBatch, layout: str | None = None) -> dict[str, Any]:
        """Return all rows of a batch, in order, as one micro-batch in a layout, to be scored; default: the current."""
        config, rows, sequences = self.batching_config(layout), range(len(batch)), batch.sequences()
        inputs = batch.sequences(config.owners_of)
        lengths, overlaps = list(map(len, sequences)), [0, *map(common_prefix, inputs, inputs[1:])]
        trees = one_each(rows, lengths)
        if config.layout != "padded":
            trees = grow(rows, lengths, overlaps, sum(lengths), config.fork_cost)
        micro_batch = batch.collate(rows, len(batch), config.pad_token_id, config.pad_to_multiple_of)
        if batch.images is not None:
            micro_batch |= images_of(trees, sequences, batch.images, config.owners_of)
        completions = list(map(len, batch.completion_ids))
        return micro_batch | lay_out(trees, sequences, completions, config.pad_token_id, config.row_multiple)

    def batching_config(self, kind: str | None = None) -> BatchingConfig:
        """Return the options of batching for a layout; default: the current."""
        layout, kind = self.layout, kind or self.layout.kind
        return replace(
            self.config,
            pad_to_multiple_of=layout.row_multiple,
            layout=kind,
            fork_cost=layout.fork_cost if kind == "forked" else None,
            owners_of=None if layout.image_inputs is None else layout.image_inputs.owners,
            scale_of=layout.scale_of,
            kl=self.log_probs.beta != 0.0,
        )

    def add_log_probs(
        self,
        model: torch.nn.Module,
        reference: torch.nn.Module | None,
        micro_batches: list[dict[str, Any]],
        unwrapped: torch.nn.Module | None = None,
    ) -> dict[str, float]:
        """Add log-probabilities that the loss compares with; return `sampling/*` metrics known before the update."""
        self.log_probs.add(model, reference, micro_batches, unwrapped)
        return self.log_probs.metrics() if self.log_probs.needs_old_log_probs else {}

    def metrics(self) -> dict[str, float]:
        """Return the `sampling/*` metrics that the update itself computes. All ranks call it together."""
        return {} if self.log_probs.needs_old_log_probs else self.log_probs.metrics()

    @without_cudnn_attention()
    def score(self, model: torch.nn.Module, micro_batch: dict[str, Any]) -> torch.Tensor:
        """Return log-probabilities of the completion tokens, (rows, C)."""
        batch = send_to_device(micro_batch, self.accelerator.device)
        with self.layout.of(model, batch):
            return self.per_token(
                model,
                torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                batch["completion_ids"].size(1),
            )[0]

    @without_cudnn_attention()
    def backward(
        self,
        model: torch.nn.Module,
        micro_batches: list[dict[str, Any]],
        train: Callable[[dict[str, Any]], torch.Tensor],
    ) -> torch.Tensor:
        """Return the sum of a mini-batch's losses; gradients are summed and, at an optimizer step, exchanged once.

        `train` runs forward and backward of a micro-batch and returns its loss. If the gradient of an optimizer step
        is not finite, a `FloatingPointError` is raised on every rank.
        """
        accelerator = self.accelerator
        loss = torch.zeros((), device=accelerator.device)
        ends_step = accelerator.sync_gradients
        # Only the last backward pass of an optimizer step exchanges gradients; DeepSpeed also steps there. FSDP
        # exchanges after each: a gradient that is not exchanged is kept whole, of all weights on every rank.
        if accelerator.is_fsdp2:  # transformers has switched it off, except in the step's last mini-batch
            model.set_requires_gradient_sync(True)
        fsdp = fsdp_plugin_of(accelerator) is not None
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            set_sync_gradients(accelerator, ends_step and last)
            with (
                nullcontext() if last or fsdp else accelerator.no_sync(model),
                self.guard.watch_backward(model, ends_step and last),
                self.layout.of(model, micro_batch),
            ):
                loss += train(micro_batch)
        if ends_step:
            self.guard.check(model)
        return loss


def set_optimizer_mode(optimizer: Any, training: bool) -> None:
    """Switch to the weights for training or evaluation, if an optimizer has both, as schedule-free ones do."""
    switch = getattr(optimizer, "train" if training else "eval", None)
    if callable(switch):
        switch()

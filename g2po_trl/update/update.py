"""`Update`: from a rollout's step samples to micro-batches with all inputs of the loss, and their backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object, send_to_device

from ..utils.forward_pass import evaluation_mode, without_cudnn_attention
from ..utils.trl_compat import expose_body
from .batch import BatchingConfig, StepBatch, make_mini_batches
from .guard import GradientGuard
from .layout import Layout
from .log_probs import LogProbs
from .policy.importance import importance_ratio
from .policy.reference import AdapterReference
from .tree import grow, is_exact, measure, one_each

_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)
MiniBatches = list[list[dict[str, Any]]]  # [mini-batch][micro-batch] of a rank


class Update:
    """Prepares step samples for the loss: layout, micro-batches, log-probabilities to compare with.

    Args:
        layout: layout of micro-batches in the model.
        config: how samples are batched, but for what `layout` decides.
        seed: seed of the order in which samples are trained.
        num_iterations: passes over a rollout.
        mini_batches_per_step: mini-batches that an optimizer step trains, over all passes.
        log_probs: options of `LogProbs`.
    """

    def __init__(
        self,
        layout: Layout,
        accelerator: Accelerator,
        config: BatchingConfig,
        seed: int,
        num_iterations: int,
        mini_batches_per_step: int,
        **log_probs: Any,
    ):
        self.layout, self.accelerator, self.config, self.seed = layout, accelerator, config, seed
        self.num_iterations, self.mini_batches_per_step = num_iterations, mini_batches_per_step
        self.guard = GradientGuard(accelerator)
        self.log_probs = LogProbs(self.score, accelerator.unwrap_model, **log_probs)
        self._plan_old_log_probs(config.num_mini_batches)

    @classmethod
    def of(
        cls,
        args: Any,
        model: torch.nn.Module,
        accelerator: Accelerator,
        pad_token_id: int,
        reference: torch.nn.Module | AdapterReference | None = None,
        image_inputs: Callable[..., dict[str, torch.Tensor]] | None = None,
    ) -> Update:
        """Return the update with the attributes of `args`, those of a `G2POConfig`."""
        if isinstance(reference, torch.nn.Module):
            expose_body(accelerator.unwrap_model(reference))
        options = {"image_inputs": image_inputs, "checkpointing": args.gradient_checkpointing}
        layout = Layout(args.token_layout, model, accelerator, args.pad_to_multiple_of, args.temperature, **options)
        sizes = args.steps_per_generation, args.max_tokens_per_micro_batch
        config = BatchingConfig(*sizes, args.loss_type, pad_token_id, mini_batch_size=args.mini_batch_size)
        bounds = {name: getattr(args, f"vllm_importance_sampling_{name}") for name in ("mode", "clip_min", "clip_max")}
        corrects = args.corrects_sampling and args.vllm_importance_sampling_correction
        is_exact = layout.precision(model) == torch.float32 and not layout.scale_of([0])[0]
        is_exact &= not args.corrects_sampling and not args.reshaping
        log_probs = {
            "beta": args.beta,
            "reference": reference,
            "correction": partial(importance_ratio, **bounds) if corrects else None,
            "checkpointing": args.gradient_checkpointing_kwargs,
            "old_of_engine": args.old_log_probs == "auto" and is_exact,
        }
        schedule = args.seed, args.num_iterations, args.gradient_accumulation_steps
        return cls(layout, accelerator, config, *schedule, **log_probs)

    def _plan_old_log_probs(self, num_mini_batches: int) -> None:
        is_one_step = self.mini_batches_per_step % (num_mini_batches * self.num_iterations) == 0
        self.log_probs.needs_old_log_probs = not is_one_step

    def make_mini_batches(
        self, model: torch.nn.Module, local: StepBatch, step: int = 0
    ) -> tuple[MiniBatches, dict[str, float]]:
        """Return this rank's part of all ranks' step samples, in a verified layout, and `update/*` metrics."""
        batches = gather_object([local])
        if any(any(batch.images) for batch in batches):
            self.layout.notice_images()
        is_exact = False
        while not is_exact:
            mini_batches, metrics = self.split(batches, step)
            is_exact = self.verify_layout(model, mini_batches, batches)
        self._plan_old_log_probs(len(mini_batches))
        return mini_batches, metrics

    def split(self, batches: Sequence[StepBatch], step: int = 0) -> tuple[MiniBatches, dict[str, float]]:
        """Return this rank's part of all ranks' step samples, the same at each call, and `update/*` metrics."""
        rng = np.random.default_rng([self.seed, step, 0])  # the same on every rank
        return make_mini_batches(batches, self.accelerator.process_index, self.batching_config(), rng)

    def verify_layout(self, model: torch.nn.Module, mini_batches: MiniBatches, batches: Sequence[StepBatch]) -> bool:
        """Return whether the layout gives the log-probabilities of samples alone; fall back if not.

        Compared are the tree with the longest sequence, and with images also one that shows any. All ranks call it.
        """
        layout, batch = self.layout, StepBatch.concatenate(batches)
        lengths, images = batch.lengths().sum(1) * batch.trained, batch.images
        micro_batches = [micro_batch for part in mini_batches for micro_batch in part]
        trees = [one for one in micro_batches if {"branches", "forks"} & one.keys() and len(one["rows"]) > 1]
        trees.sort(key=lambda tree: lengths[tree["rows"]].max(), reverse=True)
        shown = [tree for tree in trees if any(images[row] for row in tree["rows"])]
        ranks = gather_object([(int(lengths[trees[0]["rows"]].max()) if trees else 0, bool(shown))])
        longest, any_shown = map(max, zip(*ranks))
        if not layout.needs_check(longest):
            return True
        compared = (trees or micro_batches)[:1]
        layout.checked_length = longest if any_shown or not layout.has_images else 0  # images are compared later
        if layout.has_images:
            compared += shown[:1] or compared
        reason = next(filter(None, [self._why_inexact(model, tree, batch) for tree in compared]), None)
        if reason is not None:
            layout.fall_back(f"on sequences of up to {longest} tokens {reason}")
        return reason is None

    def _why_inexact(self, model: torch.nn.Module, tree: dict[str, Any], batch: StepBatch) -> str | None:
        """Return in which way a tree changes log-probabilities, `None` if only by rounding."""
        rows, lengths = tree["rows"] or [0], batch.lengths().sum(1) * batch.trained
        scored = [row for row in rows if lengths[row]] or rows[:1]
        shown = next((row for row in scored if batch.images[row]), scored[len(scored) // 2])
        chosen, why = [max(scored, key=lengths.__getitem__), scored[0], shown, scored[-1]], ""  # as many on every rank
        sizes = batch.lengths()[:, 1] * batch.trained * bool(tree["rows"])  # a row that fills up for a rank has none
        with evaluation_mode(model), torch.no_grad():
            alone = [self.score(model, self.micro_batch(batch.take([row]), "padded"))[0] for row in chosen]
            alone = [wanted[: sizes[row]] for row, wanted in zip(chosen, alone)]
            try:
                found = self.score(model, tree)
                off = [found[rows.index(row), : len(wanted)] - wanted for row, wanted in zip(chosen, alone)]
            except Exception as error:  # models that do not take it raise errors of any class
                if isinstance(error, torch.OutOfMemoryError) or self.accelerator.distributed_type in _SHARDED:
                    raise  # other ranks would wait for this one
                off, why = [torch.full_like(wanted, torch.inf) for wanted in alone], f" ({error!r})"
        off = torch.cat(off)
        if "branches" in tree and not is_exact(tree, batch.take(rows).sequences(), sizes[rows].tolist()):
            off, why = torch.full_like(off, torch.inf), " (branches attend to other tokens than their own)"
        mean = self.mean_difference(off)
        if mean <= self.layout.tolerance(model):
            return None
        return f"log-probabilities differ from those of a sequence alone by {mean:.2g} nats on average{why}"

    def micro_batch(self, batch: StepBatch, layout: str | None = None) -> dict[str, Any]:
        """Return all rows of a batch, in order, as one micro-batch in a layout, to be scored; default: the current."""
        config = self.batching_config(layout)
        rows, lengths, overlaps = measure(batch.sequences(config.owners_of), range(len(batch)))
        trees = one_each(rows.tolist(), lengths.tolist())
        if config.layout != "padded":
            trees = grow(rows, lengths, overlaps, lengths.sum(), config.fork_cost)
        return batch.micro_batch(trees, len(batch), config)

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

    @without_cudnn_attention()
    def score(self, model: torch.nn.Module, micro_batch: dict[str, Any]) -> torch.Tensor:
        """Return log-probabilities of the completion tokens, (rows, C)."""
        batch = send_to_device(micro_batch, self.accelerator.device)
        with self.layout.of(model, batch):
            return self.layout.log_probs(model, batch["completion_mask"], compute_entropy=False)[0]

    def mean_difference(self, off: torch.Tensor) -> float:
        """Return the mean absolute value over all ranks; infinity for NaN."""
        off = off.abs().float().nan_to_num(torch.inf)
        sums = torch.stack([off.sum(), off.new_tensor(off.numel())]).to(self.accelerator.device)
        total, number = self.accelerator.reduce(sums, reduction="sum").tolist()
        return total / max(number, 1)

    @without_cudnn_attention()
    def backward(
        self,
        model: torch.nn.Module,
        micro_batches: list[dict[str, Any]],
        train: Callable[[dict[str, Any]], torch.Tensor],
    ) -> torch.Tensor:
        """Return the sum of a mini-batch's losses; gradients are summed and, at an optimizer step, exchanged once.

        `train` runs forward and backward of a micro-batch and returns its loss.

        Raises:
            FloatingPointError: on every rank, if the gradient of an optimizer step is not finite.
        """
        accelerator, ends_step = self.accelerator, self.accelerator.sync_gradients
        loss, fsdp = torch.zeros((), device=accelerator.device), accelerator.distributed_type == DistributedType.FSDP
        # Only the last backward pass of an optimizer step exchanges gradients; DeepSpeed also steps there. FSDP
        # exchanges after each: a gradient that is not exchanged is kept whole, of all weights on every rank.
        if accelerator.is_fsdp2:  # transformers has switched it off, except in the step's last mini-batch
            model.set_requires_gradient_sync(True)
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            accelerator.sync_gradients = ends_step and last
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

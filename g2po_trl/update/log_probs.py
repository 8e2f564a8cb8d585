"""Log-probabilities that the loss holds against the update's own: the reference's, the acting policy's, the engine's.

Where a rollout is trained on in one optimizer step, the policy of the update is the policy that acted. Its
log-probabilities are then the update's own, and so is the correction for an engine that computes them otherwise: no
pass through the model is made for either.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from .importance import SamplingStatistics, importance_ratio
from .layout import LayoutTrainer


class LogProbsTrainer(LayoutTrainer):
    """Adds to micro-batches what the loss compares with, and measures how far the engine is from the model."""

    _updating: dict[str, Any] | None = None

    @property
    def policy_moves_on(self) -> bool:
        """Whether some rows are trained after an optimizer step on others of the same rollout."""
        slices = self.args.steps_per_generation * self.num_iterations
        return self.args.gradient_accumulation_steps % slices != 0

    def add_log_probs(self, micro_batches: list[dict[str, Any]]) -> None:
        """Those of the reference; and of the policy that acted, if it will have moved on."""
        self._statistics = SamplingStatistics()
        unwrapped = self.accelerator.unwrap_model(self.model)
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            for micro_batch in micro_batches:
                if self.policy_moves_on:
                    micro_batch["old_per_token_logps"] = self.log_probs(self.model, micro_batch)
                    self._compare_with_engine(micro_batch, micro_batch["old_per_token_logps"])
                if self.beta != 0.0 and self.ref_model is not None:
                    micro_batch["ref_per_token_logps"] = self.log_probs(self.ref_model, micro_batch)
                elif self.beta != 0.0:  # the adapter switched off, or its copy from before training
                    with use_adapter(unwrapped, adapter_name="ref" if "ref" in unwrapped.peft_config else None):
                        micro_batch["ref_per_token_logps"] = self.log_probs(self.model, micro_batch)
        if self.policy_moves_on:
            self.log_sampling()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self._updating = None if self.policy_moves_on else inputs
        try:
            with self.in_layout(inputs):
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self._updating = None

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._updating is not None:  # the loss reads what this adds only afterwards
            self._compare_with_engine(self._updating, outputs[0].detach())
        return outputs

    def _compare_with_engine(self, micro_batch: dict[str, Any], logps: torch.Tensor) -> None:
        """Statistics, and the importance ratios that correct for vLLM if they are asked for."""
        if "sampling_per_token_logps" not in micro_batch:
            return
        sampling_logps, mask = (
            micro_batch[name].to(logps.device) for name in ("sampling_per_token_logps", "completion_mask")
        )
        ratio = outside = None
        if self.use_vllm and self.vllm_importance_sampling_correction:
            ratio, outside = importance_ratio(
                logps,
                sampling_logps,
                mask,
                self.vllm_importance_sampling_mode,
                self.vllm_importance_sampling_clip_min,
                self.vllm_importance_sampling_clip_max,
            )
            micro_batch["importance_sampling_ratio"] = ratio
        self._statistics.add(logps, sampling_logps, mask, ratio, outside)

    def log_sampling(self) -> None:
        """`sampling/*` of the iteration, over all ranks: they call it together."""
        for name, value in SamplingStatistics.metrics(gather_object([self._statistics.summary()])).items():
            self._metrics["train"][name].append(value)

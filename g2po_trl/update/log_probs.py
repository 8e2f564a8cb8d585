"""Log-probabilities that the loss compares with: of the reference, the acting policy and the engine.

If a rollout is trained in one optimizer step, the acting policy is the one that is updated. The log-probabilities of
the loss itself then serve as the old ones and for the correction of the engine, without another forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object

from ..utils.forward_pass import evaluation_mode
from ..utils.trl_compat import disable_gradient_checkpointing
from .layout import Score
from .policy.importance import SamplingStatistics
from .policy.reference import AdapterReference

# (log-probabilities of the trainer, those of the engine, mask) -> weights and where they are bounded, see
# `importance_ratio`.
Correction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class LogProbs:
    """Log-probabilities that micro-batches need in addition to the loss's own, and statistics of the engine's.

    Args:
        score: log-probabilities of a model.
        beta: weight of the KL term; 0 needs no reference.
        needs_old_log_probs: whether some rows are trained after an optimizer step on others of the same rollout.
        correction: importance correction; `None` for engines without it.
        checkpointing: `gradient_checkpointing_kwargs`; checkpointing is switched off while scoring.
        old_of_engine: the engine's log-probabilities are the old ones, if it returned them.

    Attributes:
        adapter_reference: reference of a model with an adapter, if `beta` is not 0.
    """

    def __init__(
        self,
        score: Score,
        beta: float,
        needs_old_log_probs: bool,
        correction: Correction | None = None,
        checkpointing: dict[str, Any] | None = None,
        old_of_engine: bool = False,
    ):
        self.old_of_engine = old_of_engine
        self.score, self.beta, self.needs_old_log_probs = score, beta, needs_old_log_probs
        self.correction, self.checkpointing = correction, checkpointing
        self.adapter_reference: AdapterReference | None = None
        self._statistics = SamplingStatistics()
        self._updating: dict[str, Any] | None = None

    def add(
        self,
        model: torch.nn.Module,
        reference: torch.nn.Module | None,
        micro_batches: Sequence[dict[str, Any]],
        unwrapped: torch.nn.Module | None = None,
    ) -> None:
        """Add `ref_per_token_logps` and, if needed, `old_per_token_logps` to the micro-batches of a rollout.

        Without a `reference`, it is the model with its initial adapter, see `AdapterReference`. `unwrapped` is the
        model, if `model` is a wrapper.
        """
        self._statistics = SamplingStatistics()
        unwrapped = model if unwrapped is None else unwrapped
        with evaluation_mode(model), torch.no_grad(), disable_gradient_checkpointing(model, self.checkpointing):
            for micro_batch in micro_batches if self.needs_old_log_probs else ():
                if self.old_of_engine and "sampling_per_token_logps" in micro_batch:
                    micro_batch["old_per_token_logps"] = micro_batch["sampling_per_token_logps"]
                    continue
                micro_batch["old_per_token_logps"] = self.score(model, micro_batch)
                self._compare_with_engine(micro_batch, micro_batch["old_per_token_logps"])
            if self.beta != 0.0:
                with self.as_reference(model, reference, unwrapped) as compared:
                    for micro_batch in micro_batches:
                        micro_batch["ref_per_token_logps"] = self.score(compared, micro_batch)

    @contextmanager
    def as_reference(
        self, model: torch.nn.Module, reference: torch.nn.Module | None, unwrapped: torch.nn.Module
    ) -> Iterator[torch.nn.Module]:
        """Yield the model that scores as the reference inside; see `add`."""
        if reference is not None:
            yield reference
            return
        with self.adapter_reference.in_place(unwrapped):
            yield model

    @contextmanager
    def updating(self, micro_batch: dict[str, Any]) -> Iterator[None]:
        """Compute the loss of this micro-batch inside."""
        self._updating = None if self.needs_old_log_probs else micro_batch
        try:
            yield
        finally:
            self._updating = None

    def record(self, log_probs: torch.Tensor) -> None:
        """Compare computed log-probabilities with the engine's; the loss reads the importance ratio afterwards."""
        if self._updating is not None:
            self._compare_with_engine(self._updating, log_probs.detach())

    def _compare_with_engine(self, micro_batch: dict[str, Any], logps: torch.Tensor) -> None:
        """Add to the statistics and, with a correction, set the micro-batch's importance ratio."""
        if "sampling_per_token_logps" not in micro_batch:
            return
        sampling_logps, mask = (
            micro_batch[name].to(logps.device) for name in ("sampling_per_token_logps", "completion_mask")
        )
        ratio = outside = None
        if self.correction is not None:
            ratio, outside = self.correction(logps, sampling_logps, mask)
            micro_batch["importance_sampling_ratio"] = ratio
        self._statistics.add(logps, sampling_logps, mask, ratio, outside)

    def metrics(self) -> dict[str, float]:
        """Return `sampling/*` of the iteration, over all ranks: they call it together."""
        return SamplingStatistics.metrics(gather_object([self._statistics.summary()]))

"""Log-probabilities that the loss compares with: of the reference, the acting policy and the engine.

If a rollout is trained in one optimizer step, the acting policy is the one that is updated. The log-probabilities of
the loss itself then serve as the old ones and for the correction of the engine, without another forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object

from ..utils.forward_pass import evaluation_mode
from ..utils.trl_compat import disable_gradient_checkpointing, replaced
from .policy.importance import SamplingStatistics
from .policy.reference import AdapterReference


class LogProbs:
    """Log-probabilities that micro-batches need in addition to the loss's own, and statistics of the engine's.

    Args:
        score: (model, micro-batch) -> log-probabilities of its completion tokens, (rows, C).
        unwrap: returns a model without its wrappers.
        beta: weight of the KL term; 0 needs no reference.
        reference: a model or, of one with an adapter, the weights of its reference.
        correction: `importance_ratio` with its options; `None` for engines without it.
        checkpointing: `gradient_checkpointing_kwargs`; checkpointing is switched off while scoring.
        old_of_engine: the engine's log-probabilities are the old ones, if it returned them.

    Attributes:
        needs_old_log_probs: whether some rows are trained after an optimizer step on others of the same rollout.
    """

    def __init__(
        self,
        score: Callable[[torch.nn.Module, dict[str, Any]], torch.Tensor],
        unwrap: Callable[[torch.nn.Module], torch.nn.Module],
        beta: float,
        reference: torch.nn.Module | AdapterReference | None = None,
        correction: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
        checkpointing: dict[str, Any] | None = None,
        old_of_engine: bool = False,
    ):
        self.score, self.unwrap, self.beta, self.reference = score, unwrap, beta, reference
        self.correction, self.checkpointing, self.old_of_engine = correction, checkpointing, old_of_engine
        self.needs_old_log_probs = False
        self._statistics = SamplingStatistics()
        self._updating: dict[str, Any] | None = None

    def add(self, model: torch.nn.Module, micro_batches: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Add `ref_per_token_logps` and, if needed, `old_per_token_logps` to the micro-batches of a rollout.

        Returns:
            `sampling/*`, if it is known before the update.
        """
        self._statistics = SamplingStatistics()
        with evaluation_mode(model), torch.no_grad(), disable_gradient_checkpointing(model, self.checkpointing):
            for micro_batch in micro_batches if self.needs_old_log_probs else ():
                if self.old_of_engine and "sampling_per_token_logps" in micro_batch:
                    micro_batch["old_per_token_logps"] = micro_batch["sampling_per_token_logps"]
                    continue
                micro_batch["old_per_token_logps"] = self.score(model, micro_batch)
                self._compare_with_engine(micro_batch, micro_batch["old_per_token_logps"])
            if self.beta != 0.0:
                with self.as_reference(model) as compared:
                    for micro_batch in micro_batches:
                        micro_batch["ref_per_token_logps"] = self.score(compared, micro_batch)
        return self.metrics() if self.needs_old_log_probs else {}

    @contextmanager
    def as_reference(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Yield the model that scores as the reference inside: its own, or this one with the reference's weights."""
        if isinstance(self.reference, AdapterReference):
            with self.reference.in_place(self.unwrap(model)):
                yield model
        else:
            yield self.reference

    def updating(self, micro_batch: dict[str, Any]) -> AbstractContextManager[None]:
        """Return a context in which the loss of this micro-batch is computed."""
        return replaced(self, _updating=None if self.needs_old_log_probs else micro_batch)

    def record(self, log_probs: torch.Tensor) -> None:
        """Compare computed log-probabilities with the engine's; the loss reads the importance ratio afterwards."""
        if self._updating is not None:
            self._compare_with_engine(self._updating, log_probs.detach())

    def _compare_with_engine(self, micro_batch: dict[str, Any], logps: torch.Tensor) -> None:
        """Add to the statistics and, with a correction, set the micro-batch's importance ratio."""
        if "sampling_per_token_logps" not in micro_batch:
            return
        names = ("sampling_per_token_logps", "completion_mask")
        sampling_logps, mask = (micro_batch[name].to(logps.device) for name in names)
        ratio = outside = None
        if self.correction is not None:
            ratio, outside = self.correction(logps, sampling_logps, mask)
            micro_batch["importance_sampling_ratio"] = ratio
        self._statistics.add(logps, sampling_logps, mask, ratio, outside)

    def metrics(self) -> dict[str, float]:
        """Return `sampling/*` of the iteration, over all ranks: they call it together."""
        return SamplingStatistics.metrics(gather_object([self._statistics]))

"""Importance sampling between the engine that generated and the model that is trained.

vLLM's kernels differ from the trainer's, so a policy gradient on its samples is biased. The correction weighs a token
(or a completion) by p_trainer / p_engine, bounded: "truncate" caps the ratio, "mask" drops tokens outside the bounds.
Modes and defaults are those of TRL's options `vllm_importance_sampling_*`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

ROUNDING = 1e-4  # of a ratio: one that is less than this beyond its bound, e.g. beyond 1 on-policy, is not outside
_DIFFERENCE, _RATIO = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
_OUTSIDE = f"{_RATIO}/clipped_fraction"
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def importance_ratio(
    logps, sampling_logps, mask, mode: str, clip_min: float | None, clip_max: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of the policy loss, and which of them were out of bounds beyond rounding.

    Log-probabilities of trainer and engine, NaN if it reports none, and the mask of trained tokens are (rows, tokens),
    and so are the results, or (rows, 1) in the modes of sequences. `None` is no bound.
    """
    difference = torch.nan_to_num((logps - sampling_logps) * mask, nan=0.0)
    ratio = torch.exp(difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference)
    low, high = -math.inf if clip_min is None else clip_min, math.inf if clip_max is None else clip_max
    outside = (ratio < low * (1 - ROUNDING)) | (ratio > high * (1 + ROUNDING))
    bounded = ratio.clamp(low, high) if mode.endswith("truncate") else ratio.masked_fill(outside, 0.0)
    return bounded, outside


class SamplingStatistics:
    """Differences between the engine's and the trainer's probabilities, over the micro-batches of a rollout."""

    def __init__(self):
        self.parts: dict[str, list[tuple[float, ...]]] = {_DIFFERENCE: [], _RATIO: [], _OUTSIDE: []}

    def add(self, logps, sampling_logps, mask, ratio=None, outside=None) -> None:
        """Add a micro-batch: the arguments and the results of `importance_ratio`."""
        trained = mask.bool()
        found = {_DIFFERENCE: (logps - sampling_logps).abs()[trained & ~sampling_logps.isnan()]}
        if ratio is not None:
            rows = trained if ratio.shape == mask.shape else trained.any(-1, keepdim=True)
            found |= {_RATIO: ratio[rows], _OUTSIDE: outside[rows]}
        for name, values in found.items():
            if len(values := values.double().cpu()):
                self.parts[name].append((values.sum().item(), len(values), values.min().item(), values.max().item()))

    @staticmethod
    def metrics(ranks: Sequence[SamplingStatistics]) -> dict[str, float]:
        """Return metrics over all ranks, under TRL's names; `clipped_fraction` is not TRL's."""
        metrics = {}
        for name in (_DIFFERENCE, _RATIO, _OUTSIDE):
            if parts := [part for rank in ranks for part in rank.parts[name]]:
                sums, counts, least, most = zip(*parts)
                mean = sum(sums) / sum(counts)
                metrics |= {name: mean} if name == _OUTSIDE else {f"{name}/mean": mean, f"{name}/max": max(most)}
                metrics |= {f"{name}/min": min(least)} if name == _RATIO else {}
        return metrics

"""Importance sampling between the engine that generated and the model that is trained.

vLLM's kernels differ from the trainer's, so its probabilities do too, and a policy gradient on its samples is biased.
The correction weighs a token (or a reply) by p_trainer / p_engine, bounded: "truncate" caps the ratio, "mask" drops
what lies outside the bounds. Same modes and defaults as TRL's options `vllm_importance_sampling_*`.
"""

from __future__ import annotations

import math

import torch

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def importance_ratio(
    logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the policy loss.

    Args:
        logps, sampling_logps: (rows, tokens) log-probabilities of the trainer and of the engine; NaN in the latter,
            where the engine gave none, counts as no difference.
        mask: (rows, tokens) 1 for trained tokens.

    Returns:
        ratio: (rows, tokens), or (rows, 1) in the sequence modes, bounded.
        outside: the same shape, bool: capped or dropped.

    Raises:
        ValueError: for an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"vllm_importance_sampling_mode is {mode!r}: choose one of {', '.join(MODES)}")
    difference = torch.nan_to_num((logps - sampling_logps) * mask, nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = torch.exp(difference)
    low, high = -math.inf if clip_min is None else clip_min, math.inf if clip_max is None else clip_max
    outside = (ratio < low) | (ratio > high)
    bounded = ratio.clamp(low, high) if mode.endswith("truncate") else ratio.masked_fill(outside, 0.0)
    return bounded, outside


class SamplingStatistics:
    """How far the engine's probabilities are from the trainer's, over the micro-batches of a rollout."""

    def __init__(self):
        self.differences: list[torch.Tensor] = []
        self.ratios: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []
        self.outside: list[torch.Tensor] = []

    def add(self, logps, sampling_logps, mask, ratio=None, outside=None) -> None:
        """Arguments as in `importance_ratio`, and what it returned."""
        trained = mask.bool()
        difference = (logps - sampling_logps).abs()[trained]
        self.differences.append(difference[~torch.isnan(difference)].float().cpu())
        if ratio is not None:
            rows = trained if ratio.shape == mask.shape else trained.any(-1, keepdim=True)
            self.ratios.append(ratio[rows].float().cpu())
            self.weights.append(self.ratios[-1] ** 2)
            self.outside.append(outside[rows].float().cpu())

    def summary(self) -> dict[str, tuple[float, float, float, float]]:
        """(sum, count, min, max) of each quantity of this rank, small enough to gather."""
        return {
            name: (float(v.sum()), float(len(v)), float(v.min()), float(v.max()))
            for name, parts in (
                ("difference", self.differences),
                ("ratio", self.ratios),
                ("ratio squared", self.weights),
                ("outside", self.outside),
            )
            if parts and len(v := torch.cat(parts))
        }

    @staticmethod
    def metrics(summaries: list[dict[str, tuple[float, float, float, float]]]) -> dict[str, float]:
        """Metrics over all ranks' summaries, under TRL's names; `clipped_fraction` and `effective_sample_size`, the
        share of a sample of the same size from the trained policy that it is worth, are ours."""
        values = {}
        for name in ("difference", "ratio", "ratio squared", "outside"):
            parts = [summary[name] for summary in summaries if name in summary]
            if parts:
                mean = sum(p[0] for p in parts) / sum(p[1] for p in parts)
                values[name] = mean, min(p[2] for p in parts), max(p[3] for p in parts)
        metrics = {}
        if "difference" in values:
            metrics["sampling/sampling_logp_difference/mean"] = values["difference"][0]
            metrics["sampling/sampling_logp_difference/max"] = values["difference"][2]
        if "ratio" in values:
            for name, value in zip(("mean", "min", "max"), values["ratio"]):
                metrics[f"sampling/importance_sampling_ratio/{name}"] = value
            metrics["sampling/importance_sampling_ratio/clipped_fraction"] = values["outside"][0]
            squares = values["ratio squared"][0]
            metrics["sampling/effective_sample_size"] = values["ratio"][0] ** 2 / squares if squares else 0.0
        return metrics

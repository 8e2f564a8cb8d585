"""Importance sampling between the engine that generated and the model that is trained.

vLLM's kernels differ from the trainer's, so its probabilities do too, and a policy gradient on its samples is biased.
The correction weighs a token (or a completion) by p_trainer / p_engine, bounded: "truncate" caps the ratio, "mask"
drops tokens outside the bounds. The modes and defaults are those of TRL's options `vllm_importance_sampling_*`.
"""

from __future__ import annotations

import math

import numpy as np
import torch

ROUNDING = 1e-4  # of a ratio: one that is less than this beyond its bound, e.g. beyond 1 on-policy, is not outside
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def importance_ratio(
    logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of the policy loss, and where they were bounded.

    Args:
        logps: (rows, tokens) log-probabilities of the trainer.
        sampling_logps: (rows, tokens) log-probabilities of the engine; NaN (not reported) counts as no difference.
        mask: (rows, tokens) 1 for trained tokens.
        mode: one of `MODES`.
        clip_min: lower bound, or `None`.
        clip_max: upper bound, or `None`.

    Returns:
        ratio: (rows, tokens), or (rows, 1) in the sequence modes, bounded.
        outside: the same shape, bool: capped or dropped, beyond rounding.
    """
    ratio = torch.exp(log_ratio(logps, sampling_logps, mask, mode))
    low, high = -math.inf if clip_min is None else clip_min, math.inf if clip_max is None else clip_max
    outside = (ratio < low * (1 - ROUNDING)) | (ratio > high * (1 + ROUNDING))
    bounded = ratio.clamp(low, high) if mode.endswith("truncate") else ratio.masked_fill(outside, 0.0)
    return bounded, outside


def log_ratio(logps: torch.Tensor, sampling_logps: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """Return log(p_trainer / p_engine), not bounded: (rows, tokens), or (rows, 1) in the sequence modes."""
    difference = torch.nan_to_num((logps - sampling_logps) * mask, nan=0.0)
    return difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference


class SamplingStatistics:
    """Differences between the engine's and the trainer's probabilities, over the micro-batches of a rollout."""

    def __init__(self):
        self.differences: list[torch.Tensor] = []
        self.ratios: list[torch.Tensor] = []
        self.outside: list[torch.Tensor] = []
        self.log_ratios: list[torch.Tensor] = []

    def add(self, logps, sampling_logps, mask, ratio=None, outside=None) -> None:
        """Add a micro-batch: the arguments and the results of `importance_ratio`."""
        trained = mask.bool()
        difference = (logps - sampling_logps).abs()[trained]
        self.differences.append(difference[~torch.isnan(difference)].float().cpu())
        if ratio is not None:
            by_token = ratio.shape == mask.shape
            rows = trained if by_token else trained.any(-1, keepdim=True)
            unbounded = log_ratio(logps, sampling_logps, mask, "token" if by_token else "sequence")
            self.ratios.append(ratio[rows].float().cpu())
            self.outside.append(outside[rows].float().cpu())
            self.log_ratios.append(unbounded[rows].cpu().double())

    def summary(self) -> dict[str, tuple[float, ...]]:
        """Return (sum, count, min, max) of each quantity of this rank.

        For the unbounded ratios, it also has the logarithms of their sum and of the sum of their squares, which stay
        finite.
        """
        found: dict[str, tuple[float, ...]] = {
            name: (float(v.sum()), float(len(v)), float(v.min()), float(v.max()))
            for name, parts in (("difference", self.differences), ("ratio", self.ratios), ("outside", self.outside))
            if parts and len(v := torch.cat(parts))
        }
        if self.log_ratios and len(logs := torch.cat(self.log_ratios)):
            found["log sums"] = float(logs.logsumexp(0)), float((2 * logs).logsumexp(0))
        return found

    @staticmethod
    def metrics(summaries: list[dict[str, tuple[float, ...]]]) -> dict[str, float]:
        """Return metrics over all ranks' summaries, under TRL's names.

        Two metrics are not TRL's: `clipped_fraction`, and `effective_sample_size` of the unbounded ratios, as a share
        of the samples: the number of samples of the trained policy to which they are equivalent.
        """
        values = {}
        for name in ("difference", "ratio", "outside"):
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
            counted = [summary for summary in summaries if "log sums" in summary]
            log_sum, log_squares = (np.logaddexp.reduce([s["log sums"][i] for s in counted]) for i in (0, 1))
            number = sum(summary["ratio"][1] for summary in counted)
            metrics["sampling/effective_sample_size"] = float(np.exp(2 * log_sum - log_squares) / number)
        return metrics

"""Importance ratios between the policy and the engine that sampled, and their metrics."""

import pytest
import torch

from g2po_trl.update.policy.importance import SamplingStatistics, importance_ratio

LOGPS = torch.log(torch.tensor([[0.8, 0.2, 0.5], [0.9, 0.5, 0.5]]))
SAMPLING = torch.log(torch.tensor([[0.4, 0.4, 0.1], [0.1, 0.5, 0.1]]))
MASK = torch.tensor([[1, 1, 0], [1, 1, 0]])


@pytest.mark.parametrize(
    ("mode", "ratio", "outside"),
    [
        ("token_truncate", [[2.0, 0.5, 1.0], [3.0, 1.0, 1.0]], [[0, 0, 0], [1, 0, 0]]),
        ("token_mask", [[2.0, 0.5, 1.0], [0.0, 1.0, 1.0]], [[0, 0, 0], [1, 0, 0]]),
        ("sequence_truncate", [[1.0], [3.0]], [[0], [1]]),
        ("sequence_mask", [[1.0], [0.0]], [[0], [1]]),
    ],
)
def test_importance_ratio_by_hand(mode, ratio, outside):
    ours, dropped = importance_ratio(LOGPS, SAMPLING, MASK, mode, None, 3.0)
    assert torch.allclose(ours, torch.tensor(ratio)) and dropped.int().tolist() == outside
    statistics = SamplingStatistics()
    statistics.add(LOGPS, SAMPLING, MASK, ours, dropped)
    metrics = SamplingStatistics.metrics([statistics.summary(), SamplingStatistics().summary()])
    trained = ours[:, :2]
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(trained.mean().item())
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(trained.max().item())
    assert metrics["sampling/importance_sampling_ratio/clipped_fraction"] == pytest.approx(
        torch.tensor(outside)[:, :2].float().mean().item()
    )
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(torch.log(torch.tensor(9.0)).item())


def test_the_effective_sample_size_is_of_ratios_before_they_are_bounded():
    """At a bound of 1 the bounded ratios hardly differ, however far the policy has moved."""
    spread = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0))

    def metrics(sigma, shift=0.0, ranks=1):
        logps, mask = sigma * spread - sigma**2 / 2 + shift, torch.ones_like(spread, dtype=torch.long)
        parts = []
        for part in range(ranks):
            one = [tensor[:, part::ranks] for tensor in (logps, torch.zeros_like(logps), mask)]
            statistics = SamplingStatistics()
            statistics.add(*one, *importance_ratio(*one, "token_truncate", None, 1.0))
            parts.append(statistics.summary())
        return SamplingStatistics.metrics(parts)

    for sigma in (0.5, 1.0):
        size = metrics(sigma)["sampling/effective_sample_size"]
        assert size == pytest.approx(torch.tensor(-(sigma**2)).exp().item(), rel=0.1)
        assert metrics(sigma, shift=500.0, ranks=2)["sampling/effective_sample_size"] == pytest.approx(size, rel=1e-4)
    fractions = [metrics(sigma)["sampling/importance_sampling_ratio/clipped_fraction"] for sigma in (1e-6, 0.1)]
    assert fractions[0] == 0 and fractions[1] > 0.4, "rounding is not clipping"


def test_importance_ratio_without_engine_probability_is_one():
    sampling = SAMPLING.clone()
    sampling[0, 0] = float("nan")
    ratio, _ = importance_ratio(LOGPS, sampling, MASK, "token_truncate", 0.75, None)
    assert ratio[0].tolist() == pytest.approx([1.0, 0.75, 1.0])

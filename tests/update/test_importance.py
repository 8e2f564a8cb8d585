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
    metrics = SamplingStatistics.metrics([statistics, SamplingStatistics()])
    trained = ours[:, :2]
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(trained.mean().item())
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(trained.max().item())
    assert metrics["sampling/importance_sampling_ratio/clipped_fraction"] == pytest.approx(
        torch.tensor(outside)[:, :2].float().mean().item()
    )
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(torch.log(torch.tensor(9.0)).item())


def test_importance_ratio_without_engine_probability_is_one():
    sampling = SAMPLING.clone()
    sampling[0, 0] = float("nan")
    ratio, _ = importance_ratio(LOGPS, sampling, MASK, "token_truncate", 0.75, None)
    assert ratio[0].tolist() == pytest.approx([1.0, 0.75, 1.0])

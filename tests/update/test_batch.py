import numpy as np
import pytest
import torch
from refusals import refused

from g2po_trl.trajectory import Step, Trajectory
from g2po_trl.update.batch import StepBatch, loss_scale


def batch_of(lengths):
    return StepBatch(
        [np.full(p, 1, dtype=np.int32) for p, _ in lengths],
        [np.full(c, 2, dtype=np.int32) for _, c in lengths],
        np.arange(len(lengths), dtype=np.float32),
        np.ones(len(lengths), dtype=bool),
    )


def test_concatenation_keeps_rows_in_order():
    first, second = batch_of([(3, 1), (1, 2)]), batch_of([(5, 4)])
    both = StepBatch.concatenate([first, StepBatch.from_trajectories([], []), second])
    assert both.lengths().tolist() == [[3, 1], [1, 2], [5, 4]] and both.advantages.tolist() == [0, 1, 0]
    assert both.logprobs is None
    nothing = StepBatch.concatenate([StepBatch.from_trajectories([], [])] * 2)
    assert len(nothing) == 0
    filler = nothing.collate([], num_rows=1, pad_token_id=0)
    assert filler["sampling_per_token_logps"].tolist() == [[0.0, 0.0]], "the loss may ask for it, also of filler rows"


def test_engine_log_probabilities_are_collated():
    steps = [Step("o", "a", prompt_ids=[1], completion_ids=[5, 6], logprobs=[-1.0, -2.0])]
    steps += [Step("o", "a", prompt_ids=[1], completion_ids=[7], logprobs=[-3.0])]
    batch = StepBatch.from_trajectories([Trajectory("t", steps, 1.0, "success")], [1, 1])
    tensors = batch.collate([1, 0], num_rows=3, pad_token_id=0)
    assert tensors["sampling_per_token_logps"].tolist() == [[-3, 0], [-1, -2], [0, 0]]
    steps[0].logprobs = None
    assert StepBatch.from_trajectories([Trajectory("t", steps, 1.0, "success")], [1, 1]).logprobs is None


@pytest.mark.parametrize(
    ("changes", "advantages"),
    [({}, [1.0, 2.0]), ({}, []), ({"prompt_ids": []}, [1.0]), ({"logprobs": [-1.0]}, [1.0])],
)
def test_lengths_that_do_not_fit_are_refused(changes, advantages):
    """One log-probability would be that of all tokens, and advantages would be other steps'."""
    one = Step("o", "a", **{"prompt_ids": [1], "completion_ids": [5, 6], **changes})
    with refused("logprobs" if len(advantages) == 1 else "advantages"):
        StepBatch.from_trajectories([Trajectory("t", [one], 1.0, "success")], advantages)


def test_collate():
    batch = batch_of([(3, 1), (1, 2)])
    batch.trained[1] = False
    tensors = batch.collate([0, 1], num_rows=3, pad_token_id=0)
    assert tensors["prompt_ids"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert tensors["prompt_mask"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 1]]
    assert tensors["completion_ids"].tolist() == [[2, 0], [2, 2], [0, 0]]
    assert tensors["completion_mask"].tolist() == [[1, 0], [0, 0], [0, 0]]
    assert tensors["advantages"].tolist() == [0, 1, 0]
    assert batch.num_trained_tokens() == 1
    padded = batch.collate([0, 1], num_rows=2, pad_token_id=0, pad_to_multiple_of=4)
    assert padded["prompt_ids"].shape == (2, 4) and padded["completion_ids"].shape == (2, 4)


def step(ids):
    return Step("o", "a", prompt_ids=[1], completion_ids=ids, completion_truncated=ids[-1] != 9)


def test_rows_come_from_every_trajectory_with_a_result():
    trajectories = [
        Trajectory("t", [step([5]), step([6, 9])], 1.0, "success"),
        Trajectory("t", [step([7])], 0.0, "error"),
        Trajectory("t", [step([8, 9])], 0.0, "truncated"),
        Trajectory("t", [step([4, 9])], 0.0, "lost"),
    ]
    batch = StepBatch.from_trajectories(trajectories, [1, 2, 3, 4, 5], mask_truncated=True)
    assert [ids.tolist() for ids in batch.completion_ids] == [[5], [6, 9], [8, 9]]
    assert batch.advantages.tolist() == [1, 2, 4]
    assert batch.trained.tolist() == [False, True, True]


def test_scaled_means_of_micro_batches_add_up_to_the_mean_of_all():
    values = torch.randn(10, generator=torch.manual_seed(0)).double()
    micro_batches = [values[:3], values[3:4], values[4:]]
    scaled = sum(
        v.mean() * loss_scale("grpo", {"advantages": v, "completion_mask": torch.ones(len(v), 2)}, 10, 20, 1, 1)
        for v in micro_batches
    )
    assert scaled.item() == pytest.approx(values.mean().item())
    assert loss_scale("dapo", {"advantages": values, "completion_mask": torch.ones(1, 1)}, 1, 1, 1, 1) == 1.0

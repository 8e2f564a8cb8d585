import numpy as np
import pytest
import torch

from g2po_trl.batch import StepBatch, loss_scale, plan_micro_batches
from g2po_trl.trajectory import Step, Trajectory


def batch_of(lengths):
    return StepBatch(
        [[1] * p for p, _ in lengths],
        [[2] * c for _, c in lengths],
        np.arange(len(lengths), dtype=np.float32),
        np.ones(len(lengths), dtype=bool),
    )


def test_plan_covers_every_row_once_and_bounds_tokens():
    rng = np.random.default_rng(0)
    for _ in range(50):
        ranks = []
        for _ in range(rng.integers(1, 4)):
            rows = rng.integers(1, 60, size=(rng.integers(0, 40), 2)).tolist()
            ranks.append(sorted(map(tuple, rows), key=sum, reverse=True))
        plan = plan_micro_batches(ranks, max_tokens=400)
        assert plan[0][0] == 0 and plan[-1][1] == max(1, max(map(len, ranks)))
        assert all(stop == start for (_, stop), (start, _) in zip(plan, plan[1:]))
        for start, stop in plan:
            for rows in ranks:
                part = rows[start:stop]
                if part:
                    width = max(p for p, _ in part) + max(c for _, c in part)
                    assert width * (stop - start) <= 400 or stop - start == 1


def test_plan_of_nothing_is_one_filler_row():
    assert plan_micro_batches([[], []], 100) == [(0, 1)]


def test_slices_drop_nothing():
    batch = batch_of([(5, 2)] * 23)
    slices = batch.slices(4, np.random.default_rng(0))
    assert sorted(row for part in slices for row in part) == list(range(23))
    assert sorted(map(len, slices)) == [5, 6, 6, 6]


def test_collate():
    batch = batch_of([(3, 1), (1, 2)])
    batch.trained[1] = False
    tensors = batch.collate([0, 1], num_rows=3, pad_token_id=0)
    assert tensors["prompt_ids"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert tensors["prompt_mask"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 1]]
    assert tensors["completion_ids"].tolist() == [[2, 0], [2, 2], [0, 0]]
    assert tensors["completion_mask"].tolist() == [[1, 0], [0, 0], [0, 0]]
    assert tensors["advantages"].tolist() == [0, 1, 0]
    assert batch.num_tokens == 1
    padded = batch.collate([0, 1], num_rows=2, pad_token_id=0, pad_to_multiple_of=4)
    assert padded["prompt_ids"].shape == (2, 4) and padded["completion_ids"].shape == (2, 4)


def step(ids):
    return Step("o", "a", prompt_ids=[1], completion_ids=ids)


def test_rows_come_from_every_trajectory_but_errors():
    trajectories = [
        Trajectory("t", [step([5]), step([6, 9])], 1.0, "success"),
        Trajectory("t", [step([7])], 0.0, "error"),
        Trajectory("t", [step([8, 9])], 0.0, "truncated"),
    ]
    batch = StepBatch.from_trajectories(trajectories, [1, 2, 3, 4], untrained_unless_ends_in={9})
    assert batch.completion_ids == [[5], [6, 9], [8, 9]]
    assert batch.advantages.tolist() == [1, 2, 4]
    assert batch.trained.tolist() == [False, True, True]
    with pytest.raises(ValueError, match="4 steps"):
        StepBatch.from_trajectories(trajectories, [1, 2, 3])
    with pytest.raises(ValueError, match="prompt_ids"):
        StepBatch.from_trajectories([Trajectory("t", [Step("o", "a")], 0.0, "failure")], [1.0])


def test_scaled_means_of_micro_batches_add_up_to_the_mean_of_all():
    values = torch.randn(10, generator=torch.manual_seed(0)).double()
    micro_batches = [values[:3], values[3:4], values[4:]]
    scaled = sum(
        v.mean() * loss_scale("grpo", {"advantages": v, "completion_mask": torch.ones(len(v), 2)}, 10, 20, 1, 1)
        for v in micro_batches
    )
    assert scaled.item() == pytest.approx(values.mean().item())
    assert loss_scale("dapo", {"advantages": values, "completion_mask": torch.ones(1, 1)}, 1, 1, 1, 1) == 1.0
    with pytest.raises(ValueError, match="loss_type is 'new'"):
        loss_scale("new", {"advantages": values, "completion_mask": torch.ones(1, 1)}, 1, 1, 1, 1)

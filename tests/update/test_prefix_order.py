"""The order of all ranks' rows, and the mini-batches that ranks make of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g2po_trl.update.batch import BatchingConfig, StepBatch, make_mini_batches
from g2po_trl.update.tree import common_prefix, in_order


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=20), st.data())
def test_neighbours_have_the_longest_common_prefixes(numbers, data):
    sequences = [np.array(sequence, dtype=np.int32) for sequence in numbers]
    some = data.draw(st.lists(st.sampled_from(range(len(numbers))), unique=True)) if numbers else []
    rows, lengths, overlaps = in_order(sequences, some)
    assert sorted(some) == sorted(rows) and [numbers[row] for row in rows] == sorted(numbers[row] for row in some)
    assert lengths.tolist() == [len(numbers[row]) for row in rows]
    wanted = [0, *(common_prefix(sequences[a], sequences[b]) for a, b in zip(rows, rows[1:]))][: len(rows)]
    assert overlaps.tolist() == wanted


def ragged(counts, rng):
    """The step samples of ranks: prompts of two tasks that begin alike, some of advantage 0, some not trained."""
    tasks = [rng.integers(0, 500, 50) for _ in range(2)]
    batches = []
    for count in counts:
        prompts = [np.concatenate([tasks[n % 2], rng.integers(0, 2, rng.integers(1, 60))]) for n in range(count)]
        completions = [rng.integers(0, 2, rng.integers(1, 12)).astype(np.int32) for _ in range(count)]
        batches.append(
            StepBatch(
                [prompt.astype(np.int32) for prompt in prompts],
                completions,
                rng.integers(-1, 2, count).astype(np.float32),
                rng.random(count) < 0.9,
                [rng.normal(size=len(completion)).astype(np.float32) for completion in completions],
            )
        )
    return batches


@pytest.mark.parametrize("layout", ["shared", "padded"])
@pytest.mark.parametrize("counts", [(30, 25), (40, 0, 7), (0, 0)])
def test_each_row_with_a_gradient_is_trained_by_one_rank(counts, layout):
    batches = ragged(counts, np.random.default_rng(0))
    options = BatchingConfig(3, 200, "grpo", 0, None, layout, kl=False)
    made = [make_mini_batches(batches, rank, options, np.random.default_rng(1)) for rank in range(len(counts))]
    whole, metrics = StepBatch.concatenate(batches), made[0][1]
    kept = np.flatnonzero(whole.trained & (whole.advantages != 0)).tolist()
    assert sorted(row for parts, _ in made for part in parts for one in part for row in one["rows"]) == kept
    for shapes in zip(*([[one["completion_ids"].shape[0] for part in parts for one in part] for parts, _ in made])):
        assert len(set(shapes)) == 1, "as many rows on every rank"
    assert all(other == metrics for _, other in made)
    assert metrics["update/left_out_fraction"] == pytest.approx(1 - len(kept) / len(whole) if sum(counts) else 0)
    if sum(counts):
        assert 0.3 < metrics["update/left_out_fraction"] < 0.6


@pytest.mark.parametrize("layout", ["shared", "padded"])
def test_the_mini_batches_are_the_same_for_any_number_of_ranks(layout):
    whole = StepBatch.concatenate(ragged((30, 25, 0, 9), np.random.default_rng(0)))
    options, sequences = BatchingConfig(3, 200, "grpo", 0, None, layout), whole.sequences()
    found = []
    for ranks in (1, 4, 8):
        plan = options.plan(sequences, np.ones(len(whole), dtype=bool), ranks, np.random.default_rng(0))
        found.append(
            [sorted(row for trees in part for own in trees for tree in own for row in tree.rows) for part in plan]
        )
    assert len(found[0]) == 3 and all(found[0])
    assert found[0] == found[1] == found[2]

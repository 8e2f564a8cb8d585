"""The plan of an update: the order of rows, mini-batches that keep subtrees together, and what each rank gets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g2po_trl.update.balance import BatchingConfig, deal, imbalance, plan_micro_batches, split_into_mini_batches
from g2po_trl.update.batch import StepBatch, make_mini_batches
from g2po_trl.update.tree import common_prefix, in_order

EPISODES, TURNS, READ, WRITTEN = 12, 14, 8, 2
MINI_BATCHES = 4


def test_plan_covers_every_row_once_and_bounds_tokens():
    rng = np.random.default_rng(0)
    for _ in range(20):
        drawn = [rng.integers(1, 120, rng.integers(0, 40)).tolist() for _ in range(rng.integers(1, 4))]
        ranks = [sorted(rows, reverse=True) for rows in drawn]
        plan = plan_micro_batches(ranks, max_tokens=400)
        assert plan[0][0] == 0 and plan[-1][1] == max(1, max(map(len, ranks)))
        assert all(stop == start for (_, stop), (start, _) in zip(plan, plan[1:]))
        for start, stop in plan:
            for rows in ranks:
                width = max(rows[start:stop], default=0)
                assert width * (stop - start) <= 400 or stop - start == 1
    assert plan_micro_batches([[], []], 100) == [(0, 1)], "a filler row"


def test_ranks_get_equal_work():
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(1, 4000, rng.integers(1, 300))
        num_ranks = int(rng.integers(1, 9))
        rows = rng.permutation(len(lengths))
        dealt = deal(rows, lengths[rows], num_ranks)
        assert sorted(row for rows in dealt for row in rows) == list(range(len(lengths)))
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
        work = [lengths[rows].sum() for rows in dealt]
        assert max(work) - min(work) <= max(lengths)
    assert imbalance([3, 1]) == 1.5 and imbalance([0, 0]) == 1.0


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
    tasks, batches = [rng.integers(0, 500, 50) for _ in range(2)], []
    for count in counts:
        ends = [rng.integers(0, 2, rng.integers(1, 60)) for _ in range(count)]
        prompts = [np.append(tasks[n % 2], end).astype(np.int32) for n, end in enumerate(ends)]
        completions = [rng.integers(0, 2, rng.integers(1, 12)).astype(np.int32) for _ in range(count)]
        advantages, trained = rng.integers(-1, 2, count).astype(np.float32), rng.random(count) < 0.9
        logprobs = [rng.normal(size=len(completion)).astype(np.float32) for completion in completions]
        batches.append(StepBatch(prompts, completions, advantages, trained, logprobs))
    return batches


@pytest.mark.parametrize("layout", ["shared", "padded", "forked"])
@pytest.mark.parametrize("counts", [(30,), (30, 25), (40, 0, 7), (0, 0)])
def test_each_row_with_a_gradient_is_trained_by_one_rank(counts, layout):
    batches = ragged(counts, np.random.default_rng(0))
    options = BatchingConfig(3, 200, "grpo", 0, None, layout, 5 if layout == "forked" else None, kl=False)
    made = [make_mini_batches(batches, rank, options, np.random.default_rng(1)) for rank in range(len(counts))]
    whole, metrics = StepBatch.concatenate(batches), made[0][1]
    kept = np.flatnonzero(whole.trained & (whole.advantages != 0)).tolist()
    assert sorted(row for parts, _ in made for part in parts for one in part for row in one["rows"]) == kept
    for shapes in zip(*([[one["completion_ids"].shape[0] for part in parts for one in part] for parts, _ in made])):
        assert len(set(shapes)) == 1, "as many rows on every rank"
    assert all(other == metrics for _, other in made)
    assert metrics["update/left_out_fraction"] == pytest.approx(1 - len(kept) / len(whole) if sum(counts) else 0)
    parts = [one for parts, _ in made for part in parts for one in part]
    trained = sum(int(one["completion_mask"].sum()) for one in parts)
    assert trained == sum(int((one["scored_ids"] >= 0).sum()) for one in parts) == whole.num_trained_tokens(kept)
    assert sum(one["row_ids"].numel() for one in parts) == metrics["update/forwarded_tokens"]
    assert all(one["row_ids"].numel() <= 200 for one in parts)
    if sum(counts):
        assert 0.3 < metrics["update/left_out_fraction"] < 0.6
        assert (metrics["update/repeated_token_fraction"] > 0) == (layout != "padded")


@pytest.mark.parametrize("layout", ["shared", "padded"])
def test_the_mini_batches_are_the_same_for_any_number_of_ranks(layout):
    whole = StepBatch.concatenate(ragged((30, 25, 0, 9), np.random.default_rng(0)))
    options, sequences = BatchingConfig(3, 200, "grpo", 0, None, layout), whole.sequences()
    found = []
    for ranks in (1, 4, 8):
        plan = options.plan(sequences, np.ones(len(whole), dtype=bool), ranks, np.random.default_rng(0))
        trees = [[tree for of_rank in part for own in of_rank for tree in own] for part in plan]
        found.append([sorted(row for tree in part for row in tree.rows) for part in trees])
    assert len(found[0]) == 3 and all(found[0])
    assert found[0] == found[1] == found[2]


def split(overlaps, number, seed=0):
    """The mini-batches of rows that are in order already."""
    rows, lengths, rng = np.arange(len(overlaps)), np.full(len(overlaps), 10**6), np.random.default_rng(seed)
    return [part.tolist() for part in split_into_mini_batches(rows, lengths, np.array(overlaps), number, rng)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=120), st.integers(1, 9))
def test_mini_batches_are_equal_and_have_every_row_once(overlaps, number):
    parts = split(overlaps, number)
    assert sorted(row for part in parts for row in part) == list(range(len(overlaps)))
    assert len(parts) == number and max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts == split(overlaps, number)


def test_subtrees_are_cut_only_where_mini_batches_end():
    """32 subtrees of eight rows, of which four each have more in common: as many as an eighth of four mini-batches."""
    overlaps = ([0] + [20] * 3 + [10] + [20] * 3) * 32
    for number, cut in ((4, 0), (3, 2)):  # three of 86 or 85 rows: two of them end inside of a subtree
        parts, others = (split(overlaps, number, seed) for seed in (0, 1))
        assert sum(len({row // 8 for row in part}) for part in parts) == 32 + cut
        assert parts != others, "at random"
        assert all(max(part) - min(part) >= len(part) for part in parts), "of many subtrees, not of neighbours"


def test_several_mini_batches_of_conversations_cost_one_pass_over_each_token():
    """Of more turns than a block has rows: what continues another stays with it."""
    prompts, completions = [], []
    for episode in range(EPISODES):
        ids = []
        for turn in range(TURNS):
            ids = [*ids, *[1000 * episode + turn] * READ]  # an episode's own observations
            prompts.append(np.array(ids, dtype=np.int32))
            completions.append(np.full(WRITTEN, 90_000 + episode, dtype=np.int32))
            ids = [*ids, *completions[-1]]
    ones = np.ones(len(prompts), dtype=np.float32)
    batch = StepBatch(prompts, completions, ones, ones.astype(bool))
    config = BatchingConfig(MINI_BATCHES, 1_000, "dapo", 0, None, "shared")
    made, metrics = make_mini_batches([batch], 0, config, np.random.default_rng(0))
    parts = [[row for micro_batch in part for row in micro_batch["rows"]] for part in made]
    assert [len({row // TURNS for row in part}) for part in parts] == [EPISODES // MINI_BATCHES] * MINI_BATCHES
    assert metrics["update/forwarded_tokens"] == len(prompts) * (READ + WRITTEN)

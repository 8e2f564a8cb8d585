"""Random mini-batches of equal size keep subtrees together, so that they share nearly as much as one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from g2po_trl.update.balance import BatchingConfig, split_into_mini_batches
from g2po_trl.update.batch import StepBatch, make_mini_batches

EPISODES, TURNS, READ, WRITTEN = 12, 14, 8, 2
MINI_BATCHES = 4


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


def test_a_large_subtree_is_cut_where_its_rows_have_least_in_common():
    """64 rows with 100 tokens in common, in 16 subtrees of four, each of two pairs: a block is a pair."""
    for part in split(([100] + [300, 200, 300]) * 16, 4):
        assert len({row // 2 for row in part}) == len(part) // 2


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

"""Random mini-batches leave conversations whole, whose turns begin with those before; others go in blocks of eight."""

from itertools import pairwise

import numpy as np

from g2po_trl.update.balance import BatchingConfig, RowSummary, split_into_mini_batches
from g2po_trl.update.packing import RowLength
from g2po_trl.update.prefix_order import Ordering

EPISODES, TURNS, READ, WRITTEN = 12, 14, 8, 2
TURN = READ + WRITTEN
MINI_BATCHES = 4


def plan(window):
    """The mini-batches of episodes by conversation, or of the same turns in prompts of their own, and the metrics."""
    sequences, prompts = [], []
    for episode in range(EPISODES):
        ids = []
        for turn in range(TURNS):
            ids = [] if window else ids
            ids = [*ids, *[1000 * episode + turn] * READ]  # an episode's own observations
            prompts.append(len(ids))
            ids = [*ids, *[90_000 + episode] * WRITTEN]
            sequences.append(np.array(ids))
    n = len(sequences)
    full = np.ones(n, dtype=np.float32)
    rows = RowSummary(np.array(prompts), np.full(n, WRITTEN), full, full.astype(bool), [n], False)
    ordering, rng = Ordering.from_sequences(sequences), np.random.default_rng(0)
    config = BatchingConfig(MINI_BATCHES, 10_000, "dapo", 0, None, "shared", RowLength(1_000))
    planned, metrics = config.plan(rows, ordering, rng)
    return [[row for one in parts for rank in one.rows for row in rank] for parts in planned], metrics


def test_conversations_are_split_only_where_mini_batches_end():
    mini_batches, metrics = plan(window=False)
    assert [len(rows) for rows in mini_batches] == [EPISODES * TURNS // MINI_BATCHES] * MINI_BATCHES
    assert sorted(row for rows in mini_batches for row in rows) == list(range(EPISODES * TURNS))
    seen_in = [{number for number, rows in enumerate(mini_batches) if {*of} & {*rows}} for of in episodes()]
    assert [len(numbers) for numbers in seen_in] == [1] * EPISODES, "three episodes fill a mini-batch"
    assert metrics["update/forwarded_tokens"] == EPISODES * TURNS * TURN, "one pass over each token"
    assert len({*map(tuple, seen_in)}) == MINI_BATCHES and seen_in != sorted(seen_in, key=min), "at random"


def test_a_conversation_at_the_end_of_a_mini_batch_is_divided():
    """Mini-batches of equal size come before whole episodes."""
    order, continues = np.arange(20), np.array(([False] + [True] * 9) * 2)
    parts = split_into_mini_batches(order, 4, np.random.default_rng(0), 8, continues)
    assert [len(part) for part in parts] == [5] * 4
    assert all(b == a + 1 for part in parts for a, b in pairwise(part.tolist()))


def test_rows_that_continue_no_other_go_in_blocks_of_eight():
    mini_batches, _ = plan(window=True)
    order = list(range(EPISODES * TURNS))  # which is lexicographic
    blocks = np.array_split(order, EPISODES * TURNS // 8)
    shuffled = np.concatenate([blocks[block] for block in np.random.default_rng(0).permutation(len(blocks))])
    expected = np.array_split(shuffled, MINI_BATCHES)
    assert [sorted(rows) for rows in mini_batches] == [sorted(part.tolist()) for part in expected]


def episodes():
    return np.arange(EPISODES * TURNS).reshape(EPISODES, TURNS).tolist()

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g2po_trl import ordering
from g2po_trl.ordering import Ordering, order_over_ranks
from g2po_trl.packing import common_prefix


def on_ranks(parts, work):
    """`work(part, rank, gather)` on a thread per rank, with a gather between them."""
    barrier, boxes, results = threading.Barrier(len(parts)), {}, [None] * len(parts)

    def run(rank):
        calls = iter(range(10**6))

        def gather(thing):
            call = next(calls)
            boxes[call, rank] = thing
            barrier.wait(timeout=60)
            return [boxes[call, r] for r in range(len(parts))]

        try:
            results[rank] = work(parts[rank], rank, gather)
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return results


def assert_same(parts):
    sequences = [sequence for part in parts for sequence in part]
    wanted = Ordering.of(sequences)
    for found in on_ranks(parts, order_over_ranks):
        assert found.places.tolist() == wanted.places.tolist()
        assert found.overlaps.tolist() == wanted.overlaps.tolist()
    return wanted


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=8), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_ranks_find_the_order_of_all_sequences_by_hashes(ranks, block):
    before, ordering._BLOCK = ordering._BLOCK, block
    try:
        assert_same([[np.array(sequence, dtype=np.int32) for sequence in rank] for rank in ranks])
    finally:
        ordering._BLOCK = before


def test_the_order_of_long_sequences_that_begin_alike():
    rng = np.random.default_rng(0)
    task = rng.integers(0, 150_000, 200)
    pages = [np.concatenate([task, rng.integers(0, 150_000, 150)]) for _ in range(6)]
    rows = [
        np.concatenate([page, rng.integers(0, 3, rng.integers(1, 40))]).astype(np.int32)
        for page in pages
        for _ in range(10)
    ]
    rows += [rows[0], rows[31], pages[0].astype(np.int32), pages[0][:64].astype(np.int32)]
    shuffled = [rows[i] for i in rng.permutation(len(rows))]
    wanted = assert_same([shuffled[:20], [], shuffled[20:21], shuffled[21:]])
    some = wanted.sort(rng.permutation(len(rows))[:30])
    found = wanted.neighbours(some, np.array([len(row) for row in shuffled]))
    assert found.tolist() == [0, *(common_prefix(shuffled[a], shuffled[b]) for a, b in zip(some, some[1:]))]
    assert sum(len(row) for row in rows) * 4 > 5 * sum(part.hashes.nbytes for part in [ordering._Beginnings.of(rows)])


@pytest.mark.parametrize("rows", [[], [3]])
def test_neighbours_of_nothing(rows):
    whole = Ordering.of([np.array([n], dtype=np.int32) for n in range(5)])
    assert whole.neighbours(np.array(rows, dtype=np.int64), np.ones(5)).tolist() == [0] * len(rows)

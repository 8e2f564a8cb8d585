import dataclasses
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from g2po_trl.update.balance import RowSummary
from g2po_trl.update.batch import BatchingConfig, StepBatch, make_mini_batches
from g2po_trl.update.prefix_order import Ordering, common_prefix, order_over_ranks
from g2po_trl.update.redistribute import make_mini_batches_over_ranks


def on_ranks(parts, work):
    """`work(part, rank, gather)` on a thread per rank, with a gather and `all_to_all_single` between them."""
    barrier, boxes, results = threading.Barrier(len(parts)), {}, [None] * len(parts)
    own, moved = threading.local(), []

    def run(rank):
        calls = iter(range(10**6))

        def gather(thing):
            call = next(calls)
            boxes[call, rank] = pickle.dumps(thing)
            barrier.wait(timeout=60)
            return [pickle.loads(boxes[call, r]) for r in range(len(parts))]

        def all_to_all(received, sent, received_sizes, sent_sizes):
            pieces = [
                torch.from_numpy(of_rank[rank]) for of_rank in gather([p.numpy() for p in sent.split(sent_sizes)])
            ]
            assert list(map(len, pieces)) == received_sizes
            torch.cat(pieces, out=received)
            moved.append(len(received))

        own.all_to_all = all_to_all
        try:
            results[rank] = work(parts[rank], rank, gather)
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_to_all_single", lambda *arguments: own.all_to_all(*arguments))
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return results, moved


def assert_same(parts):
    sequences = [sequence for part in parts for sequence in part]
    wanted = Ordering.from_sequences(sequences)
    found_by_ranks, moved = on_ranks(parts, lambda *own: order_over_ranks(*own, "cpu"))
    for found in found_by_ranks:
        assert found.places.tolist() == wanted.places.tolist()
        assert found.overlaps.tolist() == wanted.overlaps.tolist()
    headers = len(parts) ** 2 + 2 * len(sequences)
    assert sum(moved) == headers + sum(map(len, sequences)), "each sequence goes to one rank"
    return wanted


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=8), min_size=1, max_size=4),
)
def test_ranks_find_the_order_of_all_sequences(ranks):
    assert_same([[np.array(sequence, dtype=np.int32) for sequence in rank] for rank in ranks])


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


@pytest.mark.parametrize("rows", [[], [3]])
def test_neighbours_of_nothing(rows):
    whole = Ordering.from_sequences([np.array([n], dtype=np.int32) for n in range(5)])
    assert whole.neighbours(np.array(rows, dtype=np.int64), np.ones(5)).tolist() == [0] * len(rows)


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
def test_a_rank_that_gets_its_own_rows_alone_makes_of_them_what_one_with_all_makes(counts, layout):
    def cut(batch, rank, gather):
        return make_mini_batches_over_ranks(batch, rank, options, np.random.default_rng(1), gather, "cpu")

    batches = ragged(counts, np.random.default_rng(0))
    options = BatchingConfig(3, 200, "grpo", 0, None, layout, kl=False)
    for rank, (mini_batches, metrics) in enumerate(on_ranks(batches, cut)[0]):
        wanted, wanted_metrics = make_mini_batches(batches, rank, options, np.random.default_rng(1))
        assert metrics == wanted_metrics
        for part, wanted_part in zip(mini_batches, wanted, strict=True):
            for micro_batch, other in zip(part, wanted_part, strict=True):
                assert micro_batch.keys() == other.keys()
                assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(other[k])) for k, v in micro_batch.items())
    kept = [row for batch in batches for row in range(len(batch)) if batch.trained[row] and batch.advantages[row] != 0]
    assert metrics["update/left_out_fraction"] == pytest.approx(
        1 - len(kept) / max(sum(counts), 1) if sum(counts) else 0
    )
    if sum(counts):
        assert 0.3 < metrics["update/left_out_fraction"] < 0.6


@pytest.mark.parametrize("layout", ["shared", "padded"])
def test_the_mini_batches_are_the_same_for_any_number_of_ranks(layout):
    batches = ragged((30, 25, 0, 9), np.random.default_rng(0))
    cut = BatchingConfig(3, 200, "grpo", 0, None, layout)
    rows = RowSummary.concatenate([batch.summary for batch in batches])
    wanted = Ordering.from_sequences([sequence for batch in batches for sequence in batch.sequences()])
    found = []
    for ranks in (1, 4, 8):
        spread = dataclasses.replace(rows, counts=[len(part) for part in np.array_split(np.arange(len(rows)), ranks)])
        plan, _ = cut.plan(spread, wanted, np.random.default_rng(0))
        found.append([sorted(row for planned in part for own in planned.rows for row in own) for part in plan])
    assert len(found[0]) == 3 and all(found[0])
    assert found[0] == found[1] == found[2]

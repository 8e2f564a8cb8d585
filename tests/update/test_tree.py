"""Token layouts: what is laid out where, who sees whom, and that the gradient is that of padded rows."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from letter_environment import LongLetterEnvironment
from letter_trainer import flat_gradient, move_weights, play_batch
from model_sizes import LargeModel, SmallModel
from peft import LoraConfig
from torch.nn.attention import flex_attention as torch_flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.flex_attention import WrappedFlexAttention
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

from benchmarks.packs import make_packs
from g2po_trl.update.attention import visible
from g2po_trl.update.batch import BatchingConfig, StepBatch, make_mini_batches
from g2po_trl.update.packing import (
    LAYOUTS,
    RowLength,
    best_packs,
    common_prefix,
    cut_into_packs,
    lay_out,
    split_packs,
)


def arrays(*sequences):
    return [np.array(sequence, dtype=np.int32) for sequence in sequences]


def test_the_example_of_the_module():
    sequences = arrays([1, 2, 3, 4], [1, 7], [1, 2, 3, 5, 6])
    (pack,) = make_packs(sequences, max_tokens=100)
    assert (pack.rows, pack.shared, pack.num_tokens) == ([0, 2, 1], [0, 3, 1], 7)
    layout = lay_out([pack], sequences, [1, 1, 2], pad_token_id=0)
    assert layout["packed_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert layout["packed_positions"].tolist() == [[0, 1, 2, 3, 3, 4, 1]]
    assert layout["packed_ends"].tolist() == [[7, 6, 6, 4, 6, 6, 7]]
    assert layout["scored_ids"].tolist() == [4, 5, 6, 7]
    assert layout["scored_from"].tolist() == [2, 2, 4, 0], "the state that foretells a token is its predecessor's"
    sees = [[j for j in range(7) if row[j]] for row in visible(layout["packed_ends"])[0, 0].tolist()]
    assert sees == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 4, 5], [0, 6]]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=20),
    st.integers(1, 40),
    st.booleans(),
)
def test_every_sequence_sees_itself_and_nothing_else(sequences, max_tokens, share):
    sequences = arrays(*sequences)
    packs = make_packs(sequences, max_tokens, share)
    assert sorted(row for pack in packs for row in pack.rows) == list(range(len(sequences)))
    layout = lay_out(packs, sequences, [1] * len(sequences), pad_token_id=9)
    rows, length = layout["packed_ids"].shape
    alone = torch.arange(1, length + 1).expand(rows, -1)
    ends = layout.get("packed_ends", torch.full_like(alone, length))  # rows of one sequence are causal as they are
    positions = layout.get("packed_positions", alone - 1)
    sees = visible(ends)[:, 0]
    assert sees.diagonal(dim1=1, dim2=2).all(), "attention over nothing is undefined"
    scored = iter(zip(layout["scored_from"].tolist(), layout["scored_ids"].tolist()))
    for r, pack in enumerate(packs):
        assert pack.num_tokens <= max_tokens or len(pack.rows) == 1
        assert share or pack.num_tokens == sum(len(sequences[row]) for row in pack.rows)
        for row in pack.rows:
            place, token = next(scored)
            seen = sees[r, place - r * length].nonzero().flatten()
            assert layout["packed_ids"][r, seen].tolist() == sequences[row][:-1].tolist()
            assert positions[r, seen].tolist() == list(range(len(sequences[row]) - 1))
            assert token == sequences[row][-1]
    assert next(scored, None) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=30), st.integers(1, 5))
def test_packs_are_halved_until_ranks_get_as_many(sequences, num_ranks):
    sequences = arrays(*sequences)
    packs = split_packs(make_packs(sequences, 25), [len(sequence) for sequence in sequences], num_ranks)
    assert len(packs) % num_ranks == 0 or all(len(pack.rows) == 1 for pack in packs)
    assert sorted(row for pack in packs for row in pack.rows) == list(range(len(sequences)))
    for pack in packs:
        before = [np.zeros(0), *(sequences[row] for row in pack.rows)]
        assert pack.shared == [common_prefix(a, sequences[row]) for a, row in zip(before, pack.rows)]
        assert pack.num_tokens == sum(len(sequences[row]) for row in pack.rows) - sum(pack.shared)


def test_equal_sequences_are_laid_out_once_and_all_scored():
    sequences = arrays([5, 6, 7], [5, 6, 7], [5, 6, 7])
    (pack,) = make_packs(sequences, 3)
    layout = lay_out([pack], sequences, [2, 2, 0], pad_token_id=0, pad_to_multiple_of=8)
    assert pack.num_tokens == 3 and layout["packed_ids"].shape == (1, 8)
    assert layout["scored_from"].tolist() == [0, 1, 0, 1], "the third is not trained"


def test_a_rank_without_rows_still_forwards_a_token():
    layout = lay_out([], [], [], pad_token_id=3)
    assert layout["packed_ids"].tolist() == [[3]] and layout["scored_ids"].tolist() == [-100]


def test_rows_are_as_long_as_model_and_memory_let_them():
    """212,992 weights a layer / (2 * 128) are 832 tokens of as many operations; attention's take twice as long."""
    assert RowLength.from_config(SmallModel, "sdpa", 16384) == RowLength(4096, 416.0, 16384)
    assert RowLength.from_config(SmallModel, "sdpa", 1000).most == 1000, "a micro-batch holds no more"
    assert RowLength.from_config(LargeModel, "sdpa", 16384).even == pytest.approx(8256)
    for attention in ("flex_attention", "flash_attention_2"):
        assert RowLength.from_config(SmallModel, attention, 16384) == RowLength(512, longest=16384)
        assert RowLength.from_config(LargeModel, attention, 16384) == RowLength(4096, longest=16384)


def test_rows_are_of_the_length_that_costs_least():
    """64 sequences of 150 tokens, of which 90, 140 or 10 are those of the one before.

    By hand, of 140: two rows, 510 * (1 + 510 / 2000) + 410 * (1 + 410 / 2000) = 1134, or one, 780 * 1.39 = 1084.
    """
    rows, lengths = list(range(64)), [150] * 64
    for overlap, even, longest in ((90, 100.0, 256), (90, 1000.0, 512), (140, 2000.0, 1024), (10, 1e6, 4096)):
        packs = best_packs(rows, lengths, [0] + [overlap] * 63, RowLength(4096, even))
        assert packs == cut_into_packs(rows, lengths, [0] + [overlap] * 63, longest), (overlap, even)
    assert best_packs(rows, lengths, [0] + [90] * 63, RowLength(400)) == cut_into_packs(
        rows, lengths, [0] + [90] * 63, 400
    )
    assert best_packs([], [], [], RowLength(4096, 100.0)) == []


def test_long_sequences_share_what_most_of_them_is():
    """Prompts of coding agents: 9,000 tokens, of which 8,900 are those of the one before."""
    rows, lengths = list(range(5)), [9000] * 5
    for even in (None, 400.0, 8000.0):
        packs = best_packs(rows, lengths, [0, 8900, 8900, 5000, 8900], RowLength(4096, even, 16384))
        assert [(pack.rows, pack.num_tokens) for pack in packs] == [([0, 1, 2], 9200), ([3, 4], 9100)]
        assert len(best_packs(rows, lengths, [0] + [8900] * 4, RowLength(4096, even, 9150))) == 3, (
            "as memory lets them"
        )
        assert len(best_packs(rows, lengths, [0] + [8900] * 4, RowLength(4096, even))) == 5


def test_long_conversations_have_rows_of_the_length_with_the_least_work():
    """Eight episodes that begin with the same 15,000 tokens, of ten turns: one row has a mask of 111,400 squared."""
    lengths = [18_050 + 1_000 * turn for _ in range(8) for turn in range(10)]
    overlaps = [lengths[row - 1] if row % 10 else 15_000 * (row > 0) for row in range(80)]
    given = range(80), lengths, overlaps
    assert [pack.num_tokens for pack in cut_into_packs(*given, 4096, 131_072)] == [111_400]
    assert [pack.num_tokens for pack in best_packs(*given, RowLength(4096, 4544.0, 131_072))] == [63_200, 63_200]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("layout", ["shared", "packed", "chained", "forked"])
def test_ranks_agree_and_nothing_is_dropped(num_ranks, layout):
    rng = np.random.default_rng(0)
    batches = []
    for size in (70, 0, 90)[:num_ranks]:
        prompts = [rng.integers(0, 3, rng.integers(3, 30)).astype(np.int32) for _ in range(size)]
        completions = [rng.integers(0, 3, rng.integers(1, 5)).astype(np.int32) for _ in range(size)]
        batches.append(StepBatch(prompts, completions, np.arange(size, dtype=np.float32), np.ones(size, dtype=bool)))
    length = RowLength(40, fork_cost=5 if layout == "forked" else None)
    config = BatchingConfig(2, 60, "dapo", 0, None, layout, length)
    made = [make_mini_batches(batches, rank, config, np.random.default_rng(3)) for rank in range(num_ranks)]
    shapes = [[[len(m["advantages"]) for m in part] for part in mini_batches] for mini_batches, _ in made]
    assert all(shape == shapes[0] for shape in shapes)
    micro_batches = [m for mini_batches, _ in made for part in mini_batches for m in part]
    trained = sum(int(m["completion_mask"].sum()) for m in micro_batches)
    assert trained == sum(batch.summary.num_trained_tokens() for batch in batches)
    assert trained == sum(int((m["scored_ids"] >= 0).sum()) for m in micro_batches)
    assert sum(m["packed_ids"].numel() for m in micro_batches) == made[0][1]["update/forwarded_tokens"]
    assert (made[0][1]["update/repeated_token_fraction"] > 0) == (layout != "packed")
    for m in micro_batches:
        assert m["packed_ids"].numel() <= 60 or len(m["packed_ids"]) == 1


def test_alike_rows_go_to_a_mini_batch_together():
    """Rows go in blocks of eight, alike in every layout, and several mini-batches share as much as one, or nearly."""
    rng = np.random.default_rng(0)
    prompts = [np.array([*([n // 32] * 20), *([n // 8] * 20)], dtype=np.int32) for n in range(256)]
    completions = [rng.integers(0, 9, 5).astype(np.int32) for _ in prompts]
    batch = StepBatch(prompts, completions, np.arange(256, dtype=np.float32), np.ones(256, dtype=bool))

    def cut(num_mini_batches, layout):
        mini_batches, metrics = make_mini_batches(
            [batch],
            0,
            BatchingConfig(num_mini_batches, 2000, "dapo", 0, None, layout, RowLength(1000)),
            np.random.default_rng(3),
        )
        rows = [sorted(row for m in part for row in m["advantages"].int().tolist()) for part in mini_batches]
        return rows, metrics["update/repeated_token_fraction"]

    (rows, shared), (same_rows, _), (rows_of_one, shared_of_one) = cut(4, "shared"), cut(4, "padded"), cut(1, "shared")
    assert rows == same_rows and sorted(sum(rows, [])) == sum(rows_of_one, []) == list(range(256))
    assert [len(part) for part in rows] == [64] * 4
    assert all(part[i] // 8 == part[i + 7] // 8 for part in rows for i in range(0, 64, 8))
    assert rows != [list(range(i, i + 64)) for i in range(0, 256, 64)], "by chance"
    assert shared_of_one - 0.1 < shared <= shared_of_one


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "grpo", "max_tokens_per_micro_batch": 80, "packed_row_tokens": 60},
        {"gradient_checkpointing": True},
        {"model_init_kwargs": {"attn_implementation": "eager"}},
        {"steps_per_generation": 2, "num_iterations": 2, "pad_to_multiple_of": 16},
        {"history": "conversation"},
        {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)},
    ],
    ids=["default", "small", "checkpointing", "eager", "mini_batches", "conversation", "lora"],
)
def test_gradients_are_those_of_padded_rows(make_trainer, options):
    trainer = make_trainer(LongLetterEnvironment, max_completion_length=4, beta=0.1, **options)
    batch = play_batch(trainer)
    move_weights(trainer)
    gradients, forwarded = {}, {}
    for layout in ("padded", "packed", "shared"):
        trainer.update.layout.kind = layout
        mini_batches, metrics = trainer.update.split(batch)
        part = [micro_batch for part in mini_batches for micro_batch in part]
        trainer._add_log_probs([part])
        gradients[layout], forwarded[layout] = flat_gradient(trainer, part), metrics["update/forwarded_tokens"]
    assert gradients["padded"].norm() > 0
    for layout in ("packed", "shared"):
        assert (gradients[layout] - gradients["padded"]).norm() < 1e-5 * gradients["padded"].norm()
    assert forwarded["shared"] < forwarded["padded"]


def test_long_rows_have_the_gradient_of_padded_ones(make_trainer):
    options = {"history": "conversation", "max_completion_length": 4, "beta": 0.0}
    trainer = make_trainer(LongLetterEnvironment, **options)
    batch = play_batch(trainer)
    gradients, forwarded = [], []
    for kind, length in (("padded", None), ("shared", RowLength(16)), ("shared", RowLength(16, longest=8192))):
        trainer.update.layout.kind = kind
        trainer.update.layout.row_length = length or trainer.update.layout.row_length
        (part,), metrics = trainer.update.split(batch)
        gradients.append(flat_gradient(trainer, part))
        forwarded.append(metrics["update/forwarded_tokens"])
    assert forwarded[2] <= forwarded[1] < forwarded[0] / 2, "turns of a conversation are one row, however long"
    for gradient in gradients[1:]:
        assert (gradient - gradients[0]).norm() < 1e-5 * gradients[0].norm() != 0


def test_a_conversation_costs_one_pass_over_its_tokens(make_trainer):
    """Each prompt begins with the one before it, and the model processes their common tokens once."""
    options = {"max_completion_length": 4, "packed_row_tokens": 4096, "max_tokens_per_micro_batch": 8192}
    trainer = make_trainer(LongLetterEnvironment, history="conversation", **options)
    trajectories, stats = trainer.play([{"seed": seed} for seed in range(4)])
    assert stats.continued_prompts == stats.later_prompts > 0
    batch = StepBatch.from_trajectories(trajectories, np.ones(sum(len(t.steps) for t in trajectories)))
    _, metrics = trainer.update.split(batch)
    sequences = [tuple(step.prompt_ids + step.completion_ids) for t in trajectories for step in t.steps]
    prefixes = {sequence[:end] for sequence in sequences for end in range(1, len(sequence) + 1)}
    assert metrics["update/forwarded_tokens"] == len(prefixes)
    whole = [len(t.steps[-1].prompt_ids) + len(t.steps[-1].completion_ids) for t in trajectories]
    assert len(prefixes) < sum(whole) < sum(map(len, sequences)), "less than one pass over each: they begin alike"


@pytest.fixture
def flex_attention(monkeypatch):
    """Flex attention as PyTorch defines it, uncompiled: it has a gradient on a CPU too, though PyTorch forbids it."""
    monkeypatch.setattr(torch_flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: torch_flex_attention.flex_attention)


@pytest.mark.slow
def test_flex_attention_has_the_same_gradients(make_trainer, flex_attention):
    options = {"max_completion_length": 4, "beta": 0.1, "max_tokens_per_micro_batch": 300, "packed_row_tokens": 150}
    trainer = make_trainer(LongLetterEnvironment, **options)
    batch = play_batch(trainer)
    move_weights(trainer)
    gradients = {}
    for layout, attention in (("padded", "sdpa"), ("packed", "flex_attention"), ("shared", "flex_attention")):
        trainer.update.layout.kind = layout
        for model in (trainer.model, trainer.ref_model):
            model.set_attn_implementation(attention)
        (part,), _ = trainer.update.split(batch)
        trainer._add_log_probs([part])
        gradients[layout] = flat_gradient(trainer, part)
    for layout in ("packed", "shared"):
        assert (gradients[layout] - gradients["padded"]).norm() < 1e-5 * gradients["padded"].norm()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="compiles for the CPU, and there is no C++ compiler")
def test_compiled_flex_attention_has_the_same_log_probabilities(make_trainer):
    trainer = make_trainer(LongLetterEnvironment, max_completion_length=4)
    ((micro_batch,),), _ = trainer.update.split(play_batch(trainer))
    with torch.no_grad():
        wanted = trainer.update.score(trainer.model, micro_batch)
        trainer.model.set_attn_implementation("flex_attention")
        assert torch.allclose(trainer.update.score(trainer.model, micro_batch), wanted, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is trained")
def test_flex_attention_is_refused_on_a_cpu(make_trainer):
    with pytest.raises(ValueError, match="attn_implementation"):
        make_trainer(LongLetterEnvironment, model_init_kwargs={"attn_implementation": "flex_attention"})


def test_half_precision_is_within_its_rounding(make_trainer):
    trainer = make_trainer(LongLetterEnvironment, max_completion_length=4, bf16=True)
    ((micro_batch,),), _ = trainer.update.split(play_batch(trainer))
    assert trainer.update.verify_layout(trainer.model, [[micro_batch]]) and trainer.update.layout.kind == "shared"


def test_only_scored_positions_reach_the_lm_head(make_trainer, monkeypatch):
    trainer = make_trainer(LongLetterEnvironment, max_completion_length=4)
    ((micro_batch,),), _ = trainer.update.split(play_batch(trainer))
    from trl.trainer import utils

    seen = []
    apply = utils._ChunkedLogProbFunction.apply
    monkeypatch.setattr(
        utils._ChunkedLogProbFunction, "apply", lambda hidden, *rest: seen.append(len(hidden)) or apply(hidden, *rest)
    )
    trainer.update.score(trainer.model, micro_batch)
    assert seen == [int(micro_batch["completion_mask"].sum())]


class BesideVocabulary(TorchDispatchMode):
    """Of all tensors that operations make and that reach over the vocabulary, the most rows of one."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        made = function(*arguments, **(named or {}))
        for tensor in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(tensor, torch.Tensor) and self.vocabulary in tensor.shape:
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tensor_is_tokens_by_vocabulary(make_trainer, monkeypatch, layout):
    """With TRL's tiles scaled down as the model is. What reaches over the vocabulary is the LM head's weights."""
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", 32)
    monkeypatch.setattr(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 100)
    trainer = make_trainer(LongLetterEnvironment, max_completion_length=4, beta=0.1, token_layout=layout)
    ((micro_batch,),), _ = trainer.update.split(play_batch(trainer))
    config = trainer.model.config
    with BesideVocabulary(config.vocab_size) as seen:
        trainer._add_log_probs([[micro_batch]])
        flat_gradient(trainer, [micro_batch])
    assert seen.rows == config.hidden_size < micro_batch["completion_mask"].sum() / 3


def test_training_keeps_the_layout_and_reports_it(make_trainer):
    trainer = make_trainer(LongLetterEnvironment, max_completion_length=4)
    trainer.train()
    (log, *_) = [log for log in trainer.state.log_history if "update/forwarded_tokens" in log]
    assert trainer.update.layout.kind == "shared" and trainer.update.layout.checked_length > 0
    assert 0 < log["update/repeated_token_fraction"] < 1 and 0 <= log["update/padding_fraction"] < 1


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_small_mini_batches_share_on_several_ranks_too(num_ranks):
    """64 samples that begin with the same 300 tokens: the busiest rank has far less than its share of whole rows."""
    rng = np.random.default_rng(0)
    begin, number = rng.integers(0, 99, 300), 64 // num_ranks
    batches = [
        StepBatch(
            [np.append(begin, rng.integers(0, 99, rng.integers(50, 100))).astype(np.int32) for _ in range(number)],
            [rng.integers(0, 99, 20).astype(np.int32) for _ in range(number)],
            np.ones(number, dtype=np.float32),
            np.ones(number, dtype=bool),
        )
        for _ in range(num_ranks)
    ]
    cut = BatchingConfig(1, 4096, "dapo", 0, None, "shared", RowLength(2048, 6000.0), mini_batch_size=64)
    metrics = make_mini_batches(batches, 0, cut, np.random.default_rng(0))[1]
    busiest = metrics["update/token_imbalance"] * (1 - metrics["update/repeated_token_fraction"])
    assert busiest < 0.5

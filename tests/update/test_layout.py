"""Which layout a run takes, when it is looked at again, and what that look costs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from g2po_trl.update import attention
from g2po_trl.update.batch import StepBatch
from g2po_trl.utils.trl_compat import fused_log_probs


def batch_of(lengths, seed=0):
    """Prompts of so many tokens that begin alike, with completions of four."""
    rng = np.random.default_rng(seed)
    root = rng.integers(3, 300, max(lengths))
    prompts = [np.concatenate([root[: n // 2], rng.integers(3, 300, n - n // 2)]).astype(np.int32) for n in lengths]
    completions = [rng.integers(3, 300, 4).astype(np.int32) for _ in lengths]
    return StepBatch(prompts, completions, np.ones(len(lengths), dtype=np.float32), np.ones(len(lengths), dtype=bool))


def verify(trainer, lengths):
    return verify_batch(trainer, batch_of(lengths))


def verify_batch(trainer, batch, mini_batches=None):
    return trainer.update.verify_layout(trainer.model, mini_batches or trainer.update.split([batch])[0], [batch])


@pytest.mark.parametrize("known", [True, False], ids=["a known window", "one that no configuration tells"])
def test_longer_sequences_are_looked_at_again(make_family_trainer, monkeypatch, caplog, known):
    """Without its window, attention is right for short sequences, as many as there are, and wrong for longer ones."""
    trainer = make_family_trainer("Mistral with a window")
    attend = attention._of_branch
    monkeypatch.setattr(
        attention, "_of_branch", lambda *parts, **options: attend(*parts, **{**options, "sliding_window": None})
    )
    if not known:
        monkeypatch.setattr("g2po_trl.update.layout.limits", lambda config: [])
    assert verify(trainer, [4, 6, 8, 10]) and verify(trainer, [11, 11, 12, 12]) and not caplog.text
    assert not verify(trainer, [18, 19, 20, 20] if known else [22, 23, 24, 24])
    assert trainer.update.layout.kind == "padded"
    assert "token_layout is 'shared' and 'padded' is used: on sequences of up to 2" in caplog.text


def test_a_window_keeps_the_shared_layout(make_family_trainer):
    trainer = make_family_trainer("Mistral with a window")
    assert verify(trainer, [4, 6, 8, 10]) and verify(trainer, [30, 60, 90, 90])
    assert verify(trainer, [100, 120]) and trainer.update.layout.kind == "shared"
    assert trainer.update.layout.checked_length == 94, "not twice as long: not looked at again"


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", ["another token", "none"])
def test_one_wrong_token_of_one_path_is_found(make_family_trainer, bf16, wrong):
    """Among 60, where it changes less than bfloat16's rounding; of a sequence that is not scored alone, too."""
    trainer = make_family_trainer("Qwen2", bf16=bf16)
    batch = batch_of([60] * 10)
    mini_batches, _ = trainer.update.split([batch])
    assert verify_batch(trainer, batch, mini_batches)
    ((micro_batch,),) = mini_batches
    queries, keys = micro_batch["branches"][-1]
    first = len(micro_batch["paths"]) - keys
    if wrong == "none":  # the path lacks its first token
        micro_batch["paths"] = micro_batch["paths"][torch.arange(first + keys) != first]
        micro_batch["branches"][-1] = (queries, keys - 1)
    else:  # the one before its own is that before the branch in the row, of another sequence
        micro_batch["paths"][-queries - 1] = micro_batch["row_ids"].shape[1] - queries - 1
    trainer.update.layout.checked_length = 0
    assert not verify_batch(trainer, batch, mini_batches)


@pytest.mark.parametrize(("part", "exact"), [(0.8, True), (1.2, False)])
def test_a_look_allows_rounding_alone(make_family_trainer, monkeypatch, part, exact):
    trainer = make_family_trainer("Qwen2")
    score, layout, layout_of = trainer.update.score, trainer.update.layout, {True: "shared", False: "padded"}
    layout.largest_logit = 5.0
    off = part * (5e-4 + 5 * 2**-23)
    monkeypatch.setattr(trainer.update, "score", lambda model, of: score(model, of) + off * ("branches" in of))
    assert verify(trainer, [20] * 6) is exact and layout.kind == layout_of[exact]


def test_attention_that_is_not_the_configurations_is_found(make_family_trainer, monkeypatch):
    """In bfloat16, too: its effect may be less than rounding."""
    trainer = make_family_trainer("Qwen2", bf16=True)
    monkeypatch.setattr(attention, "_NAME", "eager")  # as in a model that does not ask for the name
    assert not verify(trainer, [20] * 10) and trainer.update.layout.kind == "padded"


def test_a_resumed_run_keeps_the_layout(make_family_trainer, tmp_path):
    """Looked at again, on other sequences, it might be another: the runs would differ in their last bits."""
    first = make_family_trainer("Qwen2")
    assert verify(first, [10, 12])
    for first.update.layout.kind in ("shared", "padded"):  # "padded" as where it was not exact
        first.resumption.save(tmp_path / first.update.layout.kind, first.run_identity())
    for folder, wanted in (("shared", ("shared", 16)), ("padded", ("padded", 16)), ("shared", ("padded", 0))):
        options = {"token_layout": "padded"} if wanted[1] == 0 else {}
        resumed = make_family_trainer("Qwen2", **options)
        resumed.resumption.restore(tmp_path / folder, resumed.run_identity())
        assert (resumed.update.layout.kind, resumed.update.layout.checked_length) == wanted


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_gradients_of_shared_places_are_added_in_a_fixed_order(two_threads):
    """Read by indexing, every one of these sums of some 80 gradients differed from the last in its rounding."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 256, generator=generator, requires_grad=True)
    places = torch.randint(0, 50, (4000,), generator=generator)
    weights, body = torch.randn(4000, 256, generator=generator), torch.nn.Module()
    body.forward = lambda: SimpleNamespace(last_hidden_state=hidden[None])

    def model(shift_labels, fused_lm_head):
        return SimpleNamespace(log_probs=(body().last_hidden_state * weights).sum(-1), entropy=None)

    def gradient():
        log_probs, _ = fused_log_probs(model, body, {}, places, places)
        return torch.autograd.grad(log_probs.sum(), hidden)[0]

    first = gradient()
    assert all(torch.equal(first, gradient()) for _ in range(20))
    torch.testing.assert_close(first, torch.zeros(50, 256).index_add(0, places, weights))


@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v4", "minimax_m3_vl_text"])
def test_a_layout_is_compared_again_where_an_indexer_begins_to_choose(model_type):
    """By keys, by compressed entries of 4 tokens, by blocks of 128; Qwen's by a budget that has no default."""
    assert 2048 in attention.limits(AutoConfig.for_model(model_type))
    assert attention.limits(SimpleNamespace(indexer_budget=4096)) == [4096]

"""Prefixes whose cache starts each continuation: what is processed when, and that nothing else changes."""

import numpy as np
import pytest
import torch
from families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from letter_trainer import by_layout, play_batch
from transformers import DynamicCache

from benchmarks.trees import make_trees
from g2po_trl.update.forks import ForkedCache
from g2po_trl.update.policy.probe import why_not_forked
from g2po_trl.update.tree import lay_out


def arrays(*sequences):
    return [np.array(sequence, dtype=np.int32) for sequence in sequences]


def test_the_example_of_the_module():
    """Letters are pairs of tokens here: single tokens are not forked."""
    words = {letter: [2 * number + 3, 2 * number + 4] for number, letter in enumerate("ABcdefg")}
    sequences = arrays(*(sum(map(words.get, text), []) for text in ("ABcd", "ABcef", "Ag")))
    (tree,) = make_trees(sequences, 100, fork_cost=1)
    layout = lay_out([tree], sequences, [2, 2, 2], pad_token_id=0)
    assert tree.num_tokens == layout["row_ids"].numel() == 2 + 2 + 4 + 2 + 4
    assert layout["forks"] == [(1, 2, None), (1, 2, 0), (1, 4, 0), (1, 4, 2), (1, 2, 2)]
    flat = layout["row_ids"][0].tolist()
    assert flat == sum(map(words.get, "AgBcefd"), [])
    scored = [(words["c"][1], words["d"][0]), (words["e"][1], words["f"][0]), (words["A"][1], words["g"][0])]
    assert [flat[place] for place in layout["scored_from"]] == [token for pair in scored for token in pair]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=20),
    st.integers(1, 12),
    st.integers(6, 60),
)
def test_every_sequence_is_read_from_its_beginning(sequences, cost, max_tokens):
    sequences = arrays(*sequences)
    trees = make_trees(sequences, max_tokens, cost)
    assert sorted(row for tree in trees for row in tree.rows) == list(range(len(sequences)))
    for tree in trees:
        layout = lay_out([tree], sequences, [1] * len(sequences), 9)
        assert tree.num_tokens == layout["row_ids"].numel()
        assert tree.num_tokens <= max_tokens or len(tree.rows) == 1
        read, places, first = [], {}, 0  # what each pass knows at its end; each place's text so far
        for number, (rows, length, parent) in enumerate(layout["forks"]):
            assert parent is None or (parent < number and layout["forks"][parent][0] == 1 and length > 1)
            before = [] if parent is None else read[parent]
            for row in layout["row_ids"][0, first : first + rows * length].view(rows, length).tolist():
                places |= {first + i: before + row[: i + 1] for i in range(length)}
                first += length
            read.append(before + row)
        for row, place in zip(tree.rows, layout["scored_from"].tolist()):
            assert places[place] == sequences[row][:-1].tolist()


@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2"])
@pytest.mark.parametrize("how", ["detached", "in place"])
def test_a_cache_that_loses_the_gradient_is_found(name, how, monkeypatch):
    model = FAMILIES[name].build()
    assert why_not_forked(model) is None
    if how == "detached":
        fork = ForkedCache.fork

        def without_graph(self, rows):
            forked = fork(self, rows)
            for layer in forked.layers:
                for holder in (vars(layer), *(value for value in vars(layer).values() if isinstance(value, dict))):
                    holder.update({name: of.detach() for name, of in holder.items() if isinstance(of, torch.Tensor)})
            return forked

        monkeypatch.setattr(ForkedCache, "fork", without_graph)
    else:
        monkeypatch.setattr(ForkedCache, "update_recurrent_state", DynamicCache.update_recurrent_state)
    reason = why_not_forked(model)
    if how == "detached":
        assert "hidden states and gradients are off" in reason
    else:
        assert (reason is not None) == (name == "Qwen3.5"), "others have no recurrent state"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("name", "history"), [("Qwen3.5", "window"), ("LFM2", "conversation")])
def test_the_gradient_is_that_of_padded_rows(make_family_trainer, name, history):
    trainer = make_family_trainer(name, beta=0.1, router_aux_loss_coef=0.0, history=history)
    assert trainer.update.layout.kind == "forked"
    trainer.update.layout.fork_cost = 16
    (padded, _, most), (forked, micro_batches, forwarded) = by_layout(trainer, ("padded", "forked")).values()
    assert sum(m["row_ids"].numel() for m in micro_batches) == forwarded < most
    assert max(len(m.get("forks", [])) for m in micro_batches) > 1
    assert 0 < (forked - padded).norm() < 2e-5 * padded.norm()


def test_without_a_cache_rows_are_padded(make_family_trainer, caplog):
    trainer = make_family_trainer("LFM2", gradient_checkpointing=True)
    assert trainer.update.layout.kind == "padded"
    assert "'padded' is used: layers of type 'conv' do not attend by branches, and gradient check" in caplog.text


def test_a_fork_that_is_not_exact_is_left_out_of_training(make_family_trainer, caplog, monkeypatch):
    """As one that only longer texts show: its state is that of another sequence."""
    trainer = make_family_trainer("LFM2", history="conversation")
    trainer.update.layout.fork_cost = 16
    batch, fork = play_batch(trainer), ForkedCache.fork

    def wrong(self, rows):
        forked = fork(self, rows)
        for layer in forked.layers:
            vars(layer).update({name: -value for name, value in vars(layer).items() if name == "keys"})
        return forked

    monkeypatch.setattr(ForkedCache, "fork", wrong)
    mini_batches, _ = trainer.update.make_mini_batches(trainer.model, batch)
    assert trainer.update.layout.kind == "padded"
    assert "'padded' is used: on sequences of up to" in caplog.text
    assert not any("forks" in micro_batch for part in mini_batches for micro_batch in part)

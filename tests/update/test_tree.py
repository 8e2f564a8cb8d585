"""Trees: what is laid out where, who sees whom, and that the gradient is that of padded rows."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from letter_environment import LongLetterEnvironment
from letter_trainer import by_layout, flat_gradient, play_batch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

from benchmarks.trees import make_trees
from g2po_trl.update.tree import LAYOUTS, common_prefix, grow, in_order, is_exact, lay_out


def arrays(*sequences):
    return [np.array(sequence, dtype=np.int32) for sequence in sequences]


def test_the_example_of_the_module():
    sequences = arrays([1, 2, 3, 4], [1, 7], [1, 2, 3, 5, 6])
    (tree,) = make_trees(sequences, max_tokens=100)
    assert (tree.rows, tree.shared, tree.num_tokens) == ([0, 2, 1], [0, 3, 1], 7)
    layout = lay_out([tree], sequences, [1, 1, 2], pad_token_id=0)
    assert layout["row_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert layout["row_positions"].tolist() == [[0, 1, 2, 3, 3, 4, 1]]
    assert layout["branches"] == [(4, 4), (2, 5), (1, 2)]
    assert layout["paths"].tolist() == [*(0, 1, 2, 3), *(0, 1, 2, 4, 5), *(0, 6)]
    assert layout["scored_ids"].tolist() == [4, 5, 6, 7]
    assert layout["scored_from"].tolist() == [2, 2, 4, 0], "the state that foretells a token is its predecessor's"
    equal = arrays([5, 6, 7], [5, 6, 7], [5, 6, 7])
    layout = lay_out(make_trees(equal, 3), equal, [2, 2, 0], pad_token_id=0)
    assert layout["row_ids"].tolist() == [[5, 6, 7]] and set(layout) == {"row_ids", "scored_from", "scored_ids"}
    assert layout["scored_from"].tolist() == [0, 1, 0, 1], "the third is not trained"


def seen_places(layout):
    """For each place of the row, the places of the keys that its query sees, the last query of a branch all."""
    length = layout["row_ids"].shape[1]
    branches, paths = layout.get("branches", [(length, length)]), layout.get("paths", torch.arange(length))
    of_branch = paths.split([keys for _, keys in branches])
    pairs = list(zip(branches, of_branch))
    return [path[: keys - queries + n + 1] for (queries, keys), path in pairs for n in range(queries)]


# Few tokens: many sequences are equal, or begin others.
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12).map(np.array), min_size=1, max_size=20)


def order_of(sequences, is_sorted):
    rows = range(len(sequences))
    return in_order(sequences, rows)[0].tolist() if is_sorted else list(rows)


def measured(sequences, order):
    """Lengths and overlaps, as `grow` takes them."""
    overlaps = [0, *(common_prefix(sequences[a], sequences[b]) for a, b in pairwise(order))]
    return [len(sequences[row]) for row in order], overlaps


def limit(length, max_tokens):
    """Tokens of a tree that one of this length allows."""
    return max_tokens if length <= max_tokens else int(1.5 * length)


@settings(max_examples=200, deadline=None)
@given(SEQUENCES, st.integers(1, 40), st.booleans())
def test_every_token_sees_what_is_before_it_in_its_sequence_and_nothing_else(sequences, max_tokens, is_sorted):
    order = order_of(sequences, is_sorted)
    num_scored = [(row % 3 > 0) * (len(sequence) - 1) for row, sequence in enumerate(sequences)]
    trees = grow(order, *measured(sequences, order), max_tokens)
    assert [row for tree in trees for row in tree.rows] == order
    for tree in trees:
        layout, own = lay_out([tree], sequences, num_scored, pad_token_id=9), [sequences[row] for row in tree.rows]
        ids, seen = layout["row_ids"][0], seen_places(layout)
        positions = layout.get("row_positions", torch.arange(len(ids))[None])[0]
        most = max(limit(len(of), max_tokens) for of in own)
        assert tree.num_tokens == len(ids) == len(seen) <= most
        assert len(layout.get("paths", [])) <= 8 * most, "gathered keys take memory"
        begins = {tuple(of[:stop]) for of in own for stop in range(1, len(of) + 1)}
        for place, sees in enumerate(seen):
            assert sees[-1] == place and tuple(ids[sees].tolist()) in begins
            assert positions[sees].tolist() == list(range(len(sees)))
        scored = iter(zip(layout["scored_from"].tolist(), layout["scored_ids"].tolist()))
        for row, of in zip(tree.rows, own):
            for stop in range(len(of) - num_scored[row], len(of)):
                place, token = next(scored)
                assert ids[seen[place]].tolist() == of[:stop].tolist() and token == of[stop]
        assert next(scored, (0, -100)) == (0, -100)
        if is_sorted:
            assert len(ids) == len(begins), "no token twice"


@settings(max_examples=200, deadline=None)
@given(SEQUENCES, st.booleans(), st.data())
def test_one_wrong_key_of_one_path_is_found(sequences, is_sorted, data):
    """Also one of the same token at the same position: another's past is behind it. Unless no score depends on it."""
    order = order_of(sequences, is_sorted)
    (tree,) = grow(order, *measured(sequences, order), 10**6)
    own, num_scored = [sequences[row] for row in order], [len(sequences[row]) - 1 for row in order]
    layout = lay_out([tree], sequences, [len(sequence) - 1 for sequence in sequences], 9)
    if "branches" not in layout:
        return
    assert is_exact(layout, own, num_scored)
    at = data.draw(st.integers(0, len(layout["paths"]) - 1))
    seen, (queries, keys) = seen_places(layout), np.cumsum(layout["branches"], axis=0).T
    branch = int(np.searchsorted(keys, at, side="right"))
    used = {place for scored in layout["scored_from"].tolist() for place in seen[scored].tolist()}
    assume(not used.isdisjoint(range(queries[branch] - layout["branches"][branch][0], queries[branch])))
    before = [layout["row_ids"][0, of].tolist() for of in seen]  # tokens that each place sees
    places = [place for place in range(len(seen)) if before[place] != before[layout["paths"][at]]]
    assume(places)
    layout["paths"][at] = data.draw(st.sampled_from(places))
    assert not is_exact(layout, own, num_scored)


@settings(max_examples=150, deadline=None)
@given(SEQUENCES.filter(lambda sequences: len(sequences) < 9), st.integers(1, 20), st.booleans())
def test_trees_repeat_the_fewest_tokens(sequences, max_tokens, is_sorted):
    """Of all that fit: tokens, and one for each tree."""
    order = order_of(sequences, is_sorted)
    lengths, overlaps = measured(sequences, order)
    least = [0]
    for stop in range(1, len(order) + 1):
        costs = []
        for start in range(stop):
            most = max(limit(length, max_tokens) for length in lengths[start:stop])
            tokens = sum(lengths[start:stop]) - sum(overlaps[start + 1 : stop])
            pairs = zip(lengths[start:stop], lengths[start + 1 : stop], overlaps[start + 1 : stop])
            keys = lengths[start] + sum(length - before * (same == before) for before, length, same in pairs)
            costs += [least[start] + tokens + 1] if tokens <= most and keys <= 8 * most else []
        least.append(min(costs))
    assert sum(tree.num_tokens + 1 for tree in grow(order, lengths, overlaps, max_tokens)) == least[-1]


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
OPTIONS = {
    "small": {"loss_type": "grpo", "max_tokens_per_micro_batch": 80},
    "eager, LoRA": {"model_init_kwargs": {"attn_implementation": "eager"}, "peft_config": LORA},
    "mini-batches": {"steps_per_generation": 2, "num_iterations": 2, "pad_to_multiple_of": 16},
    "conversation, bfloat16": {"history": "conversation", "bf16": True},
    "reentrant": {},
    "not reentrant": {},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_padded_rows(make_trainer, name):
    trainer = make_trainer(LongLetterEnvironment, max_completion_length=4, beta=0.1, **OPTIONS[name])
    if "reentrant" in name:  # layers are computed once more, in the backward pass
        trainer.model.gradient_checkpointing_enable({"use_reentrant": name == "reentrant"})
    (padded, _, most), (shared, micro_batches, forwarded) = by_layout(trainer, ("padded", "shared")).values()
    assert any("branches" in micro_batch for micro_batch in micro_batches)
    limit = 0.05 if "bfloat16" in name else 1e-5
    assert 0 < (shared - padded).norm() < limit * padded.norm() and forwarded < most


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
    ((micro_batch,),), _ = trainer.update.split([play_batch(trainer)])
    config = trainer.model.config
    with BesideVocabulary(config.vocab_size) as seen:
        trainer._add_log_probs([[micro_batch]])
        flat_gradient(trainer, [micro_batch])
    assert seen.rows == config.hidden_size < micro_batch["completion_mask"].sum() / 3

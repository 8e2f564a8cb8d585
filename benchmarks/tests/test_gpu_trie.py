"""Conversations on a GPU's benchmark: TRL's trie computes what rows of their own do, and repeats are compared."""

import pytest
import torch
from families import FAMILIES
from trl.trainer.utils import add_fused_lm_head

from benchmarks.gpu import repeat, trie, work


@pytest.fixture
def conversations():
    return work.synthetic_conversations(2, turns=3, vocabulary=60, lengths=(20, 4, 0, 6))


def test_a_conversation_grows(conversations):
    for one in conversations:
        ids, written = work.conversation_tokens(one)
        assert len(ids) == len(written)
        for step in one.steps:
            before = len(step.prompt_ids)
            assert ids[:before] == step.prompt_ids
            assert ids[before : before + len(step.completion_ids)] == step.completion_ids
        assert sum(written) == sum(len(step.completion_ids) for step in one.steps)
        (whole,) = work.as_one_row(one).steps
        assert [*whole.prompt_ids, *whole.completion_ids] == ids


def test_a_trie_has_the_log_probabilities_of_rows(conversations):
    model = FAMILIES["Qwen2"].build()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    rows = trie.micro_batches(conversations, 400)
    assert len(rows) > 1 and sum(row["conversation_tokens"] for row in rows) > sum(
        len(row["input_ids"]) for row in rows
    )
    wanted = []
    for one in conversations:
        ids, written = work.conversation_tokens(one)
        scores = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        picked = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        wanted.append(picked[torch.tensor(written[1:]) == 1])
    model.set_attn_implementation(trie.register())
    found = torch.cat([trie.log_probs(model, row, torch.device("cpu")) for row in rows])
    torch.testing.assert_close(found, torch.cat(wanted), atol=1e-4, rtol=0)
    advantages = torch.cat([row["advantages"] for row in rows])
    trie.loss(found, {"advantages": advantages}).backward()
    assert all(weights.grad is not None for weights in model.model.layers.parameters())


def test_runs_are_equal_until_they_differ():
    one = [{"weights": "a", "completions": "x"}, {"weights": "b", "completions": "y"}, {"weights": "c"}]
    other = [{"weights": "a", "completions": "x"}, {"weights": "q", "completions": "y"}, {"weights": "c"}]
    found = repeat.equal_until(one, other)
    assert (found["weights"], found["completions"], found["prompts"]) == (1, 2, 0)


def test_seconds_leave_out_the_first_iteration_and_panels():
    lines = [{"panel": 0.5}, *({"success_rate": 0.1, "rollout": r, "logps": 0.25, "update": 0.5} for r in (9, 1, 2))]
    assert repeat.seconds_of(lines) == [1.75, 2.75]

"""Attention by branches where kernels of GPUs would be called, and rows beside the limits of rotary embeddings."""

import numpy as np
import pytest
import torch
from families import FAMILIES, Family, alone, gradient, in_layout, samples
from letter_environment import LongLetterEnvironment
from letter_trainer import flat_gradient
from torch.nn.attention import varlen
from transformers import AttentionInterface, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward
from trl.trainer.utils import add_fused_lm_head

from g2po_trl.engines.sampling import Sampling
from g2po_trl.engines.transformers import TransformersEngine
from g2po_trl.update.attention import Branches, _in_one_call, _of_branch
from g2po_trl.update.batch import StepBatch


def by_hand(query, key, value, queries, keys, scale, window=None):
    """Attention (N, heads, D) of parts, given where they begin, causal from the lower right; a query sees `window`."""
    found = []
    for first, last, start, stop in zip(queries, queries[1:], keys, keys[1:]):
        k, v = (of[start:stop].repeat_interleave(query.shape[1] // of.shape[1], 1) for of in (key, value))
        before = torch.arange(stop - start)[first - last :, None] - torch.arange(stop - start)
        sees = (before >= 0) & (before < (window or stop))
        scores = torch.einsum("qhd,khd->hqk", query[first:last], k) * scale
        found.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v))
    return torch.cat(found)


def flash_test(module, query, key, value, attention_mask, scaling, sliding_window=None, **options):
    """Attention with the arguments that transformers' flash attention takes."""
    rows = [of[0].transpose(0, 1) for of in (query, key, value)]
    starts = [options.get(f"cu_seq_lens_{of}", torch.tensor([0, len(rows[0])])) for of in "qk"]
    if "cu_seq_lens_q" in options:
        calls.append(len(starts[0]) - 1)
        longest = [int(of.diff().max()) for of in starts]
        assert longest == [options["max_length_q"], options["max_length_k"]]
        assert {of.dtype for of in starts} == {torch.int32}
    assert attention_mask is None and len(query) == 1
    assert module.config._attn_implementation == "flash_test", "there transformers reads which kernels it calls"
    return by_hand(*rows, *(of.tolist() for of in starts), scaling, sliding_window)[None], None


calls: list[int] = []  # branches of each
AttentionInterface.register("flash_test", flash_test)


@pytest.mark.parametrize("name", ["Llama 3", "Mistral with a window", "Gemma-3"])
def test_flash_attention_is_told_where_branches_begin(name):
    model, (sequences, scored) = FAMILIES[name].build(), samples()
    wanted = alone(model, sequences, scored)
    length = gradient(model, wanted)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    model.config._attn_implementation = "flash_test"
    calls.clear()
    found = in_layout(model, sequences, scored, "shared")
    assert max(calls) > 3 and (found - wanted).abs().max() < 1e-4
    assert (gradient(model, found) - length).norm() < 1e-4 * length.norm()


@pytest.mark.parametrize("window", [None, 4])
def test_one_call_of_all_branches_is_a_call_of_each(window, monkeypatch):
    """PyTorch's `varlen_attn` needs a GPU; here a loop takes its place."""

    def looped(query, key, value, queries, keys, most_queries, most_keys, *, scale, window_size, enable_gqa):
        assert enable_gqa and window_size[1] == 0
        assert (most_queries, most_keys) == (int(queries.diff().max()), int(keys.diff().max()))
        seen = None if window_size[0] < 0 else window_size[0] + 1
        return by_hand(query, key, value, queries.tolist(), keys.tolist(), scale, seen)

    monkeypatch.setattr(varlen, "varlen_attn", looped)
    of = Branches("sdpa", [5, 1, 3, 2], [5, 4, 9, 2], torch.arange(20))
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, *of, 8, generator=draw) for of in ((4, 11), (2, 20), (2, 20)))
    found = _in_one_call(of, query, key, value, 0.3, window)
    module, options = torch.nn.Module(), {"scaling": 0.3, "sliding_window": window}
    module.num_key_value_groups, module.is_causal = 2, True
    parts = zip(query.split(of.queries, 2), key.split(of.keys, 2), value.split(of.keys, 2))
    wanted = [_of_branch(sdpa_attention_forward, True, module, *part, **options) for part in parts]
    torch.testing.assert_close(found, torch.cat(wanted, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("own", [sdpa_attention_forward, eager_attention_forward])
@pytest.mark.parametrize("n", [1, 5, 9])
def test_a_query_sees_the_end_of_its_path_and_nothing_else(own, window, dtype, n):
    """In half precision, too: of a value at one place, queries that do not see it have exactly 0."""
    module = torch.nn.Module().eval()
    module.num_key_value_groups, module.is_causal = 1, True
    same, value = torch.zeros(1, 1, 9, 9, dtype=dtype), torch.eye(9, dtype=dtype)[None, None]
    is_sdpa = own is sdpa_attention_forward
    found = _of_branch(own, is_sdpa, module, same[:, :, :n], same, value, scaling=1.0, sliding_window=window)
    before = torch.arange(9 - n, 9)[:, None] - torch.arange(9)
    assert torch.equal(found[0, :, 0] > 0, (before >= 0) & (before < (window or 9)))


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 48}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [1.5, 2.5, 4.0, 8.0] * 2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
ROPES = {
    "longrope": Family(
        "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 48, "sliding_window": None}
    ),
    "dynamic": Family("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 48}),
}


@pytest.mark.parametrize("layout", ["shared", "padded"])
@pytest.mark.parametrize("name", ROPES)
def test_rows_on_either_side_of_a_rotary_limit(make_trainer, name, layout):
    """transformers chooses frequencies by the longest row of a pass; each row is scored as when it is alone."""
    rng = np.random.default_rng(0)
    begin = rng.integers(4, 300, 15)
    prompts = [np.append(begin, rng.integers(4, 300, n - 15)).astype(np.int32) for n in (20, 25, 42, 43, 70, 100, 100)]
    completions = [rng.integers(4, 300, 6).astype(np.int32) for _ in prompts]
    advantages = np.linspace(-1, 1.5, len(prompts), dtype=np.float32)
    batch = StepBatch(prompts, completions, advantages, np.ones(len(prompts), dtype=bool))
    trainer = make_trainer(LongLetterEnvironment, model=ROPES[name].build(), beta=0.0, token_layout=layout)
    wanted, total = {}, 0.0
    for prompt, completion, advantage in zip(prompts, completions, advantages):
        model = ROPES[name].build()  # which has seen no longer row
        log_probs = alone(model, [np.append(prompt, completion)], [6])
        wanted[tuple(completion)] = log_probs[0].detach()
        (log_probs * float(-advantage) / (6 * len(prompts))).sum().backward()
        total = total + torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    (micro_batches,), _ = trainer.update.make_mini_batches(trainer.model, batch)
    assert trainer.update.layout.kind == layout and len(micro_batches) > 1
    found = {}
    with torch.no_grad():
        for micro_batch in micro_batches[::-1]:  # whichever comes first
            scored = trainer.update.score(trainer.model.eval(), micro_batch)
            found |= {tuple(ids[:6].tolist()): of[:6] for ids, of in zip(micro_batch["completion_ids"], scored)}
    assert max((found[of] - log_probs).abs().max() for of, log_probs in wanted.items()) < 1e-4
    assert (flat_gradient(trainer, micro_batches) - total).norm() < 1e-4 * total.norm()


@pytest.mark.parametrize("name", ROPES)
def test_a_prompt_beside_longer_ones_is_played_as_alone(tiny_model_dir, name):
    """Its first token; a cache keeps the scale of the prompt."""
    tokenizer, draw = AutoTokenizer.from_pretrained(tiny_model_dir), np.random.default_rng(0)
    prompts = [draw.integers(4, 300, n).tolist() for n in (20, 60, 100, 25, 70)]
    engine = TransformersEngine.from_model(ROPES[name].build(), tokenizer, logprobs=True)
    for prompt, completion in zip(prompts, engine.generate(prompts, Sampling(max_completion_length=1))):
        model = ROPES[name].build()  # which has seen no longer row
        wanted = model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[completion.ids[0]]
        assert abs(completion.logprobs[0] - wanted.item()) < 1e-4


def test_a_prefix_of_its_own_has_no_rotary_scale_of_its_own(make_trainer):
    """A hybrid's common tokens pass alone, and transformers would scale them by their own number."""
    model = Family("granitemoehybrid", {**ROPES["dynamic"].options, "position_embedding_type": "rope"}).build()
    assert make_trainer(LongLetterEnvironment, model=model, router_aux_loss_coef=0).update.layout.kind == "padded"

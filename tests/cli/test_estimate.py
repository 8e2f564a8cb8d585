"""`g2po estimate`: numbers by hand, and settings as `g2po train` reads them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused

from g2po_trl.cli import main
from g2po_trl.estimate.memory import ModelShape, Training, memory_parts, read_shape, vllm_cache
from g2po_trl.estimate.plan import Episodes, Plan
from g2po_trl.runs.iterations import load_log

ROOT = Path(__file__).parents[2]
# 1,000 parameters beside a head of 200, two layers.
SHAPE = ModelShape(1200, 200, True, hidden=10, intermediate=30, layers=2, vocabulary=20, kv_width=8)
LARGE = ModelShape(1_543_714_304, 151_936 * 1536, True, 1536, 8960, 28, 151_936, 512)  # Qwen2.5-1.5B


def sizes(shape, **training):
    return {part.name: part.size for part in memory_parts(shape, Training(**training), 1e6)}


def test_parts_by_hand():
    """Copies of the weights, Adam's moments; activations of one layer with checkpointing, else of every layer."""
    update = 2 * 100 * 10 * 2 + 2 * 100 * (120 + 135 + 40 + 90) + 6 * 200
    copies = dict.fromkeys(("weights", "reference", "gradients"), 4800)
    assert sizes(SHAPE, micro_batch_tokens=100) == {**copies, "Adam": 9600, "update": update}
    every = 2 * 2 * 100 * (120 + 135) + 6 * 200
    found = sizes(SHAPE, reference=False, checkpointing=False, micro_batch_tokens=100, dtype="bfloat16")
    assert found == {"weights": 2400, "gradients": 2400, "Adam": 4800, "update": every}
    cast = sizes(SHAPE, checkpointing=False, micro_batch_tokens=100, autocast=True)
    assert cast["update"] == every + 2 * 1200, "16 bits of each float32 weight"
    assert sizes(SHAPE, critic=True, dtype="bfloat16")["critic"] == 16 * 1200, "in float32 whatever the policy is"
    adapted = sizes(replace(SHAPE, adapter=50), quantized="4bit", vllm_share=0.25, micro_batch_tokens=100)
    assert adapted == {"weights": 1200 * 0.56, "adapter": 800, "update": update - 1200, "vLLM": 0.25e6}
    sharded = sizes(SHAPE, sharded=True, processes=4)
    assert sharded["Adam"] == 9600 / 4 and sharded["gathered"] == 2 * (2 * 500 + 2 * 200), "two layers and the head"


def test_memory_is_near_that_of_an_h200():
    """Without an optimizer. Only the last row was checkpointed (benchmarks/results/gpu/README.md)."""
    measured = json.loads((ROOT / "benchmarks/results/gpu/h200/phases.json").read_text())["parts"]["phases"]
    found = [row for row in measured["findings"][1:] if "peak_gb" in row]
    rows = {(row["attention"], row["layout"]): row["peak_gb"] for row in found}
    assert len(rows) == 6
    for row, peak in rows.items():
        checkpointing = row == ("flex_attention", "packed")
        options = {"reference": False, "autocast": True, "checkpointing": checkpointing, "micro_batch_tokens": 32_768}
        found = {part.name: part.size for part in memory_parts(LARGE, Training(**options), 141e9)}
        assert 0.85 < (sum(found.values()) - found["Adam"]) / 1e9 / peak < 1.05, row


@pytest.mark.parametrize("gpus", [1, 2])
def test_vllms_cache_is_what_its_share_leaves(gpus):
    memory = 4e9 + 2 * 2400 / gpus + 32_000
    cache = vllm_cache(SHAPE, Training(vllm_share=0.5, vllm_gpus=gpus), memory, episodes=3, longest=20)
    assert cache.weights == 2400 / gpus
    assert cache.tokens == 500 * gpus and cache.needed == 60 * gpus  # 16,000 bytes at 2 x 2 layers x 8


SETTINGS = {"max_steps": 12, "num_generations": 4, "per_device_train_batch_size": 8, "steps_per_generation": 3}
SETTINGS |= {"gradient_accumulation_steps": 1, "num_iterations": 2}


def test_iterations_and_episodes_are_counted():
    for batch in ({}, {"steps_per_generation": None, "generation_batch_size": 48}):
        plan = Plan({**SETTINGS, **batch}, processes=2)
        assert (plan.iterations, plan.episodes) == (2, 48)
    for changed in ({"max_steps": -1}, {"num_generations": 5}):
        with refused(*changed):
            Plan({**SETTINGS, **changed})


def test_episodes_are_those_of_a_run(tmp_path):
    tokens = {"rollout/steps": 10.0, "rollout/episodes": 2.0, "rollout/prompt_tokens": 300.0}
    tokens |= {"rollout/completion_tokens": 100.0, "update/forwarded_tokens": 200.0, "time/update": 1.0}
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 1, "episode/success_rate": 0.5, **tokens}))
    assert Episodes.of_log(load_log(tmp_path), "a run") == Episodes(5, 30, 10, 0.5, "a run")
    with refused("like"):
        Episodes.of_log([dict.fromkeys(tokens, 0.0)], "a run of errors")


def test_a_recipe_is_estimated_with_flags_of_train(tmp_path, capsys):
    from transformers import Qwen2Config

    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "vocab_size": 151936}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}
    Qwen2Config(**sizes, **heads).save_pretrained(tmp_path)
    assert read_shape(str(tmp_path)) == LARGE
    adapted = read_shape(str(tmp_path), lora={"r": 2, "target_modules": ["all-linear"]})
    attention, mlp = 2 * (2 * 1536 * 2) + 2 * 2 * (1536 + 256), 3 * 2 * (1536 + 8960)
    assert adapted == replace(LARGE, adapter=28 * (attention + mlp))
    words = f"alfworld --config qwen2.5-1.5b --model {tmp_path} --num_processes 2 --max-turns 15 --max_steps 15"
    for memory, verdict in ((80, "80 GB: fits"), (24, "24 GB: does not fit (remedies: max_tokens_per_micro_batch, ")):
        main(["estimate", *words.split(), "--gpu-memory", str(memory)])
        text = capsys.readouterr().out
        assert "1.54 B parameters, all trained" in text and "Memory of each of 2 GPUs" in text and verdict in text
        assert "15 iterations" in text and "1,267 step samples" in text

"""`g2po estimate`: numbers by hand, settings as `g2po train` reads them, messages."""

import json
from pathlib import Path

import pytest
from refusals import refused

from g2po_envs.alfworld.tiny import tiny_model_path
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


def test_full_training_keeps_four_copies_and_adams_moments():
    update = 2 * 100 * 10 * 2 + 2 * 100 * (120 + 135 + 40 + 90) + 6 * 200
    copies = dict.fromkeys(("weights", "reference", "gradients"), 4800)
    assert sizes(SHAPE, micro_batch_tokens=100) == {**copies, "Adam": 9600, "update": update}


def test_without_kl_there_is_no_reference_and_without_checkpointing_every_layer_is_kept():
    found = sizes(SHAPE, reference=False, checkpointing=False, micro_batch_tokens=100, dtype="bfloat16")
    assert "reference" not in found and found["weights"] == 2400
    assert found["update"] == 2 * 2 * 100 * (120 + 135) + 6 * 200
    cast = sizes(SHAPE, checkpointing=False, micro_batch_tokens=100, autocast=True)
    assert cast["update"] - found["update"] == 2 * 1200, "16 bits of each float32 weight"
    assert sizes(SHAPE, critic=True, dtype="bfloat16")["critic"] == 16 * 1200, "in float32 whatever the policy is"


def test_an_adapter_leaves_the_model_frozen_and_is_its_own_reference():
    adapted = ModelShape(1200, 200, True, 10, 30, 2, 20, 8, adapter=50)
    found = sizes(adapted, quantized="4bit", vllm_share=0.25)
    assert found["adapter"] == 800 and found["weights"] == 1200 * 0.56 and found["vLLM"] == 0.25e6
    assert {"gradients", "Adam", "reference"}.isdisjoint(found)


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


def test_shards_are_divided_and_layers_gathered():
    found = sizes(SHAPE, sharded=True, processes=4)
    assert found["Adam"] == 9600 / 4 and found["gathered"] == 2 * (2 * 500 + 2 * 200)


@pytest.mark.parametrize("gpus", [1, 2])
def test_vllms_cache_is_what_its_share_leaves(gpus):
    memory = 4e9 + 2 * 2400 / gpus + 32_000
    cache = vllm_cache(SHAPE, Training(vllm_share=0.5, vllm_gpus=gpus), memory, episodes=3, longest=20)
    assert cache.weights == 2400 / gpus
    assert cache.tokens == 500 * gpus and cache.needed == 60 * gpus  # 16,000 bytes at 2 x 2 layers x 8


def test_shape_of_a_folder_is_its_models():
    from transformers import AutoModelForCausalLM

    shape = read_shape(str(tiny_model_path()))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path())
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    kept = model(model.dummy_inputs["input_ids"], use_cache=True).past_key_values.layers[0]
    assert shape.kv_width == sum(part[0, :, 0].numel() for part in (kept.keys, kept.values))
    adapted = read_shape(str(tiny_model_path()), lora={"r": 2, "target_modules": ["all-linear"]})
    attention = 2 * (2 * shape.hidden * 2) + 2 * 2 * (shape.hidden + shape.kv_width // 2)
    mlp = 3 * 2 * (shape.hidden + shape.intermediate)
    assert adapted.adapter == shape.layers * (attention + mlp)


@pytest.fixture
def qwen(tmp_path):
    """A folder with the configuration of Qwen2.5-1.5B."""
    from transformers import Qwen2Config

    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "vocab_size": 151936}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}
    Qwen2Config(**sizes, **heads).save_pretrained(tmp_path / "qwen")
    return str(tmp_path / "qwen")


def test_shape_of_a_multimodal_model_has_all_its_parts(tmp_path):
    from transformers import MambaConfig, Qwen2VLConfig

    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 200}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, architectures=["Qwen2VLForConditionalGeneration"])
    config.save_pretrained(tmp_path / "vision")
    shape = read_shape(str(tmp_path / "vision"))
    assert (shape.hidden, shape.layers, shape.kv_width) == (64, 2, 64)
    assert shape.parameters > 2 * shape.head + 2 * 3 * 64 * 96
    MambaConfig(num_hidden_layers=1, hidden_size=8).save_pretrained(tmp_path / "mamba")
    with refused("model_name_or_path"):
        read_shape(str(tmp_path / "mamba"))


SETTINGS = {"max_steps": 12, "num_generations": 4, "per_device_train_batch_size": 8, "steps_per_generation": 3}
SETTINGS |= {"gradient_accumulation_steps": 1, "num_iterations": 2}


@pytest.mark.parametrize("batch", [{}, {"steps_per_generation": None, "generation_batch_size": 48}])
def test_iterations_and_episodes_are_counted(batch):
    plan = Plan({**SETTINGS, **batch}, processes=2)
    assert (plan.iterations, plan.episodes) == (2, 48)


@pytest.mark.parametrize("changed", [{"max_steps": -1}, {"num_generations": 5}])
def test_runs_that_cannot_be_counted_are_refused(changed):
    with refused(*changed):
        Plan({**SETTINGS, **changed})


def test_episodes_are_those_of_a_run(tmp_path, capsys):
    tokens = {"rollout/steps": 10.0, "rollout/episodes": 2.0, "rollout/prompt_tokens": 300.0}
    tokens |= {"rollout/completion_tokens": 100.0, "update/forwarded_tokens": 200.0, "time/update": 1.0}
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 1, "episode/success_rate": 0.5, **tokens}))
    found = Episodes.of_log(load_log(tmp_path), "a run")
    assert found == Episodes(5, 30, 10, 0.5, "a run")
    assert "5 turns" in run(capsys, "alfworld", "--like", str(tmp_path))
    with pytest.raises(SystemExit):
        run(capsys, "alfworld", "--gpu-memory", "0")
    with refused("like"):
        Episodes.of_log([dict.fromkeys(tokens, 0.0)], "a run of errors")


def run(capsys, *words):
    main(["estimate", *words])
    return capsys.readouterr().out


def test_a_recipe_is_estimated_with_flags_of_train(capsys, qwen):
    assert read_shape(qwen) == LARGE
    words = ["alfworld", "--config", "qwen2.5-1.5b", "--model", qwen, "--num_processes", "2", "--max-turns", "15"]
    text = run(capsys, *words, "--max_steps", "15", "--gpu-memory", "80")
    assert "1.54 B parameters, all trained" in text and "Memory of each of 2 GPUs" in text and "80 GB: fits" in text
    assert "15 iterations" in text and "1,267 step samples" in text
    small = run(capsys, *words, "--gpu_memory", "24")
    assert "of 24 GB: does not fit (remedies: max_tokens_per_micro_batch, " in small


def test_the_bundled_model_is_found(tmp_path, capsys):
    text = run(capsys, "alfworld")
    assert "706 k parameters" in text and "40 iterations" in text and "fit" not in text
    text = run(capsys, "sokoban", "--max_steps", "8", "--num_eval_levels", "8")
    assert "8 iterations" in text
    (tmp_path / "game.py").write_text("from g2po_envs.sokoban import SokobanEnvironment\n")
    own = [f"{tmp_path}/game.py:SokobanEnvironment", "--model", str(tiny_model_path()), "--max_steps", "8"]
    assert "8 iterations" in run(capsys, *own, "--tasks", "t.jsonl")

"""A resumed, best or finished model has its checkpoint's numbers, parameter by parameter; what differs is refused."""

import shutil

import pytest
import torch
from families import FAMILIES
from letter_trainer import TASKS, flat_weights
from peft import LoraConfig
from refusals import refused
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from g2po_trl.runs.checkpoint import WeightCheck, load_weights

RENAMED = ("Qwen3 MoE", "Qwen2.5-VL", "GPT-OSS", "Mixtral", "Gemma-3, images", "Qwen2")  # on the Hub, but Qwen2
SAVED = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None, "learning_rate": 1e-2, "beta": 0.0}
SAVED |= {"lr_scheduler_type": "constant", "max_prompt_length": 300, "router_aux_loss_coef": 0}


def digests(model):
    return WeightCheck(lambda: model).state_dict()


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in RENAMED else pytest.mark.slow) for name in FAMILIES]
)
def test_weights_of_each_family_are_loaded_to_the_bit(family, tmp_path):
    saved, other = (FAMILIES[family].build(seed) for seed in (0, 1))
    saved.save_pretrained(tmp_path)
    assert digests(saved) != digests(other)
    load_weights(other, tmp_path)
    assert digests(saved) == digests(other)


@pytest.mark.parametrize("family", ["Qwen3 MoE", pytest.param("Qwen2.5-VL", marks=pytest.mark.slow)])
def test_a_run_that_is_resumed_is_the_one_that_was_not(make_family_trainer, family, tmp_path):
    def run(output, max_steps, **options):
        trainer = make_family_trainer(family, output=output, max_steps=max_steps, **options, **SAVED)
        trainer.train(resume_from_checkpoint="auto")
        return trainer

    whole = run("whole", 3)
    run("parts", 2)
    resumed = run("parts", 3)
    assert torch.equal(flat_weights(resumed), flat_weights(whole))
    finished = run("parts", 3)  # nothing is left to train
    assert torch.equal(flat_weights(finished), flat_weights(whole))
    best = {"load_best_model_at_end": True, "metric_for_best_model": "turns", "eval_strategy": "steps"}
    chosen = run("best", 2, eval_dataset=TASKS.select([0]), eval_steps=1, **best)
    chosen.weight_check.check(chosen.state.best_model_checkpoint)


def test_a_head_in_float32_over_bfloat16_keeps_its_numbers(tmp_path):
    saved, other = (FAMILIES["Qwen2"].build(seed).to(torch.bfloat16) for seed in (0, 1))
    for model in (saved, other):
        model.lm_head = torch.nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
        model.config.tie_word_embeddings = False
    saved.save_pretrained(tmp_path)
    load_weights(other, tmp_path)
    assert digests(saved) == digests(other) and other.lm_head.weight.dtype == torch.float32


def test_a_model_whose_files_lack_a_weight_is_refused(make_trainer, tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in weights.items() if "down_proj" not in name}, folder / "model.safetensors")
    with refused("model"):
        make_trainer(model=str(folder))


def test_weights_that_were_changed_are_refused(make_trainer, tmp_path):
    make_trainer(max_steps=1, **SAVED).train()
    file = tmp_path / "out" / "checkpoint-1" / "model.safetensors"
    (file.parent / "file_digests.json").unlink()
    weights = load_file(file)
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, file, metadata={"format": "pt"})
    for max_steps in (2, 1):  # nor is it the model of a finished run
        with refused("resume_from_checkpoint"):
            make_trainer(max_steps=max_steps, **SAVED).train(resume_from_checkpoint="auto")


def test_another_base_of_an_adapter_is_refused(make_trainer, tiny_model_dir):
    adapter = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    make_trainer(max_steps=1, **adapter, **SAVED).train()
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        base.model.norm.weight[0] += 1e-3
    with refused("resume_from_checkpoint"):
        make_trainer(model=base, max_steps=2, **adapter, **SAVED).train(resume_from_checkpoint="auto")

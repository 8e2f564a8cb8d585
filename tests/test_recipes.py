"""Every configuration of the recipe is read, and the paper's ones say what the paper says."""

import importlib.util
from pathlib import Path

import pytest
import yaml

pytest.importorskip("alfworld")

from trl import ModelConfig, TrlParser, get_peft_config

from g2po_trl import G2POConfig

RECIPES = Path(__file__).parents[1] / "recipes"


def load_recipe():
    spec = importlib.util.spec_from_file_location("train_alfworld", RECIPES / "train_alfworld.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(name, *flags):
    parser = TrlParser((load_recipe().ScriptArguments, G2POConfig, ModelConfig))
    config = ["--config", str(RECIPES / "alfworld" / name)]
    return parser.parse_args_and_config([*config, "--use_cpu", "true", "--bf16", "false", *flags])


@pytest.mark.parametrize(("name", "gpus"), [("qwen2.5-1.5b.yaml", 2), ("qwen2.5-7b.yaml", 8)])
def test_the_papers_setting(tmp_path, name, gpus):
    script, args, model = parse(name, "--output_dir", str(tmp_path))
    assert args.per_device_train_batch_size * args.steps_per_generation * gpus == 128, "16 groups of 8"
    assert (args.num_generations, args.learning_rate, args.gamma, args.beta) == (8, 1e-6, 0.95, 0.01)
    assert (args.step_advantage_weight, args.invalid_action_penalty, args.eval_temperature) == (1.0, 0.1, 0.4)
    assert (args.max_turns, args.history_length) == (50, 2)
    assert model.model_name_or_path.startswith("Qwen/Qwen2.5-") and script.prompt == "full"


@pytest.mark.parametrize("name", ["qwen2.5-1.5b-lora.yaml", "qwen2.5-7b-lora.yaml"])
def test_adapters_on_one_gpu(tmp_path, name):
    _, args, model = parse(name, "--output_dir", str(tmp_path))
    assert args.per_device_train_batch_size * args.steps_per_generation == 128, "16 groups of 8"
    peft_config = get_peft_config(model)
    assert (peft_config.r, peft_config.lora_dropout, peft_config.target_modules) == (64, 0.0, "all-linear")
    assert args.use_vllm and args.vllm_max_model_length == 2048 + 512
    assert args.load_best_model_at_end and args.save_steps == args.optimizer_steps_per_iteration


def test_the_default(tmp_path):
    script, args, model = parse("tiny.yaml", "--output_dir", str(tmp_path), "--learning_rate", "1e-4")
    assert args.learning_rate == 1e-4, "flags win over the file"
    assert args.generation_batch_size == 64 and args.optimizer_steps_per_iteration == 1
    assert (script.prompt, script.intro, model.model_name_or_path) == ("compact", False, None)
    assert script.hidden_actions == ["help", "look", "inventory", "examine"]


@pytest.mark.parametrize("path", sorted((RECIPES / "accelerate").glob("*.yaml")), ids=lambda path: path.name)
def test_accelerate_configurations_are_known_to_accelerate(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == yaml.safe_load(path.read_text())["num_processes"]

"""Every configuration of the recipes is read, the paper's ones say what the paper says, and recipes train."""

import json
import re
import runpy
from pathlib import Path

import programs
import pytest
import yaml

pytest.importorskip("alfworld")

from letter_trainer import TASKS
from refusals import refused
from trl import get_peft_config

from g2po_trl.cli.recipe import parse_arguments, run_recipe
from g2po_trl.environments.tasks import split_tasks

RECIPES = Path(__file__).parents[2] / "recipes"
SIZES = [("qwen2.5-1.5b", 2), ("qwen2.5-7b", 8)]
CONFIGURATIONS = [one for one in sorted(RECIPES.glob("*/*.yaml")) if one.parent.name not in ("accelerate", "agents")]


def load_recipe(name):
    return runpy.run_path(str(RECIPES / f"train_{name}.py"))["RECIPE"]


def parse(name, *flags, recipe="alfworld"):
    loaded = load_recipe(recipe)
    argv = ["--config", name, "--use_cpu", "true", "--bf16", "false", *map(str, flags)]
    return parse_arguments(loaded.types, loaded.config, argv=argv)


@pytest.fixture
def unchecked(monkeypatch):
    """Packages and models of configurations need not be there."""
    monkeypatch.setattr("g2po_trl.cli.recipe.check_files_and_packages", lambda values: None)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Flags that a recipe for an environment needs, in a folder with ten tasks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"seed": i}) + "\n" for i in range(10)))
    return ["--environment", "a:B", "--tasks", "tasks.jsonl", "--output_dir", "out"]


PAPER = [(name, gpus, *of) for name, gpus in SIZES for of in (("alfworld", 50), ("webshop", 15))]


@pytest.mark.parametrize(("name", "gpus", "recipe", "turns"), [*PAPER, (*SIZES[1], "appworld", None)])
def test_the_papers_setting(tmp_path, unchecked, name, gpus, recipe, turns):
    script, args, model = parse(name, "--output_dir", tmp_path, recipe=recipe)
    assert args.per_device_train_batch_size * args.steps_per_generation * gpus == 128, "16 groups of 8"
    assert (args.num_generations, args.learning_rate, args.gamma, args.beta) == (8, 1e-6, 0.95, 0.01)
    assert (args.step_advantage_weight, args.invalid_action_penalty) == (1.0, 0.1)
    assert args.mini_batch_size == (256 if recipe == "alfworld" else 64), "step samples"
    assert args.max_steps == 150 and args.save_steps in (5, 10)
    assert model.model_name_or_path.startswith("Qwen/Qwen2.5-")
    if recipe == "appworld":
        assert script.key == "output" and not script.tiny
        return
    assert (args.max_turns, args.history_length, args.eval_temperature) == (turns, 2, 0.4)
    assert args.optimizer_steps_per_iteration == 1 and args.eval_steps == 10 and script.prompt == "full"
    assert args.scale_rewards == {"alfworld": "group", "webshop": "none"}[recipe]
    assert (args.use_bias_correction_kl, args.delta, args.weight_decay) == (False, 3.0, 0.01)


def test_adapters_and_the_default(tmp_path, unchecked):
    _, args, model = parse("qwen2.5-7b-lora", "--output_dir", tmp_path)
    assert args.per_device_train_batch_size * args.steps_per_generation == 128, "16 groups of 8"
    adapter = get_peft_config(model)
    assert (adapter.r, adapter.lora_dropout, adapter.target_modules) == (64, 0.0, "all-linear")
    assert args.use_vllm and args.load_best_model_at_end and (args.mini_batch_size, args.save_steps) == (256, 1)
    script, args, model = parse("tiny", "--output_dir", tmp_path, "--learning_rate", "1e-4")
    assert args.learning_rate == 1e-4, "flags win over the file"
    assert args.generation_batch_size == 64 and args.optimizer_steps_per_iteration == 1
    assert (script.prompt, script.intro, model.model_name_or_path) == ("compact", False, None)
    assert script.hidden_actions == ["help", "look", "inventory", "examine"]


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_configuration_is_read(path, own, monkeypatch, unchecked):
    """Its keys are fields, of the right types, each has an effect, and what chooses a checkpoint is not reported."""
    monkeypatch.syspath_prepend(str(RECIPES))
    kind, given = path.parent.name, yaml.safe_load(path.read_text())
    name = f"teach_{path.stem}" if kind == "teach" else f"train_{kind}{'_ppo' if 'ppo' in path.stem else ''}"
    name = name if (RECIPES / f"{name}.py").is_file() else "teach_environment"
    script = runpy.run_path(str(RECIPES / f"{name}.py"))
    types = script["RECIPE"].types if "RECIPE" in script else script["TYPES"]
    flags = [*(own if name == "teach_environment" else own[4:]), "--use_cpu", "true", "--bf16", "false"]
    *_, args, model = parse_arguments(types, argv=[*flags, "--config", str(path)])
    assert args.output_dir == "out" and args.model_init_kwargs["dtype"] == model.dtype
    if given.get("load_best_model_at_end"):
        (reported,) = (key for key in given if re.fullmatch(r"(num_)?report_\w+", key) and key != "report_to")
        assert "tiny" not in path.stem and given[reported] != given[reported.replace("report_", "eval_")]


def test_reported_games_are_others_than_those_that_choose(tmp_path):
    from g2po_envs.alfworld.panels import load_panel

    tasks = load_recipe("alfworld").tasks
    best = ("--load_best_model_at_end", "true", "--eval_strategy", "steps", "--eval_steps", 1)
    few = ("--num_games", 1, "--num_eval_games", 1, "--cache_dir", tmp_path, "--output_dir", tmp_path)
    options, args, _ = parse("tiny", *few, *best)
    task = tasks(options, args)
    assert len(task.held_out) == len(task.reported) == 1
    panel = load_panel(task.evaluation["panel"], **task.evaluation["panel_options"])
    assert panel.rows == task.reported
    assert not {row["task_id"] for row in task.held_out} & {row["task_id"] for row in task.reported}
    told = panel.environment_factory.keywords
    assert told["hidden_actions"] == ("help", "look", "inventory", "examine") and told["intro"] is False
    options.report_games = str(tmp_path / "alfworld-tiny-0" / "held-out-2")  # those that choose
    with refused("reported"):
        tasks(options, args)


def test_a_recipe_reports_on_another_panel_than_it_chooses_on(make_trainer, tmp_path):
    best = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer = make_trainer(eval_steps=1, eval_strategy="steps", eval_dataset=TASKS.select(range(3)), **best)
    with refused("report_dataset"):
        run_recipe(trainer)
    assert trainer.state.global_step == 0, "told before it trains"
    run_recipe(trainer, report_dataset=TASKS.select(range(3, 7)))
    names = [(entry["name"], entry["step"], entry["episodes"]) for entry in trainer.folder.evaluations]
    assert names == [("report", 0, 4), ("eval", 1, 3), ("eval", 2, 3), ("report", 2, 4)]
    assert "chosen on another evaluation set" in (tmp_path / "out" / "README.md").read_text()


def test_tasks_of_an_environment_of_ones_own(own):
    for given, trained, held_out in (((None, None), 8, 2), ((None, 3), 7, 3), (("tasks.jsonl", None), 10, 10)):
        train, held = split_tasks("tasks.jsonl", *given)
        assert (len(train), len(held), held[-1]) == (trained, held_out, {"seed": 9})


def test_what_a_recipe_refuses(own, capsys):
    types = load_recipe("environment").types
    for flags, named in (
        ("--gama 1", "--gamma?"),
        ("--agent a.py:b", "--environment"),
        ("--agent_state_key a.py:b", "agent_state_key"),
        ("--config alfworld/tiny", "game_size"),
    ):
        with pytest.raises(SystemExit):
            parse_arguments(types, argv=[*own, *flags.split()])
        assert named in capsys.readouterr().err
    with refused("vllm_mode"):  # without its condition
        parse_arguments(types, argv=[*own, "--vllm_mode", "colocate"])


@pytest.mark.parametrize("path", sorted((RECIPES / "accelerate").glob("*.yaml")), ids=lambda path: path.name)
def test_accelerate_configurations_are_known_to_accelerate(path):
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(path)).num_processes == yaml.safe_load(path.read_text())["num_processes"]


@pytest.mark.parametrize(
    ("name", "tasks", "flags"),
    [
        ("webshop", "goals", ""),
        ("sokoban", "levels", "--exact_distances true"),
        ("alfworld_ppo", "games", "--cache_dir cache"),
    ],
)
def test_the_recipes_train(name, tasks, flags, tmp_path):
    size = f"--max_steps 2 --per_device_train_batch_size 8 --num_generations 4 --num_{tasks} 2 --num_eval_{tasks} 2"
    flags = f"{size} --num_environment_workers 1 --output_dir run {flags}".split()
    run = programs.run(RECIPES / f"train_{name}.py", *flags, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert f"Training {tasks}: 2" in run.stdout and "success: all" in run.stdout
    trajectories = [json.loads(line) for line in (tmp_path / "run" / "trajectories" / "train-000002.jsonl").open()]
    assert len(trajectories) == 8 and len({one["task_id"] for one in trajectories}) == 2
    if name == "alfworld_ppo":
        history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
        critic = [entry["critic/value"] for entry in history if "critic/loss" in entry]
        assert len(critic) == 2 and critic[0] == 0 != critic[1]
        assert (tmp_path / "run" / "checkpoint-2" / "critic.safetensors").is_file()

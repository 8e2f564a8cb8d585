"""Every configuration of the recipes is read, and the paper's ones say what the paper says."""

import dataclasses
import importlib.util
import json
import re
import runpy
import urllib.error
import urllib.request
from pathlib import Path

import programs
import pytest
import yaml

pytest.importorskip("alfworld")

from letter_trainer import TASKS
from transformers import TrainerCallback
from trl import ModelConfig, TrlParser, get_peft_config

from g2po_trl import G2POConfig
from g2po_trl.cli.commands.train import HELP
from g2po_trl.cli.launch import VIEW
from g2po_trl.cli.recipe import parse_arguments, run_recipe
from g2po_trl.environments.tasks import split_tasks
from g2po_trl.utils.masking import masked

RECIPES = Path(__file__).parents[2] / "recipes"


def load_recipe(environment):
    spec = importlib.util.spec_from_file_location(environment, RECIPES / f"train_{environment}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(name, *flags, environment="alfworld"):
    parser = TrlParser((load_recipe(environment).ScriptArguments, G2POConfig, ModelConfig))
    config = ["--config", str(RECIPES / environment / name)]
    return parser.parse_args_and_config([*config, "--use_cpu", "true", "--bf16", "false", *flags])


@pytest.mark.parametrize("environment", ["alfworld", "sokoban", "textworld", "webshop", "appworld", "environment"])
def test_no_setting_of_a_recipe_looks_like_a_secret(environment):
    """`g2po evaluate --model` of its run needs them all."""
    given = {"environment": "a:B", "tasks": "tasks.jsonl"} if environment == "environment" else {}
    script_args = dataclasses.asdict(load_recipe(environment).ScriptArguments(**given))
    assert masked(script_args) == script_args


@pytest.mark.parametrize(("name", "gpus"), [("qwen2.5-1.5b.yaml", 2), ("qwen2.5-7b.yaml", 8)])
@pytest.mark.parametrize(("environment", "turns"), [("alfworld", 50), ("webshop", 15)])
def test_the_papers_setting(tmp_path, name, gpus, environment, turns):
    script, args, model = parse(name, "--output_dir", str(tmp_path), environment=environment)
    assert args.per_device_train_batch_size * args.steps_per_generation * gpus == 128, "16 groups of 8"
    assert (args.num_generations, args.learning_rate, args.gamma, args.beta) == (8, 1e-6, 0.95, 0.01)
    assert (args.step_advantage_weight, args.invalid_action_penalty, args.eval_temperature) == (1.0, 0.1, 0.4)
    assert (args.max_turns, args.history_length) == (turns, 2)
    assert args.mini_batch_size == {"alfworld": 256, "webshop": 64}[environment], "step samples"
    assert args.max_steps == 150 and args.optimizer_steps_per_iteration == 1, "iterations"
    assert args.scale_rewards == {"alfworld": "group", "webshop": "none"}[environment]
    assert (args.use_bias_correction_kl, args.delta, args.weight_decay) == (False, 3.0, 0.01)
    assert args.eval_steps == 10 and args.save_steps in (5, 10)
    assert model.model_name_or_path.startswith("Qwen/Qwen2.5-") and script.prompt == "full"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_chooses_the_checkpoint_is_not_reported(path):
    """The largest of many evaluations of a panel is too high for the same panel to be reported on."""
    given = yaml.safe_load(path.read_text())
    if given.get("load_best_model_at_end"):
        chosen, reported = {
            "alfworld": ("eval_games", "report_games"),
            "sokoban": ("num_eval_levels", "num_report_levels"),
            "textworld": ("num_eval_games", "num_report_games"),
            "webshop": ("num_eval_goals", "num_report_goals"),
            "appworld": ("eval_split", "report_split"),
        }[path.parent.name]
        assert given[reported] and given[chosen] != given[reported]
    assert "tiny" not in path.stem or "load_best_model_at_end" not in given


def test_reported_games_are_others_than_those_that_choose(tmp_path):
    recipe = load_recipe("alfworld")
    script, args, _ = parse("tiny.yaml", "--output_dir", str(tmp_path), "--num_eval_games", "3", "--cache_dir",
                            str(tmp_path), "--load_best_model_at_end", "true", "--eval_strategy", "steps",
                            "--eval_steps", "1")  # fmt: skip
    held_out = recipe.load_games(None, "held-out", 3, script)
    reported = recipe.load_report_games(script, args, held_out)
    assert len(held_out) == len(reported) == 3 and not set(held_out.games) & set(reported.games)
    panel = load_panel(recipe.describe_panel(script, reported))
    assert [row["task_id"] for row in panel.rows] == list(reported.games) and panel.data == reported.hash
    told = panel.environment_factory.keywords
    assert told["hidden_actions"] == ("help", "look", "inventory", "examine") and told["intro"] is False
    script.report_games = str(tmp_path / "alfworld-tiny-0" / "held-out-6")
    with pytest.raises(ValueError, match="report_games and eval_games share 3 games"):
        recipe.load_report_games(script, args, held_out)
    script.eval_games, script.report_games = "official:valid_unseen", None
    with pytest.raises(ValueError, match="name other games to report on"):
        recipe.load_report_games(script, args, held_out)
    args.load_best_model_at_end = False
    assert recipe.load_report_games(script, args, held_out) is None


def load_panel(evaluation):
    from g2po_envs.alfworld.panels import load_panel

    assert evaluation["environment"] == "alfworld"
    return load_panel(evaluation["panel"], **evaluation["panel_options"])


def test_a_recipe_reports_on_another_panel_than_it_chooses_on(make_trainer, tmp_path, capsys):

    best = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(
        max_steps=2, eval_strategy="steps", eval_steps=1, eval_dataset=TASKS.select(range(3)), **best
    )
    with pytest.raises(ValueError, match="report_dataset"):
        run_recipe(trainer, None, {})
    trainer.eval_dataset, panel = None, trainer.eval_dataset
    trainer.args.load_best_model_at_end = False
    with pytest.raises(ValueError, match="report_dataset"):
        run_recipe(trainer, None, {})
    assert trainer.state.global_step == 0, "told before it trains"
    trainer.eval_dataset, trainer.args.load_best_model_at_end = panel, True
    run_recipe(trainer, None, {}, report_dataset=TASKS.select(range(3, 7)))
    names = [(entry["name"], entry["step"], entry["episodes"]) for entry in trainer.folder.evaluations]
    assert names == [("report", 0, 4), ("eval", 1, 3), ("eval", 2, 3), ("report", 2, 4)]
    assert "Held-out tasks, 4 episodes" in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text()
    assert "4 episodes of a fixed evaluation set" in card and "chosen on another evaluation set" in card


@pytest.mark.parametrize(("eval_steps", "steps"), [(1, [1, 2]), (3, [2])])
def test_the_last_weights_are_evaluated_once(make_trainer, eval_steps, steps):
    trainer = make_trainer(
        max_steps=2, eval_strategy="steps", eval_steps=eval_steps, eval_dataset=TASKS.select(range(3))
    )
    run_recipe(trainer, None, {})
    assert [entry["step"] for entry in trainer.folder.evaluations] == steps
    assert trainer.args.run_name == Path(trainer.args.output_dir).name, "Trackio continues its run with the last one"


def test_the_page_is_served_while_it_trains(make_trainer, capsys, monkeypatch, tmp_path):
    """A page is answered before the first iteration and during the run, and not after it."""
    monkeypatch.setenv(VIEW, "1")
    trainer = make_trainer(max_steps=2, eval_dataset=TASKS.select(range(3)))
    trainer.args.save_trajectories = False
    with pytest.raises(ValueError, match="save_trajectories"):
        run_recipe(trainer, None, {})
    trainer.args.save_trajectories = True
    answers = []

    class Visitor(TrainerCallback):
        def get(self, path):
            (address,) = re.findall(r"Watch the run at (http://127\.0\.0\.1:\d+/\S+/)", self.said)
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            return json.load(opener.open(address + path, timeout=10))

        def on_train_begin(self, *args, **kwargs):
            self.said = capsys.readouterr().out
            answers.append(self.get("overview")["sources"][0])

        def on_step_end(self, *args, **kwargs):
            answers.append(self.get("overview")["sources"][0])
            assert self.get("version")

    add = trainer.add_callback
    visitor = Visitor()
    monkeypatch.setattr(trainer, "add_callback", lambda one: (add(one), add(visitor)))
    run_recipe(trainer, None, {})
    assert [one["iterations"] for one in answers] == [[], [1], [1, 2]]
    assert [[point["n"] for point in one["curves"]] for one in answers[1:]] == [[], [1]], "the line follows its step"
    assert f"no longer served. To open the run again: g2po view {tmp_path / 'out'}" in capsys.readouterr().out
    with pytest.raises(urllib.error.URLError):
        visitor.get("version")


@pytest.mark.parametrize("name", ["qwen2.5-1.5b-lora.yaml", "qwen2.5-7b-lora.yaml"])
def test_adapters_on_one_gpu(tmp_path, name):
    _, args, model = parse(name, "--output_dir", str(tmp_path))
    assert args.per_device_train_batch_size * args.steps_per_generation == 128, "16 groups of 8"
    peft_config = get_peft_config(model)
    assert (peft_config.r, peft_config.lora_dropout, peft_config.target_modules) == (64, 0.0, "all-linear")
    assert args.use_vllm and args.vllm_max_model_length == 2048 + 512
    assert args.load_best_model_at_end and (args.mini_batch_size, args.save_steps) == (256, 1)


def test_the_short_help_names_flags_that_exist():
    known = {"--help-all", "--model", "--view", "--config", "--num-processes", "--accelerate-config"}
    for environment in ("alfworld", "sokoban", "textworld", "webshop", "appworld", "environment"):
        for config in (load_recipe(environment).ScriptArguments, G2POConfig, ModelConfig):
            known |= {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(config)}
    named = set(re.findall(r"--[a-z][a-z0-9-]*", HELP))
    assert len(named) > 40 and named <= known


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Flags that a recipe for an environment needs, in a folder with ten tasks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"seed": i}) + "\n" for i in range(10)))
    return ["--environment", "a:B", "--tasks", "tasks.jsonl", "--output_dir", "out"]


def test_arguments_of_a_recipe(tmp_path, own):
    (config := tmp_path / "mine.yaml").write_text("gamma: 0.5\nbeta: 0.25\n")
    types, cpu = load_recipe("environment").TYPES, {"use_cpu": True, "bf16": False, "beta": 0.75}
    for flags in (["--config", "mine.yaml"], ["--config=mine.yaml"]):
        script, args, model = parse_arguments(types, None, cpu, [*own, "--use_peft", "--lora_r", "3", *flags])
        assert (script.tasks, args.gamma, args.beta, model.lora_r) == ("tasks.jsonl", 0.5, 0.25, 3)
        assert args.model_init_kwargs["dtype"] == "float32", "of the model's arguments"
    assert parse_arguments(types, config, cpu, [*own, "--beta", "0"])[1].beta == 0
    assert parse_arguments(types, None, cpu, own)[1].beta == 0.75
    bundled = [*own, "--config", "alfworld/tiny"]
    with pytest.raises(SystemExit):
        parse_arguments(types, None, cpu, bundled)  # its own fields are no flags here
    alfworld = load_recipe("alfworld")
    script, args, _ = parse_arguments(alfworld.TYPES, alfworld.DEFAULT_CONFIG, argv=["--config", "tiny-long"])
    assert (script.game_size, args.max_turns, args.use_cpu) == ("long", 30, True)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--gama", "1"], "--gama is not a flag: did you mean --gamma?"),
        (["stray"], "'stray' does not belong to a flag"),
        (["--gamma", "1.5"], "gamma"),
        (["--agent", "a.py:b"], "environment and agent are both given"),
        (["--agent_state_key", "a.py:b"], "agent_state_key has no effect"),
    ],
)
def test_what_a_recipe_refuses(own, capsys, flags, text):
    with pytest.raises(SystemExit):
        parse_arguments(load_recipe("environment").TYPES, argv=[*own, *flags])
    assert text in capsys.readouterr().err


CONFIGURATIONS = [
    path for path in sorted(RECIPES.glob("*/*.yaml")) if path.parent.name not in ("accelerate", "agents")
]


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_configuration_is_read(path, own, monkeypatch):
    """Its keys are fields, of the right types, and each has an effect."""
    monkeypatch.setattr("g2po_trl.cli.recipe.check_files_and_packages", lambda values: None)
    monkeypatch.syspath_prepend(str(RECIPES))
    kind = path.parent.name
    name = f"teach_{path.stem}" if kind == "teach" else f"train_{kind}{'_ppo' if 'ppo' in path.stem else ''}"
    name = name if (RECIPES / f"{name}.py").is_file() else "teach_environment"
    recipe = runpy.run_path(str(RECIPES / f"{name}.py"))
    flags = [*(own if name == "teach_environment" else own[4:]), "--use_cpu", "true", "--bf16", "false"]
    *_, args, model = parse_arguments(recipe["TYPES"], argv=[*flags, "--config", str(path)])
    assert args.output_dir == "out" and args.model_init_kwargs["dtype"] == model.dtype


def test_an_option_without_its_condition_is_refused(own):
    types = load_recipe("environment").TYPES
    for flags, name in ((["--lora_r", "3"], "lora_r"), (["--vllm_mode", "colocate"], "vllm_mode")):
        with pytest.raises(ValueError, match=name):
            parse_arguments(types, argv=[*own, *flags])
    parse_arguments(types, argv=[*own, "--lora_r", "3", "--use_peft", "false"])  # given as off: a decision


def test_the_help_of_a_recipe_has_its_defaults_in_groups(capsys):
    alfworld = load_recipe("alfworld")
    with pytest.raises(SystemExit) as exit_:
        parse_arguments(alfworld.TYPES, alfworld.DEFAULT_CONFIG, argv=["--help"])
    assert not exit_.value.code
    shown = capsys.readouterr().out
    titles = ["options:", "G2POConfig:", "GRPOConfig (trl):", "TrainingArguments (transformers):"]
    at = [shown.index(f"\n{title}") for title in titles] + [len(shown)]
    assert at == sorted(at)
    flags = (("--num-games", 0), ("--value-lambda", 1), ("--num-generations", 2), ("--seed", 3))
    for flag, group in flags:
        assert at[group] < shown.index(f"\n  {flag}") < at[group + 1], flag
    text = " ".join(shown.split())
    assert "ends as `truncated`. (default: 15)" in text and "(default: 0.0003)" in text


@pytest.mark.parametrize(
    ("flags", "trained", "held_out"),
    [([], 8, 2), (["--num_eval_tasks", "3"], 7, 3), (["--eval_tasks", "tasks.jsonl"], 10, 10)],
)
def test_tasks_of_an_environment_of_ones_own(own, flags, trained, held_out):
    (script,) = parse_arguments((load_recipe("environment").ScriptArguments,), argv=[*own[:4], *flags])
    train, held = split_tasks(script.tasks, script.eval_tasks, script.num_eval_tasks)
    assert (len(train), len(held), held[-1]) == (trained, held_out, {"seed": 9})


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


@pytest.mark.parametrize("recipe", ["alfworld", "webshop"])
def test_ppo_has_the_defaults_of_g2po_and_a_critic_besides(recipe):
    tiny, ppo = (yaml.safe_load((RECIPES / recipe / name).read_text()) for name in ("tiny.yaml", "tiny-ppo.yaml"))
    assert {key for key in tiny.keys() | ppo.keys() if tiny.get(key, "") != ppo.get(key, "")} == {
        "output_dir",
        "critic_learning_rate",
        "critic_mini_batches",
        "value_clip_range",
    }


def test_the_long_setting_differs_in_rooms_and_turns_alone():
    tiny, longer = (
        yaml.safe_load((RECIPES / "alfworld" / f"{name}.yaml").read_text()) for name in ("tiny", "tiny-long")
    )
    changed = {key: longer.get(key) for key in tiny.keys() | longer.keys() if tiny.get(key, "") != longer.get(key, "")}
    assert changed == {"output_dir": "runs/alfworld-tiny-long", "game_size": "long", "max_turns": 30, "max_steps": 20}


def test_the_papers_appworld_setting(tmp_path):
    script, args, _ = parse("qwen2.5-7b.yaml", "--output_dir", str(tmp_path), environment="appworld")
    assert args.per_device_train_batch_size * args.steps_per_generation * 8 == 128, "16 groups of 8"
    assert (args.learning_rate, args.gamma, args.beta, args.invalid_action_penalty) == (1e-6, 0.95, 0.01, 0.1)
    assert (args.mini_batch_size, args.max_steps, args.save_steps) == (64, 150, 10)
    assert script.key == "output" and not script.tiny


def test_the_webshop_recipe_trains(tmp_path):
    flags = "--max_steps 2 --per_device_train_batch_size 8 --num_generations 4 --num_goals 6 --num_eval_goals 6"
    run = programs.run(
        *(RECIPES / "train_webshop.py", *flags.split(), "--output_dir", tmp_path / "run"),
        *("--num_environment_workers", "1"),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "success: all" in run.stdout and "score" in run.stdout
    trajectories = [json.loads(line) for line in (tmp_path / "run" / "trajectories" / "train-000002.jsonl").open()]
    assert len(trajectories) == 8 and {len({t["task_id"] for t in trajectories})} == {2}
    bought = [t for t in trajectories if t["info"]]
    assert bought and all(0 <= t["info"]["score"] <= 1 for t in bought)


def test_the_sokoban_recipe_trains(tmp_path):
    flags = "--max_steps 1 --per_device_train_batch_size 8 --num_generations 4 --num_levels 6 --num_eval_levels 6"
    run = programs.run(
        *(RECIPES / "train_sokoban.py", *flags.split(), "--output_dir", tmp_path / "run"),
        *("--exact_distances", "true", "--num_environment_workers", "1"),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "train: 6 levels of size small" in run.stdout and "success: all" in run.stdout
    trajectories = [json.loads(line) for line in (tmp_path / "run" / "trajectories" / "train-000001.jsonl").open()]
    assert len({t["task_id"] for t in trajectories}) == 2 and len(trajectories) == 8
    assert all("\nyou" in step["observation"] for t in trajectories for step in t["steps"])


@pytest.mark.parametrize(("name", "tasks"), [("alfworld", "games"), ("webshop", "goals")])
def test_the_ppo_recipes_train(name, tasks, tmp_path):
    flags = f"--max_steps 2 --per_device_train_batch_size 8 --num_generations 4 --num_{tasks} 6 --num_eval_{tasks} 6"
    cache = ("--cache_dir", tmp_path / "cache") if name == "alfworld" else ()
    run = programs.run(
        *(RECIPES / f"train_{name}_ppo.py", *flags.split(), "--output_dir", tmp_path / "run"),
        *(*cache, "--num_environment_workers", "1"),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "success: all" in run.stdout
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    critic = [entry for entry in history if "critic/loss" in entry]
    assert len(critic) == 2 and critic[0]["critic/value"] == 0 and critic[1]["critic/value"] != 0
    assert (tmp_path / "run" / "checkpoint-2" / "critic.safetensors").is_file()

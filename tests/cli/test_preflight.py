"""What `g2po train`, `teach` and `evaluate` refuse before torch is imported, and what a file is taken for."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from run_g2po import outcome

from g2po_trl.cli.commands.init import write_folder
from g2po_trl.cli.commands.train import classify_source, read, resolve
from g2po_trl.cli.flags import fields_of, make_parser
from g2po_trl.cli.preflight import check_command, check_model, recipe_fields
from g2po_trl.cli.recipe_files import recipes_folder
from g2po_trl.environments.loading import resolve_environment_name
from g2po_trl.utils.dependent_options import SWITCHES, check_given, without_effect
from g2po_trl.utils.parser import REMOVED

RECIPES = recipes_folder()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_folder(tmp_path / "tidy")
    monkeypatch.chdir(tmp_path / "tidy")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "tidy"


@pytest.mark.parametrize(
    "name",
    [
        "train_alfworld",
        "train_alfworld_ppo",
        "train_webshop_ppo",
        "train_environment",
        "teach_webshop",
        "teach_environment",
    ],
)
def test_flags_are_those_of_trls_parser(name, monkeypatch):
    """Names, number of values, booleans and what is negated: read from the source, equal to what the classes give."""
    from trl import ModelConfig, SFTConfig, TrlParser

    from g2po_trl import G2POConfig, PPOConfig

    monkeypatch.syspath_prepend(str(RECIPES))
    module = __import__(name.removesuffix("_ppo"))
    config = SFTConfig if "teach" in name else PPOConfig if "ppo" in name else G2POConfig
    real = TrlParser((module.ScriptArguments, config, ModelConfig))
    ours = make_parser(list(recipe_fields(RECIPES / f"{name}.py").values()))

    def flags(parser):
        return {option: action.dest for action in parser._actions for option in action.option_strings}

    assert {"--help", "-h"} == set(flags(real)) - set(flags(ours))
    assert flags(ours).items() <= flags(real).items()
    theirs = {action.dest: action for action in reversed(real._actions)}
    for action in ours._actions:
        other = theirs[action.dest]
        if action.type is not None:
            expected = other.type.__name__.replace("string_to_bool", "as_bool")
            assert (action.type.__name__, action.nargs) == (expected, other.nargs), action.dest


def test_fields_are_followed_through_imports(tmp_path):
    (tmp_path / "base.py").write_text(
        "from dataclasses import dataclass, field\nfrom typing import ClassVar\n@dataclass\nclass A:\n"
        "    size: int = 3\n    kind: ClassVar[int] = 1\n    hidden: int = field(init=False)\n"
        "    names: list[str] | None = field(default=None, metadata={'help': 'x', 'aliases': '-n'})\n"
    )
    (tmp_path / "mine.py").write_text("from base import A as B\n@dataclass\nclass Mine(B):\n    size: float = 2.5\n")
    found = fields_of(tmp_path / "mine.py", "Mine")
    assert [(one.name, one.annotation, one.default, one.aliases) for one in found.values()] == [
        ("size", "float", 2.5, ()),
        ("names", "list[str] | None", None, ("-n",)),
    ]


def test_told_without_torch_and_without_a_file(folder, capsys, tmp_path):
    """In a process of its own, so that what is imported can be seen; `tempfile` has a folder of the test."""
    (folder / "empty.yaml").write_text("")
    (folder / "broken.yaml").write_text("a: [1")
    (folder / "typo.yaml").write_text("lerning_rate: 1.0e-6\n")
    (folder / "text.yaml").write_text("learning_rate: fast\n")
    (folder / "nothing.py").write_text("print('hello')\n")
    (folder / "runs" / "a" / "checkpoint-3").mkdir(parents=True)
    (folder / "runs" / "a" / "checkpoint-3" / "trainer_state.json").touch()
    (folder / "runs" / "old").mkdir()
    (folder / "runs" / "old" / "run.json").write_text("{}")
    (folder / "runs" / "alfworld-tiny").mkdir()
    (folder / "runs" / "alfworld-tiny" / "run.json").write_text("{}")
    (folder / "one.jsonl").write_text('{"things": ["pen", "egg"]}\n')
    mine = ["train", "--model", "model"]
    commands = {
        ("train", "--max_step", "3"): "--max_step is not a flag: did you mean --max_steps?",
        ("train", "--lr", "3"): "--lr is not a flag: did you mean --learning_rate?",
        (*mine, "--learning_rate", "abc"): "--learning_rate: invalid float value: 'abc'",
        (*mine, "--max_steps"): "--max_steps: expected one argument",
        (*mine, "--bf16", "maybe"): "--bf16: 'maybe' is neither true nor false",
        (*mine, "stray"): "'stray' does not belong to a flag",
        (*mine, "--dtype", "float8"): "--dtype: invalid choice: 'float8'",
        (*mine, "--config", "empty.yaml"): "config is 'empty.yaml', which contains no fields",
        (*mine, "--config", "broken.yaml"): "config is 'broken.yaml', which cannot be read: while parsing",
        (
            *mine,
            "--config",
            "typo.yaml",
        ): "--lerning_rate is not a key of the config file: did you mean --learning_rat",
        (*mine, "--config", "text.yaml"): "learning_rate is 'fast': invalid float value: 'fast'",
        (*mine, "--tasks", "none.jsonl"): "tasks is 'none.jsonl', which cannot be read",
        ("train", "--model", "no/such/model"): "model_name_or_path is 'no/such/model': there is no such folder",
        ("train", "--model", "runs/b"): "model_name_or_path is 'runs/b': there is no such folder",
        ("train", "--model", "runs/a"): "without a model (no config.json): it has checkpoint-3: pass one of these",
        ("train", "--model", "config.yaml"): "which is a file: pass the folder",
        ("train", "--model", "Qwen/none"): "no folder has this name, and HF_HUB_OFFLINE is set",
        ("evaluate", "--model", "no/such", "--environment", "environment.py"): "model is 'no/such': no folder has",
        ("evaluate", "--model", "model", "--environment", "alfwrld"): "environment is 'alfwrld': choose one of",
        ("evaluate", "--model", "model", "--environment", "environment.py", "--tasks", "no"): "tasks is 'no', which",
        ("evaluate", "--model", "m", "--environment", "alfworld", "--base-url", "me"): "base_url is 'me': write",
        (*mine, "--lora_r", "8"): "lora_r has no effect without --use_peft: add it, or leave it out",
        (*mine, "--vllm_mode", "colocate"): "vllm_mode has no effect without --use_vllm",
        (*mine, "--load_in_4bit"): "bitsandbytes" if not _has("bitsandbytes") else "rounded weights cannot be trained",
        (*mine, "--output_dir", "runs/old"): "output_dir is 'runs/old', which holds another run (run.json): pass --",
        ("train", "alfworld"): "output_dir is 'runs/alfworld-tiny', which holds another run (run.json): pass --",
        (*mine, "--tasks", "one.jsonl"): "num_eval_tasks is 16 and one.jsonl has 1 tasks: hold out at least 1",
        ("train", "nothing.py"): "makes no trainer and holds no TextEnvironment",
        ("train", "environment.py:Nope"): "environment.py has no Nope: it contains TidyEnvironment",
        ("train", "nosuch:Game", "--model", "model"): "there is no module nosuch here",
        ("teach", "alfworld", "--max_step", "3"): "--max_step is not a flag: did you mean --max_steps?",
        ("train", "alfworld", "--estimator_kwargs", "{bad"): "estimator_kwargs is '{bad': write",
    }
    occupied = "output_dir is 'runs/alfworld-tiny', which holds"  # reported after what the strategy excludes
    vespo = ("partial_rollouts", "{}", "--loss_type", "vespo")
    strategies = {
        (
            "branch",
            "{}",
        ): "rollout_strategy is 'branch': choose one of synchronous, dynamic_sampling, partial_rollout",
        ("dynamic_sampling", "{"): "rollout_strategy_kwargs is '{': write {\"option\": value}, or None",
        (
            "synchronous",
            '{"rule": "uniform"}',
        ): "rollout_strategy_kwargs has 'rule', which rollout_strategy='synchron",
        (
            "dynamic_sampling",
            '{"share": 1}',
        ): "has 'share', which rollout_strategy='dynamic_sampling' does not have",
        ("dynamic_sampling", '{"max_generation_batches": 1}'): "is 1: set it to 2 or more",
        ("partial_rollouts", '{"max_off_policy_steps": 3}'): "is 3: set it to 1 or 2",
        vespo: occupied,
        (*vespo, "--vllm_importance_sampling_mode", "sequence_mask"): "='vespo' takes token_truncate or token_mask",
    }
    for (name, options, *more), text in strategies.items():
        flags = ("--rollout_strategy", name, "--rollout_strategy_kwargs", options)
        commands[("train", "alfworld", *flags, *more)] = text
    if not _has("vllm"):
        commands[(*mine, "--use_vllm")] = "vllm is not installed: pip install"
        commands[("train", "textworld")] = "use_vllm is True: vllm is not installed: pip"
    code = f"""
import contextlib, io, json, sys
from g2po_trl.utils.parser import REMOVED
from g2po_trl.cli import main
for command in {list(commands)!r}:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        main(list(command))
    heavy = sorted({{"torch", "transformers", "trl", "datasets", "accelerate"}} & set(sys.modules))
    print(json.dumps([said.getvalue(), heavy]))
"""
    import json

    environment = {"PATH": "", "TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(answers) == len(commands), run.stderr
    for (command, text), (said, heavy) in zip(commands.items(), answers):
        assert text in said and "error: " in said and not heavy, (command, said, heavy)
    assert not list(tmp_path.glob("g2po-error-*"))


def _has(module):
    from importlib.util import find_spec

    return find_spec(module) is not None


def test_every_configuration_passes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no run is
    paths = [path for path in RECIPES.glob("*/*.yaml") if path.parent.name not in ("accelerate", "agents")]
    assert len(paths) > 10
    (tmp_path / "here.py").touch()
    (tasks := tmp_path / "tasks.jsonl").write_text('{"seed": 1}\n{"seed": 2}\n')
    for path in paths:
        kind = path.parent.name
        given = yaml.safe_load(path.read_text())
        check_given(given)
        here = {name: value for name, value in given.items() if name != "model_name_or_path" and "vllm" not in name}
        (tmp_path / "here.yaml").write_text(yaml.safe_dump(here))
        recipe = f"teach_{path.stem}" if kind == "teach" else f"train_{kind}{'_ppo' if 'ppo' in path.stem else ''}"
        if not (RECIPES / f"{recipe}.py").is_file():  # of an environment without a recipe
            recipe = "teach_environment"
        own = ["--environment", "here:Game", "--tasks", str(tasks)] if recipe == "teach_environment" else []
        check_command(RECIPES / f"{recipe}.py", ["--config", str(tmp_path / "here.yaml"), *own])


def test_a_switch_that_is_given_is_a_decision():
    check_given({"lora_r", "use_peft"})
    check_given({"vllm_mode", "use_vllm", "vllm_gpu_memory_utilization"})
    check_given({"use_vllm", "vllm_merge_adapter"})
    with pytest.raises(ValueError, match="vllm_merge_adapter has no effect without --use_vllm --vllm_mode colocate"):
        check_given({"vllm_merge_adapter"})
    with pytest.raises(ValueError, match="vllm_server_host has no effect without --use_vllm --vllm_mode server"):
        check_given({"use_vllm", "vllm_server_host"})
    with pytest.raises(ValueError, match="bnb_4bit_quant_type, use_bnb_nested_quant have no effect without --load_in"):
        check_given({"bnb_4bit_quant_type", "use_bnb_nested_quant"})


def test_a_removed_option_is_refused_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(REMOVED, "old_option", "set max_steps")
    file = tmp_path / "old.yaml"
    file.write_text("old_option: true\n")
    for words in (["--old_option", "3"], ["--old-option=3"], ["--no_old_option"], ["--config", str(file)]):
        with pytest.raises(ValueError, match="^old_option was removed: set max_steps$"):
            check_command(RECIPES / "train_alfworld.py", words)


def test_a_removed_value_is_refused_with_its_remedy(tmp_path):
    file = tmp_path / "old.yaml"
    file.write_text("value_lambda: auto\n")
    for words in (["--value_lambda", "auto"], ["--value-lambda=auto"], ["--config", str(file)]):
        with pytest.raises(ValueError, match="^value_lambda is 'auto', which was removed: set a number.*g2po report"):
            check_command(RECIPES / "train_alfworld.py", words)


def test_a_removed_option_is_no_field():
    fields = {name for recipe in RECIPES.glob("t*_*.py") for name in recipe_fields(recipe)}
    assert "max_steps" in fields and not fields & set(REMOVED)


def test_switches_are_of_fields_that_are_there():
    known = set(recipe_fields(RECIPES / "train_alfworld.py"))
    assert not {name for switch in SWITCHES for name in (*switch.switches, *switch.fields)} - known


def test_objects_are_told_too(tmp_path):
    from g2po_trl import G2POConfig

    options = {"use_cpu": True, "bf16": False, "report_to": "none"}
    with pytest.warns(UserWarning, match="vllm_gpu_memory_utilization has no effect without --use_vllm"):
        G2POConfig(str(tmp_path), vllm_gpu_memory_utilization=0.5, **options)
    with pytest.warns(UserWarning, match="vllm_merge_adapter has no effect without --use_vllm --vllm_mode colocate"):
        G2POConfig(str(tmp_path), use_vllm=True, vllm_mode="server", vllm_merge_adapter=False, **options)
    for name, value in {"log_completions": True, "num_completions_to_print": 4}.items():
        with pytest.warns(UserWarning, match=f"{name}={value} has no effect in G2PO: `save_trajectories`"):
            G2POConfig(str(tmp_path), **{name: value}, **options)
    made = G2POConfig(str(tmp_path), **options)
    defaults = {field.name: field.default for field in dataclasses.fields(made)}
    assert not list(without_effect(vars(made), defaults)), "defaults that are worked out are no decision"


def test_episodes_are_whole_groups(tmp_path):
    from g2po_trl import G2POConfig

    options = {"use_cpu": True, "bf16": False, "report_to": "none", "num_generations": 8}
    with pytest.raises(ValueError) as error:
        G2POConfig(str(tmp_path), per_device_train_batch_size=12, steps_per_generation=1, **options)
    assert "12 episodes per iteration" in str(error.value) and "Set it to 8 or 16." in str(error.value)
    with pytest.raises(ValueError, match="generation_batch_size is 12: .* Set it to 8 or 16"):
        G2POConfig(str(tmp_path), per_device_train_batch_size=4, generation_batch_size=12, **options)
    G2POConfig(str(tmp_path), per_device_train_batch_size=4, steps_per_generation=2, **options)


SCRIPTS = {
    "trainer": ("from g2po_trl import G2POTrainer\nG2POTrainer(1).train()", False),
    "handed on": ("from train import main\nfrom g2po_trl import PPOTrainer\nmain(PPOTrainer)", False),
    "recipe": ("import g2po_trl.cli.recipe as r\nr.run_recipe(make())", False),
    "other trainer": ("build().train()", False),
    "environment": ("from g2po_trl import TextEnvironment\nclass A(TextEnvironment): pass", True),
    "alias": ("from g2po_trl import TextEnvironment as T\nclass A(T): pass", True),
    "attribute": ("import g2po_trl\nclass A(g2po_trl.TextEnvironment): pass\nclass B: pass", True),
    "adapter": ("from g2po_trl import GymnasiumEnvironment\nclass A(GymnasiumEnvironment): pass", True),
    "hidden base": ("from g2po_trl import TextEnvironment\nclass _B(TextEnvironment): pass\nclass A(_B): pass", True),
    "tools": ("class A:\n  def reset(self): pass\n  def get_reward(self): pass", True),
    "names a trainer": ("from g2po_trl import *\nclass A(TextEnvironment):\n  trainer: 'G2POTrainer'", True),
}


@pytest.mark.parametrize(("source", "is_environment"), SCRIPTS.values(), ids=SCRIPTS)
def test_environment_or_script(tmp_path, source, is_environment):
    (tmp_path / "a.py").write_text(source)
    assert classify_source(tmp_path / "a.py").is_environment == is_environment
    if is_environment:
        assert resolve_environment_name(str(tmp_path / "a.py")) == f"{tmp_path}/a.py:A"


def test_a_main_block_hides_no_environment(folder, capsys):
    with open("environment.py", "a") as file:
        file.write('\nif __name__ == "__main__":\n    print("demo")\n')
    request = read(["environment.py"])
    script, arguments = resolve(request)
    assert script.name == "train_environment.py" and f"{folder}/environment.py:TidyEnvironment" in arguments
    assert 'its `if __name__ == "__main__"` block is not run (python environment.py runs it)' in request.notes[0]
    with open("environment.py", "a") as file:
        file.write("    from g2po_trl import G2POTrainer\n    G2POTrainer(TidyEnvironment).train()\n")
    request = read(["environment.py", "--max_steps", "1"])
    assert resolve(request) == (Path("environment.py"), ["--max_steps", "1"])
    first, second = request.notes
    assert first.endswith("is run as a script. Its environment alone: environment.py:TidyEnvironment")
    assert "warning: environment.py does not read its command" in second and "--max_steps 1 is ignored" in second
    with open("environment.py", "a") as file:
        file.write("    import sys\n    print(sys.argv)\n")
    resolve(request := read(["environment.py", "--max_steps", "1"]))
    assert len(request.notes) == 1


def test_all_commands_take_an_environment_the_same_way(folder, capsys):
    from g2po_trl.cli.commands import evaluate
    from g2po_trl.environments.loading import load

    args = evaluate.read(["--model", "m", "--environment", "environment.py"])[0]
    assert args.environment == f"{folder}/environment.py:TidyEnvironment" and args.tasks == folder / "tasks.jsonl"
    assert load("environment.py").__name__ == "TidyEnvironment"
    Path("two.py").write_text(
        "from g2po_trl import TextEnvironment\nclass Coin2(TextEnvironment): pass\nclass Coin3(Coin2): pass\n"
    )
    commands = ["train", "two.py"], ["check", "two.py"], ["play", "two.py"], ["serve", "two.py"]
    for command in (*commands, ["evaluate", "--model", "m", "--environment", "two.py"]):
        assert "two.py contains Coin2, Coin3: write two.py:Coin2" in outcome(capsys, *command)[2], command


def test_a_model_in_the_cache_is_there_without_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--some--model").mkdir()
    check_model("model", "some/model")
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        check_model("model", "some/other")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    check_model("model", "some/other")

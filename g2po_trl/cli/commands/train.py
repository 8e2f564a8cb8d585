"""`g2po train`: find the script, the configuration and the number of processes; the script reads all other flags."""

from __future__ import annotations

import ast
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from ...credit.estimators.registry import ESTIMATORS
from ...environments.loading import (
    find_agents,
    find_environments,
    read_source,
    resolve_agent_name,
    resolve_environment_name,
)
from ...utils.parser import read_config, take_options
from ..launch import VIEW, launch
from ..preflight import check_command
from ..recipe_files import OWN_RECIPE, config_names, find_config, recipe_names, recipes_folder

HELP = f"""usage: g2po train [TARGET] [--config FILE|NAME] [--FIELD VALUE ...]

TARGET      alfworld, sokoban, webshop, appworld: a recipe, by default a tiny model on the CPU;
            alfworld-ppo, webshop-ppo: by PPO; textworld: a recipe for a GPU;
            FILE.py or FILE.py:Class: an environment as `g2po init` writes it, with config.yaml and tasks.jsonl
            in the same folder; module:Class, or the address of an OpenEnv server; or a FILE.py that makes a trainer:
            a script, which gets all flags. Default: environment.py, else the agent in agent.py.
--agent FILE.py[:NAME]   instead of TARGET: an agent, a function (task, client), with the same two files;
            --agent_state_key FILE.py:FUNCTION: messages of a request -> its state key

run         --config FILE|NAME         YAML file, or a bundled one: alfworld/qwen2.5-1.5b-lora; flags override it
            --output_dir FOLDER        model, checkpoints, trajectories, metrics
            --max_steps N              optimizer steps, or iterations with mini_batch_size
            --resume_from_checkpoint auto    continue the run in output_dir, if there is one
            --overwrite                delete the earlier run in output_dir
            --seed N  --report_to trackio|wandb|tensorboard  --push_to_hub
            --view                     serve the viewer's page on this machine while it trains
model       --model FOLDER|ID          --model_name_or_path; --dtype, --use_peft, --lora_r, --load_in_4bit
data        --tasks FILE  --num_eval_tasks N            (your own environment)
            --games, --eval_games  (alfworld)   --level_size, --num_levels  (sokoban)   --kind  (textworld)
            --shop, --goals  (webshop)          --train_split  (appworld)
batch       --num_generations N        episodes of one task, a group
            --per_device_train_batch_size N  --steps_per_generation N
                                       groups per iteration = processes x both / num_generations
            --max_tokens_per_micro_batch N   memory of the update
learning    --learning_rate X  --beta X (KL)  --gamma X  --value_lambda X  --step_advantage_weight X
            --advantage_estimator {"|".join(ESTIMATORS)}
episodes    --max_turns N  --history_length N  --max_prompt_length N  --max_completion_length N
            --temperature X  --eval_temperature X  --invalid_action_penalty X
generation  --use_vllm --vllm_mode colocate|server  --vllm_gpu_memory_utilization X  --vllm_servers URL …
processes   --num_processes N          processes, through Accelerate: one per GPU, or CPU processes
            --accelerate_config FILE|NAME    ddp (default), fsdp2, deepspeed_zero2, deepspeed_zero3
            several machines: accelerate launch … -m g2po_trl train …

--help-all: every flag of TARGET, with defaults.  --debug: the traceback of an error.
"""
# Option with a value -> field of `Request`.
_VALUES = {
    "config": "config",
    "num_processes": "processes",
    "accelerate_config": "accelerate",
    "model": "model",
    "agent": "agent",
}


@dataclass
class Request:
    """A parsed command line: the command's own options, arguments for the script (`passed`), and notes to print."""

    target: str | None = None
    config: str | None = None
    processes: str | None = None
    accelerate: str | None = None
    model: str | None = None
    help_all: bool = False
    passed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    agent: str | None = None
    view: bool = False


def read(argv: Sequence[str]) -> Request:
    """Return the parsed command line: the target comes first, options of `_VALUES` anywhere."""
    words = list(argv)
    target = words.pop(0) if words and not words[0].startswith("-") else None
    values, passed = take_options(words, _VALUES)
    request = Request(target, **{_VALUES[name]: value for name, value in values.items()})
    request.help_all, request.view = "--help-all" in passed, "--view" in passed
    request.passed = [word for word in passed if word not in ("--help-all", "--view")]
    return request


def starts_training(tree: ast.Module) -> bool:
    """Return whether a file makes a trainer, calls `run_recipe`, or passes a trainer's class to a call."""
    used = [part for node in ast.walk(tree) if isinstance(node, ast.Call) for part in (node.func, *node.args)]
    return any(name.endswith("Trainer") or name == "run_recipe" for name in map(_last_name, used))


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def reads_arguments(tree: ast.Module) -> bool:
    """Return whether a script reads its command line, by a parser or from `sys.argv`."""
    names = set()
    for node in ast.walk(tree):
        names |= {getattr(node, "id", ""), getattr(node, "attr", "")}
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.name for alias in node.names} | {getattr(node, "module", "") or ""}
    parsers = {"argv", "click", "typer", "fire", "tyro", "hydra", "docopt", "absl"}
    return any(isinstance(name, str) and (name in parsers or "pars" in name.lower()) for name in names)


@dataclass(frozen=True)
class Source:
    """The kind of a file, an environment or a script, and notes for its user."""

    is_environment: bool
    notes: tuple[str, ...] = ()


def classify_source(path: Path, flags: Sequence[str] = ()) -> Source:
    """Return whether a file is an environment, or a script that gets `flags`, judged by its source."""
    tree = read_source(path)
    found = find_environments(tree)
    if not starts_training(tree):
        if not found and "train" not in {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}:
            if agents := find_agents(tree):
                raise ValueError(f"{path} contains the agent {agents[0]}: write --agent {path}")
            raise ValueError(
                f"{path} makes no trainer and holds no TextEnvironment, so that nothing would be trained: write "
                f"{path}:Class if a class of it is one, or python {path} to run it"
            )
        if found:
            block = f'its `if __name__ == "__main__"` block is not run (python {path} runs it)'
            return Source(True, (f"trains {found[0]} of {path}; {block}",) if _has_main(tree) else ())
    notes = []
    if found:
        notes.append(f"{path} starts a trainer and is run as a script. Its environment alone: {path}:{found[0]}")
    if flags and not reads_arguments(tree):
        ignored = " ".join(flags)
        notes.append(f"warning: {path} does not read its command line (parse_arguments would): {ignored} is ignored")
    return Source(False, tuple(notes))


def _has_main(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)


def resolve(request: Request) -> tuple[Path, list[str]]:
    """Return the script to run and its arguments."""
    target, arguments = request.target, list(request.passed)
    if request.agent is not None and target is not None:
        raise ValueError(f"{target} and --agent {request.agent} are both given: remove one of them")
    if target is None:
        target = "environment.py"
        if request.agent is None and not Path(target).is_file() and Path("agent.py").is_file():
            request.agent = "agent.py"
        if request.agent is not None:
            return _own_recipe(request, "agent", request.agent, resolve_agent_name(request.agent))
        if not Path(target).is_file():
            names = ", ".join(recipe_names())
            raise ValueError(f"no target is given and there is no environment.py here: pass {names} or FILE.py")
    elif target in recipe_names():
        script = recipes_folder() / f"train_{target.replace('-', '_')}.py"
        return script, [*_config_and_model(request, target.partition("-")[0]), *arguments]
    file, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    path = Path(file)
    if ":" in target and path.suffix != ".py":  # module:Class, or the address of a server
        return _own_recipe(request, "environment", target, target)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(
            f"{target!r} is neither a recipe nor a file: choose one of {', '.join(recipe_names())}, or FILE.py"
        )
    if not name:
        given = {"config": request.config, "model": request.model}
        words = [word for key, value in given.items() if value for word in (f"--{key}", value)] + arguments
        source = classify_source(path, words)
        request.notes += source.notes
        if not source.is_environment:
            return path, words
    return _own_recipe(request, "environment", target, resolve_environment_name(target))


def _own_recipe(request: Request, kind: str, given: str, name: str) -> tuple[Path, list[str]]:
    """Return the recipe for an environment or an agent and its arguments, with the files beside `file.py:NAME`.

    `kind` is "environment" or "agent", `given` its name on the command line, `name` its full name.
    """
    path, tasks = file_of(given), []
    if path.suffix == ".py":
        if request.config is None and (beside := path.with_name("config.yaml")).is_file():
            request.config = str(beside)
        if (beside := path.with_name("tasks.jsonl")).is_file() and "tasks" not in _keys(request.config):
            tasks = ["--tasks", str(beside)]
    words = [f"--{kind}", name, *_config_and_model(request), *tasks, *request.passed]
    return recipes_folder() / f"train_{OWN_RECIPE}.py", words


def file_of(name: str) -> Path:
    """Return the file of `file.py:NAME` or `file.py`; of other names, something without the suffix `.py`."""
    return Path(name if name.endswith(".py") else name.rpartition(":")[0])


def _config_and_model(request: Request, kind: str | None = None) -> list[str]:
    words = []
    if request.config is not None:
        names = [request.config, f"{kind}/{request.config}"]  # short for alfworld/tiny-long
        near = kind is not None and not Path(names[0]).is_file() and names[1] in config_names()
        words += ["--config", str(find_config(names[near]))]
    return words + (["--model_name_or_path", request.model] if request.model is not None else [])


def _keys(config: str | None) -> set[str]:
    return set() if config is None else set(read_config(find_config(config)))


def _check_view(script: Path) -> None:
    """Refuse `--view` for a script of the user's, and without the graph library."""
    if script.resolve().parent != recipes_folder():
        raise ValueError(
            f"--view has no effect on {script}, which is run as a script: run `g2po view OUTPUT_DIR --serve` in "
            "another terminal"
        )
    from ...view.page import library

    try:
        library()
    except ImportError as error:
        raise ValueError(str(error)) from error


def run_in_place(script: Path, arguments: Sequence[str]) -> None:
    """Run `python SCRIPT ARGUMENTS` in this process."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        request = read(argv)
        if {"-h", "--help"} & set(request.passed):
            print(HELP, end="")
            return
        script, arguments = resolve(request)
        config = None
        if request.accelerate is not None:
            config = find_config(request.accelerate, "accelerate_config", "accelerate")
        if request.processes is not None and not (request.processes.isdigit() and int(request.processes)):
            raise ValueError(f"num_processes is {request.processes!r}: set it to at least 1")
        if (request.accelerate or "").startswith("deepspeed") and find_spec("deepspeed") is None:
            raise ValueError(f"accelerate_config is {request.accelerate!r}: it needs pip install deepspeed")
        if request.view:
            _check_view(script)
        if script.parent == recipes_folder() and not request.help_all:
            check_command(script, arguments)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if request.view:
        os.environ[VIEW] = "1"
    if "RANK" not in os.environ:
        for note in request.notes:
            print(f"g2po train: {note}", file=sys.stderr)
    if request.help_all:
        run_in_place(script, ["--help"])
    elif config is None and request.processes in (None, "1"):
        run_in_place(script, arguments)
    else:
        launch(["train", *take_options(argv, ("num_processes", "accelerate_config"))[1]], request.processes, config)

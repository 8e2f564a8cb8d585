"""`g2po train`: which script, which configuration, how many processes. The script reads all other flags."""

from __future__ import annotations

import ast
import logging
import runpy
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

HELP = """usage: g2po train [TARGET] [--config FILE|NAME] [--FIELD VALUE ...]

TARGET      alfworld, alfworld-ppo, webshop, appworld: a recipe, by default with a tiny model on the CPU;
            FILE.py or FILE.py:Class: an environment as `g2po init` writes it, with config.yaml and tasks.jsonl
            beside it; or a script of your own, which gets all flags. Default: environment.py.

run         --config FILE|NAME         YAML file, or one of g2po-trl: alfworld/qwen2.5-1.5b-lora; flags win
            --output_dir FOLDER        model, checkpoints, trajectories, metrics
            --max_steps N              optimizer steps
            --resume_from_checkpoint auto    continue the run in output_dir, if there is one
            --overwrite                delete the run in output_dir
            --seed N  --report_to wandb|tensorboard|none  --push_to_hub
model       --model FOLDER|ID          --model_name_or_path; --dtype, --use_peft, --lora_r, --load_in_4bit
data        --tasks FILE  --num_eval_tasks N            (an environment of your own)
            --games, --eval_games  (alfworld)   --shop, --goals  (webshop)   --train_split  (appworld)
batch       --num_generations N        episodes of one task, a group
            --per_device_train_batch_size N  --steps_per_generation N
                                       groups an iteration = processes x both / num_generations
            --max_tokens_per_micro_batch N   memory of the update
learning    --learning_rate X  --beta X (KL)  --gamma X  --value_lambda X  --step_advantage_weight X
            --advantage_estimator g2po|gigpo|grpo|rloo|graphgpo|hgpo|crbc
episodes    --max_turns N  --history_length N  --max_prompt_length N  --max_completion_length N
            --temperature X  --eval_temperature X  --invalid_action_penalty X
generation  --use_vllm --vllm_mode colocate|server  --vllm_gpu_memory_utilization X  --vllm_servers URL …
processes   --num_processes N          more than one: through Accelerate, a process a GPU (or CPU processes)
            --accelerate_config FILE|NAME    ddp (default), fsdp2, deepspeed_zero2, deepspeed_zero3
            several machines: accelerate launch … -m g2po_trl train …

--help-all: every flag of TARGET, with defaults.  --debug: the traceback of an error.
"""
OWN_RECIPE = "environment"
_VALUES = {
    "--config": "config",
    "--num_processes": "processes",
    "--accelerate_config": "accelerate",
    "--model": "model",
}


@dataclass
class Request:
    """A command line: what this command reads, and what it passes on."""

    target: str | None = None
    config: str | None = None
    processes: str | None = None
    accelerate: str | None = None
    model: str | None = None
    help_all: bool = False
    passed: list[str] = field(default_factory=list)


def read(argv: Sequence[str]) -> Request:
    """The target comes first; of the flags those of `_VALUES` are read, wherever they are.

    Raises:
        ValueError: for a flag without its value.
    """
    request, words = Request(), list(argv)
    if words and not words[0].startswith("-"):
        request.target = words.pop(0)
    while words:
        name, _, value = (word := words.pop(0)).partition("=")
        own = _VALUES.get(name.replace("-", "_").replace("__", "--", 1))
        if word == "--help-all":
            request.help_all = True
        elif own is None:
            request.passed.append(word)
        elif "=" not in word and (not words or words[0].startswith("--")):
            raise ValueError(f"{name} has no value: write {name} VALUE")
        else:
            setattr(request, own, value if "=" in word else words.pop(0))
    return request


def recipes_folder() -> Path:
    """Recipes and their YAML files: the clone's, or the installed package's."""
    beside = Path(__file__).resolve().parents[2] / "recipes"
    if (beside / "train_alfworld.py").is_file():
        return beside
    spec = find_spec("g2po_recipes")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("g2po_recipes is missing: reinstall g2po-trl")
    return Path(next(iter(spec.submodule_search_locations)))


def recipe_names() -> list[str]:
    """The targets that are recipes."""
    found = (path.stem.removeprefix("train_") for path in recipes_folder().glob("train_*.py"))
    return sorted(name.replace("_", "-") for name in found if name != OWN_RECIPE)


def config_names(kind: str | None = None) -> list[str]:
    """Configurations of recipes as `--config` takes them; those in recipes/KIND by their file's name."""
    folder = recipes_folder()
    if kind is not None:
        return sorted(path.stem for path in (folder / kind).glob("*.yaml"))
    paths = [path for path in folder.glob("*/*.yaml") if path.parent.name not in ("accelerate", "agents", "teach")]
    return sorted(f"{path.parent.name}/{path.stem}" for path in paths)


def find_config(name: str, option: str = "config", kind: str | None = None, among: str | None = None) -> Path:
    """A YAML file: of the user's by its path, of g2po-trl by its short name.

    Args:
        kind: names are those of recipes/KIND. among: names are said to be those of recipes/AMONG, with the folder.

    Raises:
        ValueError: when there is none.
    """
    if Path(name).is_file():
        return Path(name)
    folder = recipes_folder() / (kind or "")
    if (found := folder / f"{name.removesuffix('.yaml')}.yaml").is_file():
        return found
    names = [f"{among}/{one}" for one in config_names(among)] if among else config_names(kind)
    raise ValueError(f"{option} is {name!r}, which is not a file: pass one, or one of {', '.join(names)}")


def environment_in(path: Path) -> str | None:
    """The class of a file that holds an environment and no training; `None` for a script.

    Raises:
        ValueError: when it cannot be read, or holds several.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if "__name__" in names or any(name.endswith("Trainer") for name in names):
        return None
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found = [one.name for one in classes if any("TextEnvironment" in ast.unparse(base) for base in one.bases)]
    if len(found) > 1:
        raise ValueError(f"{path} holds {', '.join(found)}: name one, {path}:{found[0]}")
    return found[0] if found else None


def resolve(request: Request) -> tuple[Path, list[str]]:
    """The script to run and its arguments.

    Raises:
        ValueError: for a target or a configuration that is not there.
    """
    target, arguments = request.target, list(request.passed)
    if target is None:
        target = "environment.py"
        if not Path(target).is_file():
            names = "|".join(recipe_names())
            raise ValueError(f"no target is given and there is no environment.py here: g2po train {names}|FILE.py")
    elif target in recipe_names():
        script = recipes_folder() / f"train_{target.replace('-', '_')}.py"
        return script, [*_config_and_model(request, target.partition("-")[0]), *arguments]
    file, _, name = target.partition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(
            f"{target!r} is neither a recipe nor a file: choose one of {', '.join(recipe_names())}, or FILE.py"
        )
    name = name or environment_in(path)
    if name is None:
        given = {"config": request.config, "model": request.model}
        return path, [word for key, value in given.items() if value for word in (f"--{key}", value)] + arguments
    if request.config is None and (beside := path.with_name("config.yaml")).is_file():
        request.config = str(beside)
    own = ["--environment", f"{path.resolve()}:{name}", *_config_and_model(request)]
    if (tasks := path.with_name("tasks.jsonl")).is_file() and "tasks" not in _keys(request.config):
        own += ["--tasks", str(tasks)]
    return recipes_folder() / f"train_{OWN_RECIPE}.py", own + arguments


def _config_and_model(request: Request, kind: str | None = None) -> list[str]:
    words = []
    if request.config is not None:
        names = [request.config, f"{kind}/{request.config}"]  # `g2po train alfworld --config tiny-long` will do
        near = kind is not None and not Path(names[0]).is_file() and names[1] in config_names()
        words += ["--config", str(find_config(names[near]))]
    return words + (["--model_name_or_path", request.model] if request.model is not None else [])


def _keys(config: str | None) -> set[str]:
    if config is None:
        return set()
    import yaml

    try:
        return set(yaml.safe_load(find_config(config).read_text(encoding="utf-8")) or ())
    except (OSError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"config is {config!r}, which cannot be read: {error}") from error


def run_in_place(script: Path, arguments: Sequence[str]) -> None:
    """What `python SCRIPT ARGUMENTS` does, in this process."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # without a GPU it warns wherever peft is imported
    if script.resolve().parent == recipes_folder():  # of names that TRL uses, not the user
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
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
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if request.help_all:
        run_in_place(script, ["--help"])
    elif config is None and request.processes in (None, "1"):
        run_in_place(script, arguments)
    else:
        from .launch import launch

        launch(["train", *_without_launching(argv)], request.processes, config)


def _without_launching(argv: Sequence[str]) -> list[str]:
    """What each process is called with."""
    words, kept = list(argv), []
    while words:
        name, equals, _ = (word := words.pop(0)).partition("=")
        if name.replace("-", "_") in ("__num_processes", "__accelerate_config"):
            words = words if equals else words[1:]
        else:
            kept.append(word)
    return kept

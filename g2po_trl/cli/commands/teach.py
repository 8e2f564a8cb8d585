"""`g2po teach`: supervised fine-tuning on demonstrations, as a start for reinforcement learning."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ...environments.loading import resolve_agent_name, resolve_environment_name
from ...utils.parser import read_config
from ..preflight import check_command
from ..recipe_files import OWN_RECIPE, find_config, recipes_folder
from .train import Request, file_of, read, run_in_place

HELP = """usage: g2po teach [TARGET] [--config FILE] [--FIELD VALUE ...]

TARGET      alfworld, webshop, FILE.py, FILE.py:Class or module:Class. Default: environment.py, else agent.py. The
            default model is SmolLM2-135M-Instruct (Apache-2.0; downloaded once), on the CPU if there is no GPU.
--agent FILE.py[:NAME]   instead of TARGET: an agent

run         --config FILE              YAML file; flags override it. Default: teach.yaml next to FILE.py
            --output_dir FOLDER        the taught model
            --resume_from_checkpoint auto                            resume from the last checkpoint
            --overwrite                replace the taught model in output_dir
            --seed N
model       --model FOLDER|ID          --model_name_or_path; --dtype, --use_peft (merged at the end)
FILE.py     --train_config FILE        has the tasks, model and prompts; default: config.yaml next to FILE.py
            --expert FILE.py:NAME      default: `expert` in FILE.py, a function (environment) or (messages, tools)
            --demonstrations FILE, --random_episodes N    instead: recorded trajectories, played again; random episodes
            --num_episodes N  --demonstration_turns N    the expert's episodes and their length; successes are taught
samples     --num_demonstrations N     maximum number of the expert's answers to train on
            --learning_rate X  --per_device_train_batch_size N
exam        --target_success X         stop at this success rate on the exam's tasks
            --exam_steps N  --num_exam_tasks N  --temperature X  --max_turns N

Then: g2po train TARGET --model FOLDER, or, for SmolLM2, g2po train TARGET --config smollm2-135m.

--help-all: every flag, with defaults.  --debug: the traceback of an error.
"""


def targets() -> list[str]:
    """Return the environments with a recipe for teaching."""
    names = (path.stem.removeprefix("teach_") for path in recipes_folder().glob("teach_*.py"))
    return sorted(name for name in names if name != OWN_RECIPE)


def resolve(request: Request) -> tuple[Path, list[str]]:
    """Return the recipe of a command line and its arguments."""
    config = None if request.config is None else find_config(request.config, kind="teach")
    words = [] if request.model is None else ["--model_name_or_path", request.model]
    if request.target in targets() and request.agent is None:
        return recipes_folder() / f"teach_{request.target}.py", [*_config(config), *words, *request.passed]
    kind, given, name = _own_target(request)
    path = file_of(given)
    if path.suffix == ".py":
        training, tasks, own = (path.with_name(name) for name in ("config.yaml", "tasks.jsonl", "teach.yaml"))
        config = own if config is None and own.is_file() else config
        passed = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in request.passed}
        if "train_config" not in passed and training.is_file():
            words += ["--train_config", str(training)]
        if "tasks" not in passed and tasks.is_file() and not (training.is_file() and "tasks" in read_config(training)):
            words += ["--tasks", str(tasks)]
    return recipes_folder() / f"teach_{OWN_RECIPE}.py", [f"--{kind}", name, *_config(config), *words, *request.passed]


def _config(path: Path | None) -> list[str]:
    return [] if path is None else ["--config", str(path)]


def _own_target(request: Request) -> tuple[str, str, str]:
    """Return "environment" or "agent", its name on the command line, and its full name."""
    target, agent = request.target, request.agent
    if target is not None and agent is not None:
        raise ValueError(f"{target} and --agent {agent} are both given: remove one of them")
    if target is None and agent is None:
        target = "environment.py" if Path("environment.py").is_file() else None
        agent = "agent.py" if target is None and Path("agent.py").is_file() else None
    if agent is not None:
        return "agent", agent, resolve_agent_name(agent)
    if target is None or (":" not in target and not target.endswith(".py")):
        problem = "no target is given" if target is None else f"{target!r} cannot be taught"
        raise ValueError(f"{problem}: choose one of {', '.join(targets())}, FILE.py or --agent FILE.py")
    return "environment", target, resolve_environment_name(target)


def main(argv: Sequence[str] | None = None) -> None:
    try:
        request = read(list(sys.argv[1:] if argv is None else argv))
        if {"-h", "--help"} & set(request.passed):
            print(HELP, end="")
            return
        script, words = resolve(request)
        if request.processes not in (None, "1") or request.accelerate is not None:
            raise ValueError("num_processes is above 1: teaching takes minutes and runs in one process. Leave it out.")
        if not request.help_all:
            check_command(script, words)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    run_in_place(script, ["--help"] if request.help_all else words)

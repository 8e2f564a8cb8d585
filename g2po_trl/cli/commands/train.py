"""`g2po train`: find the recipe and the number of processes; the recipe reads all other flags."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...credit.estimators.registry import ESTIMATORS
from ...engines.registry import ENGINES
from ...environments.loading import resolve_agent_name, resolve_environment_name
from ...utils.options import Options, option, require
from .. import parser
from ..launch import launch
from ..recipe_files import OWN_RECIPE, environment_or_agent, find_config, recipes_of

HELP = f"""usage: g2po train [TARGET] [--config FILE|NAME] [--FIELD VALUE ...]

Play each task several times, give each step an advantage, and train the model with them.

TARGET      alfworld, sokoban, webshop, appworld: a recipe, by default a tiny model on the CPU;
            alfworld-ppo, webshop-ppo: by PPO; textworld: a recipe for a GPU;
            FILE.py[:Class] or module:Class: an environment, or the address of an OpenEnv server.
            Default: the environment in environment.py, else the agent in agent.py.
--agent FILE.py[:NAME]   instead of TARGET: an agent, a function (task, client)

run         --config FILE|NAME (default: config.yaml next to FILE.py), --output-dir FOLDER, --overwrite
            --max-steps N, --resume-from-checkpoint auto
model       --model FOLDER|ID, --use-peft, --learning-rate X
            --advantage-estimator {"|".join(ESTIMATORS)}
episodes    --num-generations N (of a task), --max-turns N, --max-completion-length N, --engine {"|".join(ENGINES)}
processes   --num-processes N (one per GPU, or on the CPU; several machines: accelerate launch … -m g2po_trl train …)
            --accelerate-config FILE|NAME    ddp (default), fsdp2, deepspeed_zero2, deepspeed_zero3

g2po train TARGET --help-all: every flag, with its default.
"""


@dataclass
class Request(Options):
    """A command line: options of the command itself, the name of the recipe, and the words for it."""

    agent: str | None = option("instead of TARGET: an agent", None, metavar="FILE.py[:NAME]")
    num_processes: int | None = option("processes, through Accelerate", None, within="[1, inf)")
    accelerate_config: str | None = option("Accelerate's configuration", None, metavar="FILE|NAME")
    target: str | None = field(default=None, init=False)
    passed: list[str] = field(default_factory=list, init=False)


def read(
    argv: Sequence[str] | None, command: str = "g2po train", help_: str = HELP, kind: type[Request] = Request
) -> Any:
    """Return the parsed command line, whose first word is the target; print the help and exit if it asks for that.

    A flag that no recipe has ends the process: a recipe would say so after importing torch and TRL. Messages of a
    recipe that is run then name the command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    target = words.pop(0) if words and not words[0].startswith("-") else None
    if {"-h", "--help"} & set(words):
        print(help_, end="")
        raise SystemExit(0)
    own = parser.Parser((kind,), prog=command)
    try:
        values, passed = own.split(words)
        (request,) = own.build(values)
    except ValueError as error:
        own.error(str(error))
    if message := parser.misspelled(passed, own.fields):
        own.error(message)
    request.target, request.passed, parser.COMMAND = target, passed, command
    return request


def resolve(request: Request, kind: str = "train") -> tuple[Path, list[str]]:
    """Return the recipe's script, of `g2po train` or by `kind` of `g2po teach`, and its arguments."""
    scripts = recipes_of(kind)
    own = scripts.pop(OWN_RECIPE)
    environment, agent = environment_or_agent(request.target, request.agent)
    if agent is not None:
        return own, ["--agent", resolve_agent_name(agent), *request.passed]
    if environment in scripts:
        return scripts[environment], request.passed
    is_named = environment is not None and (":" in environment or environment.endswith(".py"))
    instead = f"pass {', '.join(scripts)}, FILE.py:Class or --agent FILE.py"
    require(is_named, "target", request.target, parser.nearest(request.target or "", scripts, instead))
    return own, ["--environment", resolve_environment_name(environment), *request.passed]


def run_in_place(script: Path, arguments: Sequence[str]) -> None:
    """Run `python SCRIPT ARGUMENTS` in this process."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


def main(argv: Sequence[str] | None = None) -> None:
    request = read(argv)
    script, arguments = resolve(request)
    config, processes = request.accelerate_config, request.num_processes
    if config is None and processes in (None, 1):
        return run_in_place(script, arguments)
    if config is None:
        import torch

        config = "ddp" if torch.cuda.is_available() else None
    config = config and find_config(config, "accelerate_config", kind="accelerate")
    words = [*filter(None, [request.target]), *(["--agent", request.agent] if request.agent else [])]
    launch(["train", *words, *request.passed], processes, config)

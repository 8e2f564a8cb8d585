"""`g2po teach`: supervised fine-tuning on demonstrations, as a start for reinforcement learning."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ...utils.options import require
from ..recipe_files import OWN_RECIPE, recipe_file, recipe_names
from .train import Request, check_flags, own_target, read, run_in_place

HELP = """usage: g2po teach [TARGET] [--config FILE] [--FIELD VALUE ...]

Fine-tune a model on an expert's actions, as a start for g2po train.

TARGET      alfworld, webshop, FILE.py, FILE.py:Class or module:Class. Default: environment.py, else agent.py. Default
            model: that of config.yaml, else SmolLM2-135M-Instruct (Apache-2.0; downloaded once).
--agent FILE.py[:NAME]   instead of TARGET: an agent

run         --config FILE              YAML file; flags override it. Default: teach.yaml next to FILE.py
            --output-dir FOLDER        the taught model
            --resume-from-checkpoint auto                            resume from the last checkpoint
            --overwrite                replace the taught model in output_dir
            --seed N
model       --model FOLDER|ID; --dtype, --use-peft (merged at the end)
FILE.py     --train-config FILE        has the tasks, model and prompts; default: config.yaml next to FILE.py
            --expert FILE.py:NAME      default: `expert` in FILE.py, a function (environment) or (messages, tools)
            --demonstrations FILE, --random-episodes N    instead: recorded trajectories, played again; random episodes
            --num-episodes N  --demonstration-turns N    the expert's episodes and their length; successes are taught
samples     --num-demonstrations N     maximum number of the expert's answers to train on
            --learning-rate X  --per-device-train-batch-size N
exam        --target-success X         stop at this success rate on other training tasks
            --exam-steps N  --num-exam-tasks N  --temperature X  --max-turns N

Examples
  g2po teach                                                         # the expert in environment.py
  g2po teach alfworld                                                # then: g2po train alfworld --config smollm2-135m
  g2po teach environment.py --model Qwen/Qwen2.5-0.5B-Instruct

--help-all: every flag of TARGET, with its default.
"""


def resolve(request: Request) -> tuple[Path, list[str]]:
    """Return the recipe of a command line and its arguments."""
    names = recipe_names("teach")
    if request.target in names and request.agent is None:
        return recipe_file(request.target, "teach"), request.passed
    return recipe_file(OWN_RECIPE, "teach"), [*own_target(request, names), *request.passed]


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(argv):
        print(HELP, end="")
        return
    request = read(argv, "g2po teach")
    processes = request.num_processes
    alone = processes in (None, 1) and request.accelerate_config is None
    require(alone, "num_processes", processes, "teaching takes minutes and runs in one process. Leave it out")
    require(not request.view, "view", True, "leave it out, and run g2po view OUTPUT_DIR afterwards")
    script, arguments = resolve(request)
    check_flags(arguments, "g2po teach")
    run_in_place(script, arguments)

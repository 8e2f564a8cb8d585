"""`g2po teach`: supervised fine-tuning on demonstrations, as a start for reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence

from ...utils.options import require
from .train import read, resolve, run_in_place

HELP = """usage: g2po teach [TARGET] [--config FILE] [--FIELD VALUE ...]

Fine-tune a model on an expert's actions, as a start for g2po train.

TARGET      alfworld, webshop, FILE.py, FILE.py:Class or module:Class. Default: environment.py, else agent.py
--agent FILE.py[:NAME]   instead of TARGET: an agent

run         --config FILE (default: teach.yaml next to FILE.py), --output-dir FOLDER, --overwrite, --seed N
            --resume-from-checkpoint auto
model       --model FOLDER|ID          default: that of config.yaml, else SmolLM2-135M-Instruct, downloaded once
            --dtype, --use-peft        an adapter, merged at the end
FILE.py     --train-config FILE        has the tasks, model and prompts; default: config.yaml next to FILE.py
            --expert FILE.py:NAME      default: `expert` in FILE.py, a function (environment) or (messages, tools)
            --demonstrations FILE, --random-episodes N    instead: recorded trajectories, played again; random episodes
            --num-episodes N, --demonstration-turns N    the expert's episodes and their length; successes are taught
learning    --num-demonstrations N, --learning-rate X, --per-device-train-batch-size N
validation  --target-success X (stop at this rate on other tasks), --validation-steps N, --num-validation-tasks N

g2po teach TARGET --help-all: every flag, with its default.
"""


def main(argv: Sequence[str] | None = None) -> None:
    request = read(argv, "g2po teach", HELP)
    for name in ("num_processes", "accelerate_config"):
        require(not getattr(request, name), name, getattr(request, name), "teaching does without, leave it out")
    run_in_place(*resolve(request))

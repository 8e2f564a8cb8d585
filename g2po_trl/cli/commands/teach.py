"""`g2po teach`: supervised fine-tuning on demonstrations, as a start for reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence

from ...utils.options import require
from .train import read, resolve, run_in_place

HELP = """usage: g2po teach [TARGET] [--config FILE] [--FIELD VALUE ...]

Fine-tune a model on an expert's actions, as a start for g2po train.

TARGET      alfworld, webshop, FILE.py, FILE.py:Class or module:Class. Default: environment.py, else agent.py
--agent FILE.py[:NAME]   instead of TARGET: an agent

--config FILE (default: teach.yaml next to FILE.py), --model FOLDER|ID, --use-peft (an adapter, merged at the end)
--output-dir FOLDER, --overwrite, --resume-from-checkpoint auto
--expert FILE.py:NAME (default: `expert` in FILE.py), or instead --demonstrations FILE or --random-episodes N
--num-demonstrations N, --learning-rate X, --target-success X (stop at this rate on other tasks)

g2po teach TARGET --help-all: every flag, with its default.
"""


def main(argv: Sequence[str] | None = None) -> None:
    request = read(argv, "g2po teach", HELP)
    for name in ("num_processes", "accelerate_config"):
        require(not getattr(request, name), name, getattr(request, name), "teaching does without, leave it out")
    run_in_place(*resolve(request, "teach"))

"""Estimate the memory, by part, and the tokens that a training run needs. Loads no weights and trains nothing.

    g2po estimate alfworld --config qwen2.5-1.5b-lora --gpu-memory 24
    g2po estimate alfworld --like runs/alfworld-tiny

TARGET, the first word, --config and --FIELD VALUE are as for `g2po train`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...estimate.plan import Episodes, Plan
from ...estimate.report import format_plan
from ...runs.iterations import load_log
from ...utils.options import option
from ..parser import Parser
from ..recipe_files import config_keys
from .train import Request, read, resolve


@dataclass
class EstimateOptions(Request):
    gpu_memory: float | None = option("memory of a GPU in GB, to print whether the run fits", None, within="(0, inf)")
    like: Path | None = option("take turns, tokens and shared prefixes of episodes from this run", None, metavar="RUN")


def main(argv: Sequence[str] | None = None) -> None:
    help_ = Parser((EstimateOptions,), prog="g2po estimate [TARGET]", description=__doc__).help_with({})
    options = read(argv, "g2po estimate", help_, EstimateOptions)
    script, arguments = resolve(options)
    sys.path.insert(0, str(script.parent))
    recipe = runpy.run_path(str(script))["RECIPE"]
    parser = Parser(recipe.types, prog="g2po estimate")
    settings = parser.defaults | parser.read(arguments, config=partial(config_keys, recipe.config, ""))[0]
    settings["model_name_or_path"] = settings["model_name_or_path"] or recipe.model
    sharded = any(name in (options.accelerate_config or "") for name in ("fsdp", "zero3"))
    plan = Plan(settings, options.num_processes or 1, sharded)
    of_run = options.like and Episodes.of_log(load_log(options.like), str(options.like))
    memory = None if options.gpu_memory is None else options.gpu_memory * 1e9
    print(format_plan(plan, of_run or plan.assumed_episodes(), memory))

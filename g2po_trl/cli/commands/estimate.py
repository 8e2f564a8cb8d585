"""`g2po estimate`: what a training needs, from its configuration."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...estimate.plan import Episodes, Plan
from ...estimate.report import format_plan
from ...runs.iterations import load_log
from ...utils.options import Options, require
from ..parser import Parser, field_defaults, option
from ..parser import read as read_values
from ..recipe_files import bundled_model, recipes_folder
from .train import check_flags, read, resolve

HELP = """usage: g2po estimate [TARGET] [--config FILE|NAME] [--FIELD VALUE ...]     as for `g2po train`

Estimate the memory, by part, and the tokens that a training run needs. Loads no weights and trains nothing.

--gpu-memory GB         memory of a GPU: also print whether the run fits
--like RUN              take turns, tokens and shared prefixes of episodes from this run
--mean-turns X  --prompt-tokens X  --completion-tokens X
                        mean turns of an episode, and mean tokens of a step. Default: two thirds of max_turns, and at
                        most 700 and 150

Examples
  g2po estimate alfworld --config qwen2.5-1.5b-lora --gpu-memory 24
  g2po estimate alfworld --like runs/alfworld-tiny
"""


@dataclass
class EstimateOptions(Options):
    gpu_memory: float | None = option("memory of a GPU in GB", None, within="(0, inf)")
    like: Path | None = option("run whose episodes the training's are like", None)
    mean_turns: float | None = option("mean turns of an episode", None, within="(0, inf)")
    prompt_tokens: float | None = option("mean tokens of a prompt", None, within="(0, inf)")
    completion_tokens: float | None = option("mean tokens of a completion", None, within="(0, inf)")

    def __post_init__(self):
        super().__post_init__()
        means = (self.mean_turns, self.prompt_tokens, self.completion_tokens)
        is_alone = self.like is None or means == (None, None, None)
        require(is_alone, "like", self.like, "leave it out, or the mean turns and tokens")

    def episodes(self, plan: Plan) -> Episodes:
        """Return what episodes are like: those of `like`, else the given means, else assumed ones."""
        if self.like is not None:
            return Episodes.of_log(load_log(self.like), str(self.like))
        most = plan["max_turns"]
        require((self.mean_turns or 0) <= most, "mean_turns", self.mean_turns, f"set it to at most max_turns, {most}")
        means = {"turns": self.mean_turns, "prompt_tokens": self.prompt_tokens}
        means |= {"completion_tokens": self.completion_tokens}
        return plan.assumed_episodes(**{name: value for name, value in means.items() if value is not None})


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser((EstimateOptions,), prog="g2po estimate")
    try:
        values, words = parser.split(sys.argv[1:] if argv is None else argv)
        if "help" in values:
            print(HELP, end="")
            return
        (options,) = parser.build(values)
    except ValueError as error:
        parser.error(str(error))
    request = read(words, "g2po estimate")
    script, arguments = resolve(request)
    is_recipe = script.parent == recipes_folder()
    require(is_recipe, "target", str(script), f"pass {script}:Class, settings of a script cannot be read")
    check_flags(arguments, "g2po estimate")
    settings = recipe_settings(script, arguments)
    settings["model_name_or_path"] = settings["model_name_or_path"] or bundled_model(request.target)
    sharded = any(name in (request.accelerate_config or "") for name in ("fsdp", "zero3"))
    plan = Plan(settings, request.num_processes or 1, sharded)
    memory = None if options.gpu_memory is None else options.gpu_memory * 1e9
    print(format_plan(plan, options.episodes(plan), memory))


def recipe_settings(script: Path, arguments: Sequence[str]) -> dict:
    """Return every field of a recipe: from the flags, else its configuration, else its default."""
    from ..recipe import parser_options  # with TRL, which is slow to import

    sys.path.insert(0, str(script.parent))
    recipe = runpy.run_path(str(script))
    options = {**parser_options(recipe["DEFAULT_CONFIG"]), "defaults": None}
    _, values, _ = read_values(recipe["TYPES"], arguments, command="g2po estimate", **options)
    return {**field_defaults(recipe["TYPES"]), **values}

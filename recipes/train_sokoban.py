"""Train an agent on Sokoban by G2PO.

    g2po train sokoban                                 # a tiny model, levels of one box, CPU
    g2po train sokoban --config qwen2.5-1.5b           # one GPU of 80 GB
    g2po train sokoban --config qwen2.5-vl-3b          # the grid as an image, one GPU of 80 GB

Levels are generated from a number, and nothing is downloaded. The grid is the whole state, so states recur often.
Any field of `ScriptArguments`, `G2POConfig` and TRL's `ModelConfig` is a flag and a YAML key; flags win.
`--resume-from-checkpoint auto` continues the run in `output_dir` if there is one.
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trl import ModelConfig

from g2po_envs.sokoban.environment import RENDER, SokobanEnvironment
from g2po_envs.sokoban.exact import ExactAdvantage
from g2po_envs.sokoban.games import level_rows
from g2po_envs.sokoban.prompts import PROMPTS
from g2po_envs.sokoban.tiny import tiny_model_path
from g2po_trl import G2POConfig
from g2po_trl.cli.recipe import Task, split_panel, train
from g2po_trl.utils.options import Options, option


@dataclass
class ScriptArguments(Options):
    level_size: str = option("'tiny' and 'small' (one box), 'medium' and 'large' (two boxes).", "small")
    num_levels: int = option("Training levels.", 320, within="[1, inf)")
    num_eval_levels: int = option("Held-out levels, none a turned training level.", 192, within="[1, inf)")
    num_report_levels: int | None = option("Reported levels. None: those of evaluations.", None, within="[1, inf)")
    prompt: str = option("Wording of prompts; compact for small models.", "full", choices=tuple(PROMPTS))
    positions: bool = option("Add a line with the positions of boxes and goals relative to the player.", False)
    render: str = option("How the grid is shown.", "text", choices=RENDER)
    end_when_lost: bool = option("End an episode as soon as it cannot be solved any more.", False)
    exact_distances: bool = option("Compute values from exact distances instead of mean returns.", False)


TYPES = (ScriptArguments, G2POConfig, ModelConfig)
DEFAULT_CONFIG = Path(__file__).parent / "sokoban" / "tiny.yaml"


def tasks(options: ScriptArguments, args: G2POConfig) -> Task:
    """Return the levels."""
    size, rows = options.level_size, level_rows(options.level_size, options.num_levels)
    held_out, reported, panel = split_panel(
        partial(level_rows, size, held_out=True), options.num_eval_levels, options.num_report_levels, args
    )
    shown = {name: getattr(options, name) for name in ("positions", "end_when_lost", "render")}
    factory = partial(SokobanEnvironment, **shown)
    return Task(
        train=rows,
        held_out=held_out,
        reported=reported,
        facts={"Training levels": f"{len(rows)} of size {size}", "Held-out levels": f"{len(reported or held_out)}"},
        trainer={
            "environment_factory": factory,
            "advantage_fn": ExactAdvantage(rows, factory()) if options.exact_distances else None,
        },
        prompt=PROMPTS[options.prompt],
        evaluation={"environment": "sokoban", "panel": size, "panel_options": {**panel, **shown}},
    )


if __name__ == "__main__":
    train(tasks, TYPES, DEFAULT_CONFIG, "Sokoban", tiny_model_path())

"""Train an agent on Sokoban by G2PO. Levels are generated; the grid is the whole state, so states recur often.

g2po train sokoban                                 # a tiny model, levels of one box, CPU
g2po train sokoban --config qwen2.5-1.5b           # one GPU of 80 GB
g2po train sokoban --config qwen2.5-vl-3b          # the grid as an image, one GPU of 80 GB
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import dataclass

from g2po_envs.sokoban.environment import RENDER, SokobanEnvironment
from g2po_envs.sokoban.exact import ExactAdvantage
from g2po_envs.sokoban.games import level_rows
from g2po_envs.sokoban.prompts import PROMPTS
from g2po_envs.sokoban.tiny import tiny_model_path
from g2po_trl import G2POConfig
from g2po_trl.cli.recipe import Recipe, Task, numbered_panels
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
    exact_distances: bool = option("Compute values from exact distances instead of mean returns.", False)


def tasks(options: ScriptArguments, args: G2POConfig) -> Task:
    """Return the levels."""
    rows = level_rows(options.level_size, options.num_levels)
    shown = {"positions": options.positions, "render": options.render}
    exact = ExactAdvantage(rows, SokobanEnvironment(**shown)) if options.exact_distances else None
    return Task.of_panels(
        "sokoban",
        *numbered_panels(options.level_size, shown, options.num_eval_levels, options.num_report_levels, args),
        train=rows,
        facts={"Training levels": f"{len(rows)} of size {options.level_size}"},
        trainer={"prompt_template": PROMPTS[options.prompt], "advantage_fn": exact},
    )


RECIPE = Recipe(tasks, ScriptArguments, "sokoban/tiny", "Sokoban", tiny_model_path())

if __name__ == "__main__":
    RECIPE.train()

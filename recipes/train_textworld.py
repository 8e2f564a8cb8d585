"""Train an agent on small TextWorld games by G2PO, one game for each seed, generated into --cache-dir.

g2po train textworld                               # Qwen2.5-1.5B-Instruct, one GPU of 80 GB
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import dataclass

from g2po_envs.textworld import KINDS, TEXTWORLD_PROMPT, game_rows
from g2po_trl import G2POConfig
from g2po_trl.cli.recipe import Recipe, Task, numbered_panels
from g2po_trl.utils.options import Options, option


@dataclass
class ScriptArguments(Options):
    kind: str = option("Kind of games; coin-N needs N commands.", "coin-5", choices=tuple(KINDS))
    num_games: int = option("Training games.", 320, within="[1, inf)")
    num_eval_games: int = option("Held-out games, of other seeds.", 128, within="[1, inf)")
    num_report_games: int | None = option("Reported games. None: those of evaluations.", None, within="[1, inf)")
    cache_dir: str = option("Folder of generated games.", "~/.cache/g2po_trl")


def tasks(options: ScriptArguments, args: G2POConfig) -> Task:
    """Return the games."""
    return Task.of_panels(
        "textworld",
        *numbered_panels(
            options.kind, {"cache_dir": options.cache_dir}, options.num_eval_games, options.num_report_games, args
        ),
        train=game_rows(options.kind, options.num_games),
        facts={"Training games": f"{options.num_games} of kind {options.kind}"},
        trainer={"prompt_template": TEXTWORLD_PROMPT},
    )


RECIPE = Recipe(tasks, ScriptArguments, "textworld/qwen2.5-1.5b", "TextWorld")

if __name__ == "__main__":
    RECIPE.train()

"""Train an agent on small generated TextWorld games by G2PO.

    g2po train textworld                               # Qwen2.5-1.5B-Instruct, one GPU of 80 GB

TextWorld generates one game for each seed and stores it in --cache-dir.
Any field of `ScriptArguments`, `G2POConfig` and TRL's `ModelConfig` is a flag and a YAML key; flags win.
`--resume-from-checkpoint auto` continues the run in `output_dir` if there is one.
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trl import ModelConfig

from g2po_envs.textworld import KINDS, TEXTWORLD_PROMPT, TextWorldEnvironment, game_rows
from g2po_trl import G2POConfig
from g2po_trl.cli.recipe import Task, kept_path, split_panel, train
from g2po_trl.utils.options import Options, option


@dataclass
class ScriptArguments(Options):
    kind: str = option("Kind of games; coin-N needs N commands.", "coin-5", choices=tuple(KINDS))
    num_games: int = option("Training games.", 320, within="[1, inf)")
    num_eval_games: int = option("Held-out games, of other seeds.", 128, within="[1, inf)")
    num_report_games: int | None = option("Reported games. None: those of evaluations.", None, within="[1, inf)")
    cache_dir: str = option("Folder of generated games.", "~/.cache/g2po_trl")


TYPES = (ScriptArguments, G2POConfig, ModelConfig)
DEFAULT_CONFIG = Path(__file__).parent / "textworld" / "qwen2.5-1.5b.yaml"


def tasks(options: ScriptArguments, args: G2POConfig) -> Task:
    """Return the games."""
    kind, rows = options.kind, game_rows(options.kind, options.num_games)
    held_out, reported, panel = split_panel(
        partial(game_rows, kind, held_out=True), options.num_eval_games, options.num_report_games, args
    )
    panel["cache_dir"] = kept_path(options.cache_dir)
    return Task(
        train=rows,
        held_out=held_out,
        reported=reported,
        facts={"Training games": f"{len(rows)} of kind {kind}", "Held-out games": f"{len(reported or held_out)}"},
        trainer={"environment_factory": partial(TextWorldEnvironment, cache_dir=options.cache_dir)},
        prompt=TEXTWORLD_PROMPT,
        evaluation={"environment": "textworld", "panel": kind, "panel_options": panel},
    )


if __name__ == "__main__":
    train(tasks, TYPES, DEFAULT_CONFIG, "TextWorld")

# /// script
# requires-python = ">=3.11"
# dependencies = ["g2po-trl[alfworld]"]
# [tool.uv.sources]
# g2po-trl = { path = ".." }
# ///
"""Train an agent on ALFWorld by G2PO.

    python recipes/train_alfworld.py                    # a tiny model, generated games, CPU
    uv run recipes/train_alfworld.py                    # the same in an environment that uv makes
    python -m g2po_envs.alfworld.official               # downloads the official games, once; then the paper's run:
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train_alfworld.py \
        --config recipes/alfworld/qwen2.5-1.5b.yaml

Any field of `ScriptArguments`, `G2POConfig` and TRL's `ModelConfig` is a flag and a YAML key; flags win.
`--resume-from-checkpoint auto` continues the run in `output_dir` if there is one. Exit code 3: the model was trained
and saved, but not pushed to the Hub.
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trl import ModelConfig

from g2po_envs.alfworld.environment import KEYS, AlfworldEnvironment
from g2po_envs.alfworld.games import SIZES
from g2po_envs.alfworld.panels import find_games, panel_of
from g2po_envs.alfworld.prompts import PROMPTS
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import G2POConfig
from g2po_trl.cli.recipe import Task, kept_path, train
from g2po_trl.utils.options import Options, option, require


@dataclass
class ScriptArguments(Options):
    games: str | None = option("Training games: a folder, or 'official:train'. None: generate them.", None)
    eval_games: str | None = option(
        "Held-out games: a folder, 'official:valid_seen' or 'official:valid_unseen', or None.", None
    )
    report_games: str | None = option(
        "Games to report success on, a folder or official games. None: the held-out ones, or others if these choose "
        "the best checkpoint.",
        None,
    )
    game_size: str = option("Size of generated games.", "tiny", choices=tuple(SIZES))
    num_games: int = option("Training games to generate.", 320, within="[1, inf)")
    num_eval_games: int = option("Held-out games to generate.", 192, within="[1, inf)")
    game_seed: int = option("Seed of generated games.", 0)
    cache_dir: str = option("Folder of generated games.", "~/.cache/g2po_trl")
    prompt: str = option("Wording of prompts; compact for small models.", "full", choices=tuple(PROMPTS))
    intro: bool = option("First observation: the whole introduction (true) or only the room (false).", True)
    hidden_actions: list[str] = option("First words of actions to leave out of the list.", ["help"])
    key: str = option(
        "State key. released: as in the paper's code. memory: also what was heated, cooled, cleaned or switched on.",
        "released",
        choices=tuple(KEYS),
    )
    eval_before: bool = option("Also evaluate before training; false if the model's success is known.", True)


TYPES = (ScriptArguments, G2POConfig, ModelConfig)
DEFAULT_CONFIG = Path(__file__).parent / "alfworld" / "tiny.yaml"
OTHERS = {"generated": "generated-report", "valid_seen": "valid_unseen"}  # panel that chooses -> panel that reports


def tasks(options: ScriptArguments, args: G2POConfig) -> Task:
    """Return the games."""
    made = {"number": options.num_eval_games, "seed": options.game_seed, "size": options.game_size}
    made["cache_dir"] = kept_path(options.cache_dir)
    panel = panel_of(options.eval_games)
    if reports := options.report_games is not None or args.load_best_model_at_end:
        known = options.report_games is not None or panel in OTHERS
        require(known, "report_games", None, "eval_games choose the best checkpoint; name other games to report on")
        panel = OTHERS[panel] if options.report_games is None else panel_of(options.report_games)
    rows = find_games(panel_of(options.games), **{**made, "number": options.num_games}, split="train")
    held_out = find_games(panel_of(options.eval_games), **made)
    reported = find_games(panel, **made) if reports else None
    shared = 0 if reported is None else len(reported) - len(reported.without(held_out))
    remedy = f"eval_games have {shared} of its games: report games that choose no checkpoint"
    require(not shared, "report_games", options.report_games, remedy)
    hidden = tuple(options.hidden_actions)
    shown = {"hidden_actions": options.hidden_actions, "intro": options.intro, "key": options.key}
    made = made if panel.startswith("generated") else {}
    games = {"train": rows, "eval": held_out, "report": reported}
    names = {"train": "Training games", "eval": "Held-out games", "report": "Reported games"}
    return Task(
        train=rows.rows(),
        held_out=held_out.rows(),
        reported=reported.rows() if reported else (),
        facts={names[name]: some.summary() for name, some in games.items() if some},
        trainer={
            "environment_factory": partial(
                AlfworldEnvironment, rows.merged(held_out, reported or held_out), **{**shown, "hidden_actions": hidden}
            )
        },
        prompt=PROMPTS[options.prompt],
        evaluation={"environment": "alfworld", "panel": panel, "panel_options": shown | made},
        settings={f"{name}_manifest": some.hash if some else None for name, some in games.items()},
    )


if __name__ == "__main__":
    train(tasks, TYPES, DEFAULT_CONFIG, "ALFWorld", tiny_model_path())

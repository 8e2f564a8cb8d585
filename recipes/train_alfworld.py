"""Train an agent on ALFWorld by G2PO.

    python recipes/train_alfworld.py                    # a tiny model, generated games, CPU
    python -m g2po_envs.alfworld.official               # downloads the official games, once; then the paper's run:
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train_alfworld.py \
        --config recipes/alfworld/qwen2.5-1.5b.yaml
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import dataclass
from functools import partial

from g2po_envs.alfworld.environment import KEYS, AlfworldEnvironment
from g2po_envs.alfworld.games import SIZES
from g2po_envs.alfworld.panels import find_games, panel_of
from g2po_envs.alfworld.prompts import PROMPTS
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import G2POConfig
from g2po_trl.cli.recipe import Recipe, Task
from g2po_trl.utils.options import Options, option, require


@dataclass
class ScriptArguments(Options):
    games: str | None = option("Training games: a folder, or 'official:train'. None: generate them.", None)
    eval_games: str | None = option("Held-out: a folder, official:valid_seen or official:valid_unseen, or None.", None)
    report_games: str | None = option("Reported games. None: the held-out; others if those choose a checkpoint.", None)
    game_size: str = option("Size of generated games.", "tiny", choices=tuple(SIZES))
    num_games: int = option("Training games to generate.", 320, within="[1, inf)")
    num_eval_games: int = option("Held-out games to generate.", 192, within="[1, inf)")
    cache_dir: str = option("Folder of generated games.", "~/.cache/g2po_trl")
    prompt: str = option("Wording of prompts; compact for small models.", "full", choices=tuple(PROMPTS))
    intro: bool = option("First observation: the whole introduction (true) or only the room (false).", True)
    hidden_actions: list[str] = option("First words of actions to leave out of the list.", ["help"])
    key: str = option("State key; memory: also what was heated, cooled or cleaned.", "released", choices=tuple(KEYS))


OTHERS = {"generated": "generated-report", "valid_seen": "valid_unseen"}  # panel that chooses -> panel that reports


def tasks(options: ScriptArguments, args: G2POConfig) -> Task:
    """Return the games."""
    held_out, reported = panel_of(options.eval_games), options.report_games and panel_of(options.report_games)
    if args.load_best_model_at_end and reported is None:
        remedy = "eval_games choose the best checkpoint; name other games to report on"
        require(held_out in OTHERS, "report_games", None, remedy)
        reported = OTHERS[held_out]
    made = {"seed": 0, "size": options.game_size, "cache_dir": options.cache_dir}
    games = [find_games(panel_of(options.games), options.num_games, **made, split="train")]
    made["number"] = options.num_eval_games
    games += [find_games(name, **made) for name in (held_out, reported) if name]
    shown = {"hidden_actions": tuple(options.hidden_actions), "intro": options.intro, "key": options.key}
    every_game = partial(AlfworldEnvironment, games[0].merged(*games[1:]), **shown)
    return Task.of_panels(
        "alfworld",
        (held_out, {**shown, **made}),
        (reported, {**shown, **made}) if reported else None,
        train=games[0].rows(),
        facts={f"{name} games": some.summary() for name, some in zip(("Training", "Held-out", "Reported"), games)},
        trainer={"environment_factory": every_game, "prompt_template": PROMPTS[options.prompt]},
    )


RECIPE = Recipe(tasks, ScriptArguments, "alfworld/tiny", "ALFWorld", tiny_model_path())

if __name__ == "__main__":
    RECIPE.train()

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

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from trl import ModelConfig, get_peft_config, get_quantization_config

from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, ALFWORLD_PROMPT, AlfworldEnvironment, Manifest, generate_games
from g2po_envs.alfworld.environment import KEYS
from g2po_envs.alfworld.games import SIZES, report_games
from g2po_envs.alfworld.official import PREFIX, official_games
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import G2POConfig, G2POTrainer, tasks_dataset
from g2po_trl.cli.recipe import kept_path, parse_arguments, run_recipe, starting_point
from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.options import Options, option

DEFAULT_CONFIG = Path(__file__).parent / "alfworld" / "tiny.yaml"
PROMPTS = {"full": ALFWORLD_PROMPT, "compact": ALFWORLD_COMPACT_PROMPT}


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


def load_games(directory: str | None, split: str, number: int, script_args: ScriptArguments) -> Manifest:
    """Return the games in `directory`, official ones, or generated ones."""
    if directory and directory.startswith(PREFIX):
        return official_games(directory.removeprefix(PREFIX))
    if directory is None:
        root = Path(script_args.cache_dir).expanduser() / f"alfworld-{script_args.game_size}-{script_args.game_seed}"
        directory = root / f"{split}-{number}"
        generate_games(directory, split, number, seed=script_args.game_seed, size=script_args.game_size)
    return Manifest.scan(directory)


def load_report_games(script_args: ScriptArguments, args: G2POConfig, held_out: Manifest) -> Manifest | None:
    """Return the reported games if a checkpoint is chosen on `held_out`; `None` if `held_out` is reported.

    Raises:
        G2POError: if there are no other games than `held_out`.
    """
    directory = script_args.report_games
    if directory is None and not args.load_best_model_at_end:
        return None
    if directory is None and script_args.eval_games is None:
        root = Path(script_args.cache_dir).expanduser() / f"alfworld-{script_args.game_size}-{script_args.game_seed}"
        return report_games(root, script_args.num_eval_games, script_args.game_seed, script_args.game_size)
    if directory is None and script_args.eval_games == f"{PREFIX}valid_seen":
        directory = f"{PREFIX}valid_unseen"
    if directory is None:
        raise G2POError("report_games is None: eval_games choose the best checkpoint; name other games to report on")
    games = load_games(directory, "held-out", script_args.num_eval_games, script_args)
    if shared := len(games) - len(games.without(held_out)):
        raise G2POError(f"report_games and eval_games share {shared} games: report games that choose no checkpoint")
    return games


def describe_panel(script_args: ScriptArguments, reported: Manifest | None) -> dict:
    """Return the arguments with which `g2po evaluate` plays the reported panel."""
    directory = script_args.eval_games if reported is None else script_args.report_games
    options = {"hidden_actions": script_args.hidden_actions, "intro": script_args.intro, "key": script_args.key}
    if directory is None and reported is not None and script_args.eval_games is not None:
        directory = f"{PREFIX}valid_unseen"
    if directory is None:
        options |= {"number": script_args.num_eval_games, "seed": script_args.game_seed, "size": script_args.game_size}
        options |= {"cache_dir": kept_path(script_args.cache_dir)}
        directory = "generated" if reported is None else "generated-report"
    elif not directory.startswith(PREFIX):
        directory = str(Path(directory).expanduser().absolute())
    return {"environment": "alfworld", "panel": directory.removeprefix(PREFIX), "panel_options": options}


TYPES = (ScriptArguments, G2POConfig, ModelConfig)


def main(
    types: tuple[type, ...] = TYPES,
    trainer_class: type[G2POTrainer] = G2POTrainer,
    default_config: Path = DEFAULT_CONFIG,
) -> None:
    script_args, args, model_args = parse_arguments(types, default_config)
    checkpoint = starting_point(args)
    args.eval_on_start = checkpoint is None and script_args.eval_before

    # data
    with args.main_process_first(desc="games"):
        train = load_games(script_args.games, "train", script_args.num_games, script_args)
        held_out = load_games(script_args.eval_games, "held-out", script_args.num_eval_games, script_args)
        reported = load_report_games(script_args, args, held_out)
    if args.process_index == 0:
        print(f"train: {train.summary()}\nheld-out: {held_out.summary()}", flush=True)
        if reported is not None:
            print(f"reported: {reported.summary()}", flush=True)

    trainer = trainer_class(
        model=model_args.model_name_or_path or str(tiny_model_path()),
        args=args,
        train_dataset=tasks_dataset(train.rows()),
        eval_dataset=tasks_dataset(held_out.rows()),
        environment_factory=partial(
            AlfworldEnvironment,
            train.merged(held_out, reported or held_out),
            hidden_actions=tuple(script_args.hidden_actions),
            intro=script_args.intro,
            key=script_args.key,
        ),
        prompt_template=PROMPTS[script_args.prompt],
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
        card_facts={
            "Training games": train.summary(),
            "Held-out games": held_out.summary(),
            **({"Reported games": reported.summary()} if reported else {}),
        },
    )
    settings = {
        "script": asdict(script_args),
        "model": asdict(model_args),
        "train_manifest": train.hash,
        "eval_manifest": held_out.hash,
        "report_manifest": reported.hash if reported else None,
        "evaluation": describe_panel(script_args, reported),
    }
    report_dataset = tasks_dataset(reported.rows()) if reported else None
    run_recipe(trainer, checkpoint, settings, dataset_name="ALFWorld", report_dataset=report_dataset)


if __name__ == "__main__":
    main()

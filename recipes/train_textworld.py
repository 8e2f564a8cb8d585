"""Train an agent on small generated TextWorld games by G2PO.

    g2po train textworld                               # Qwen2.5-1.5B-Instruct, one GPU of 80 GB

TextWorld generates one game for each seed and stores it in --cache-dir.
Any field of `ScriptArguments`, `G2POConfig` and TRL's `ModelConfig` is a flag and a YAML key; flags win.
`--resume-from-checkpoint auto` continues the run in `output_dir` if there is one.
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from trl import ModelConfig, get_peft_config, get_quantization_config

from g2po_envs.textworld import KINDS, TEXTWORLD_PROMPT, TextWorldEnvironment, game_rows
from g2po_trl import G2POConfig, G2POTrainer, tasks_dataset
from g2po_trl.cli.recipe import kept_path, parse_arguments, run_recipe, starting_point
from g2po_trl.utils.options import Options, option

DEFAULT_CONFIG = Path(__file__).parent / "textworld" / "qwen2.5-1.5b.yaml"


@dataclass
class ScriptArguments(Options):
    kind: str = option("Kind of games; coin-N needs N commands.", "coin-5", choices=tuple(KINDS))
    num_games: int = option("Training games.", 320, within="[1, inf)")
    num_eval_games: int = option("Held-out games, of other seeds.", 128, within="[1, inf)")
    num_report_games: int | None = option(
        "Number of games to report success on. None: those of evaluations.", None, within="[1, inf)"
    )
    cache_dir: str = option("Folder of generated games.", "~/.cache/g2po_trl")


TYPES = (ScriptArguments, G2POConfig, ModelConfig)


def main() -> None:
    script_args, args, model_args = parse_arguments(TYPES, DEFAULT_CONFIG)
    checkpoint = starting_point(args)
    args.eval_on_start = checkpoint is None
    kind, chosen, number = script_args.kind, script_args.num_eval_games, script_args.num_report_games

    # data
    number = number or (chosen if args.load_best_model_at_end else 0)
    train = game_rows(kind, script_args.num_games)
    held_out = game_rows(kind, chosen, held_out=True)
    reported = game_rows(kind, number, held_out=True, first=chosen)
    if args.process_index == 0:
        print(f"train: {len(train)} games of kind {kind}\nheld-out: {len(held_out)} games", flush=True)
        if reported:
            print(f"reported: {len(reported)} games", flush=True)

    trainer = G2POTrainer(
        model=model_args.model_name_or_path,
        args=args,
        train_dataset=tasks_dataset(train),
        eval_dataset=tasks_dataset(held_out),
        environment_factory=partial(TextWorldEnvironment, cache_dir=script_args.cache_dir),
        prompt_template=TEXTWORLD_PROMPT,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
        card_facts={
            "Training games": f"{len(train)} of kind {kind}",
            "Held-out games": f"{len(reported or held_out)}",
        },
    )
    settings = {"script": asdict(script_args), "model": asdict(model_args)}
    settings["evaluation"] = {
        "environment": "textworld",
        "panel": kind,
        "panel_options": {
            **{"number": len(reported) or chosen, "skip": chosen if reported else 0},
            "cache_dir": kept_path(script_args.cache_dir),
        },
    }
    report_dataset = tasks_dataset(reported) if reported else None
    run_recipe(trainer, checkpoint, settings, dataset_name="TextWorld", report_dataset=report_dataset)


if __name__ == "__main__":
    main()

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

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from trl import ModelConfig, get_peft_config, get_quantization_config

from g2po_envs.sokoban import SOKOBAN_COMPACT_PROMPT, SOKOBAN_PROMPT, SokobanEnvironment, level_rows
from g2po_envs.sokoban.environment import RENDER
from g2po_envs.sokoban.exact import ExactAdvantage
from g2po_envs.sokoban.tiny import tiny_model_path
from g2po_trl import G2POConfig, G2POTrainer, tasks_dataset
from g2po_trl.cli.recipe import parse_arguments, run_recipe, starting_point
from g2po_trl.utils.options import Options, option

DEFAULT_CONFIG = Path(__file__).parent / "sokoban" / "tiny.yaml"
PROMPTS = {"full": SOKOBAN_PROMPT, "compact": SOKOBAN_COMPACT_PROMPT}


@dataclass
class ScriptArguments(Options):
    level_size: str = option("'tiny' and 'small' (one box), 'medium' and 'large' (two boxes).", "small")
    num_levels: int = option("Training levels.", 320, within="[1, inf)")
    num_eval_levels: int = option(
        "Held-out levels, none of them a rotated or mirrored training level.", 192, within="[1, inf)"
    )
    num_report_levels: int | None = option(
        "Number of levels to report success on. None: those of evaluations.", None, within="[1, inf)"
    )
    prompt: str = option("Wording of prompts; compact for small models.", "full", choices=tuple(PROMPTS))
    positions: bool = option("Add a line with the positions of boxes and goals relative to the player.", False)
    render: str = option("How the grid is shown.", "text", choices=RENDER)
    end_when_lost: bool = option("End an episode as soon as it cannot be solved any more.", False)
    exact_distances: bool = option("Compute values from exact distances instead of mean returns.", False)


TYPES = (ScriptArguments, G2POConfig, ModelConfig)


def main() -> None:
    script_args, args, model_args = parse_arguments(TYPES, DEFAULT_CONFIG)
    checkpoint = starting_point(args)
    args.eval_on_start = checkpoint is None

    # data
    size, chosen, number = script_args.level_size, script_args.num_eval_levels, script_args.num_report_levels
    number = number or (chosen if args.load_best_model_at_end else 0)
    train = level_rows(size, script_args.num_levels)
    held_out = level_rows(size, chosen + number, held_out=True)
    held_out, reported = held_out[:chosen], held_out[chosen:]
    facts = {"Training levels": f"{len(train)} of size {size}", "Held-out levels": f"{len(reported or held_out)}"}
    if args.process_index == 0:
        print(f"train: {len(train)} levels of size {size}\nheld-out: {len(held_out)} levels", flush=True)
        if reported:
            print(f"reported: {len(reported)} levels", flush=True)

    shown = {name: getattr(script_args, name) for name in ("positions", "end_when_lost", "render")}
    factory = partial(SokobanEnvironment, **shown)

    trainer = G2POTrainer(
        model=model_args.model_name_or_path or str(tiny_model_path()),
        args=args,
        train_dataset=tasks_dataset(train),
        eval_dataset=tasks_dataset(held_out),
        environment_factory=factory,
        advantage_fn=ExactAdvantage(train, factory()) if script_args.exact_distances else None,
        prompt_template=PROMPTS[script_args.prompt],
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
        card_facts=facts,
    )
    settings = {"script": asdict(script_args), "model": asdict(model_args)}
    settings["evaluation"] = {
        "environment": "sokoban",
        "panel": size,
        "panel_options": {
            **{"number": len(reported) or chosen, "skip": chosen if reported else 0},
            **shown,
        },
    }
    report_dataset = tasks_dataset(reported) if reported else None
    run_recipe(trainer, checkpoint, settings, dataset_name="Sokoban", report_dataset=report_dataset)


if __name__ == "__main__":
    main()

"""Train an agent on WebShop by G2PO.

    python recipes/train_webshop.py         # a tiny model in a synthetic catalogue, CPU
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train_webshop.py \
        --config recipes/webshop/qwen2.5-1.5b.yaml --shop $WEBSHOP_DATA                    # the paper's run

Any field of `ScriptArguments`, `G2POConfig` and TRL's `ModelConfig` is a flag and a YAML key; flags win.
`--resume-from-checkpoint auto` continues the run in `output_dir` if there is one.
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from trl import ModelConfig, get_peft_config, get_quantization_config

from g2po_envs.webshop import WEBSHOP_COMPACT_PROMPT, WEBSHOP_PROMPT, ShopSource, WebshopEnvironment
from g2po_envs.webshop.nouns import spacy_nouns, textblob_nouns
from g2po_envs.webshop.tiny import tiny_model_path
from g2po_trl import G2POConfig, G2POTrainer, tasks_dataset
from g2po_trl.cli.recipe import parse_arguments, run_recipe, starting_point
from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.options import Options, option

DEFAULT_CONFIG = Path(__file__).parent / "webshop" / "tiny.yaml"
PROMPTS = {"full": WEBSHOP_PROMPT, "compact": WEBSHOP_COMPACT_PROMPT}
NOUNS = {"textblob": textblob_nouns, "spacy": spacy_nouns}


@dataclass
class ScriptArguments(Options):
    shop: str | None = option("Folder of the official data. None: a synthetic catalogue.", None)
    shop_size: str = option("Size of the official data: 'small' (1,000 products) or 'full'.", "small")
    goals: str = option("'synthetic' or 'human' (written by people).", "synthetic")
    shop_seed: int = option("Seed of the synthetic catalogue, of prices and price limits.", 0)
    num_goals: int | None = option("Training goals. None: all.", None, within="[1, inf)")
    num_eval_goals: int = option("Held-out goals, of other products.", 192, within="[1, inf)")
    num_report_goals: int | None = option(
        "Number of goals to report success on. None: those of evaluations.", None, within="[1, inf)"
    )
    prompt: str = option("Wording of prompts; compact for small models.", "full", choices=tuple(PROMPTS))
    partial_reward: bool = option("Reward partial scores too, not only a full score.", False)
    plain: bool = option("Lower-case texts, and products clicked by position: for tiny models.", False)
    nouns: str = option("Tagger that finds nouns of titles for the score.", "textblob", choices=tuple(NOUNS))


TYPES = (ScriptArguments, G2POConfig, ModelConfig)


def main(
    types: tuple[type, ...] = TYPES,
    trainer_class: type[G2POTrainer] = G2POTrainer,
    default_config: Path = DEFAULT_CONFIG,
) -> None:
    script_args, args, model_args = parse_arguments(types, default_config)
    checkpoint = starting_point(args)
    args.eval_on_start = checkpoint is None

    # data
    if script_args.shop is None and script_args.shop_size != "small":
        raise G2POError(f"shop_size is {script_args.shop_size!r}: it has no effect without shop, leave it out")
    if script_args.shop is None:
        source = ShopSource(goals=script_args.goals, seed=script_args.shop_seed)
    else:
        source = ShopSource.official(script_args.shop, script_args.shop_size, script_args.goals, script_args.shop_seed)
    train = source.rows("train", script_args.num_goals)
    chosen, number = script_args.num_eval_goals, script_args.num_report_goals
    number = number or (chosen if args.load_best_model_at_end else 0)
    held_out = source.rows("held-out", chosen + number)
    held_out, reported = held_out[:chosen], held_out[chosen:]
    if args.process_index == 0:
        print(f"train: {source.summary(train)}\nheld-out: {source.summary(held_out)}", flush=True)
        if reported:
            print(f"reported: {source.summary(reported)}", flush=True)

    trainer = trainer_class(
        model=model_args.model_name_or_path or str(tiny_model_path()),
        args=args,
        train_dataset=tasks_dataset(train),
        eval_dataset=tasks_dataset(held_out),
        environment_factory=partial(
            WebshopEnvironment,
            source,
            partial_reward=script_args.partial_reward,
            nouns=NOUNS[script_args.nouns],
            plain=script_args.plain,
        ),
        prompt_template=PROMPTS[script_args.prompt],
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
        card_facts={"Training goals": source.summary(train), "Held-out goals": source.summary(held_out)},
    )
    settings = {"script": asdict(script_args), "model": asdict(model_args)}
    settings |= {"train_manifest": source.summary(train), "eval_manifest": source.summary(held_out)}
    settings["evaluation"] = {
        "environment": "webshop",
        "panel": str(Path(script_args.shop).expanduser().absolute()) if script_args.shop else "invented",
        "panel_options": {
            **{"number": len(reported) or chosen, "skip": chosen if reported else 0, "seed": script_args.shop_seed},
            **{"size": script_args.shop_size, "goals": script_args.goals, "nouns": script_args.nouns},
            **{"plain": script_args.plain, "partial_reward": script_args.partial_reward},
        },
    }
    report_dataset = tasks_dataset(reported) if reported else None
    run_recipe(trainer, checkpoint, settings, dataset_name="WebShop", report_dataset=report_dataset)


if __name__ == "__main__":
    main()

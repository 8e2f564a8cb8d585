"""Train an agent on WebShop by G2PO.

    python recipes/train_webshop.py         # a tiny model in a synthetic catalogue, CPU
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train_webshop.py \
        --config recipes/webshop/qwen2.5-1.5b.yaml --shop $WEBSHOP_DATA                    # the paper's run

Any field of `ScriptArguments`, `G2POConfig` and TRL's `ModelConfig` is a flag and a YAML key; flags win.
`--resume-from-checkpoint auto` continues the run in `output_dir` if there is one.
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trl import ModelConfig

from g2po_envs.webshop.environment import WebshopEnvironment
from g2po_envs.webshop.nouns import NOUNS
from g2po_envs.webshop.prompts import PROMPTS
from g2po_envs.webshop.source import ShopSource
from g2po_envs.webshop.tiny import tiny_model_path
from g2po_trl import G2POConfig
from g2po_trl.cli.recipe import Task, split_panel, train
from g2po_trl.utils.options import Options, option, require


@dataclass
class ScriptArguments(Options):
    shop: str | None = option("Folder of the official data. None: a synthetic catalogue.", None)
    shop_size: str = option("Size of the official data: 'small' (1,000 products) or 'full'.", "small")
    goals: str = option("'synthetic' or 'human' (written by people).", "synthetic")
    shop_seed: int = option("Seed of the synthetic catalogue, of prices and price limits.", 0)
    num_goals: int | None = option("Training goals. None: all.", None, within="[1, inf)")
    num_eval_goals: int = option("Held-out goals, of other products.", 192, within="[1, inf)")
    num_report_goals: int | None = option("Reported goals. None: those of evaluations.", None, within="[1, inf)")
    prompt: str = option("Wording of prompts; compact for small models.", "full", choices=tuple(PROMPTS))
    partial_reward: bool = option("Reward partial scores too, not only a full score.", False)
    plain: bool = option("Lower-case texts, and products clicked by position: for tiny models.", False)
    nouns: str = option("Tagger that finds nouns of titles for the score.", "textblob", choices=tuple(NOUNS))


TYPES = (ScriptArguments, G2POConfig, ModelConfig)
DEFAULT_CONFIG = Path(__file__).parent / "webshop" / "tiny.yaml"


def tasks(options: ScriptArguments, args: G2POConfig) -> Task:
    """Return the goals."""
    has_effect = options.shop is not None or options.shop_size == "small"
    require(has_effect, "shop_size", options.shop_size, "it has no effect without shop, leave it out")
    if options.shop is None:
        source = ShopSource(goals=options.goals, seed=options.shop_seed)
    else:
        source = ShopSource.official(options.shop, options.shop_size, options.goals, options.shop_seed)
    rows = source.rows("train", options.num_goals)
    held_out, reported, panel = split_panel(
        partial(source.rows, "held-out"), options.num_eval_goals, options.num_report_goals, args
    )
    shown = {"plain": options.plain, "partial_reward": options.partial_reward}
    panel |= {"seed": options.shop_seed, "size": options.shop_size, "goals": options.goals, "nouns": options.nouns}
    return Task(
        train=rows,
        held_out=held_out,
        reported=reported,
        facts={"Training goals": source.summary(rows), "Held-out goals": source.summary(held_out)},
        trainer={"environment_factory": partial(WebshopEnvironment, source, nouns=NOUNS[options.nouns], **shown)},
        prompt=PROMPTS[options.prompt],
        evaluation={
            "environment": "webshop",
            "panel": str(Path(options.shop).expanduser().absolute()) if options.shop else "invented",
            "panel_options": {**panel, **shown},
        },
        settings={"train_manifest": source.summary(rows), "eval_manifest": source.summary(held_out)},
    )


if __name__ == "__main__":
    train(tasks, TYPES, DEFAULT_CONFIG, "WebShop", tiny_model_path())

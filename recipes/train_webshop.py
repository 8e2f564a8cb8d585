"""Train an agent on WebShop by G2PO.

    python recipes/train_webshop.py         # a tiny model in a synthetic catalogue, CPU
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train_webshop.py \
        --config recipes/webshop/qwen2.5-1.5b.yaml --shop $WEBSHOP_DATA                    # the paper's run
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import dataclass
from pathlib import Path

from g2po_envs.webshop.nouns import NOUNS
from g2po_envs.webshop.prompts import PROMPTS
from g2po_envs.webshop.source import ShopSource
from g2po_envs.webshop.tiny import tiny_model_path
from g2po_trl import G2POConfig
from g2po_trl.cli.recipe import Recipe, Task, numbered_panels
from g2po_trl.utils.options import Options, option, require


@dataclass
class ScriptArguments(Options):
    shop: str | None = option("Folder of the official data. None: a synthetic catalogue.", None)
    shop_size: str = option("Size of the official data: 'small' (1,000 products) or 'full'.", "small")
    goals: str = option("'synthetic' or 'human' (written by people).", "synthetic")
    num_goals: int | None = option("Training goals. None: all.", None, within="[1, inf)")
    num_eval_goals: int = option("Held-out goals, of other products.", 192, within="[1, inf)")
    num_report_goals: int | None = option("Reported goals. None: those of evaluations.", None, within="[1, inf)")
    prompt: str = option("Wording of prompts; compact for small models.", "full", choices=tuple(PROMPTS))
    partial_reward: bool = option("Reward partial scores too, not only a full score.", False)
    plain: bool = option("Lower-case texts, and products clicked by position: for tiny models.", False)
    nouns: str = option("Tagger that finds nouns of titles for the score.", "textblob", choices=tuple(NOUNS))


def tasks(options: ScriptArguments, args: G2POConfig) -> Task:
    """Return the goals."""
    shop, size, goals = options.shop and Path(options.shop).expanduser().absolute(), options.shop_size, options.goals
    require(shop or size == "small", "shop_size", size, "it has no effect without shop, leave it out")
    source = ShopSource.official(shop, size, goals) if shop else ShopSource(goals=goals)
    shown = {"size": size, "goals": goals, "nouns": options.nouns}
    shown |= {"plain": options.plain, "partial_reward": options.partial_reward}
    name, rows = str(shop or "invented"), source.rows("train", options.num_goals)
    return Task.of_panels(
        "webshop",
        *numbered_panels(name, shown, options.num_eval_goals, options.num_report_goals, args),
        train=rows,
        facts={"Training goals": source.summary(rows)},
        trainer={"prompt_template": PROMPTS[options.prompt]},
    )


RECIPE = Recipe(tasks, ScriptArguments, "webshop/tiny", "WebShop", tiny_model_path())

if __name__ == "__main__":
    RECIPE.train()

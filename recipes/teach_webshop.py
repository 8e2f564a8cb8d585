"""Fine-tune a language model on an expert's actions in WebShop, as a start for reinforcement learning.

    g2po teach webshop                                  # SmolLM2-135M, two CPU cores or a small GPU
    g2po teach webshop --model Qwen/Qwen2.5-0.5B-Instruct --use-peft true

The model is trained on single actions in random order until it reaches a success rate of `--target-success` on other
training goals. Then: g2po train webshop --config smollm2-135m
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import dataclass
from functools import partial

from trl import ModelConfig, SFTConfig

from g2po_envs.webshop.demonstrations import demonstrate
from g2po_envs.webshop.environment import WebshopEnvironment
from g2po_envs.webshop.prompts import PROMPTS
from g2po_envs.webshop.source import ShopSource
from g2po_recipes.smollm2 import smollm2_path
from g2po_trl.cli.recipe import parse_arguments
from g2po_trl.teach.sft import teach_states
from g2po_trl.teach.validation import TeachingArguments
from g2po_trl.utils.options import option


@dataclass
class ScriptArguments(TeachingArguments):
    num_goals: int = option("Training goals, as in the training recipe.", 320, within="[1, inf)")


TYPES = (ScriptArguments, SFTConfig, ModelConfig)


def lesson(options: ScriptArguments, seed: int) -> tuple:
    """Return the environment, the goals, the wording of prompts, and what shows an expert's actions for goals."""
    # The expert reads lower-case texts and clicks products by position.
    factory = partial(WebshopEnvironment, ShopSource(), partial_reward=True, plain=True)
    shows = partial(demonstrate, factory(), seed=seed, max_turns=options.max_turns)
    return factory, ShopSource().rows("train", options.num_goals), PROMPTS[options.prompt], shows


if __name__ == "__main__":
    teach_states(parse_arguments(TYPES, "teach/webshop"), smollm2_path, lesson)

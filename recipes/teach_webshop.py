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
from g2po_trl.runs.ownership import held
from g2po_trl.teach.exam import SuccessEvaluation, TeachingArguments
from g2po_trl.teach.sft import draw_samples, load_base_model, run_teaching
from g2po_trl.utils.options import option


@dataclass
class ScriptArguments(TeachingArguments):
    num_goals: int = option("Training goals, as in the training recipe.", 320, within="[1, inf)")


TYPES = (ScriptArguments, SFTConfig, ModelConfig)


def main() -> None:
    options, args, model_args = parse_arguments(TYPES, "teach/webshop")
    with held(args.output_dir, "output_dir"):
        base_model = load_base_model(options, args, model_args, smollm2_path)
        # The expert reads lower-case texts and clicks products by position.
        factory = partial(WebshopEnvironment, ShopSource(), partial_reward=True, plain=True)
        to_show, to_examine = options.split(ShopSource().rows("train", options.num_goals), args.seed)
        exam = SuccessEvaluation(factory, to_examine, PROMPTS[options.prompt], options)
        states = demonstrate(factory(), to_show, args.seed, options.max_turns)
        run_teaching(args, model_args, base_model, draw_samples(states, exam, base_model, args.seed), exam)


if __name__ == "__main__":
    main()

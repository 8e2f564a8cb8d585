"""Fine-tune a language model on an expert's actions in ALFWorld, as a start for reinforcement learning.

    g2po teach alfworld                                  # SmolLM2-135M, two CPU cores or a small GPU
    g2po teach alfworld --model Qwen/Qwen2.5-0.5B-Instruct --use-peft true

An expert plays training games, and the model is trained on single actions in random order until it reaches a success
rate of `--target-success` on other training games. Then: g2po train alfworld --config smollm2-135m

Any field of `ScriptArguments`, TRL's `SFTConfig` and `ModelConfig` is a flag and a YAML key; flags win.
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trl import ModelConfig, SFTConfig

from g2po_envs.alfworld import AlfworldEnvironment
from g2po_envs.alfworld.demonstrations import demonstrate
from g2po_envs.alfworld.games import SIZES, generate_games
from g2po_envs.alfworld.prompts import PROMPTS
from g2po_recipes.smollm2 import smollm2_path
from g2po_trl.cli.recipe import parse_arguments
from g2po_trl.runs.ownership import held
from g2po_trl.teach.exam import SuccessEvaluation, TeachingArguments
from g2po_trl.teach.sft import draw_samples, load_base_model, run_teaching
from g2po_trl.utils.options import option

DEFAULT_CONFIG = "teach/alfworld"


@dataclass
class ScriptArguments(TeachingArguments):
    num_games: int = option("Training games to generate, as in the training recipe.", 320, within="[1, inf)")
    game_size: str = option("Size of generated games.", "tiny", choices=tuple(SIZES))
    game_seed: int = option("Seed of generated games.", 0)
    intro: bool = option("First observation: the whole introduction (true) or only the room (false).", False)
    hidden_actions: list[str] = option("First words of actions left out of the list.", ["help"])


TYPES = (ScriptArguments, SFTConfig, ModelConfig)


def main() -> None:
    options, args, model_args = parse_arguments(TYPES, DEFAULT_CONFIG)
    root = Path(options.cache_dir).expanduser() / f"alfworld-{options.game_size}-{options.game_seed}"
    folder, number = root / f"train-{options.num_games}", options.num_games
    with held(args.output_dir, "output_dir"):
        to_teach = load_base_model(options, args, model_args, smollm2_path)
        games = generate_games(folder, "train", number, seed=options.game_seed, size=options.game_size)
        factory = partial(
            AlfworldEnvironment, games, hidden_actions=tuple(options.hidden_actions), intro=options.intro
        )
        to_show, to_examine = options.split(games.rows(), args.seed)
        exam = SuccessEvaluation(factory, to_examine, PROMPTS[options.prompt], options)
        shown = demonstrate(factory(), to_show, 1, args.seed, options.max_turns, options.history_length)
        samples = draw_samples(shown, exam, to_teach, args.seed)
        run_teaching(args, model_args, to_teach, samples, exam)


if __name__ == "__main__":
    main()

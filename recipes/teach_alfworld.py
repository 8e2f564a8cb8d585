"""Fine-tune a language model on an expert's actions in ALFWorld, as a start for reinforcement learning.

    g2po teach alfworld                                  # SmolLM2-135M, two CPU cores or a small GPU
    g2po teach alfworld --model Qwen/Qwen2.5-0.5B-Instruct --use-peft true

The model is trained on single actions in random order until it reaches a success rate of `--target-success` on other
training games. Then: g2po train alfworld --config smollm2-135m
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import dataclass
from functools import partial

from trl import ModelConfig, SFTConfig

from g2po_envs.alfworld.demonstrations import demonstrate
from g2po_envs.alfworld.environment import AlfworldEnvironment
from g2po_envs.alfworld.games import SIZES
from g2po_envs.alfworld.panels import find_games
from g2po_envs.alfworld.prompts import PROMPTS
from g2po_recipes.smollm2 import smollm2_path
from g2po_trl.cli.recipe import parse_arguments
from g2po_trl.teach.sft import teach_states
from g2po_trl.teach.validation import TeachingArguments
from g2po_trl.utils.options import option


@dataclass
class ScriptArguments(TeachingArguments):
    num_games: int = option("Training games to generate, as in the training recipe.", 320, within="[1, inf)")
    game_size: str = option("Size of generated games.", "tiny", choices=tuple(SIZES))
    intro: bool = option("First observation: the whole introduction (true) or only the room (false).", False)
    hidden_actions: list[str] = option("First words of actions left out of the list.", ["help"])


TYPES = (ScriptArguments, SFTConfig, ModelConfig)


def lesson(options: ScriptArguments, seed: int) -> tuple:
    """Return the environment, the games, the wording of prompts, and what shows an expert's actions in games."""
    games = find_games("generated", options.num_games, 0, options.game_size, options.cache_dir, "train")
    factory = partial(AlfworldEnvironment, games, hidden_actions=tuple(options.hidden_actions), intro=options.intro)
    lengths = {"max_turns": options.max_turns, "history_length": options.history_length}
    shows = partial(demonstrate, factory(), episodes=1, seed=seed, **lengths)
    return factory, games.rows(), PROMPTS[options.prompt], shows


if __name__ == "__main__":
    teach_states(parse_arguments(TYPES, "teach/alfworld"), smollm2_path, lesson)

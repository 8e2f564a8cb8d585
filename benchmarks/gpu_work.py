"""What a GPU is given to do: step samples as long as the paper's, a trainer of them, and what recipes say it takes."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from trl import ModelConfig, get_peft_config

from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import G2POConfig, G2POTrainer, Observation, Step, StepResult, TextEnvironment, Trajectory
from g2po_trl.recipe import use_model_arguments
from g2po_trl.rollout.player import RolloutStats

RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "alfworld"
GROUP = 8


def synthetic_trajectories(
    groups: int = 16,
    turns: int = 6,
    vocabulary: int = 50_000,
    lengths: tuple[int, int, int, int] = (280, 30, 390, 150),
    seed: int = 0,
) -> list[Trajectory]:
    """Episodes of random tokens in groups of 8, which branch: in turn t a member is in one of t + 1 states.

    Args:
        lengths: tokens of what all prompts begin with, of the task, and, in the mean, of the rest of a prompt (the
            same for members in the same state) and of a reply. 700 and 150 together are what `costs.Work` assumes.
    """
    rng = np.random.default_rng(seed)
    constant, task, state, reply = lengths

    def tokens(mean: int) -> list[int]:
        length = int(np.clip(rng.lognormal(np.log(mean) - 0.045, 0.3), 2, 3.4 * mean))  # of this mean
        return rng.integers(3, vocabulary, length).tolist()

    start, found = rng.integers(3, vocabulary, constant).tolist(), []
    for group in range(groups):
        of_task = [*start, *rng.integers(3, vocabulary, task).tolist()]
        states = [[[*of_task, *tokens(state)] for _ in range(turn + 1)] for turn in range(turns)]
        for member in range(GROUP):
            steps = []
            for turn in range(turns):
                at = int(rng.integers(turn + 1))
                name = f"{turn}.{at}"
                steps.append(Step(name, "go", prompt_ids=states[turn][at], completion_ids=tokens(reply)))
            won = bool(rng.integers(2)) if member > 1 else bool(member)  # some of each group: advantages are not all 0
            outcome = "success" if won else "failure"
            found.append(Trajectory(f"task {group}", steps, 10.0 * won, outcome, group=group))
    return found


class NeverPlayed(TextEnvironment):
    """Lets a trainer be made: its episodes are recorded ones."""

    def reset(self, seed):
        return Observation(f"room {seed}", task="go")

    def step(self, action):
        return StepResult("end", reward=0.0, terminated=True)


class RecordedTrainer(G2POTrainer):
    """Trains on synthetic trajectories."""

    turns, vocabulary, lengths = 6, 50_000, (280, 30, 390, 150)

    def play(self, tasks, sampling=None, groups=None, description="rollout", seeds=None):
        made = synthetic_trajectories(len(tasks) // GROUP, self.turns, self.vocabulary, self.lengths)
        return made, RolloutStats()


def recipe_trainer(recipe: Path, output: Path, model: PreTrainedModel | str, **options: Any) -> RecordedTrainer:
    """A trainer with a recipe's settings on synthetic episodes; without vLLM, and two optimizer steps long.

    Args:
        model: or its folder; with all weights trained and `beta` above 0 it must be a folder.
        options: fields of `G2POConfig` in place of the recipe's.
    """
    given = yaml.safe_load(recipe.read_text())

    def part(kind: type) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name in {f.name for f in dataclasses.fields(kind)}}

    ours = {
        "use_vllm": False,
        "output_dir": str(output),
        "max_steps": 2,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "load_best_model_at_end": False,
        "save_trajectories": False,
        "num_environment_workers": 1,
        "disable_tqdm": True,
    }
    args = G2POConfig(**{**part(G2POConfig), **ours, **options})
    model_args = ModelConfig(**part(ModelConfig))
    if isinstance(model, str):
        use_model_arguments(args, model_args)
    return RecordedTrainer(
        model,
        args,
        Dataset.from_list([{"seed": seed} for seed in range(64)]),
        environment_factory=NeverPlayed,
        processing_class=AutoTokenizer.from_pretrained(tiny_model_path()),
        peft_config=get_peft_config(model_args),
    )


def memory_of_recipe(recipe: Path) -> dict[str, float]:
    """GB that the comment at the head of a recipe counts, by part: trainer, vLLM, update, CUDA; and their `sum`."""
    found: dict[str, float] = {}
    part = ""
    for line in recipe.read_text().splitlines():
        if not line.startswith("#"):
            break
        part = next((m[1] for m in [re.match(r"#   (\w+) ", line)] if m), part)
        number = re.search(r"\s{2,}([\d.]+)(?: of \d+)? GB$", line)
        if number and part:
            found[part] = round(found.get(part, 0.0) + float(number[1]), 1)
            part = "" if part == "sum" else part
    return found


def flash_attentions() -> list[str]:
    """Names of flash attention's implementations that this machine has."""
    found = [
        name
        for name, there in (
            ("flash_attention_2", is_flash_attn_2_available()),
            ("flash_attention_3", is_flash_attn_3_available()),
        )
        if there
    ]
    if not found and importlib.util.find_spec("kernels"):  # from the Hub or its cache
        found.append("kernels-community/flash-attn2")
    return found

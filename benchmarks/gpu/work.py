"""What a GPU is given to do: step samples as long as the paper's, a trainer of them, and what recipes say it takes."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from trl import ModelConfig, get_peft_config

from benchmarks.never_played import NeverPlayed
from benchmarks.speed.layouts import random_model
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import G2POConfig, G2POTrainer, Step, Trajectory
from g2po_trl.rollout.stats import RolloutStats
from g2po_trl.rollout.strategy import Rollout, SynchronousRollout

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "alfworld"
GROUP = 8
SCORE = 120.0  # below zero: exp(88.8) is the first that is no float32


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
            same for members in the same state) and of a completion. 700 and 150 together are what `costs.Work`
            assumes.
    """
    rng = np.random.default_rng(seed)
    constant, task, state, completion = lengths

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
                steps.append(Step(name, "go", prompt_ids=states[turn][at], completion_ids=tokens(completion)))
            won = bool(rng.integers(2)) if member > 1 else bool(member)  # some of each group: advantages are not all 0
            outcome = "success" if won else "failure"
            found.append(Trajectory(f"task {group}", steps, 10.0 * won, outcome, group=group))
    return found


def synthetic_conversations(
    groups: int = 16,
    turns: int = 12,
    vocabulary: int = 50_000,
    lengths: tuple[int, int, int, int] = (700, 60, 0, 150),
    seed: int = 0,
) -> list[Trajectory]:
    """Episodes of random tokens in groups of 8, each a conversation that grows: a turn's prompt holds all before it.

    Args:
        lengths: tokens of what a group begins with, of an observation, unused, and of a completion; the first is the
            same for all, the others in the mean.
    """
    rng = np.random.default_rng(seed)
    start, observation, _, completion = lengths

    def tokens(mean: int) -> list[int]:
        return rng.integers(3, vocabulary, max(2, int(rng.lognormal(np.log(mean) - 0.045, 0.3)))).tolist()

    found = []
    for group in range(groups):
        first = rng.integers(3, vocabulary, start).tolist()
        for member in range(GROUP):
            prompt, steps = first, []
            for turn in range(turns):
                steps.append(Step(f"{group}.{turn}", "go", prompt_ids=prompt, completion_ids=tokens(completion)))
                prompt = [*prompt, *steps[-1].completion_ids, *tokens(observation)]
            won = bool(rng.integers(2)) if member > 1 else bool(member)
            outcome = "success" if won else "failure"
            found.append(Trajectory(f"task {group}", steps, 10.0 * won, outcome, group=group))
    return found


def conversation_tokens(conversation: Trajectory) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation that grows, and 1 for each that the model wrote."""
    last = conversation.steps[-1]
    ids = [*last.prompt_ids, *last.completion_ids]
    written = [0] * len(ids)
    for step in conversation.steps:
        start = len(step.prompt_ids)
        written[start : start + len(step.completion_ids)] = [1] * len(step.completion_ids)
    return ids, written


def as_one_row(conversation: Trajectory) -> Trajectory:
    """Return a conversation as a single step, of all after its first prompt: one row, as in TRL's trainer."""
    ids, _ = conversation_tokens(conversation)
    start = len(conversation.steps[0].prompt_ids)
    step = Step("all", "go", prompt_ids=ids[:start], completion_ids=ids[start:])
    return Trajectory(
        conversation.task_id, [step], conversation.reward, conversation.outcome, group=conversation.group
    )


class RecordedRollout(SynchronousRollout):
    """Synthetic trajectories in place of episodes."""

    trainer: RecordedTrainer

    def collect(self, rows, groups, iteration):
        made = self.trainer
        found = synthetic_trajectories(len(rows) // GROUP, made.turns, made.vocabulary, made.lengths)
        return Rollout(found, RolloutStats())


class RecordedTrainer(G2POTrainer):
    """Trains on synthetic trajectories."""

    turns, vocabulary, lengths = 6, 50_000, (280, 30, 390, 150)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.strategy = RecordedRollout(self.strategy.context)
        self.strategy.trainer = self


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
        own = {"revision": model_args.model_revision, "attn_implementation": model_args.attn_implementation}
        args.model_init_kwargs = {"dtype": model_args.dtype, **own, **(args.model_init_kwargs or {})}
    return RecordedTrainer(
        model,
        args,
        Dataset.from_list([{"seed": seed} for seed in range(64)]),
        environment_factory=NeverPlayed,
        processing_class=AutoTokenizer.from_pretrained(tiny_model_path()),
        peft_config=get_peft_config(model_args),
    )


def hybrid_model(tiny: bool = False) -> PreTrainedModel:
    """A model of Qwen3.5-0.8B's shape with random weights: three layers in four are gated delta rules."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    hidden, heads, size, layers = (128, 2, 64, 4) if tiny else (1024, 8, 256, 24)
    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=2048 if tiny else 248320,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=size,
        linear_num_key_heads=2 * heads,
        linear_num_value_heads=2 * heads,
        linear_key_head_dim=size // 2,
        linear_value_head_dim=size // 2,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def massive_model(shape: tuple[int, ...] = (64, 128, 2, 2, 1, 2048)) -> PreTrainedModel:
    """A small Qwen2 whose attention scores are all about -120, as those of some heads of Qwen2.5 are.

    Biases of queries and keys in the two places of a head that positions hardly turn do it: each token's logsumexp is
    then below -88.7, where exp(-logsumexp) is no float32 any more.
    """
    model = random_model(shape)
    size = model.config.hidden_size // model.config.num_attention_heads
    bias = (SCORE * size**0.5) ** 0.5
    for layer in model.model.layers:
        for projection, sign in ((layer.self_attn.q_proj, 1), (layer.self_attn.k_proj, -1)):
            with torch.no_grad():
                projection.bias.view(-1, size)[:, size // 2 - 1] = sign * bias
    return model


@contextmanager
def logsumexps() -> Iterator[list[float]]:
    """The smallest logsumexp of a query's scores in each call of scaled dot-product attention in here."""
    attention, found = torch.nn.functional.scaled_dot_product_attention, []

    def measured(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **kwargs):
        scores = query.float() @ key.float().transpose(-1, -2).repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        seen = torch.ones_like(scores, dtype=torch.bool).tril(key.shape[-2] - query.shape[-2])
        mask = torch.zeros_like(scores).masked_fill(~seen, -torch.inf) if attn_mask is None else attn_mask.float()
        found.append((scores + mask).logsumexp(-1).min().item())
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = measured
    try:
        yield found
    finally:
        torch.nn.functional.scaled_dot_product_attention = attention


def massive_trainer(output: Path, **options: Any) -> RecordedTrainer:
    """A trainer of `massive_model` on short episodes, with the settings of the 1.5B recipe, for its two steps."""
    recorded = recipe_trainer(
        RECIPES / "qwen2.5-1.5b.yaml", output, massive_model(), beta=0.0, max_tokens_per_micro_batch=4096, **options
    )
    recorded.turns, recorded.vocabulary, recorded.lengths = 3, 2000, (280, 4, 40, 12)
    return recorded


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

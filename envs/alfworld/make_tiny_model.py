"""Make the tiny model: `python -m g2po_envs.alfworld.make_tiny_model --output FOLDER`.

Generated training games -> demonstrations -> tokenizer -> supervised fine-tuning in three phases, by TRL's SFTTrainer:

1. *read*: the loss is on the whole sequence. Prompts repeat themselves (rooms, names, numbers), and predicting them
   teaches the heads that find and copy a name far faster than the few tokens of a reply do.
2. *act*: the loss is on the reply, the expert's action.
3. *loosen*: the same with a share of the labels replaced by any admissible action, which leaves a policy that still
   explores: well-formed, admissible, undecided. What to do is then for reinforcement learning to find out.

Everything follows from `--seed`; training runs on one thread, on the CPU.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from datasets import IterableDataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from g2po_envs.alfworld.augmentation import augment
from g2po_envs.alfworld.demonstrations import Demonstration, demonstrate, load, save
from g2po_envs.alfworld.games import generate_games
from g2po_envs.alfworld.prompts import ALFWORLD_COMPACT_PROMPT
from g2po_envs.alfworld.tiny import HISTORY_LENGTH, tiny_environment
from g2po_envs.alfworld.tiny_tokenizer import train_tokenizer

REPLY = "<think></think><action>{action}</action><|im_end|>"


@dataclass(frozen=True)
class Phase:
    """A stretch of training. `noise`: share of labels that are any admissible action."""

    name: str
    steps: int
    learning_rate: float
    whole_sequence: bool = False
    noise: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """What makes the tiny model, but for the seed."""

    num_games: int = 2000
    size: str = "tiny"
    game_seed: int = 1000  # not the training recipe's: other games
    episodes_per_game: int = 3
    vocab_size: int = 1024  # at most
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 3
    batch_size: int = 32
    bf16: bool = True  # autocast: half as long again without it on a CPU that has AMX
    phases: tuple[Phase, ...] = (
        Phase("read", 1000, 2e-3, whole_sequence=True),
        Phase("act", 3200, 2e-3),
        Phase("loosen", 500, 5e-4, noise=0.3),
    )


def build_model(recipe: Recipe, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """A Qwen2 with heads of 32, tied embeddings and fresh weights."""
    heads = recipe.hidden_size // 32
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config._attn_implementation = "eager"  # on a CPU, short sequences: faster than sdpa under autocast
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def prompt_message(demonstration: Demonstration) -> str:
    """The user message of the prompt, as the rollout builds it."""
    (message,) = ALFWORLD_COMPACT_PROMPT.messages(
        demonstration.observation,
        task=demonstration.task,
        admissible_actions=demonstration.actions,
        history=demonstration.history[-HISTORY_LENGTH:],
        steps_taken=demonstration.steps_taken,
    )
    return message["content"]


def prompt_text(demonstration: Demonstration, tokenizer: Qwen2Tokenizer) -> str:
    """The prompt as the model reads it."""
    messages = [{"role": "user", "content": prompt_message(demonstration)}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def samples(
    demonstrations: Sequence[Demonstration], tokenizer: Qwen2Tokenizer, phase: Phase, batch: int, seed: int
) -> Iterator[dict[str, list[int]]]:
    """Endless training samples, each time with other names; neighbours of similar length share a batch."""
    rng = random.Random(f"{seed}-{phase.name}")
    deck: list[Demonstration] = []
    while True:
        chunk = []
        while len(chunk) < 32 * batch:
            if not deck:
                deck = list(demonstrations)
                rng.shuffle(deck)
            shown = augment(deck.pop(), rng)
            if rng.random() < phase.noise:
                shown = replace(shown, expert=rng.choice(shown.actions))
            chunk.append(shown)
        prompts = tokenizer([prompt_text(shown, tokenizer) for shown in chunk], add_special_tokens=False)["input_ids"]
        replies = tokenizer([REPLY.format(action=s.expert) for s in chunk], add_special_tokens=False)["input_ids"]
        rows = [
            {"input_ids": p + r, "labels": (p if phase.whole_sequence else [-100] * len(p)) + r}
            for p, r in zip(prompts, replies)
        ]
        rows.sort(key=lambda row: len(row["input_ids"]))
        batches = [rows[i : i + batch] for i in range(0, len(rows), batch)]
        rng.shuffle(batches)
        for rows in batches:
            yield from rows


def train(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    demonstrations: Sequence[Demonstration],
    recipe: Recipe,
    seed: int,
    callbacks: Sequence[TrainerCallback] = (),
) -> None:
    """Run the phases one after the other."""
    for phase in recipe.phases:
        # Not by `gen_kwargs`: `datasets` takes a list in there for shards, and would read the endless first one only.
        stream = partial(samples, demonstrations, tokenizer, phase, recipe.batch_size, seed)
        with tempfile.TemporaryDirectory() as scratch:
            trainer = SFTTrainer(
                model=model,
                args=SFTConfig(
                    output_dir=scratch,
                    max_steps=phase.steps,
                    learning_rate=phase.learning_rate,
                    lr_scheduler_type="cosine",
                    warmup_steps=min(100, phase.steps // 5),
                    adam_beta2=0.98,
                    weight_decay=0.01,
                    per_device_train_batch_size=recipe.batch_size,
                    accelerator_config={"dispatch_batches": False},
                    max_length=None,
                    logging_steps=100,
                    save_strategy="no",
                    report_to="none",
                    use_cpu=True,
                    bf16=recipe.bf16,
                    gradient_checkpointing=False,
                    disable_tqdm=True,
                    seed=seed,
                ),
                train_dataset=IterableDataset.from_generator(stream),
                processing_class=tokenizer,
                callbacks=[*callbacks],
            )
            trainer.train()


def make_demonstrations(folder: Path, recipe: Recipe) -> list[Demonstration]:
    """Generate training games in `folder` and play them."""
    games = generate_games(folder, "train", recipe.num_games, seed=recipe.game_seed, size=recipe.size)
    return demonstrate(tiny_environment(games), games.rows(), recipe.episodes_per_game, recipe.game_seed)


def make(
    demonstrations: Sequence[Demonstration], recipe: Recipe, seed: int, callbacks: Sequence[TrainerCallback] = ()
) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    """Tokenizer and model from demonstrations."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    texts = (f"user\n{prompt_message(shown)}\nassistant\n" for shown in demonstrations)
    tokenizer = train_tokenizer(texts, recipe.vocab_size)
    model = build_model(recipe, tokenizer)
    train(model, tokenizer, demonstrations, recipe, seed, callbacks)
    return model, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=Path, help="JSON lines: read if the file exists, else written")
    args = parser.parse_args()

    recipe = Recipe()
    if args.demonstrations and args.demonstrations.exists():
        demonstrations = load(args.demonstrations)
    else:
        with tempfile.TemporaryDirectory() as folder:
            demonstrations = make_demonstrations(Path(folder, "games"), recipe)
        if args.demonstrations:
            save(args.demonstrations, demonstrations)
    model, tokenizer = make(demonstrations, recipe, args.seed)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()

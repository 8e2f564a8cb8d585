"""A tiny model from demonstrations: supervised fine-tuning in phases with TRL's SFTTrainer.

0. *repeat*, for tasks that consist mostly of copying: random tokens, and then parts of them again, which only copying
   predicts. If layers come from a model that copies (`Recipe.layers_of`), its heads adapt to the new words within a
   few hundred steps; from completions alone, such heads may never appear.
1. *read*: the loss is on the whole sequence. Prompts repeat themselves (names, numbers), and predicting them trains
   the heads that find and copy a name much faster than the few tokens of a completion do.
2. *act*: the loss is on the completion, the expert's action.
3. *loosen*: like *act*, but with a share of the labels replaced by random possible actions (label noise). The
   resulting policy still explores: its actions are well-formed and admissible, but random. At a low temperature,
   little of this randomness remains; an expert with incomplete knowledge leaves more to reinforcement learning.

The result depends only on the seed; training runs on one thread, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from datasets import IterableDataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from trl import SFTConfig, SFTTrainer

from g2po_envs.tiny.demonstration import Demonstration
from g2po_trl.prompts.template import PromptTemplate, last_steps
from g2po_trl.utils.json import write_json_lines

COMPLETION = "<think></think><action>{action}</action><|im_end|>"


@dataclass(frozen=True)
class Phase:
    """One phase of training.

    Args:
        noise: share of labels that are replaced by random admissible actions.
        repeat: number of different tokens in the repetitions that replace demonstrations.
    """

    name: str
    steps: int
    learning_rate: float
    whole_sequence: bool = False
    noise: float = 0.0
    repeat: int = 0


@dataclass(frozen=True)
class Recipe:
    """Architecture and training phases of a tiny model."""

    phases: tuple[Phase, ...]
    vocab_size: int = 1024  # at most
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 3
    batch_size: int = 32
    bf16: bool = False  # autocast: faster on a CPU that has AMX, far slower on others
    layers_of: Path | None = None  # a model of the same shape to begin with, but for the embeddings


@dataclass(frozen=True)
class Course:
    """Prompts of the training samples, and their random variation.

    Args:
        template, history_length: those of the rollout's prompt.
        vary: returns a demonstration in other, random words, with its actions in another order.
    """

    template: PromptTemplate
    history_length: int
    vary: Callable[[Demonstration, random.Random], Demonstration]

    def message(self, shown: Demonstration) -> str:
        """Return the user message of the rollout's prompt."""
        (message,) = self.template.messages(
            shown.observation,
            task=shown.task,
            admissible_actions=shown.actions,
            history=last_steps(shown.history, self.history_length),
            steps_taken=shown.steps_taken,
        )
        return message["content"]

    def prompt(self, shown: Demonstration, tokenizer: Qwen2Tokenizer) -> str:
        """Return the rendered prompt."""
        messages = [{"role": "user", "content": self.message(shown)}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def texts(self, demonstrations: Iterable[Demonstration]) -> Iterator[str]:
        """Return the texts that a tokenizer is trained on."""
        return (f"user\n{self.message(shown)}\nassistant\n" for shown in demonstrations)


def build_model(recipe: Recipe, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Return a Qwen2 model with heads of size 32, tied embeddings and random weights."""
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
    # On a CPU and for short sequences each is the faster one, with and without autocast.
    config._attn_implementation = "eager" if recipe.bf16 else "sdpa"
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    if recipe.layers_of is not None:
        source = Qwen2ForCausalLM.from_pretrained(recipe.layers_of, dtype=torch.float32).model
        model.model.layers.load_state_dict(source.layers.state_dict())
        model.model.norm.load_state_dict(source.norm.state_dict())
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=source.embed_tokens.weight.std().item())
    return model


def samples(
    course: Course,
    demonstrations: Sequence[Demonstration],
    tokenizer: Qwen2Tokenizer,
    phase: Phase,
    batch: int,
    seed: int,
) -> Iterator[dict[str, list[int]]]:
    """Yield training samples endlessly, varied each time; samples of similar length share a batch."""
    rng = random.Random(f"{seed}-{phase.name}")
    deck: list[Demonstration] = []
    while phase.repeat:
        yield _repetition(rng, min(phase.repeat, len(tokenizer)))
    while True:
        chunk = []
        while len(chunk) < 32 * batch:
            if not deck:
                deck = list(demonstrations)
                rng.shuffle(deck)
            shown = course.vary(deck.pop(), rng)
            if rng.random() < phase.noise:
                shown = replace(shown, expert=rng.choice(shown.others or shown.actions))
            chunk.append(shown)
        prompts = tokenizer([course.prompt(s, tokenizer) for s in chunk], add_special_tokens=False)["input_ids"]
        answers = [COMPLETION.format(action=s.expert) for s in chunk]
        completions = tokenizer(answers, add_special_tokens=False)["input_ids"]
        rows = [
            {"input_ids": p + r, "labels": (p if phase.whole_sequence else [-100] * len(p)) + r}
            for p, r in zip(prompts, completions)
        ]
        rows.sort(key=lambda row: len(row["input_ids"]))
        batches = [rows[i : i + batch] for i in range(0, len(rows), batch)]
        rng.shuffle(batches)
        for rows in batches:
            yield from rows


def _repetition(rng: random.Random, vocabulary: int, length: int = 60, parts: int = 10) -> dict[str, list[int]]:
    """Return random tokens followed by parts of them; all but the first token of a part are predictable."""
    tokens = [rng.randrange(vocabulary) for _ in range(length)]
    ids, labels = list(tokens), [-100] * length
    for _ in range(parts):
        start, size = rng.randrange(length - 8), rng.randint(2, 8)
        ids += tokens[start : start + size]
        labels += [-100, *tokens[start + 1 : start + size]]
    return {"input_ids": ids, "labels": labels}


def teach(
    course: Course,
    demonstrations: Sequence[Demonstration],
    make_tokenizer: Callable[[Iterable[str], int], Qwen2Tokenizer],
    recipe: Recipe,
    seed: int,
) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    """Return a model and its tokenizer, trained on demonstrations.

    Args:
        course: prompts and variations.
        demonstrations: the expert's actions.
        make_tokenizer: texts and maximum vocabulary size -> tokenizer.
        recipe: architecture and phases.
        seed: determines the result.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(course.texts(demonstrations), recipe.vocab_size)
    model = build_model(recipe, tokenizer)
    for phase in recipe.phases:
        # Not by `gen_kwargs`: `datasets` takes a list in there for shards, and would read the endless first one only.
        stream = partial(samples, course, demonstrations, tokenizer, phase, recipe.batch_size, seed)
        with tempfile.TemporaryDirectory() as scratch:
            trainer = SFTTrainer(
                model=model,
                args=_arguments(recipe, phase, seed, scratch),
                train_dataset=IterableDataset.from_generator(stream),
                processing_class=tokenizer,
            )
            trainer.train()
    return model, tokenizer


def _arguments(recipe: Recipe, phase: Phase, seed: int, output_dir: str) -> SFTConfig:
    return SFTConfig(
        output_dir=output_dir,
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
    )


def make_model(
    doc: str,
    course: Course,
    make_tokenizer: Callable[[Iterable[str], int], Qwen2Tokenizer],
    recipe: Recipe,
    make_demonstrations: Callable[[], list[Demonstration]],
) -> None:
    """Train a tiny model from demonstrations and save it with its tokenizer in `--output FOLDER`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=Path, help="JSON lines: read if the file exists, else written")
    args = parser.parse_args()
    if args.demonstrations and args.demonstrations.exists():
        lines = args.demonstrations.read_text(encoding="utf-8").splitlines()
        demonstrations = [Demonstration(**json.loads(line)) for line in lines]
    else:
        demonstrations = make_demonstrations()
        if args.demonstrations:
            write_json_lines(args.demonstrations, map(asdict, demonstrations))
    for part in teach(course, demonstrations, make_tokenizer, recipe, args.seed):
        part.save_pretrained(args.output)

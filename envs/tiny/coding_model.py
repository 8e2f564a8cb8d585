"""Make the bundled model of `g2po init --coding`: `python -m g2po_envs.tiny.coding_model --output FOLDER`.

It learns to read a small module and to call the tools as the starter's expert does, on random modules
(`coding_modules`). At each token of a call, it learns the probabilities that the expert gives to the next token, and
at each token of the code, whether the failing test runs the line. The expert looks at what it is shown before each
guess at first, and as seldom as in the starter at the end.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM

from g2po_envs.tiny.coding_modules import draw_state
from g2po_trl.cli.commands.init import SOURCES
from g2po_trl.environments.loading import import_named
from g2po_trl.prompts.conversation import Message

AGENT = SOURCES["coding"] / "agent.py"
KEYS = ["<action>", "</action>", "|line=", "|old=", "|new=", "|file="]  # tokens of their own, as are line numbers
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY, LINES, WIDTH, LONGEST = 768, 40, 64, 512
CALLS = 4  # that answer a prompt, one after the other
CHOICES = 24  # most tokens that are learned at a position, the likeliest ones
PROBED = 2  # layer of which the marks are read
BATCHES, PASSES = 24, 4  # that are drawn together and sorted by length; times that each is learned: drawing is slow


def render(messages: list[Message]) -> str:
    """Return messages as the model's chat template writes them."""
    return "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)


def render_call(call: Mapping[str, Any]) -> str:
    """Return a call as the model's chat template writes it."""
    values = {name: f" {value}" if isinstance(value, int) else value for name, value in call["arguments"].items()}
    return f"<action>{call['name']}{''.join(f'|{name}={value}' for name, value in values.items())}</action>"


def make_tokenizer(agent: ModuleType) -> Tokenizer:
    """Return a byte-level BPE tokenizer of random modules and calls."""
    rng, corpus = random.Random(0), [agent.RULES] * 200
    for _ in range(4000):
        messages, call = draw_state(rng, agent)
        corpus.append(f"{messages[1]['content']}\n{render_call(call)}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [*KEYS, *(f" {number}" for number in range(1, LINES + 1))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(added), show_progress=False, special_tokens=SPECIAL, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
    return tokenizer


def probabilities(agent: ModuleType, seen: str, call: Mapping[str, Any], care: float) -> list[tuple[float, Any]]:
    """Return the calls that the expert may make where it makes `call`, with their probabilities."""
    if call["name"] != "edit":
        return [(1.0, call)]
    chances: dict[tuple, float] = defaultdict(float)
    anywhere = agent.guesses(seen, careful=False)
    for share, found in ((care, agent.guesses(seen, careful=True) or anywhere), (1 - care, anywhere)):
        for (line, old), texts in found.items():
            for new in texts:
                chances[line, old, new] += share / len(found) / len(texts)
    edits = ({"name": "edit", "arguments": dict(zip(("line", "old", "new"), one, strict=True))} for one in chances)
    return list(zip(chances.values(), edits, strict=True))


@dataclass
class Sample:
    """Token ids, whether the line of each is marked, and the next token's probabilities at positions of calls."""

    ids: list[int]
    marks: list[float]  # 1: the failing test runs the line; 0: it does not; nan: no line of the code
    positions: list[int] = field(default_factory=list)
    following: list[dict[int, float]] = field(default_factory=list)


def marks(text: str, offsets: list[tuple[int, int]]) -> list[float]:
    """Return the mark of the line that each token of a prompt is in."""
    lines = list(re.finditer(r"^ \d+(>?) .*", text, re.MULTILINE))
    spans = ([bool(one[1]) for one in lines if one.start() < end <= one.end()] for _, end in offsets)
    return [float(*span) if span else math.nan for span in spans]


class Samples:
    """Draws samples: the prompt of a random moment, and calls that answer it, one after the other."""

    def __init__(self, tokenizer: Tokenizer, agent: ModuleType, seed: int):
        self.tokenizer, self.agent, self.rng = tokenizer, agent, random.Random(seed)

    def draw(self, care: float) -> Sample:
        messages, call = draw_state(self.rng, self.agent)
        known = [
            (chance, self._ids(f"{render_call(one)}<|im_end|>"))
            for chance, one in probabilities(self.agent, messages[-1]["content"], call, care)
        ]
        prompt = self.tokenizer.encode(render(messages))
        sample = Sample(prompt.ids, marks(render(messages), prompt.offsets))
        count = CALLS if len(known) > 1 else 1
        for _, said in self.rng.choices(known, [chance for chance, _ in known], k=count):
            sample.ids += self._ids("<|im_start|>assistant\n")
            possible = known
            for place, token in enumerate(said):
                chances: dict[int, float] = defaultdict(float)
                for chance, ids in possible:
                    chances[ids[place]] += chance / sum(chance for chance, _ in possible)
                sample.positions.append(len(sample.ids) - 1)
                sample.following.append(dict(sorted(chances.items(), key=lambda one: -one[1])[:CHOICES]))
                sample.ids.append(token)
                possible = [one for one in possible if one[1][place] == token]
            sample.ids += self._ids("\n")
        return sample if len(sample.ids) <= LONGEST else self.draw(care)

    def batches(self, rows: int, care: float) -> Iterator[list[Sample]]:
        """Return batches of samples of similar length, in random order, each of them several times."""
        drawn = sorted((self.draw(care) for _ in range(rows * BATCHES)), key=lambda one: len(one.ids))
        batches = [drawn[start : start + rows] for start in range(0, len(drawn), rows)] * PASSES
        self.rng.shuffle(batches)
        return iter(batches)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids


def losses_of(
    model: Qwen2ForCausalLM, probe: torch.nn.Linear, batch: list[Sample]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the cross-entropy of a call's tokens, how far it is above its minimum, and the probe's cross-entropy."""
    pad = torch.nn.utils.rnn.pad_sequence
    device = model.device
    ids = pad([torch.tensor(one.ids) for one in batch], batch_first=True).to(device)
    output = model.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    at = [(row, place) for row, one in enumerate(batch) for place in one.positions]
    logps = model.lm_head(output.last_hidden_state[tuple(zip(*at, strict=True))]).log_softmax(-1)
    following = [chances for one in batch for chances in one.following]
    tokens = pad([torch.tensor(list(one)) for one in following], batch_first=True).to(device)
    chances = pad([torch.tensor(list(one.values())) for one in following], batch_first=True).to(device)
    loss = -(logps.gather(1, tokens) * chances).sum(1).mean()
    marked = pad([torch.tensor(one.marks) for one in batch], batch_first=True, padding_value=math.nan).to(device)
    rows, columns = (~marked.isnan()).nonzero(as_tuple=True)
    found = probe(output.hidden_states[PROBED][rows, columns]).squeeze(1)
    known = torch.nn.functional.binary_cross_entropy_with_logits(found, marked[rows, columns], reduction="sum")
    return loss, loss.detach() + torch.xlogy(chances, chances).sum(1).mean(), known / max(1, len(rows))


def train(model: Qwen2ForCausalLM, samples: Samples, steps: int, rows: int, rate: float) -> None:
    probe = torch.nn.Linear(WIDTH, 1).to(model.device)
    optimizer = torch.optim.AdamW(
        [*model.parameters(), *probe.parameters()], lr=rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    batches: Iterator[list[Sample]] = iter(())
    seen: list[list[float]] = []
    for step in range(1, steps + 1):
        left = 1 - step / steps
        batch = next(batches, None)
        if batch is None:
            care = samples.agent.CARE + (1 - samples.agent.CARE) * min(1.0, max(0.0, 2.5 * left - 0.5))
            batches = samples.batches(rows, care)
            batch = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, step / 50) * max(0.05, left)
        loss, divergence, known = losses_of(model, probe, batch)
        optimizer.zero_grad(set_to_none=True)
        (loss + known).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append([divergence.item(), known.item()])
        if step % 50 == 0:
            means = torch.tensor(seen[-50:]).mean(0)
            print(f"step {step}: care {care:.2f}, divergence {means[0]:.4f}, marks {means[1]:.4f}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="continue from this model, with its tokenizer")
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--rows", type=int, default=16, help="samples of a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    agent = import_named(str(AGENT))
    torch.manual_seed(args.seed)
    if args.model:
        tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
        model = Qwen2ForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        tokenizer = make_tokenizer(agent)
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=3,
            num_attention_heads=WIDTH // 32, num_key_value_heads=WIDTH // 32, max_position_embeddings=1024,
            tie_word_embeddings=True, pad_token_id=0, eos_token_id=2, bos_token_id=None,
        ))  # fmt: skip
    model.to("cuda" if torch.cuda.is_available() else "cpu").train()
    train(model, Samples(tokenizer, agent, args.seed), args.steps, args.rows, args.rate)
    args.output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.output)
    tokenizer.save(str(args.output / "tokenizer.json"))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(AGENT.with_name("model") / name, args.output)


if __name__ == "__main__":
    main()

"""Make the bundled model of `g2po init --coding`: `python -m g2po_recipes.cold_start.coding_model --output FOLDER`.

It learns to read a small module and to call the tools as the starter's expert does, which guesses what is wrong, on
random modules (`coding_modules`). Three minutes on a GPU; on a CPU, hours.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, get_cosine_schedule_with_warmup

from g2po_recipes.cold_start.coding_modules import draw_state
from g2po_trl.cli.commands.init import STARTER
from g2po_trl.environments.loading import load

AGENT = STARTER / "coding" / "agent.py"
KEYS = ["<action>", "</action>", "|line=", "|old=", "|new=", "|file="]  # tokens of their own, as are line numbers
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY, LINES, WIDTH, LONGEST = 768, 40, 64, 512
PROMPT_WEIGHT = 0.05  # of a token of a prompt in the loss, beside 1 of a call


def render(messages: list[Mapping[str, str]]) -> str:
    """Return messages as the model's chat template writes them."""
    return "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)


def render_call(call: Mapping[str, Any]) -> str:
    """Return a call as the model's chat template writes it."""
    values = {name: f" {value}" if isinstance(value, int) else value for name, value in call["arguments"].items()}
    return f"<action>{call['name']}{''.join(f'|{name}={value}' for name, value in values.items())}</action>"


def make_tokenizer(rules: str, expert: Any) -> Tokenizer:
    """Return a byte-level BPE tokenizer of random modules and calls."""
    rng, corpus = random.Random(0), [rules] * 200
    for _ in range(4000):
        messages, calls = draw_state(rng, rules, expert)
        corpus.append("\n".join([messages[1]["content"], *map(render_call, calls)]))
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


class Batches(torch.utils.data.IterableDataset):
    """Batches of random samples without end: ids and weights, both of shape (rows, longest)."""

    def __init__(self, tokenizer: Tokenizer, rules: str, expert: Any, rows: int, seed: int):
        self.tokenizer, self.rules, self.expert, self.rows, self.seed = tokenizer, rules, expert, rows, seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(1000 * (1 + self.seed) + (worker.id if worker else 0))
        pad = torch.nn.utils.rnn.pad_sequence
        while True:
            rows = [self._sample(rng) for _ in range(self.rows)]
            yield tuple(pad([torch.tensor(row[k][:LONGEST]) for row in rows], batch_first=True) for k in (0, 1))

    def _sample(self, rng: random.Random) -> tuple[list[int], list[float]]:
        """Return the ids of a prompt and of calls that answer it, one after the other, and their weights."""
        messages, calls = draw_state(rng, self.rules, self.expert)
        ids = self.tokenizer.encode(render(messages)).ids
        weights = [PROMPT_WEIGHT] * len(ids)
        for call in calls:
            head, said, end = (
                self.tokenizer.encode(text).ids
                for text in ("<|im_start|>assistant\n", f"{render_call(call)}<|im_end|>", "\n")
            )
            ids += [*head, *said, *end]
            weights += [*[0.0] * len(head), *[1.0] * len(said), *[0.0] * len(end)]
        return ids, weights


def train(batches: Iterator, steps: int, device: str) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=3,
        num_attention_heads=WIDTH // 32, num_key_value_heads=WIDTH // 32, max_position_embeddings=1024,
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, min(200, steps // 10), steps)
    for step in range(1, steps + 1):
        ids, weights = (part.to(device) for part in next(batches))
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        calls = (weights[:, 1:] == 1).float()
        optimizer.zero_grad(set_to_none=True)
        ((losses * weights[:, 1:]).sum() / calls.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss of a call's token {(losses * calls).sum() / calls.sum():.3f}", flush=True)
    return model


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3100)
    parser.add_argument("--rows", type=int, default=192, help="samples of a step")
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rules, expert = load(f"{AGENT}:RULES"), load(f"{AGENT}:expert")
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer(rules, expert)
    batches = Batches(tokenizer, rules, expert, args.rows, args.seed)
    loader = torch.utils.data.DataLoader(batches, batch_size=None, num_workers=args.workers)
    model = train(iter(loader), args.steps, "cuda" if torch.cuda.is_available() else "cpu")
    args.output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.output)
    tokenizer.save(str(args.output / "tokenizer.json"))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(AGENT.with_name("model") / name, args.output)


if __name__ == "__main__":
    main()

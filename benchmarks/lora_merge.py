"""What merging a LoRA adapter into bfloat16 weights loses, by the size of the adapter, on SmolLM2-135M.

    OMP_NUM_THREADS=1 python benchmarks/lora_merge.py --output benchmarks/results/lora_merge [--rank 64] [--steps 100]

The policy is base + adapter, weights of the base on the bfloat16 grid, everything computed in float32. How far from it
is what an engine samples from: KL(policy || engine) over the tokens of the base's own replies to ALFWorld prompts, all
vocabulary, in nats a token. Engines: *merged* (`merged_parameters`, as trainers send them), computed in float32
(rounding of the weights alone) and in bfloat16; *native* (base and adapter apart, both in bfloat16); *trainer*
(bfloat16 autocast, float32 adapter: what a run takes its ratios against). Beside them the base alone in bfloat16: an
engine's own rounding. Products of bfloat16 are summed in float32 and rounded, as GPUs do.

Adapters: random directions, and two trained by AdamW at `--learning_rate` for `--steps` steps: on an expert's answers
(gradients agree) and on the base's own replies with advantages of random sign (none agree); a run lies between. Each
is measured as it is after 1, 3, 10, … steps, and its last direction scaled to `RELATIVE` sizes (||delta W|| / ||W||
over all adapted weights). Prints command, machine and raw values, and writes OUTPUT/results.json after each.
"""

import argparse
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, AlfworldEnvironment, generate_games
from g2po_envs.alfworld.demonstrations import demonstrate
from g2po_envs.lessons import as_dataset
from g2po_envs.smollm2 import smollm2_path
from g2po_trl.json_text import write_json
from g2po_trl.rollout.merging import merged_parameters
from g2po_trl.runs.run_description import installed_versions

RELATIVE = (1e-2, 1e-3, 1e-4, 1e-5, 3e-3, 3e-4, 3e-5)
SNAPSHOTS = (1, 3, 10, 30, 100, 300)
REPLY_TOKENS = 32

Adapter = dict[str, torch.Tensor]
Rows = list[tuple[list[int], list[int]]]


def in_float32(compute: Callable) -> Callable:
    """Of bfloat16 operands: their product summed in float32, then rounded. CPUs without bfloat16 take 20 times as long
    for another order of summation."""

    @wraps(compute)
    def computed(*operands, **options):
        autocast = torch.is_autocast_enabled("cpu")
        if not autocast and operands[0].dtype != torch.bfloat16:
            return compute(*operands, **options)

        def widened(operand):
            is_number = isinstance(operand, torch.Tensor) and operand.is_floating_point()
            return operand.bfloat16().float() if is_number else operand

        with torch.autocast("cpu", enabled=False):
            options = {name: widened(option) for name, option in options.items()}
            return compute(*map(widened, operands), **options).bfloat16()

    return computed


def sum_bfloat16_in_float32() -> None:
    functional = torch.nn.functional
    functional.linear = in_float32(functional.linear)
    functional.scaled_dot_product_attention = in_float32(functional.scaled_dot_product_attention)


class Policies:
    """The same base five times: as the policy, and as engines have it."""

    def __init__(self, path: Path, rank: int, seed: int):
        def base(dtype: torch.dtype) -> PreTrainedModel:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
            return model.to(dtype).requires_grad_(False)

        def adapted(dtype: torch.dtype, adapter_in_float32: bool):
            torch.manual_seed(seed)
            config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
            return get_peft_model(base(dtype), config, autocast_adapter_dtype=adapter_in_float32)

        self.exact, self.native = adapted(torch.float32, True), adapted(torch.bfloat16, False)
        self.trainer = adapted(torch.bfloat16, True)
        self.plain, self.plain32 = base(torch.bfloat16), base(torch.float32)
        self.base = {name: weight.clone() for name, weight in self.plain.named_parameters()}
        self.initial = self.adapter()

    def adapter(self) -> Adapter:
        return {name: w.detach().clone() for name, w in self.trainer.named_parameters() if "lora_" in name}

    @torch.no_grad()
    def use(self, adapter: Adapter) -> None:
        for model in (self.exact, self.native, self.trainer):
            own = dict(model.named_parameters())
            for name, weight in adapter.items():
                own[name].copy_(weight)

    def modules(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name of the base weight, the weight, and the adapter's delta, both in float32."""
        for name, module in self.exact.named_modules():
            if hasattr(module, "get_delta_weight"):
                path = name.removeprefix("base_model.model.") + ".weight"
                yield path, module.get_base_layer().weight, module.get_delta_weight("default")

    @torch.no_grad()
    def relative_norm(self) -> float:
        squares = [(float(delta.square().sum()), float(weight.square().sum())) for _, weight, delta in self.modules()]
        return (sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5

    @torch.no_grad()
    def merge(self) -> dict[str, float]:
        """Into the plain models, as it is sent to vLLM; what rounding left of the adapter."""
        merged = dict(merged_parameters(self.trainer))
        for model in (self.plain, self.plain32):
            for name, weight in model.named_parameters():
                weight.copy_(merged[name])
        changed = weights = along = length = kept = 0.0
        for name, weight, delta in self.modules():
            moved = merged[name].float() - weight
            changed, weights = changed + float((moved != 0).sum()), weights + weight.numel()
            along, length = along + float((moved * delta).sum()), length + float(delta.square().sum())
            kept += float((moved - delta).square().sum())
        return {
            "weights changed": changed / weights,
            "of the adapter, along itself": along / length,
            "error / adapter": (kept / length) ** 0.5,
        }


def log_probs(model, rows: Rows, autocast: bool = False) -> torch.Tensor:
    """(tokens of all replies, vocabulary), in float64."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return torch.cat([logits_of(model, prompt, reply) for prompt, reply in rows]).double().log_softmax(-1)


def logits_of(model, prompt: list[int], reply: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt + reply[:-1]])
    return model(input_ids=ids, logits_to_keep=len(reply)).logits[0].float()


def divergence(of: torch.Tensor, other: torch.Tensor, tokens: torch.Tensor) -> dict[str, float]:
    """KL(of || other) a token, and the sampled tokens' log-probabilities."""
    kl = (of.exp() * (of - other)).sum(-1)
    gap = (of - other).gather(1, tokens[:, None])[:, 0].abs()
    return {
        "kl": float(kl.mean()),
        "largest kl": float(kl.max()),
        "gap": float(gap.mean()),
        "gap max": float(gap.max()),
    }


def measure(policies: Policies, adapter: Adapter, rows: Rows, base: torch.Tensor) -> dict:
    """`base`: log-probabilities of the base in float32."""
    policies.use(adapter)
    found = {"relative norm": policies.relative_norm(), **policies.merge()}
    tokens = torch.tensor([token for _, reply in rows for token in reply])
    exact = log_probs(policies.exact, rows)
    engines = {
        "merged, float32": log_probs(policies.plain32, rows),
        "merged": log_probs(policies.plain, rows),
        "native": log_probs(policies.native, rows),
        "trainer": log_probs(policies.trainer, rows, autocast=True),
    }
    found["movement"] = divergence(exact, base, tokens)
    found |= {name: divergence(exact, engine, tokens) for name, engine in engines.items()}
    for name in ("merged", "native"):  # what a run sees
        found[f"trainer || {name}"] = divergence(engines["trainer"], engines[name], tokens)
    return found


def scaled(policies: Policies, adapter: Adapter, relative: float) -> Adapter:
    """B times a number, so that the adapter has this relative norm."""
    policies.use(adapter)
    factor = relative / policies.relative_norm()
    return {name: weight * factor if "lora_B" in name else weight for name, weight in adapter.items()}


def random_adapter(policies: Policies, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(w.shape, generator=generator) / w.shape[-1] ** 0.5 for n, w in policies.initial.items()}


def train(policies: Policies, rows: Rows, learns: bool, options: argparse.Namespace) -> Iterator[tuple[int, Adapter]]:
    """Adapters on the way. `learns`: from each reply; else from replies with advantages of random sign."""
    policies.use(policies.initial)
    rng, model = random.Random(options.seed), policies.trainer
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=options.learning_rate, weight_decay=0.0)
    for step in range(1, options.steps + 1):
        batch = rng.sample(rows, options.batch)
        for prompt, reply in batch:
            with torch.autocast("cpu", torch.bfloat16):
                logits = logits_of(model, prompt, reply)
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(reply), reduction="sum")
            sign = 1 if learns else rng.choice((-1, 1))
            (sign * loss / sum(len(reply) for _, reply in batch)).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in SNAPSHOTS or step == options.steps:
            yield step, policies.adapter()


def expert_rows(tokenizer, folder: str, seed: int) -> Rows:
    """Short prompts of ALFWorld games, with an expert's answers."""
    games = generate_games(Path(folder).expanduser(), "train", 320, seed=0, size="tiny")
    hidden = ("help", "look", "inventory", "examine")
    environment = AlfworldEnvironment(games, hidden_actions=hidden, intro=False)
    shown = demonstrate(environment, games.rows()[:24], 1, seed, 15, 2)
    lessons = list(as_dataset(shown, ALFWORLD_COMPACT_PROMPT, 2))
    random.Random(seed).shuffle(lessons)
    lessons = [lesson for lesson in lessons if len(str(lesson["prompt"])) < 900]

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    chat = [tokenizer.apply_chat_template(x["prompt"], tokenize=False, add_generation_prompt=True) for x in lessons]
    return [(ids(text), ids(x["completion"][0]["content"] + "<|im_end|>")) for text, x in zip(chat, lessons)]


def make_rows(policies: Policies, tokenizer, options: argparse.Namespace) -> tuple[Rows, Rows, Rows]:
    """Replies to measure on, an expert's to learn from, and the base's own to learn nothing from."""
    expert = expert_rows(tokenizer, options.games, options.seed)
    own, torch_batch = [], 8
    torch.manual_seed(options.seed)
    policies.plain32.generation_config.pad_token_id = tokenizer.pad_token_id
    for first in range(0, options.own, torch_batch):
        prompts = [prompt for prompt, _ in expert[first : first + torch_batch]]
        padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        made = policies.plain32.generate(
            **padded, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=REPLY_TOKENS
        )
        for prompt, row in zip(prompts, made[:, padded["input_ids"].shape[1] :].tolist()):
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            own.append((prompt, row[:end]))
    return own[: options.replies], expert[options.own :], own[options.replies :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--games", default="~/.cache/g2po_trl/alfworld-tiny-0/train-320")
    parser.add_argument("--rank", type=int, default=64, help="and alpha twice that, as in the recipes")
    parser.add_argument("--learning_rate", type=float, default=1e-5, help="the recipes'")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--replies", type=int, default=4, help="to measure on")
    parser.add_argument("--own", type=int, default=24, help="replies to sample, those included")
    parser.add_argument("--only", default="all", choices=("all", "expert's answers", "random advantages", "random"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    sum_bfloat16_in_float32()
    path = smollm2_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    policies = Policies(path, options.rank, options.seed)
    rows, expert, own = make_rows(policies, tokenizer, options)
    started = time.perf_counter()
    found = {
        "command": "python benchmarks/lora_merge.py " + " ".join(sys.argv[1:]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads",
        "versions": installed_versions(),
        "tokens": sum(len(reply) for _, reply in rows),
        "values": [],
    }

    def note(about: dict, values: dict) -> None:
        found["values"].append({**about, **values})
        kls = {name: f"{value['kl']:.2e}" for name, value in values.items() if isinstance(value, dict)}
        plain = {name: f"{value:.3g}" for name, value in values.items() if not isinstance(value, dict)}
        print(f"{time.perf_counter() - started:.0f} s", about, plain, kls, flush=True)
        options.output.mkdir(parents=True, exist_ok=True)
        write_json(options.output / "results.json", found, indent=1)

    tokens = torch.tensor([token for _, reply in rows for token in reply])
    base = log_probs(policies.plain32, rows)
    rounded = {"base": divergence(base, log_probs(policies.plain, rows), tokens)}
    rounded["trainer"] = divergence(base, log_probs(policies.trainer, rows, autocast=True), tokens)
    note({"adapter": "none"}, rounded)
    ways = {"expert's answers": (expert, True), "random advantages": (own, False)}
    last = {}
    for name in [name for name in ways if options.only in ("all", name)]:
        examples, learns = ways[name]
        for step, adapter in train(policies, examples, learns, options):
            last[name] = adapter
            note({"adapter": name, "step": step}, measure(policies, adapter, rows, base))
            policies.use(adapter)
    if options.only in ("all", "random"):
        last["random"] = random_adapter(policies, options.seed)
    for relative in RELATIVE:
        for name, adapter in last.items():
            note({"adapter": name, "to": relative}, measure(policies, scaled(policies, adapter, relative), rows, base))


if __name__ == "__main__":
    main()

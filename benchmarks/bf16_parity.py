"""How far log-probabilities of vLLM in bfloat16 are from those of a trainer, on SmolLM2-135M.

    .venv-vllm/bin/python benchmarks/bf16_parity.py --output benchmarks/results/bf16_parity [--prompts 4] [--replies 4]

vLLM (bfloat16 weights and logits, as on GPUs) answers ALFWorld prompts at temperature 1. The trainer's
log-probabilities of these tokens are computed under bfloat16 autocast from float32 weights, as by recipes that train
all weights, and in float32. Prints command, machine, and per pair of engines what a run logs as `sampling/*`:
differences of a token's log-probability, importance ratios of tokens and of whole replies, effective sample sizes.
"""

import argparse
import os
import platform
import sys
from pathlib import Path

import torch
from lora_merge import REPLY_TOKENS, Rows, expert_rows, logits_of, sum_bfloat16_in_float32
from transformers import AutoModelForCausalLM, AutoTokenizer

from g2po_envs.smollm2 import smollm2_path
from g2po_trl.json_text import write_json
from g2po_trl.rollout.offline_vllm import OfflineVLLMEngine
from g2po_trl.rollout.sampling import Sampling
from g2po_trl.runs.run_description import installed_versions

VLLM_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def told(model, rows: Rows, autocast: bool) -> list[torch.Tensor]:
    """Log-probabilities of each reply's tokens."""
    found = []
    for prompt, reply in rows:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = logits_of(model, prompt, reply)
        found.append(logits.double().log_softmax(-1).gather(1, torch.tensor(reply)[:, None])[:, 0])
    return found


def compare(trained: list[torch.Tensor], sampled: list[torch.Tensor]) -> dict[str, float]:
    gaps = torch.cat(trained) - torch.cat(sampled)
    whole = torch.stack([(ours - theirs).sum() for ours, theirs in zip(trained, sampled)])
    found = {"difference, mean": gaps.abs().mean(), "difference, max": gaps.abs().max()}
    for name, ratios in {"tokens": gaps.exp(), "replies": whole.exp()}.items():
        found |= {f"ratio of {name}, mean": ratios.mean(), f"ratio of {name}, min": ratios.min()}
        found |= {f"ratio of {name}, max": ratios.max()}
        found[f"effective sample size of {name}"] = ratios.sum() ** 2 / (len(ratios) * ratios.square().sum())
    return {name: float(value) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--games", default="~/.cache/g2po_trl/alfworld-tiny-0/train-320")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--replies", type=int, default=4, help="to each prompt")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, value in VLLM_ON_CPU.items():
        os.environ.setdefault(name, value)
    sum_bfloat16_in_float32()
    path = smollm2_path()
    prompts = [p for p, _ in expert_rows(AutoTokenizer.from_pretrained(path), options.games, options.seed)]
    prompts = [prompt for prompt in prompts[: options.prompts] for _ in range(options.replies)]
    engine = OfflineVLLMEngine(
        str(path), dtype="bfloat16", max_model_len=1024, logprobs_mode="processed_logprobs", seed=options.seed
    )
    engine.options = {"logprobs": 0}
    replies = engine.generate(prompts, Sampling(max_tokens=REPLY_TOKENS), list(range(len(prompts))))
    sampled = [torch.tensor(reply.logprobs, dtype=torch.float64) for reply in replies]
    rows = [(list(prompt), list(reply.ids)) for prompt, reply in zip(prompts, replies)]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float()
    exact, trained = told(model, rows, False), told(model, rows, True)
    found = {
        "command": "python benchmarks/bf16_parity.py " + " ".join(sys.argv[1:]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads",
        "versions": installed_versions(),
        "tokens": sum(map(len, sampled)),
        "autocast against vLLM": compare(trained, sampled),
        "float32 against vLLM": compare(exact, sampled),
        "float32 against autocast": compare(exact, trained),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    write_json(options.output / "results.json", found, indent=1)
    for name, values in found.items():
        print(name, values)


if __name__ == "__main__":
    main()

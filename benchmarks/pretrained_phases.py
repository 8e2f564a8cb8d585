"""What an iteration of SmolLM2-135M costs by phase, with each engine and each token layout, in one process.

    .venv-vllm/bin/python benchmarks/pretrained_phases.py --model runs/alfworld-smollm2-start \\
        --output benchmarks/results/pretrained/phases [--engines generate vllm] [--episodes 16] [--repetitions 2]

Settings are those of `recipes/alfworld/smollm2-135m.yaml`. Rollouts: the same episodes (groups of 8) by transformers'
`generate` and by vLLM, in turn, with the share of prompt tokens that vLLM's prefix cache held. Update: forward and
backward of the step samples of one group in each token layout; `trl` as in `phases.py`. Prints command, machine and
raw seconds, and writes them to OUTPUT/results.json, a table to OUTPUT/table.md.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from datasets import Dataset
from phases import count, update, variants
from trl import ModelConfig

from g2po_envs.alfworld import AlfworldEnvironment
from g2po_trl import G2POConfig, G2POTrainer
from g2po_trl.json_text import write_json
from g2po_trl.parts import make_engine
from g2po_trl.recipe import parse_arguments, use_model_arguments
from g2po_trl.runs.run_description import installed_versions
from g2po_trl.update.batch import StepBatch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

from train_alfworld import PROMPTS, ScriptArguments, load_games  # noqa: E402

VLLM_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENGINES = ("generate", "vllm")


def make_trainer(model: Path, folder: Path, episodes: int, vllm: bool) -> tuple[G2POTrainer, list[dict]]:
    """The recipe's trainer, and the tasks of as many episodes."""
    flags = ["--model_name_or_path", str(model), "--output_dir", str(folder), "--disable_tqdm", "true"]
    flags += ["--per_device_train_batch_size", str(episodes), "--use_vllm", str(vllm).lower()]
    script_args, args, model_args = parse_arguments(
        (ScriptArguments, G2POConfig, ModelConfig), ROOT / "recipes/alfworld/smollm2-135m.yaml", argv=flags
    )
    games = load_games(None, "train", script_args.num_games, script_args)
    use_model_arguments(args, model_args)
    trainer = G2POTrainer(
        str(model),
        args,
        Dataset.from_list(games.rows()),
        environment_factory=partial(
            AlfworldEnvironment, games, hidden_actions=tuple(script_args.hidden_actions), intro=script_args.intro
        ),
        prompt_template=PROMPTS[script_args.prompt],
    )
    trainer.current_gradient_accumulation_steps = 1  # what `train` would set
    return trainer, [row for row in games.rows()[: episodes // 8] for _ in range(8)]


def play(trainer: G2POTrainer, engine, tasks: list[dict]) -> tuple[list, dict[str, float]]:
    trainer.player.actor.engine = engine
    started = time.perf_counter()
    trajectories, stats = trainer.play(tasks, groups=[number // 8 for number in range(len(tasks))])
    cached = {"cached": round(stats.cached_tokens / stats.cacheable_tokens, 3)} if stats.cacheable_tokens else {}
    return trajectories, {
        "seconds": round(time.perf_counter() - started, 1),
        "steps": stats.live_steps,
        "prompt tokens": stats.prompt_tokens,
        "reply tokens": stats.generated_tokens,
        "environment": round(stats.environment_time, 1),
        **cached,
    }


def measure(trainer: G2POTrainer, tasks: list[dict], kinds: list[str], repetitions: int) -> dict:
    engines = {kind: make_engine(trainer, kind) for kind in kinds}
    rollouts: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for engine in engines.values():  # loads games, compiles: not counted
        play(trainer, engine, tasks[:1])
    for _ in range(repetitions):
        for name, engine in engines.items():
            trajectories, told = play(trainer, engine, tasks)
            rollouts[name].append(told)
            print(f"rollout by {name}: {told}", flush=True)

    group = trajectories[:8]
    # None is zero, as in a group where all win or lose: such rows are left out of every layout but TRL's.
    batch = StepBatch.from_trajectories(group, np.ones(sum(len(trajectory.steps) for trajectory in group)))
    max_tokens = trainer.args.max_tokens_per_micro_batch
    made, _ = variants(trainer, batch, max_tokens)
    update(trainer, made["shared"][:1])
    updates: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(repetitions):
        for name, micro_batches in made.items():
            started = time.perf_counter()
            update(trainer, micro_batches)
            updates[name].append(round(time.perf_counter() - started, 1))
            print(f"update, {name}: {updates[name][-1]} s", flush=True)
    return {
        "rollouts": rollouts,
        "steps of the group": len(batch),
        "tokens of a packed row, at most": max(
            micro_batch["packed_ids"].shape[1] for micro_batch in made["shared"] if "packed_ids" in micro_batch
        ),
        "tokens of a micro-batch": max_tokens,
        "positions": {name: count(micro_batches, trainer.model)["positions"] for name, micro_batches in made.items()},
        "updates": updates,
    }


def table(found: dict) -> str:
    lines = ["| phase | seconds, median | speed, the phase's first row = 1 | work |", "|---|---|---|---|"]
    rows = []
    for name, runs in found["rollouts"].items():
        (last,) = runs[-1:]
        about = f"{last['steps']} steps, {last['prompt tokens']} prompt and {last['reply tokens']} reply tokens"
        about += f", {100 * last['cached']:.0f} % of the prompts' from the prefix cache" if "cached" in last else ""
        rows.append(("rollout", name, [run["seconds"] for run in runs], about))
    for name, seconds in found["updates"].items():
        rows.append(("update", name, seconds, f"{found['positions'][name]} positions"))
    first: dict[str, float] = {}
    for phase, name, seconds, about in rows:
        middle = median(seconds)
        ratio = first.setdefault(phase, middle) / middle
        lines.append(f"| {phase}, {name} | {middle:.1f} | {ratio:.2f} | {about} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="the taught start, or a checkpoint")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.episodes < 8 or options.episodes % 8:
        parser.error(f"--episodes is {options.episodes}: set it to a multiple of 8")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model is {str(options.model)!r}, which holds no model: `g2po teach alfworld` makes one")
    for name, value in VLLM_ON_CPU.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer, tasks = make_trainer(options.model, Path(folder), options.episodes, "vllm" in options.engines)
        found = {
            "command": "python benchmarks/pretrained_phases.py " + " ".join(sys.argv[1:]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads",
            "versions": installed_versions(),
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            **measure(trainer, tasks, options.engines, options.repetitions),
        }
        trainer.close()
    options.output.mkdir(parents=True, exist_ok=True)
    write_json(options.output / "results.json", found, indent=1)
    (options.output / "table.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()

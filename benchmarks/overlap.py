"""When does playing in two halves pay? Rollouts with and without `overlap_environments`, by how slow a step is.

    python benchmarks/overlap.py --output benchmarks/results/overlap [--repetitions 5] [--episodes 64]

The tiny model plays generated ALFWorld games whose every step takes `seconds` longer (it sleeps, as an environment on
another machine or a slow engine would make one wait). Both ways in turn, in one process. Prints the command, the
machine, raw seconds, medians and ratios; writes them to OUTPUT/results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from datasets import Dataset

from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, AlfworldEnvironment, Manifest, generate_games
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import G2POConfig, G2POTrainer, StepResult


class SlowAlfworld(AlfworldEnvironment):
    """Takes longer for a step: `slow_down` is a column of the task."""

    def reset(self, slow_down: float = 0.0, **task):
        self.slow_down = slow_down
        return super().reset(**task)

    def step(self, action: str) -> StepResult:
        time.sleep(self.slow_down)
        return super().step(action)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.0, 0.002, 0.005, 0.01, 0.02])
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options)
    result["command"] = "python benchmarks/overlap.py " + " ".join(sys.argv[1:])
    (options.output / "results.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


def measure(folder: Path, options: argparse.Namespace) -> dict:
    generate_games(folder / "games", "train", options.episodes // 8, seed=0, size="tiny")
    manifest = Manifest.scan(folder / "games")
    args = G2POConfig(
        str(folder / "out"),
        per_device_train_batch_size=options.episodes,
        num_generations=8,
        max_turns=options.turns,
        max_completion_length=24,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        beta=0.0,
        report_to="none",
        save_strategy="no",
        save_trajectories=False,
        disable_tqdm=True,
        num_environment_workers=2,
    )
    trainer = G2POTrainer(
        str(tiny_model_path()),
        args,
        Dataset.from_list([row | {"slow_down": 0.0} for row in manifest.rows()]),
        environment_factory=partial(
            SlowAlfworld, manifest, hidden_actions=("help", "look", "inventory", "examine"), intro=False
        ),
        prompt_template=ALFWORLD_COMPACT_PROMPT,
    )
    groups = [i // 8 for i in range(options.episodes)]
    seconds: dict[str, dict[str, list[dict[str, float]]]] = {}
    for repetition in range(options.repetitions + 1):  # the first loads the games: not counted
        for slow_down in options.seconds:
            tasks = [row | {"slow_down": slow_down} for row in manifest.rows() for _ in range(8)]
            for name, overlap in (("apart", False), ("overlap", True)):
                trainer.player.overlap = overlap
                torch.manual_seed(repetition)
                _, stats = trainer.play(tasks, groups=groups)
                if repetition:
                    seconds.setdefault(str(slow_down), {}).setdefault(name, []).append(
                        {
                            "rollout": round(stats.total_time, 3),
                            "environment": round(stats.environment_time, 3),
                            "generation": round(stats.generation_time, 3),
                            "prompts": round(stats.prompt_time, 3),
                            "steps": stats.live_steps,
                        }
                    )
    trainer.close()
    medians = {
        slow_down: {name: {key: median(run[key] for run in runs) for key in runs[0]} for name, runs in both.items()}
        for slow_down, both in seconds.items()
    }
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads, no GPU",
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
        "seconds a step is slower": medians,
        "rollout time, apart by overlap, per step": {
            slow_down: round(
                (both["apart"]["rollout"] / both["apart"]["steps"])
                / (both["overlap"]["rollout"] / both["overlap"]["steps"]),
                2,
            )
            for slow_down, both in medians.items()
        },
        "waiting for environments, share of the rollout": {
            slow_down: {name: round(m["environment"] / m["rollout"], 3) for name, m in both.items()}
            for slow_down, both in medians.items()
        },
        "raw": seconds,
    }


if __name__ == "__main__":
    main()

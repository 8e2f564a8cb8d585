"""Iterations of 50 turns by phase: in turns, and with what lets nothing wait for anything.

    python benchmarks/long_iterations.py --output benchmarks/results/long_iterations [--size long] [--repetitions 2]

The tiny model is trained on generated ALFWorld games by G2POTrainer with colocated vLLM, `max_turns` 50 and learning
rate 0, so that no arm gets better episodes than another; every step takes 0 to `seconds` longer, drawn anew each
time. Of the games of size *long* it wins few, and nearly all episodes have 50 turns; of *tiny* ones more than half,
and episodes are of all lengths. Arms, each a process of its own, one after another, in the opposite order every
other time:

    turns             stream_rollouts off: every episode waits for the slowest of each turn
    streams           stream_rollouts on
    while playing     update_while_playing as well
    one ahead         stream_rollouts, rollouts_ahead 1

All iterations count, the first too: with rollouts ahead it plays more than its own batch, and the last one less.
Episodes differ in length from game to game, so arms are compared by steps a second: those that were trained on, by the
seconds of the whole run. Prints and writes OUTPUT/SIZE.json: command, machine, versions, raw seconds of each iteration
by phase, means. Needs vLLM (on a CPU: the environment of `make test-vllm`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, AlfworldEnvironment, Manifest, generate_games
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import StepResult
from g2po_trl.json_text import write_json

ARMS = {
    "turns": {"stream_rollouts": False},
    "streams": {"stream_rollouts": True},
    "while playing": {"stream_rollouts": True, "update_while_playing": True},
    "one ahead": {"stream_rollouts": True, "rollouts_ahead": 1},
}
PHASES = ("rollout", "generation", "environment", "prompts", "advantage", "batch", "logps", "update")
MORE = ("episode/success_rate", "episode/turns", "rollout/steps", "rollout/mean_age", "rollout/active_fraction")
MORE += ("update/while_playing_fraction", "rollout/episodes")


class SlowAlfworld(AlfworldEnvironment):
    """Takes up to `seconds` longer for a step."""

    def __init__(self, games: Manifest, seconds: float, **options):
        super().__init__(games, **options)
        self.seconds = seconds

    def step(self, action: str) -> StepResult:
        # Workers that are forked would share a seeded generator's state.
        time.sleep(random.SystemRandom().uniform(0, self.seconds))
        return super().step(action)


def train(arm: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of each iteration."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from g2po_trl import G2POConfig, G2POTrainer

    generate_games(options.games, "train", 4 * (options.iterations + 2), seed=0, size=options.size, progress=False)
    manifest, iterations = Manifest.scan(options.games), []

    class Watch(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.began = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            self.seconds = time.perf_counter() - self.began

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "time/rollout" in logs:
                kept = {"seconds": self.seconds, **{name: logs.get(f"time/{name}", 0.0) for name in PHASES}}
                iterations.append(kept | {name: logs[name] for name in MORE if name in logs})

    with tempfile.TemporaryDirectory() as folder:
        args = G2POConfig(
            folder,
            per_device_train_batch_size=options.episodes,
            num_generations=8,
            max_turns=50,
            max_prompt_length=512,
            max_completion_length=24,
            stop_sequences=["</action>"],
            max_steps=options.iterations,
            learning_rate=0.0,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            use_vllm=True,
            vllm_mode="colocate",
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            report_to="none",
            save_strategy="no",
            save_trajectories=False,
            num_environment_workers=options.workers,
            max_tokens_per_micro_batch=2048,
            logging_steps=1,
            **ARMS[arm],
        )
        hidden = ("help", "look", "inventory", "examine")
        trainer = G2POTrainer(
            str(tiny_model_path()),
            args,
            Dataset.from_list(manifest.rows()),
            environment_factory=partial(SlowAlfworld, manifest, options.seconds, hidden_actions=hidden, intro=False),
            prompt_template=ALFWORLD_COMPACT_PROMPT,
            callbacks=[Watch()],
        )
        trainer.train()
        trainer.close()
    return [{name: round(value, 4) for name, value in each.items()} for each in iterations]


def summary(raw: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Means of each arm, and how many steps it plays and trains on in a second, by those of turns."""
    table = {
        arm: {name: round(mean(each.get(name, 0.0) for each in runs), 3) for name in runs[0]}
        for arm, runs in raw.items()
    }
    for arm, row in table.items():
        steps = sum(each["episode/turns"] * each["rollout/episodes"] for each in raw[arm])
        row["steps a second"] = round(steps / sum(each["seconds"] for each in raw[arm]), 2)
    for row in table.values():
        row["by turns"] = round(row["steps a second"] / table["turns"]["steps a second"], 2)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=3, help="of each process")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--size", default="long", help="of the games")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--games", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.arm:
        write_json(options.output / "arm.json", train(options.arm, options))
        return
    raw: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for repetition in range(options.repetitions):
            for arm in list(ARMS)[:: -1 if repetition % 2 else 1]:
                given = [sys.argv[0], *sys.argv[1:], "--arm", arm, "--games", f"{folder}/games"]
                subprocess.run([sys.executable, *given, "--output", folder], check=True)
                raw[arm] += json.loads(Path(folder, "arm.json").read_text())
                print(f"repetition {repetition}, {arm}:", json.dumps(raw[arm][-1]), file=sys.stderr, flush=True)
    result = {
        "command": "python benchmarks/long_iterations.py " + " ".join(sys.argv[1:]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU",
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
        "means": summary(raw),
        "raw": raw,
    }
    write_json(options.output / f"{options.size}.json", result, indent=1)
    print(json.dumps(result["means"], indent=1))


if __name__ == "__main__":
    main()

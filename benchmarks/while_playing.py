"""What `update_while_playing` saves: iterations with and without it, interleaved, in one process.

    python benchmarks/while_playing.py --output benchmarks/results/while_playing [--repetitions 5]

The tiny ALFWorld model is trained (learning rate 0, so that every iteration is the same) on replies that come from
elsewhere: an engine that answers each request after `seconds` x (0.5 to 1.5), as a server would that has room for all,
and computes nothing here. 4 groups of 8 episodes; one that fails runs to `turns`, the others need 3 to a third of it,
and those of task i fail with probability i / 8, so that some groups are complete long before the last episode ends and
others are not. Lengths, replies and delays follow from episode and turn, the same in every iteration; the gradient is
next to nothing, since the importance ratios of invented log-probabilities are. `seconds`, of which there may be
several, make the update a larger or a smaller part of an iteration. Prints and writes OUTPUT/results.json: command,
machine, raw seconds of each iteration, medians, and the share of the update that was made during the rollout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from datasets import Dataset
from transformers import TrainerCallback

from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import G2POConfig, G2POTrainer, Observation, PromptTemplate, StepResult, TextEnvironment, parts
from g2po_trl.json_text import write_json
from g2po_trl.rollout.generation import Engine, Reply
from g2po_trl.rollout.prompting import parse_plain

WORDS = "you are in the middle of a room . looking quickly around you , you see a cabinet 1 , a drawer 2".split()
TEMPLATE = PromptTemplate("{task} {observation}", "{task} {history} {observation}", parse_reply=parse_plain)


class Corridor(TextEnvironment):
    """As long as the first action says; pays where it also says so."""

    def reset(self, task: int) -> Observation:
        self.random, self.left = random.Random(task), None
        return Observation(self._text(), task=f"put a vase on shelf {task}")

    def step(self, action: str) -> StepResult:
        if self.left is None:
            self.left, self.wins = map(int, action.split()) if action[:1].isdigit() else (1, 0)
        self.left -= 1
        return StepResult(self._text(), reward=10.0 * (self.left == 0 and self.wins), terminated=self.left == 0)

    def _text(self) -> str:
        return " ".join(self.random.choices(WORDS, k=24))


class Elsewhere(Engine):
    """Answers after a while, whoever else is asked."""

    streams = takes_seeds = True
    seconds = 0.1

    def __init__(self, trainer):
        super().__init__(trainer.processing_class, trainer.eos_token_ids)
        self.turns, self.asked, self.turn = trainer.args.max_turns, {}, {}

    @contextmanager
    def _open(self):
        self.asked, self.turn = {}, {}
        yield

    def submit(self, key, prompt, sampling, seed=None):
        self.turn[key] = self.turn.get(key, 0) + 1
        chosen = random.Random(f"{key} {self.turn[key]}")
        wins = chosen.random() >= key // 8 / 8
        length = chosen.randint(3, self.turns // 3) if wins else self.turns
        text = f"{length} {int(wins)}" if self.turn[key] == 1 else " ".join(chosen.choices(WORDS, k=12))
        ids = self.tokenizer(text)["input_ids"] + sorted(self.ends)[:1]
        due = time.monotonic() + self.seconds * chosen.uniform(0.5, 1.5)
        self.asked[key] = due, Reply(ids, [-3.0] * len(ids))

    def poll(self, timeout):
        due = min(due for due, _ in self.asked.values())
        time.sleep(max(0.0, min(timeout, due - time.monotonic())))
        now = time.monotonic()
        return {key: self.asked.pop(key)[1] for key in [key for key, (due, _) in self.asked.items() if due <= now]}


class Interleaved(TrainerCallback):
    """Every other iteration without it; the first two are not counted."""

    def __init__(self, trainer):
        self.trainer, self.playing, self.raw = trainer, trainer.while_playing, {"with": [], "without": []}

    def on_step_begin(self, args, state, control, **kwargs):
        self.name = ("without", "with")[state.global_step % 2]
        self.trainer.while_playing = self.playing if self.name == "with" else None
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds, self.counted = time.perf_counter() - self.started, state.global_step > 2

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "time/rollout" in logs and self.counted:
            kept = ("time/rollout", "time/update", "time/logps", "time/update_while_playing", "grad_norm")
            kept += ("update/while_playing_fraction", "update/forwarded_tokens", "update/step_samples")
            run = {"seconds": self.seconds, **{name: logs[name] for name in kept if name in logs}}
            self.raw[self.name].append({name: round(value, 5) for name, value in run.items()})


def measure(seconds: float, folder: str, options: argparse.Namespace) -> dict:
    Elsewhere.seconds, parts.make_engine = seconds, Elsewhere
    args = G2POConfig(
        folder,
        per_device_train_batch_size=32,
        num_generations=8,
        max_turns=options.turns,
        max_completion_length=24,
        history_length=1,
        max_steps=2 + 2 * options.repetitions,
        learning_rate=0.0,
        gradient_accumulation_steps=1,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        save_trajectories=False,
        overwrite=True,  # each measurement is a run of its own
        shuffle_dataset=False,
        num_environment_workers=2,
        max_tokens_per_micro_batch=4096,
        logging_steps=1,
        vllm_servers=["http://localhost:1"],
        update_while_playing=True,
    )
    tasks = Dataset.from_list([{"task": number} for number in range(4)])
    trainer = G2POTrainer(str(tiny_model_path()), args, tasks, None, Corridor, TEMPLATE)
    watch = Interleaved(trainer)
    trainer.add_callback(watch)
    trainer.train()
    trainer.close()
    middle = {name: median(run["seconds"] for run in runs) for name, runs in watch.raw.items()}
    without, early = watch.raw["without"], [run["update/while_playing_fraction"] for run in watch.raw["with"]]
    update = median(run["time/update"] + run["time/logps"] for run in without)
    return {
        "seconds an iteration, with": round(middle["with"], 2),
        "seconds an iteration, without": round(middle["without"], 2),
        "without by with": round(middle["without"] / middle["with"], 3),
        "share of the update and log-probabilities, without": round(update / middle["without"], 3),
        "share of the update made while playing": round(median(early), 3),
        "raw": watch.raw,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.6])
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        found = {str(seconds): measure(seconds, folder, options) for seconds in options.seconds}
    result = {
        "command": "python benchmarks/while_playing.py " + " ".join(sys.argv[1:]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU; one thread",
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
        "seconds of a reply": found,
    }
    write_json(options.output / "results.json", result, indent=1)
    print(
        json.dumps({seconds: {k: v for k, v in run.items() if k != "raw"} for seconds, run in found.items()}, indent=1)
    )


if __name__ == "__main__":
    main()

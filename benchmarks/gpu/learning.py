"""One run that ends in time, its curve written as it comes: part of `run.py`.

    python -m benchmarks.gpu.learning --findings FILE --until SECONDS alfworld --config smollm2-135m …

All other words are those of `g2po train`. Panels are played while there is time for them.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from benchmarks.gpu.digests import Digests
from benchmarks.learning.statistics import first_at
from benchmarks.train import run
from g2po_trl import G2POTrainer
from g2po_trl.utils.json import to_json

METRICS = ("episode/success_rate", "episode/turns", "episode/valid_action_ratio", "grad_norm", "entropy")
SAMPLING = "sampling/sampling_logp_difference"
PHASES = ("rollout", "generation", "environment", "logps", "update")


class Curve(TrainerCallback):
    """Writes each iteration and each evaluation as a line of JSON, and ends training while the panel can be played.

    Args:
        path: file to which lines are added.
        until: when to be done, in seconds as `time.time` counts them.
        reach: mean training success of three iterations that ends training. None: nothing does.
        every: optimizer steps after which that is looked at.
        panels_take: seconds that are kept for the panels until one was played.
    """

    def __init__(self, path: Path, until: float, reach: float | None = None, every: int = 1, panels_take: float = 0.0):
        self.panels_take, self.started = panels_take, time.time()
        self.path, self.until, self.reach, self.every = path, until, reach, every
        self.longest_iteration = 0.0
        self.panel_seconds: dict[str, float] = {}  # by name of the panel
        self.began = self.started
        self.success: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = time.time()

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        line: dict[str, Any] = {"step": state.global_step, "elapsed": round(time.time() - self.started, 1)}
        panel = next((name for name in logs if name.startswith("eval") and name.endswith("_success_rate")), None)
        if panel is not None:
            name = panel.removesuffix("_success_rate")
            runtime = logs[f"{name}_runtime"]
            self.panel_seconds[name] = runtime  # the first takes longer, as an engine warms up
            at = name.removeprefix("eval").removeprefix("_t").replace("_", ".") or args.eval_temperature
            line |= {"panel": logs[panel], "temperature": float(at), "panel_seconds": round(runtime, 1)}
            line |= {key: value for key, value in logs.items() if key.startswith(f"{panel}/")}
        elif "episode/success_rate" in logs:
            self.success.append(logs["episode/success_rate"])
            line |= {name.split("/")[-1]: logs.get(name) for name in METRICS}
            line |= {
                f"logp_difference_{of}": logs[f"{SAMPLING}/{of}"]
                for of in ("mean", "max")
                if f"{SAMPLING}/{of}" in logs
            }
            line |= {name: logs[f"time/{name}"] for name in PHASES if f"time/{name}" in logs}
        else:
            return
        with self.path.open("a") as file:
            file.write(to_json({name: _short(value) for name, value in line.items()}) + "\n")

    def on_step_end(self, args, state, control, **kwargs):
        now = time.time()
        self.longest_iteration = max(self.longest_iteration, now - self.began)
        panels = 1.3 * sum(self.panel_seconds.values()) or self.panels_take
        if now + 1.2 * self.longest_iteration + panels + 5 > self.until:
            control.should_training_stop = True
        if self.reach is not None and state.global_step % self.every == 0:
            control.should_training_stop |= first_at(self.success, self.reach) is not None


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value


def set_vllm(**options: Any) -> None:
    """Have TRL start its vLLM with further arguments of `vllm.LLM`."""
    from trl.generation import vllm_generation

    vllm_generation.LLM = functools.partial(_with, vllm_generation.LLM, options)


def _with(cls: type, options: dict[str, Any], **others: Any) -> Any:
    return cls(**{**others, **options})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--findings", type=Path, required=True, help="file to which lines of JSON are added")
    parser.add_argument("--until", type=float, required=True, help="when to be done, in seconds of the epoch")
    parser.add_argument("--reach", type=float, help="mean training success of three iterations that ends training")
    parser.add_argument("--every", type=int, default=1, help="optimizer steps after which that is looked at")
    parser.add_argument("--panels_take", type=float, default=0.0, help="seconds of the panels, until one was played")
    parser.add_argument("--digests", type=Path, help="file of a line of hashes for each iteration, see digests.py")
    parser.add_argument("--deterministic", action="store_true", help="the trainer's kernels are deterministic")
    parser.add_argument("--vllm_options", type=json.loads, help="JSON, further arguments of vllm.LLM")
    args, words = parser.parse_known_args()
    if args.vllm_options:
        set_vllm(**args.vllm_options)

    def watch(trainer: G2POTrainer) -> None:
        trainer.add_callback(Curve(args.findings, args.until, args.reach, args.every, args.panels_take))
        if args.digests:
            trainer.add_callback(Digests(args.digests, trainer, args.deterministic))

    run(words, made=watch)


if __name__ == "__main__":
    main()

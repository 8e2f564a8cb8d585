"""One run of a recipe that ends in time, its curve written as it comes: part of `run.py` and of `pretrained.py`.

    python -m benchmarks.gpu.learning --findings FILE --seconds 200 --config recipes/alfworld/smollm2-135m.yaml …

All other flags are the recipe's. The held-out panel is played before, and after the last iteration there is time for.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from transformers import TrainerCallback  # noqa: E402

from benchmarks.gpu.digests import Digests  # noqa: E402
from benchmarks.learning.comparison_statistics import first_at  # noqa: E402
from g2po_trl import G2POTrainer  # noqa: E402
from g2po_trl.utils.json import to_json  # noqa: E402

RECIPES = ("train_alfworld", "train_environment")
METRICS = ("episode/success_rate", "episode/turns", "episode/valid_action_ratio", "grad_norm", "entropy")
SAMPLING = "sampling/sampling_logp_difference"
PHASES = ("rollout", "generation", "environment", "logps", "update")


class Curve(TrainerCallback):
    """Writes each iteration and each evaluation as a line of JSON, and ends training while the panel can be played.

    Args:
        path: file to which lines are added.
        seconds: from the start of the program to its end.
        reach: mean training success of three iterations that ends training. None: nothing does.
        every: optimizer steps after which that is looked at.
        panels_take: seconds that are kept for the panels until one was played.
    """

    def __init__(
        self, path: Path, seconds: float, reach: float | None = None, every: int = 1, panels_take: float = 0.0
    ):
        self.panels_take = panels_take
        self.path, self.deadline, self.reach, self.every = path, STARTED + seconds, reach, every
        self.longest_iteration = 0.0
        self.panel_seconds: dict[str, float] = {}  # by name of the panel
        self.began = time.perf_counter()
        self.success: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        line: dict[str, Any] = {"step": state.global_step, "elapsed": round(time.perf_counter() - STARTED, 1)}
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
        now = time.perf_counter()
        self.longest_iteration = max(self.longest_iteration, now - self.began)
        panels = 1.3 * sum(self.panel_seconds.values()) or self.panels_take
        if now + 1.2 * self.longest_iteration + panels + 5 > self.deadline:
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
    parser.add_argument("--seconds", type=float, required=True, help="when to be done, from the start of the program")
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0])
    parser.add_argument("--reach", type=float, help="mean training success of three iterations that ends training")
    parser.add_argument("--every", type=int, default=1, help="optimizer steps after which that is looked at")
    parser.add_argument("--panels_take", type=float, default=0.0, help="seconds of the panels, until one was played")
    parser.add_argument("--digests", type=Path, help="file of a line of hashes for each iteration, see digests.py")
    parser.add_argument("--deterministic", action="store_true", help="the trainer's kernels are deterministic")
    parser.add_argument("--vllm_options", type=json.loads, help="JSON, further arguments of vllm.LLM")
    args, flags = parser.parse_known_args()
    recipe = importlib.import_module(args.recipe)
    if args.vllm_options:
        set_vllm(**args.vllm_options)

    def trainer_class(**options: Any) -> G2POTrainer:
        trainer = G2POTrainer(**options)
        trainer.add_callback(Curve(args.findings, args.seconds, args.reach, args.every, args.panels_take))
        if args.digests:
            trainer.add_callback(Digests(args.digests, trainer, args.deterministic))
        return trainer

    sys.argv = [recipe.__file__, *flags]
    recipe.main(trainer_class=trainer_class)


if __name__ == "__main__":
    main()

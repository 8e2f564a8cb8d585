"""One run of recipes/train_alfworld.py that ends in time, its curve written as it comes: part of `run.py`.

    python -m benchmarks.gpu.learning --findings FILE --seconds 200 --config recipes/alfworld/smollm2-135m.yaml …

All other flags are the recipe's. The held-out panel is played before, and after the last iteration there is time for.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

import train_alfworld  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from g2po_trl import G2POTrainer  # noqa: E402
from g2po_trl.utils.json import to_json  # noqa: E402

METRICS = ("episode/success_rate", "episode/turns", "episode/valid_action_ratio", "grad_norm")
PHASES = ("rollout", "generation", "environment", "logps", "update")


class Curve(TrainerCallback):
    """Writes each iteration and each evaluation as a line of JSON, and ends training while the panel can be played.

    Args:
        seconds: from the start of the program to its end.
    """

    def __init__(self, path: Path, seconds: float):
        self.path, self.deadline = path, STARTED + seconds
        self.panel_seconds = self.longest_iteration = 0.0
        self.began = time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        line: dict[str, Any] = {"step": state.global_step, "elapsed": round(time.perf_counter() - STARTED, 1)}
        if "eval_success_rate" in logs:
            self.panel_seconds = max(self.panel_seconds, logs["eval_runtime"])
            kept = {name: value for name, value in logs.items() if name.startswith("eval_success_rate/")}
            line |= {"panel": logs["eval_success_rate"], **kept, "panel_seconds": round(logs["eval_runtime"], 1)}
        elif "episode/success_rate" in logs:
            line |= {name.split("/")[-1]: logs.get(name) for name in METRICS}
            line |= {name: logs.get(f"time/{name}") for name in PHASES}
        else:
            return
        with self.path.open("a") as file:
            file.write(to_json({name: _short(value) for name, value in line.items()}) + "\n")

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.longest_iteration = max(self.longest_iteration, now - self.began)
        if now + 1.2 * self.longest_iteration + 1.3 * self.panel_seconds + 5 > self.deadline:
            control.should_training_stop = True


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--findings", type=Path, required=True, help="file to which lines of JSON are added")
    parser.add_argument("--seconds", type=float, required=True, help="when to be done, from the start of the program")
    args, flags = parser.parse_known_args()

    def trainer_class(**options: Any) -> G2POTrainer:
        trainer = G2POTrainer(**options)
        trainer.add_callback(Curve(args.findings, args.seconds))
        return trainer

    sys.argv = [train_alfworld.__file__, *flags]
    train_alfworld.main(trainer_class=trainer_class)


if __name__ == "__main__":
    main()

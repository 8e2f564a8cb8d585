"""A few trajectories of every k-th iteration as a table in the run's tracker: Trackio, W&B or TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from textwrap import indent
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from ..trajectory import Trajectory

BACKENDS = ("trackio", "wandb", "tensorboard")
COLUMNS = ("iteration", "task", "outcome", "reward", "turns", "transcript")
ROWS = 4  # trajectories of a table


def transcript(trajectory: Trajectory) -> str:
    """Return observations and completions in words, numbered by the steps of the episode."""
    lines = []
    for number, step in enumerate(trajectory.steps, 1):
        lines += [f"[{number}] {step.observation}", f"> {step.completion or step.action}"]
    return "\n".join([*lines, trajectory.error or trajectory.final_observation or ""])


class SampleTable(TrainerCallback):
    """Logs a table after each log line that has new rows: of every k-th iteration (`every`; 0: of none).

    `callbacks`: the trainer's, which contain TensorBoard's writer.
    """

    def __init__(self, every: int, callbacks: Sequence[TrainerCallback]):
        self.every, self.callbacks = every, callbacks
        self._rows: list[dict[str, Any]] = []

    def offer(self, trajectories: Sequence[Trajectory], iteration: int) -> None:
        """Keep the first trajectories of an iteration as rows with `COLUMNS`, if it is one that is logged."""
        if self.every and iteration % self.every == 0:
            self._rows = [
                dict(zip(COLUMNS, (iteration, one.task_id, one.outcome, one.reward, len(one.steps), transcript(one))))
                for one in trajectories[:ROWS]
            ]

    def on_log(self, args, state, control, **kwargs):
        rows, self._rows = self._rows, []
        if not rows or not state.is_world_process_zero:
            return
        if "tensorboard" in args.report_to:
            writer = next((one.tb_writer for one in self.callbacks if isinstance(one, TensorBoardCallback)), None)
            for row in rows if writer is not None else ():
                head = ", ".join(f"{name} {row[name]}" for name in COLUMNS[:-1])
                text = f"{head}\n\n{indent(row['transcript'], '    ')}"  # Markdown: as it stands
                writer.add_text(f"trajectories/{row['task']}", text, state.global_step)
        for name in {"wandb", "trackio"} & set(args.report_to):
            import pandas

            backend, frame = import_module(name), pandas.DataFrame(rows, columns=list(COLUMNS))
            backend.log({"trajectories": backend.Table(dataframe=frame)})

"""Hashes of what each iteration read, wrote and computed: part of `learning.py`, compared by `run.py`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from transformers import TrainerCallback

from g2po_trl import G2POTrainer

SCALARS = ("loss", "grad_norm", "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max")


def digest(arrays: Iterable[np.ndarray | bytes]) -> str:
    """Return a hash of the bytes of arrays, in order."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(array if isinstance(array, bytes) else np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return the bits of a tensor: those of bfloat16, which numpy does not have, as integers."""
    tensor = tensor.detach().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy()


class Digests(TrainerCallback):
    """Writes a line of JSON for each iteration: hashes of token ids, log-probabilities and weights; and scalars.

    Args:
        path: file to which lines are added.
        trainer: is asked for them.
        deterministic: whether PyTorch takes deterministic kernels from the end of a rollout to the end of the
            iteration. vLLM's are its own business.
    """

    def __init__(self, path: Path, trainer: G2POTrainer, deterministic: bool):
        self.path, self.deterministic, self.line = path, deterministic, {}
        self.model = trainer.model
        collect, add_log_probs = trainer.strategy.collect, trainer._add_log_probs

        def collected(*args, **kwargs):
            rollout = collect(*args, **kwargs)
            steps = [step for trajectory in rollout.trajectories for step in trajectory.steps]
            self.line = {
                "prompts": digest(np.array(step.prompt_ids) for step in steps),
                "completions": digest(np.array(step.completion_ids) for step in steps),
                "sampled log-probabilities": digest(np.array(step.logprobs or [], dtype=float) for step in steps),
            }
            self._deterministic(True)
            return rollout

        def added(mini_batches):
            add_log_probs(mini_batches)
            found = [
                one["old_per_token_logps"] for part in mini_batches for one in part if "old_per_token_logps" in one
            ]
            self.line["log-probabilities"] = digest(map(bits, found))

        trainer.strategy.collect, trainer._add_log_probs = collected, added

    def _deterministic(self, on: bool) -> None:
        if self.deterministic:
            torch.use_deterministic_algorithms(on)  # if it only warns, memory-efficient attention stays as it is

    def on_step_end(self, args, state, control, **kwargs):
        self._deterministic(False)
        self.line["weights"] = digest(bits(weights) for weights in self.model.parameters())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.line and "grad_norm" in (logs or {}):
            self.line |= {name: float(logs[name]) for name in SCALARS if name in logs}
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **self.line}) + "\n")
            self.line = {}

"""A gradient that is not finite ends a run before the optimizer steps: that one step would make every weight NaN.

The norm is checked once per optimizer step. Only if it is not finite, the step's micro-batches pass again, one by one,
to find the cause. DeepSpeed steps inside its backward pass and keeps gradients to itself, so there a hook checks each
parameter's gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object

from ..utils.trl_compat import fsdp_plugin_of, set_sync_gradients
from .layout import Layout

ADVICE = "See 'The gradient is not finite' in docs/reading_a_run.md."


class GradientGuard:
    """Check of an optimizer step's gradient that stops all ranks together.

    With fp16 it does nothing: gradients overflow now and then, and the loss scaler skips such a step.
    """

    def __init__(self, accelerator: Accelerator, layout: Layout):
        self.accelerator, self.layout = accelerator, layout
        self._micro_batches: list[dict[str, Any]] = []  # since the last optimizer step
        self._finite: list[dict[str, torch.Tensor]] = []  # of each, under DeepSpeed: by parameter

    def reset(self) -> None:
        """Forget the micro-batches since the last optimizer step."""
        self._micro_batches, self._finite = [], []

    def add(self, micro_batches: Sequence[dict[str, Any]]) -> None:
        """Add micro-batches that contribute to the gradient of the next optimizer step."""
        self._micro_batches += micro_batches

    def check(self, model: torch.nn.Module, train: Callable[[dict[str, Any]], torch.Tensor]) -> None:
        """Check the complete gradient, on all ranks together. `train`: forward and backward of a micro-batch.

        If it is not finite, gradients are zeroed, weights unchanged, and a `FloatingPointError` is raised.
        """
        micro_batches = self._micro_batches
        self.reset()
        if self._is_off or self._on_deepspeed or not self._anywhere(not norm_of(model).isfinite()):
            return
        everywhere = [name for rank in gather_object([non_finite(self._inside(model))]) for name in rank]
        names = [name for name, _ in self._inside(model).named_parameters() if name in everywhere]
        made_by = None
        for number, micro_batch in enumerate(micro_batches):
            found = self._alone(model, micro_batch, train)
            if self._anywhere(bool(found)):
                made_by = number if found else None
                break
        model.zero_grad()
        self._stop(names, micro_batches, made_by)

    def _alone(self, model: torch.nn.Module, micro_batch: dict[str, Any], train: Callable) -> list[str]:
        """Return the parameters whose gradient of this micro-batch alone is not finite."""
        accelerator = self.accelerator
        model.zero_grad()
        set_sync_gradients(accelerator, False)
        sharded = fsdp_plugin_of(accelerator) is not None
        with nullcontext() if sharded else accelerator.no_sync(model):
            train(micro_batch)
        return non_finite(self._inside(model))

    @contextmanager
    def watch_backward(self, model: torch.nn.Module, steps: bool) -> Iterator[None]:
        """Watch one backward pass under DeepSpeed; check its gradients before the optimizer step in it (`steps`).

        Raises:
            FloatingPointError: in place of that step, if a gradient since the last one is not finite.
        """
        if self._is_off or not self._on_deepspeed:
            yield
            return
        finite: dict[str, torch.Tensor] = {}
        self._finite.append(finite)

        def look(name: str) -> Callable[[torch.Tensor], None]:
            def hook(gradient: torch.Tensor) -> None:
                finite[name] = finite.get(name, True) & torch.linalg.vector_norm(gradient).isfinite()

            return hook

        trained = [(name, p) for name, p in self._inside(model).named_parameters() if p.requires_grad]
        hooks = [parameter.register_hook(look(name)) for name, parameter in trained]
        step = model.step

        def checked(*args: Any, **kwargs: Any) -> Any:
            self._check_deepspeed([name for name, _ in trained])
            return step(*args, **kwargs)

        if steps:
            model.step = checked
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            if steps:
                del model.step

    def _check_deepspeed(self, names: list[str]) -> None:
        micro_batches, finite = self._micro_batches, self._finite
        self.reset()
        if not self._anywhere(not all(bool(torch.stack(list(of.values())).all()) for of in finite if of)):
            return
        bad = [[name for name in names if name in of and not of[name]] for of in finite]
        everywhere = {name for rank in gather_object([bad]) for of in rank for name in of}
        made_by = next((number for number, of in enumerate(bad) if of), None)
        self._stop([name for name in names if name in everywhere], micro_batches, made_by)

    def _stop(self, names: Sequence[str], micro_batches: Sequence[dict[str, Any]], made_by: int | None) -> None:
        rank, number = self.accelerator.process_index, len(micro_batches)
        of_rank = f" on rank {rank}" if self.accelerator.num_processes > 1 else ""
        told = []
        if made_by is not None:
            shape = self._describe(micro_batches[made_by])
            told.append(f"Micro-batch {made_by + 1} of {number}{of_rank} makes it: {shape}.")
        told = [line for lines in gather_object([told]) for line in lines]
        told = told or [f"None of the step's {number} micro-batches makes it when it passes again, alone."]
        raise FloatingPointError(
            "the gradient is not finite, and the run stops before the optimizer steps on it: weights are those of the "
            f"step before. {describe(names)}. {' '.join(told)} {ADVICE}"
        )

    def _describe(self, micro_batch: dict[str, Any]) -> str:
        rows, length = micro_batch["packed_ids"].shape
        mask = "under a mask" if "packed_ends" in micro_batch else "without a mask"
        samples = int((micro_batch["completion_mask"].sum(1) > 0).sum())
        return (
            f"{rows} row{'s' * (rows > 1)} of {length} tokens {mask}, {samples} step samples, token_layout "
            f"{self.layout.kind!r}"
        )

    def _anywhere(self, found: bool | torch.Tensor) -> bool:
        flag = torch.as_tensor(found, device=self.accelerator.device).float().reshape(1)
        return self.accelerator.reduce(flag, reduction="sum").item() > 0

    def _inside(self, model: torch.nn.Module) -> torch.nn.Module:
        return self.accelerator.unwrap_model(model)

    @property
    def _is_off(self) -> bool:
        return self.accelerator.mixed_precision == "fp16"

    @property
    def _on_deepspeed(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED


def norm_of(model: torch.nn.Module) -> torch.Tensor:
    """Return the norm of the gradient shards on this rank."""
    return torch.nn.utils.get_total_norm([_held(p.grad) for p in model.parameters() if p.grad is not None])


def non_finite(model: torch.nn.Module) -> list[str]:
    """Return the parameters whose gradient shard on this rank is not finite."""
    held = ((name, _held(p.grad)) for name, p in model.named_parameters() if p.grad is not None)
    return [name for name, gradient in held if not torch.linalg.vector_norm(gradient).isfinite()]


def describe(names: Sequence[str]) -> str:
    """Return where non-finite gradients begin, in words: the backward pass carries them to the first layer."""
    if not names:
        return "Each parameter's gradient is finite, and their norm is not"
    layer = re.match(r"(?:.*?\.\d+(?=\.))?", names[-1])[0]
    of_layer = [name.removeprefix(f"{layer}.") for name in names if name.startswith(f"{layer}.")]
    where = f"{layer} ({', '.join(of_layer)})" if layer else names[-1]
    return f"It begins in {where}; {len(names)} of the parameters have such a gradient"


def _held(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient

"""A gradient that is not finite ends a run before the optimizer steps: that one step would make every weight NaN.

The norm is checked once per optimizer step. DeepSpeed steps inside its backward pass and keeps gradients to itself, so
there a hook checks each parameter's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object

from ..utils.trl_compat import replaced


class GradientGuard:
    """Check of an optimizer step's gradient that stops all ranks together; with fp16 the loss scaler skips it."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.is_off = accelerator.mixed_precision == "fp16"
        self.on_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        self._finite: dict[str, torch.Tensor] = {}  # under DeepSpeed: by parameter, since the last optimizer step

    def reset(self) -> None:
        """Discard the record of gradients since the last optimizer step."""
        self._finite.clear()

    def check(self, model: torch.nn.Module) -> None:
        """Check the complete gradient, on all ranks together.

        Raises:
            FloatingPointError: if it is not finite. Gradients are zeroed, and weights unchanged.
        """
        if self.is_off or self.on_deepspeed:
            return
        norm = torch.nn.utils.get_total_norm([_held(p.grad) for p in model.parameters() if p.grad is not None])
        flag = (~norm.isfinite()).float().reshape(1).to(self.accelerator.device)
        if self.accelerator.reduce(flag, reduction="sum") > 0:
            names = self._of_all_ranks(model, non_finite(self.accelerator.unwrap_model(model)))
            model.zero_grad()
            raise FloatingPointError(describe(names))

    @contextmanager
    def watch_backward(self, model: torch.nn.Module, steps: bool) -> Iterator[None]:
        """Watch one backward pass under DeepSpeed; check its gradients before the optimizer step in it (`steps`).

        Raises:
            FloatingPointError: in place of that step, if a gradient since the last one is not finite.
        """
        with ExitStack() as watched:
            if self.on_deepspeed and not self.is_off:
                for name, parameter in self.accelerator.unwrap_model(model).named_parameters():
                    if parameter.requires_grad:
                        watched.callback(parameter.register_hook(partial(self._look, name)).remove)
                if steps:
                    watched.enter_context(replaced(model, step=partial(self._step, model, model.step)))
            yield

    def _look(self, name: str, gradient: torch.Tensor) -> None:
        self._finite[name] = self._finite.get(name, True) & torch.linalg.vector_norm(gradient).isfinite()

    def _step(self, model: torch.nn.Module, step, *args, **kwargs):
        names = self._of_all_ranks(model, [name for name, is_finite in self._finite.items() if not is_finite])
        self.reset()
        if names:
            raise FloatingPointError(describe(names))
        return step(*args, **kwargs)

    def _of_all_ranks(self, model: torch.nn.Module, names: list[str]) -> list[str]:
        everywhere = {name for of_rank in gather_object([names]) for name in of_rank}
        return [name for name, _ in self.accelerator.unwrap_model(model).named_parameters() if name in everywhere]


def non_finite(model: torch.nn.Module) -> list[str]:
    """Return the parameters whose gradient shard on this rank is not finite."""
    held = ((name, _held(p.grad)) for name, p in model.named_parameters() if p.grad is not None)
    return [name for name, gradient in held if not torch.linalg.vector_norm(gradient).isfinite()]


def describe(names: Sequence[str]) -> str:
    """Return a message about these parameters; the backward pass carries what is not finite on to the first layer."""
    return (
        "the gradient is not finite, and the run stops before the optimizer steps on it: that of "
        f"{len(names)} parameters, nearest to the loss {', '.join(names[:-4:-1]) or 'none, but their norm'}. "
        "See 'The gradient is not finite' on the page 'Troubleshooting and FAQ'"
    )


def _held(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient

"""The reference of a model with an adapter: the weights that train, as they were before training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FILE = "reference/weights.safetensors"  # apart from the model's: engines load all that is beside those
Gather = Callable[[Sequence[torch.nn.Parameter]], AbstractContextManager]


class AdapterReference:
    """The initial values of the weights that train: put in their place, they make the model its reference.

    The model without its adapter may not be the initial model: an adapter may be trained further, may start from
    something other than the identity or change the base at the start (PiSSA, OLoRA), and biases or whole modules may
    be trained as well.

    Args:
        model: the model before it is wrapped or sharded.
        gather: gathers parameters that ZeRO-3 shards.
    """

    def __init__(self, model: torch.nn.Module, gather: Gather = nullcontext):
        trained = _trained(model)
        with gather(list(trained.values())):
            self.weights = {name: parameter.detach().clone() for name, parameter in trained.items()}

    @contextmanager
    def in_place(self, model: torch.nn.Module) -> Iterator[None]:
        """Let the model, without wrappers, be the reference inside. All ranks enter together."""
        _reshard(model)
        trained = _trained(model)
        with torch.no_grad():
            with _writable(trained.values()):
                now = {name: parameter.detach().clone() for name, parameter in trained.items()}
                for name, parameter in trained.items():
                    parameter.copy_(_like(self.weights[name], parameter))
            try:
                yield
            finally:
                _reshard(model)
                with _writable(trained.values()):
                    for name, parameter in trained.items():
                        parameter.copy_(now[name])

    def save(self, folder: str | Path) -> None:
        """Write the weights into a checkpoint, since the model of a resumed run may begin with others."""
        path = Path(folder, FILE)
        path.parent.mkdir(exist_ok=True)
        save_file({name: weight.contiguous() for name, weight in self.weights.items()}, path)

    def load(self, folder: str | Path) -> None:
        """Read the weights of a checkpoint, if it has any."""
        path = Path(folder, FILE)
        if path.is_file():
            saved = load_file(path)
            self.weights = {name: saved[name].to(weight.device) for name, weight in self.weights.items()}


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that train, by names without the prefix of activation checkpointing."""
    named = model.named_parameters()
    return {name.replace("_checkpoint_wrapped_module.", ""): one for name, one in named if one.requires_grad}


def _reshard(model: torch.nn.Module) -> None:
    """Make FSDP2 discard the gathered weights of its last forward pass."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def _writable(parameters: Iterable[torch.nn.Parameter]) -> AbstractContextManager:
    """Return a context in which ZeRO-3 has gathered the parameters, and keeps changes to them."""
    parameters = list(parameters)
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    from deepspeed.zero import GatheredParameters

    return GatheredParameters(parameters, modifier_rank=0)


def _like(weight: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    if not hasattr(parameter, "full_tensor"):
        return weight
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(weight.to(parameter.device), parameter.device_mesh, parameter.placements)

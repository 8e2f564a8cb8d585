"""The reference model: of an adapter, the weights that train, as they were; and what a checkpoint keeps of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, load_model, save_file, save_model

from ...utils.options import require

logger = logging.getLogger(__name__)

FILE = "reference/weights.safetensors"  # apart from the model's: engines load all that is beside those
Gather = Callable[[Sequence[torch.nn.Parameter]], AbstractContextManager]


class AdapterReference:
    """The initial values of the weights that train: put in their place, they make the model its reference.

    The model without its adapter may not be the initial one: an adapter may be trained further, begin elsewhere than
    at the identity or change the base (PiSSA, OLoRA), and biases or whole modules may be trained as well. The model is
    not wrapped or sharded yet, and `gather` gathers parameters that ZeRO-3 shards.
    """

    def __init__(self, model: torch.nn.Module, gather: Gather = nullcontext):
        trained = _trained(model)
        with gather(list(trained.values())):
            self.weights = {name: parameter.detach().clone() for name, parameter in trained.items()}

    @contextmanager
    def in_place(self, model: torch.nn.Module) -> Iterator[None]:
        """Let the model, without wrappers, be the reference inside. All ranks enter together."""
        with _writable(model) as trained:
            now = {name: parameter.detach().clone() for name, parameter in trained.items()}
            for name, parameter in trained.items():
                parameter.copy_(_like(self.weights[name], parameter))
        try:
            yield
        finally:
            with _writable(model) as trained:
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


@contextmanager
def _writable(model: torch.nn.Module) -> Iterator[dict[str, torch.nn.Parameter]]:
    """Yield the parameters that train, gathered if ZeRO-3 shards them; changes to them are kept."""
    for module in model.modules():
        if hasattr(module, "reshard"):  # FSDP2 discards the gathered weights of its last forward pass
            module.reshard()
    trained, whole = _trained(model), nullcontext()
    if any(hasattr(parameter, "ds_id") for parameter in trained.values()):
        from deepspeed.zero import GatheredParameters

        whole = GatheredParameters(list(trained.values()), modifier_rank=0)
    with torch.no_grad(), whole:
        yield trained


def _like(weight: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    if not hasattr(parameter, "full_tensor"):
        return weight
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(weight.to(parameter.device), parameter.device_mesh, parameter.placements)


class ReferenceState:
    """The reference model in a checkpoint: its weights if it `moves` (`sync_ref_model`), otherwise sums of them."""

    _WEIGHTS = "reference/model.safetensors"  # not beside the model's weights, where engines would load them

    def __init__(self, model: torch.nn.Module, moves: bool):
        self.model, self.moves = model, moves

    @cached_property
    def _sums(self) -> list[float]:
        weights = [one.detach() for one in self.model.parameters() if one.is_floating_point() and not one.is_meta]
        sums = ((one.sum(dtype=torch.float64).item(), one.abs().sum(dtype=torch.float64).item()) for one in weights)
        return [sum(column) for column in zip(*sums)]

    def state_dict(self) -> list[float] | None:
        """Return the sums by which a reference that does not move is recognized."""
        return None if self.moves else self._sums

    def load_state_dict(self, state: list[float] | None) -> None:
        """Warn if the reference is not the checkpoint's: the KL term would then pull to another model than before."""
        now = self.state_dict()
        if state and now and any(abs(one - other) > 1e-6 * state[1] for one, other in zip(state, now)):
            logger.warning("The reference model is not the one that the run began with: pass the run's first model.")

    def save(self, folder: str) -> None:
        """Write the weights, if they move."""
        if self.moves:
            path = Path(folder, self._WEIGHTS)
            path.parent.mkdir(exist_ok=True)
            save_model(self.model, str(path))

    def load(self, folder: str) -> None:
        """Restore the weights, if they move."""
        if self.moves:
            path = Path(folder, self._WEIGHTS)
            require(
                path.is_file(), "sync_ref_model", True, f"the run's reference is lost with {path}: start a new run"
            )
            load_model(self.model, str(path))

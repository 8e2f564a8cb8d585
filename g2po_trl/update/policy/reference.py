"""The reference model: of an adapter, the weights that train, as they were; and what a checkpoint keeps of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file, load_model, save_file, save_model

from ...utils.errors import G2POError

logger = logging.getLogger(__name__)

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


class ReferenceState:
    """The reference model in a checkpoint, so that a resumed run compares with the same one.

    Args:
        model: the reference.
        moves: `sync_ref_model`. If `True`, the checkpoint has the reference's weights; otherwise they are those at the
            start, and the checkpoint has sums of them.
    """

    _WEIGHTS = "reference/model.safetensors"  # not beside the model's weights, where engines would load them

    def __init__(self, model: torch.nn.Module, moves: bool):
        self.model, self.moves = model, moves
        self._sums: list[float] | None = None

    def state_dict(self) -> list[float] | None:
        """Return the sums by which a reference that does not move is recognized."""
        if self._sums is None and not self.moves:
            weights = [one.detach() for one in self.model.parameters() if one.is_floating_point() and not one.is_meta]
            sums = [[float(of.sum(dtype=torch.float64)) for of in (one, one.abs())] for one in weights]
            self._sums = [sum(column) for column in zip(*sums)]
        return self._sums

    def load_state_dict(self, state: list[float] | None) -> None:
        """Warn if the reference is not the checkpoint's: the KL term would then pull to another model than before."""
        now = self.state_dict()
        if state and now and any(abs(one - other) > 1e-6 * state[1] for one, other in zip(state, now)):
            logger.warning(
                f"The reference model is not the one that the run began with (sums of its weights and of their sizes: "
                f"{now}, and before {state}). Pass the model that the run began with."
            )

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
            if not path.is_file():
                raise G2POError(
                    f"sync_ref_model is True, and {str(folder)!r} holds no {self._WEIGHTS}: the run's reference is "
                    "lost. Start a new run from its weights (model_name_or_path)"
                )
            load_model(self.model, str(path))

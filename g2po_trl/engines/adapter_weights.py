"""The weights of a model, whole and one by one: an adapter merged or alone, and the model itself untouched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer


@torch.no_grad()
def merged_parameters(
    model: PeftModel,
    gather: Callable[[Sequence[torch.nn.Parameter]], AbstractContextManager] = nullcontext,
    device: torch.device | None = None,
    merges: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each weight of the base model, with the active adapters in it.

    Merging an adapter and taking it off again leaves rounding errors in the base, and a copy of the base costs its
    size. Here the tuner layers merge into stand-ins of what they wrap (a linear's weight, stacked experts), one module
    after the other. Sharded weights come whole: every rank has to iterate to the end.

    Args:
        gather: makes parameters whole that ZeRO-3 keeps in parts.
        device: where the parts of FSDP2's weights meet, if they are kept on the host.
        merges: `False` leaves the adapters out.
    """
    tuners = defaultdict(list)
    for module in model.modules() if merges else ():
        if isinstance(module, BaseTunerLayer):  # one may wrap another: each of the experts' parameters has its own
            tuners[module.get_base_layer()].append(module)
    seen = set()
    for path, module in model.named_modules(remove_duplicate=False):
        layers = tuners.get(module, [])
        names = {}
        for name, parameter in module.named_parameters(path, recurse=bool(layers)):
            base_name = _base_name(name, model.prefix)
            if base_name is not None and parameter not in seen:
                names[name] = base_name
                seen.add(parameter)
        if not names:
            continue
        needed = [*module.parameters(recurse=bool(layers)), *(p for layer in layers for p in layer.parameters())]
        with gather(needed), _merged(module, layers):
            values = dict(module.named_parameters(path, recurse=bool(layers)))
            for name, base_name in names.items():
                yield base_name, _whole(values[name].data, device)


def base_parameters(
    model: PeftModel,
    gather: Callable[[Sequence[torch.nn.Parameter]], AbstractContextManager] = nullcontext,
    device: torch.device | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each weight of the base model without adapters. Arguments as of `merged_parameters`."""
    return merged_parameters(model, gather, device, merges=False)


@torch.no_grad()
def whole_parameters(
    model: torch.nn.Module,
    gather: Callable[[Sequence[torch.nn.Parameter]], AbstractContextManager] = nullcontext,
    device: torch.device | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each weight, an adapter's merged into them. Arguments as of `merged_parameters`."""
    if isinstance(model, PeftModel):
        yield from merged_parameters(model, gather, device)
        return
    for name, parameter in model.named_parameters():
        with gather([parameter]):
            yield _plain(name), _whole(parameter.data, device)


@torch.no_grad()
def adapter_parameters(
    model: PeftModel,
    gather: Callable[[Sequence[torch.nn.Parameter]], AbstractContextManager] = nullcontext,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """The active adapter's weights alone, by the names of PEFT's files. Arguments as of `merged_parameters`."""
    values = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or model.prefix in name:
            with gather([parameter]):
                values[_plain(name)] = _whole(parameter.data, device).clone()
    return get_peft_model_state_dict(model, values, model.active_adapter, save_embedding_layers=False)


@contextmanager
def _merged(module: torch.nn.Module, layers: Sequence[BaseTunerLayer]) -> Iterator[None]:
    """If `layers` merge into `module`: they have, into copies that stand in for its parameters."""
    kept = [
        (owner, name, parameter)
        for owner in (module.modules() if layers else ())
        for name, parameter in owner.named_parameters(recurse=False)
    ]
    for owner, name, parameter in kept:
        owner._parameters[name] = torch.nn.Parameter(parameter.detach().clone(), requires_grad=False)
    try:
        for layer in layers:
            layer.merge()
        yield
    finally:
        for layer in layers:
            layer.merged_adapters.clear()  # nothing to take off: the stand-ins go
        for owner, name, parameter in kept:
            owner._parameters[name] = parameter


def _base_name(name: str, prefix: str) -> str | None:
    """What the base model calls a parameter; `None` for what is an adapter's, or what an adapter replaces."""
    if any(part in name for part in (prefix, "original_module", "trainable_tokens_")):
        return None
    for part in ("base_model.model.", ".base_layer", ".token_adapter", "modules_to_save.default."):
        name = name.replace(part, "")
    return _plain(name)


def _plain(name: str) -> str:
    """Without what activation checkpointing writes into it."""
    return name.replace("_checkpoint_wrapped_module.", "")


def _whole(weight: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    if not hasattr(weight, "full_tensor"):
        return weight
    return (weight.to(device) if weight.is_cpu and device is not None else weight).full_tensor()

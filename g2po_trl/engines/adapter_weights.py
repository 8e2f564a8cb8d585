"""Iterate over a model's weights, gathered one by one: with an adapter merged, without it, or the adapter alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper

from ..utils.forward_pass import evaluation_mode
from ..utils.options import option_text, require

Gather = Callable[[Sequence[torch.nn.Parameter]], AbstractContextManager]


@torch.no_grad()
def merged_parameters(
    model: PeftModel, gather: Gather = nullcontext, device: torch.device | None = None, merges: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of each weight of the base model, with the active adapters merged.

    Merging an adapter and unmerging it leaves rounding errors in the base, and a copy of the base costs its size. So
    tuner layers merge into copies of the parameters that they wrap (a linear's weight, stacked experts), one module
    after the other. Sharded weights are gathered, by `gather` under ZeRO-3, on `device` if FSDP2 has offloaded them:
    every rank has to iterate to the end. The model is not changed. `merges=False` yields the base without adapters.
    """
    tuners = defaultdict(list)
    for module in model.modules() if merges else ():
        if isinstance(module, BaseTunerLayer):  # one may wrap another: each of the experts' parameters has its own
            tuners[module.get_base_layer()].append(module)
    seen, wrappers = set(), _wrappers(model)
    for path, module in model.named_modules(remove_duplicate=False):
        layers = tuners.get(module, [])
        new = {n: p for n, p in module.named_parameters(path, recurse=bool(layers)) if p not in seen}
        names = {name: base_name for name in new if (base_name := _base_name(name, wrappers, model.prefix))}
        seen.update(new[name] for name in names)
        if not names:
            continue
        needed = [*module.parameters(recurse=bool(layers)), *(p for layer in layers for p in layer.parameters())]
        with gather(needed), _merged(module, layers):
            values = dict(module.named_parameters(path, recurse=bool(layers)))
            for name, base_name in names.items():
                yield base_name, whole(values[name].data, device)


@torch.no_grad()
def adapter_parameters(
    model: PeftModel, gather: Gather = nullcontext, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Return the active adapter's weights by their names in PEFT's files. Arguments as in `merged_parameters`."""
    values = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or model.prefix in name:
            with gather([parameter]):
                values[plain_name(name)] = whole(parameter.data, device).clone()
    return get_peft_model_state_dict(model, values, model.active_adapter, save_embedding_layers=False)


@torch.no_grad()
def check_mergeable(model: PeftModel) -> None:
    """Refuse an adapter that an engine cannot have merged into the base's weights, before the engine is started.

    One layer of each kind is compared with its merged weight. All ranks call it before weights are sharded.
    """
    config, reason = model.active_peft_config, _why_untied(model)
    if getattr(model, "is_quantized", False):
        reason = "weights in 4 or 8 bits would be rounded again at each transfer"
    if getattr(config, "layer_replication", None):
        reason = "the engine's model has fewer layers than layer_replication makes"
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    kinds = {(type(one), getattr(one.get_base_layer(), "bias", None) is None): one for one in layers}
    for layer in kinds.values():
        reason = reason or _why_not_merged(layer)
    remedy = f"it cannot be merged into the weights of an engine: {reason}. Use LoRA elsewhere, or another engine"
    require(reason is None, "peft_config", option_text(config.peft_type), remedy)


def _why_not_merged(layer: BaseTunerLayer) -> str | None:
    base, wanted = layer.get_base_layer(), None
    if any(hasattr(parameter, "ds_id") for parameter in layer.parameters()):
        return None  # ZeRO-3 holds a shard of each
    if isinstance(base, torch.nn.Linear):
        inputs = torch.ones(1, base.in_features, dtype=base.weight.dtype, device=base.weight.device)
        with evaluation_mode(layer):
            wanted = layer(inputs)
    try:
        with _merged(base, [layer]):
            if layer.get_base_layer() is not base:
                layer.unmerge()
                return f"{type(layer).__name__} replaces the layer that it merges into"
            off = 0.0 if wanted is None else float((base(inputs) - wanted).abs().max())
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error)
    limit = 0.0 if wanted is None else 64 * torch.finfo(wanted.dtype).eps * (1 + float(wanted.abs().max()))
    return None if off <= limit else f"{type(layer).__name__} merged computes something else (by {off:.2g})"


def _why_untied(model: PeftModel) -> str | None:
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return None
    tied = model.get_input_embeddings(), model.get_output_embeddings()
    are_tokens = all(isinstance(module, TrainableTokensWrapper) for module in tied)
    is_one = any(isinstance(module, BaseTunerLayer) for module in tied) or tied[0].weight is not tied[1].weight
    return "the LM head is tied to the embeddings, and one of them trains alone" if is_one and not are_tokens else None


@contextmanager
def _merged(module: torch.nn.Module, layers: Sequence[BaseTunerLayer]) -> Iterator[None]:
    """Replace the parameters of `module` by copies into which `layers` are merged."""
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


def _base_name(name: str, wrappers: dict[str, str], prefix: str) -> str | None:
    """Return the base model's name of a parameter; `None` for parameters of adapters, or replaced by them.

    `wrappers`: path of each module with copies of its own in adapters -> the part of it that is active.
    """
    for path, active in wrappers.items():
        if name.startswith(f"{path}."):
            inside = name.removeprefix(f"{path}.")
            if not inside.startswith(f"{active}."):
                return None
            name = f"{path}.{inside.removeprefix(f'{active}.')}"
    if prefix in name or "trainable_tokens_" in name:
        return None
    for part in ("base_model.model.", ".base_layer", ".token_adapter"):
        name = name.replace(part, "")
    return plain_name(name)


def _wrappers(model: PeftModel) -> dict[str, str]:
    """Return modules of `modules_to_save` by their paths, with the part of each that the active adapter uses."""
    adapter = model.active_adapter
    return {
        path: f"modules_to_save.{adapter}" if adapter in module.modules_to_save else "original_module"
        for path, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper)
    }


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefix of activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


def whole(weight: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Return a weight that FSDP2 shards, gathered on `device`; others as they are."""
    if not hasattr(weight, "full_tensor"):
        return weight
    return (weight.to(device) if weight.is_cpu and device is not None else weight).full_tensor()

"""Iterate over a model's weights, gathered one by one: with an adapter merged, without it, or the adapter alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper

from ..utils.errors import G2POError


@torch.no_grad()
def merged_parameters(
    model: PeftModel,
    gather: Callable[[Sequence[torch.nn.Parameter]], AbstractContextManager] = nullcontext,
    device: torch.device | None = None,
    merges: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of each weight of the base model, with the active adapters merged.

    Merging an adapter and unmerging it leaves rounding errors in the base, and a copy of the base costs its size. So
    tuner layers merge into copies of the parameters that they wrap (a linear's weight, stacked experts), one module
    after the other. Sharded weights are gathered: every rank has to iterate to the end. The model is not changed.

    Args:
        model: with one or more adapters.
        gather: gathers parameters that ZeRO-3 shards.
        device: gathers FSDP2's weights, if they are offloaded to the host.
        merges: `False` yields the base without adapters.
    """
    tuners = defaultdict(list)
    for module in model.modules() if merges else ():
        if isinstance(module, BaseTunerLayer):  # one may wrap another: each of the experts' parameters has its own
            tuners[module.get_base_layer()].append(module)
    seen, wrappers = set(), _wrappers(model)
    for path, module in model.named_modules(remove_duplicate=False):
        layers = tuners.get(module, [])
        names = {}
        for name, parameter in module.named_parameters(path, recurse=bool(layers)):
            base_name = _base_name(name, wrappers, model.prefix)
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


@torch.no_grad()
def whole_parameters(
    model: torch.nn.Module,
    gather: Callable[[Sequence[torch.nn.Parameter]], AbstractContextManager] = nullcontext,
    device: torch.device | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of each weight, with adapters merged. Arguments as in `merged_parameters`."""
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
    """Return the active adapter's weights by their names in PEFT's files. Arguments as in `merged_parameters`."""
    values = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or model.prefix in name:
            with gather([parameter]):
                values[_plain(name)] = _whole(parameter.data, device).clone()
    return get_peft_model_state_dict(model, values, model.active_adapter, save_embedding_layers=False)


@torch.no_grad()
def check_mergeable(model: PeftModel) -> None:
    """Refuse an adapter that an engine cannot have merged into the base's weights, before the engine is started.

    One layer of each kind is compared with its merged weight. All ranks call it before weights are sharded.
    """
    if getattr(model, "is_quantized", False):
        raise G2POError(
            "the model is quantized to 4 or 8 bits: every weight sync would merge the adapter into rounded weights "
            "and round again. Use LoRA on bfloat16 weights, or engine='transformers'"
        )
    config = model.active_peft_config
    kind = getattr(config.peft_type, "value", config.peft_type)
    if getattr(config, "layer_replication", None):
        raise G2POError("the adapter has layer_replication, and the engine's model has fewer layers: remove it")
    if reason := _why_untied(model):
        raise G2POError(
            f"the model ties its LM head to its embeddings, and {reason}: an engine has one weight for both. Train "
            "neither, train trainable_token_indices instead, or generate without the engine"
        )
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in {(type(one), getattr(one.get_base_layer(), "bias", None) is None): one for one in layers}.values():
        base = layer.get_base_layer()
        if any(hasattr(parameter, "ds_id") for parameter in layer.parameters()):
            continue  # ZeRO-3 holds a shard of each
        inputs = None
        if isinstance(base, torch.nn.Linear):
            inputs = torch.ones(1, base.in_features, dtype=base.weight.dtype, device=base.weight.device)
            training = layer.training
            wanted = layer.eval()(inputs)  # without dropout
            layer.train(training)
        off = limit = 0.0
        try:
            with _merged(base, [layer]):
                if in_place := layer.get_base_layer() is base:
                    off = 0.0 if inputs is None else float((base(inputs) - wanted).abs().max())
                else:
                    layer.unmerge()
        except (NotImplementedError, RuntimeError, ValueError) as error:
            raise G2POError(f"the adapter ({kind}) cannot be merged into the weights of an engine: {error}") from error
        if inputs is not None:
            limit = 64 * torch.finfo(wanted.dtype).eps * (1 + float(wanted.abs().max()))
        if not in_place or not off <= limit:
            raise G2POError(
                f"the adapter ({kind}) cannot be merged into the weights of an engine: {type(layer).__name__} merged "
                f"computes something else{f' (by {off:.2g})' if off else ''}. Use LoRA, or generate without the engine"
            )


def _why_untied(model: PeftModel) -> str | None:
    """Return what trains apart of embeddings and LM head that the model's configuration ties, if anything does."""
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return None
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(embeddings, TrainableTokensWrapper) and isinstance(head, TrainableTokensWrapper):
        return None
    for module, name in ((embeddings, "the embeddings"), (head, "the head")):
        if isinstance(module, BaseTunerLayer):
            return f"{name} alone have an adapter" if module is embeddings else f"{name} alone has an adapter"
    if embeddings.weight is not head.weight:
        return "they train apart (modules_to_save)"
    return None


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
    return _plain(name)


def _wrappers(model: PeftModel) -> dict[str, str]:
    """Return modules of `modules_to_save` by their paths, with the part of each that the active adapter uses."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            adapter = model.active_adapter
            found[path] = f"modules_to_save.{adapter}" if adapter in module.modules_to_save else "original_module"
    return found


def _plain(name: str) -> str:
    """Return a parameter's name without the prefix of activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


def _whole(weight: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    if not hasattr(weight, "full_tensor"):
        return weight
    return (weight.to(device) if weight.is_cpu and device is not None else weight).full_tensor()

"""PEFT adapters: find one, load it on its base, and check that it can be trained, saved and loaded again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import G2POError
from .options import require

if TYPE_CHECKING:
    import torch
    from trl import GRPOConfig

ADAPTER_CONFIG = "adapter_config.json"
# Modules of vision-language models that read images and pass them on, by their paths.
_READS_IMAGES = r"(.*\.)?(visual|vision_\w+|image_\w+|multi_modal_projector|connector|embed_vision)(\..*)?"


def adapters_below(folder: str | Path) -> list[Path]:
    """Return the subfolders with an adapter, without the checkpoints of a run."""
    found = (path.parent for path in sorted(Path(folder).glob(f"[!.]*/{ADAPTER_CONFIG}")))
    return [path for path in found if not (path / "trainer_state.json").is_file()]


def find_adapter(folder: str | Path) -> Path | None:
    """Return the folder of the adapter in a model's folder, or its subfolder if it is not "default"; else `None`."""
    if Path(folder, ADAPTER_CONFIG).is_file():
        return Path(folder)
    found = [] if Path(folder, "config.json").is_file() else adapters_below(folder)
    remedy = f"it has several adapters; pass the folder of one of {[path.name for path in found]}"
    require(len(found) < 2, "model", str(folder), remedy)
    return found[0] if found else None


def adapter_of(model: str, revision: str | None = None) -> str | None:
    """Return the folder or Hub id of the adapter of a model's name; `None` if it names a whole model."""
    from transformers.utils import find_adapter_config_file

    is_folder = Path(model).is_dir()
    found = find_adapter(model) if is_folder else find_adapter_config_file(model, revision=revision)
    return None if found is None else str(found) if is_folder else model


def load_adapter(
    adapter: str, load_base: Callable[..., torch.nn.Module], revision: str | None = None, is_trainable: bool = False
) -> torch.nn.Module:
    """Return an adapter (see `adapter_of`) on its base model; `G2POError` if it names none, or does not fit it.

    `load_base` is `(name, revision=…) -> model`; the base's revision is in the adapter's configuration.
    """
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(adapter, revision=revision)
    name = config.base_model_name_or_path
    require(bool(name), "base_model_name_or_path", name, f"write the base model into adapter_config.json of {adapter}")
    base = load_base(name, revision=config.revision)
    with warnings.catch_warnings():
        # With missing keys, the base or a mixture of base and adapter would be taken.
        warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
        try:
            return PeftModel.from_pretrained(base, adapter, revision=revision, is_trainable=is_trainable)
        except UserWarning as error:
            remedy = "merge it with the versions of transformers and peft that trained it, and pass what is merged"
            message = f"model is {adapter!r}, which does not fit {name} as a {type(base).__name__}: {remedy}"
            raise G2POError(f"{message} ({str(error)[:200]}…)", "model", adapter) from error


def load_adapter_to_train(
    model: Any, args: GRPOConfig, options: dict[str, Any], processing_class: Any
) -> tuple[Any, Any]:
    """Return model and processing class, loaded here, as TRL does not, if `model` is an adapter to train further.

    `options` are arguments of the trainer, from which `quantization_config` is removed.
    """
    from transformers import AutoProcessor

    from .trl_compat import create_model_from_path

    settings = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    revision, config = settings.pop("revision", None), options.get("peft_config")
    adapter = adapter_of(model, revision) if isinstance(model, str) else None
    if adapter is None:
        known = {"revision": revision, "trust_remote_code": settings["trust_remote_code"]}
        options["peft_config"] = on_language_part(config, model, **known)
        return model, processing_class
    remedy = f"model {model!r} is an adapter: leave it out to train that one, or merge that into its base before"
    require(config is None, "peft_config", type(config).__name__, remedy)
    settings |= {"quantization_config": options.pop("quantization_config")} if "quantization_config" in options else {}
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        settings["device_map"] = None
    loaded = load_adapter(adapter, partial(create_model_from_path, **settings), revision, is_trainable=True)
    if processing_class is None and Path(model, "tokenizer_config.json").is_file():  # else TRL takes the base's
        sides = {"truncation_side": "left", "padding_side": "left"}
        processing_class = AutoProcessor.from_pretrained(model, trust_remote_code=args.trust_remote_code, **sides)
    return loaded, processing_class


def on_language_part(config: Any, model: Any, **known: Any) -> Any:
    """Return an adapter's configuration that leaves out the parts of a vision-language model that read images.

    A configuration that sets `exclude_modules` (also `[]`), or targets modules by their paths, is unchanged. `model`
    is a model or its name; for a name, `known` are arguments of `AutoConfig.from_pretrained`.
    """
    targets = getattr(config, "target_modules", None) or ()
    targets = {targets} if isinstance(targets, str) else set(targets)
    has_paths = targets != {"all-linear"} and not all(map(str.isidentifier, targets))
    if getattr(config, "exclude_modules", ...) is not None or has_paths:
        return config
    from transformers import AutoConfig

    of_model = AutoConfig.from_pretrained(model, **known) if isinstance(model, str) else model.config
    return replace(config, exclude_modules=_READS_IMAGES) if hasattr(of_model, "vision_config") else config


def check_adapter_config(config: Any) -> None:
    """Refuse kinds of adapters that this trainer does not train. `config` is PEFT's."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    require(kind != "ADALORA", "peft_config", kind, "no trainer allocates its ranks; use LoRA")
    begins = getattr(config, "alora_invocation_tokens", None)
    require(not begins, "alora_invocation_tokens", begins, "it looks for them in whole rows; leave it out")
    shifts = config.is_prompt_learning or config.is_adaption_prompt
    require(not shifts, "peft_config", kind, "it shifts tokens by virtual tokens; use LoRA")


def check_adapter(model: torch.nn.Module) -> None:
    """Refuse a model with adapters unless one of them trains and all trained parameters are saved with it."""
    import torch
    from accelerate.utils import is_peft_model
    from peft import PeftMixedModel, get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    kind = type(model).__name__
    require(not isinstance(model, PeftMixedModel), "model", kind, "its adapters cannot be saved; use PeftModel")
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if not is_peft_model(model):
        require(not layers, "model", kind, "it has adapters; make it with get_peft_model or PeftModel.from_pretrained")
        return
    names = model.active_adapters
    remedy = "choose the one to train with model.set_adapter(NAME), and merge the others before"
    require(len(names) == 1, "active_adapters", names, remedy)
    check_adapter_config(model.peft_config[names[0]])
    for state, remedy in (("merged", "unmerge_adapter"), ("disable_adapters", "base_model.enable_adapter_layers")):
        is_set = any(getattr(layer, state) for layer in layers)
        require(not is_set, state, True, f"the adapter would not train; call model.{remedy}()")
    # PEFT is asked which it saves with numbers in place of weights, which may be sharded. Tied ones have two names.
    weights = model.state_dict(keep_vars=True)
    number_of = {id(weight): float(number) for number, weight in enumerate(weights.values())}
    numbers = {name: torch.tensor([number_of[id(weight)]]) for name, weight in weights.items()}
    saved = get_peft_model_state_dict(model, numbers, names[0], save_embedding_layers=False).values()
    kept, frozen, unsaved = {float(number) for number in saved}, [], []
    for name, parameter in model.named_parameters():
        is_saved = number_of.get(id(parameter)) in kept
        frozen += [name] if is_saved and not parameter.requires_grad else []
        unsaved += [name] if parameter.requires_grad and not is_saved else []
    trains = not (frozen and model.active_peft_config.inference_mode)
    require(trains, "inference_mode", True, "load it with PeftModel.from_pretrained(…, is_trainable=True)")
    remedy = f"not saved with adapter {names[0]!r}: freeze them, or name their modules in its modules_to_save"
    require(not unsaved, "trained parameters", unsaved[:1], remedy)


def only_active_adapter(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Make `save_pretrained` inside save only the adapter that trains, if a model has several."""
    from .trl_compat import replaced

    if len(getattr(model, "peft_config", ())) < 2:
        return nullcontext()
    return replaced(model, save_pretrained=partial(model.save_pretrained, selected_adapters=model.active_adapters))

"""PEFT adapters: find one, load it on its base, and check that it can be trained, saved and loaded again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import G2POError

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
    """Return the folder of the adapter in a model's folder; `None` if there is none.

    PEFT saves the adapter "default" in the folder itself, and one of another name in a subfolder of that name.

    Raises:
        G2POError: if several subfolders have an adapter.
    """
    folder = Path(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        return folder
    found = [] if (folder / "config.json").is_file() else adapters_below(folder)
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise G2POError(f"{folder} holds several adapters ({names}): pass the folder of one of them")
    return found[0] if found else None


def adapter_of(model: str, revision: str | None = None) -> str | None:
    """Return the folder or Hub id of the adapter of a model's name; `None` if it names a whole model."""
    from transformers.utils import find_adapter_config_file

    if Path(model).is_dir():
        folder = find_adapter(model)
        return None if folder is None else str(folder)
    return None if find_adapter_config_file(model, revision=revision) is None else model


def load_adapter(
    adapter: str,
    load_base: Callable[..., torch.nn.Module],
    revision: str | None = None,
    is_trainable: bool = False,
) -> torch.nn.Module:
    """Return an adapter on its base model.

    Args:
        adapter: see `adapter_of`.
        load_base: `(name, revision=…) -> model`. The base's revision is in the adapter's configuration.
        revision: revision of the adapter.
        is_trainable: whether its weights train.

    Raises:
        G2POError: if the adapter does not name its base model, or does not fit it.
    """
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(adapter, revision=revision)
    name = config.base_model_name_or_path
    if not name:
        raise G2POError(
            f"{adapter}: base_model_name_or_path is {name!r} in adapter_config.json: write its base model there"
        )
    base = load_base(name, revision=config.revision)
    with warnings.catch_warnings():
        # With missing keys, the base or a mixture of base and adapter would be taken.
        warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
        try:
            return PeftModel.from_pretrained(base, adapter, revision=revision, is_trainable=is_trainable)
        except UserWarning as error:
            raise G2POError(
                f"the adapter {adapter} does not fit {name}, loaded as {type(base).__name__}: it was trained on "
                "another base, or with other versions of transformers and peft; merge it where it was trained, and "
                f"pass the merged checkpoint ({str(error)[:200]}…)"
            ) from error


def load_adapter_to_train(
    model: Any, args: GRPOConfig, options: dict[str, Any], processing_class: Any
) -> tuple[Any, Any]:
    """Return model and processing class, loaded here if `model` is the folder or id of an adapter to train further.

    TRL itself loads only whole models. `options` are arguments of the trainer; `quantization_config` is removed from
    them.
    """
    from transformers import AutoProcessor

    from .trl_compat import create_model_from_path

    settings = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    revision = settings.pop("revision", None)
    adapter = adapter_of(model, revision) if isinstance(model, str) else None
    if adapter is None:
        if options.get("peft_config") is not None:
            known = {"revision": revision, "trust_remote_code": settings["trust_remote_code"]}
            options["peft_config"] = on_language_part(options["peft_config"], model, **known)
        return model, processing_class
    if options.get("peft_config") is not None:
        raise G2POError(
            f"model is {model!r}, an adapter, and peft_config adds another: remove peft_config (use_peft) to train it "
            "further, or merge it into its base (merge_and_unload), save that, and pass its folder"
        )
    if (quantization := options.pop("quantization_config", None)) is not None:
        settings["quantization_config"] = quantization
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
    if getattr(config, "exclude_modules", ...) is not None:
        return config
    targets = getattr(config, "target_modules", None)
    targets = [targets] if isinstance(targets, str) else list(targets or ())
    if targets != ["all-linear"] and any(not target.isidentifier() for target in targets):
        return config
    if isinstance(model, str):
        from transformers import AutoConfig

        of_model = AutoConfig.from_pretrained(model, **known)
    else:
        of_model = model.config
    return replace(config, exclude_modules=_READS_IMAGES) if hasattr(of_model, "vision_config") else config


def check_adapter_config(config: Any) -> None:
    """Refuse kinds of adapters that this trainer does not train. `config` is PEFT's."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning or config.is_adaption_prompt or kind == "ADALORA":
        reason = "no trainer allocates its ranks" if kind == "ADALORA" else "it shifts tokens by virtual tokens"
        raise G2POError(f"the adapter is {kind}, which is not trained ({reason}): use LoRA")


def check_adapter(model: torch.nn.Module) -> None:
    """Refuse a model with adapters unless one of them trains and all trained parameters are saved with it."""
    import torch
    from accelerate.utils import is_peft_model
    from peft import PeftMixedModel, get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(model, PeftMixedModel):
        raise G2POError("the model is a PeftMixedModel, whose adapters cannot be saved: use PeftModel, with one kind")
    if not is_peft_model(model):
        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise G2POError(
                "the model has adapters and is not a PeftModel (transformers adds them so, by add_adapter or "
                "from_pretrained of an adapter's folder): use get_peft_model, or PeftModel.from_pretrained(base, "
                "folder, is_trainable=True), or pass the folder's name as model"
            )
        return
    names = model.active_adapters
    if len(names) != 1:
        raise G2POError(
            f"the model has {len(names)} active adapters ({', '.join(names)}): choose the one to train with "
            "model.set_adapter(NAME), and merge the others before"
        )
    check_adapter_config(model.peft_config[names[0]])
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for state, remedy in (("merged", "unmerge_adapter"), ("disable_adapters", "base_model.enable_adapter_layers")):
        if any(getattr(layer, state) for layer in layers):
            raise G2POError(f"the adapter would not train ({state} is True): call model.{remedy}()")
    _check_quantized(model, layers)
    # PEFT is asked which it saves with numbers in place of weights, which may be sharded. Tied ones have two names.
    weights = model.state_dict(keep_vars=True)
    number_of = {id(one): float(i) for i, one in enumerate(weights.values())}
    numbers = {name: torch.tensor([number_of[id(one)]]) for name, one in weights.items()}
    saved = get_peft_model_state_dict(model, numbers, names[0], save_embedding_layers=False).values()
    kept, parameters = {float(number) for number in saved}, dict(model.named_parameters())
    frozen = [name for name, one in parameters.items() if not one.requires_grad and number_of.get(id(one)) in kept]
    if frozen and model.active_peft_config.inference_mode:
        raise G2POError(
            f"the adapter {names[0]!r} was loaded frozen, and {frozen[0]} would not train: load it with "
            "PeftModel.from_pretrained(…, is_trainable=True)"
        )
    trained = [name for name, one in parameters.items() if one.requires_grad]
    unsaved = [name for name in trained if number_of.get(id(parameters[name])) not in kept]
    if unsaved:
        raise G2POError(
            f"{len(unsaved)} parameters train and are not saved with the adapter {names[0]!r}, such as {unsaved[0]}: "
            "freeze them (requires_grad_(False)), or name their modules in modules_to_save of its configuration"
        )


def _check_quantized(model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
    """Refuse modules that do not work with weights in 4 or 8 bits, which would fail in the first forward pass."""
    import torch
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lycoris_utils import LycorisLayer
    from peft.utils import ModulesToSaveWrapper

    for layer in layers:
        weight = getattr(layer.get_base_layer(), "weight", None)
        quantized = hasattr(weight, "quant_state") or getattr(weight, "dtype", None) == torch.int8
        if quantized and isinstance(layer, LycorisLayer):
            raise G2POError(
                "the adapter is LoHa or LoKr, which PEFT does not support with quantized weights: use LoRA, or load "
                "the model without quantization_config"
            )
    is_lora = isinstance(layers[0], LoraLayer) if layers else False
    for path, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            takes_any = not isinstance(module.original_module, torch.nn.Linear) and is_lora
            now, before = (next(one.parameters()).dtype for one in (module.modules_to_save, module.original_module))
            if now != before and getattr(model, "is_quantized", False) and not takes_any:
                name = str(now).removeprefix("torch.")
                raise G2POError(
                    f"modules_to_save has {path.rpartition('.')[2]}, which is {now} beside quantized weights, as TRL "
                    f"casts it, and the layers compute in {before}: load the model with dtype={name!r}"
                )


@contextmanager
def only_active_adapter(model: torch.nn.Module) -> Iterator[None]:
    """Make `save_pretrained` inside save only the adapter that trains, if a model has several."""
    if len(getattr(model, "peft_config", ())) < 2:
        yield
        return
    model.save_pretrained = partial(model.save_pretrained, selected_adapters=model.active_adapters)
    try:
        yield
    finally:
        del model.save_pretrained

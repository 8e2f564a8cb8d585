"""Load a checkpoint or an adapter, text-only or multimodal, with the class it was trained as."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ..utils.adapters import adapter_of, load_adapter


def load_model(model: str, **kwargs: Any):
    """Return the model of a checkpoint, or of an adapter on its base model.

    Args:
        model: a folder or a Hub id.
        **kwargs: passed to `from_pretrained`. An adapter's `revision` does not apply to its base, whose revision is in
            the adapter's configuration.

    Raises:
        ValueError: if an adapter does not name its base, or does not fit it.
    """
    revision = kwargs.pop("revision", None)
    adapter = adapter_of(model, revision)
    if adapter is None:
        return _load_checkpoint(model, revision=revision, **kwargs)
    return load_adapter(adapter, partial(_load_checkpoint, **kwargs), revision)


def load_tokenizer(model: str, loaded: Any):
    """Return the tokenizer of a model from `load_model`, padded on the left; of an adapter it may be its base's."""
    from transformers import AutoTokenizer

    places, adapter = [model], getattr(loaded, "active_peft_config", None)
    if adapter is not None:
        above = Path(model).parent  # the run's folder, if the model is a subfolder of it
        places += [str(above)] if (above / "tokenizer_config.json").is_file() else []
        places.append(adapter.base_model_name_or_path)
    for place in places[:-1]:
        try:
            return AutoTokenizer.from_pretrained(place, padding_side="left")
        except (OSError, ValueError):  # it has none
            continue
    return AutoTokenizer.from_pretrained(places[-1], padding_side="left")


def _load_checkpoint(model: str, **kwargs: Any):
    """Return the model as the class that the checkpoint's configuration names, as in training.

    `AutoModelForCausalLM` rejects some multimodal models and loads only the text part of others, with other module
    names, which adapters of the whole model do not fit.
    """
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {name: kwargs[name] for name in ("revision", "trust_remote_code") if kwargs.get(name) is not None}
    names = AutoConfig.from_pretrained(model, **known).architectures or [None]
    return (getattr(transformers, names[0] or "", None) or AutoModelForCausalLM).from_pretrained(model, **kwargs)

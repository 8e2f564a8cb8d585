"""A checkpoint or an adapter, text alone or multimodal, as the model that was trained."""

from __future__ import annotations

import warnings
from typing import Any


def load_model(model: str, **kwargs: Any):
    """The model of a checkpoint, or of an adapter with the base it was trained on: a folder or a Hub id.

    Args:
        kwargs: of `from_pretrained`; `revision` is the adapter's, whose own settings name that of its base.

    Raises:
        ValueError: when an adapter names no base, or does not fit the one it names.
    """
    from transformers.utils import find_adapter_config_file

    revision = kwargs.get("revision")
    if find_adapter_config_file(model, revision=revision) is None:
        return _load_checkpoint(model, **kwargs)
    from peft import PeftConfig, PeftModel

    kwargs.pop("revision", None)
    config = PeftConfig.from_pretrained(model, revision=revision)
    name = config.base_model_name_or_path
    if not name:
        raise ValueError(f"{model}: base_model_name_or_path is {name!r} in adapter_config.json: write there its base")
    base = _load_checkpoint(name, revision=config.revision, **kwargs)
    with warnings.catch_warnings():
        # An adapter of which a part finds no place would be evaluated as its base, or as something in between.
        warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
        try:
            return PeftModel.from_pretrained(base, model, revision=revision)
        except UserWarning as error:
            raise ValueError(
                f"the adapter {model} does not fit {name}, loaded as {type(base).__name__}: it was trained on another "
                "base, or with other versions of transformers and peft; merge it where it was trained, and evaluate "
                f"the merged checkpoint ({str(error)[:200]}…)"
            ) from error


def _load_checkpoint(model: str, **kwargs: Any):
    """As the class that the checkpoint names, which is the one that training makes.

    A multimodal one reads text alone. `AutoModelForCausalLM` does not know some of those, and of others takes the
    text part only, whose modules have other names: an adapter of the whole would find no place in it.
    """
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {name: kwargs[name] for name in ("revision", "trust_remote_code") if kwargs.get(name) is not None}
    names = AutoConfig.from_pretrained(model, **known).architectures or [None]
    return (getattr(transformers, names[0] or "", None) or AutoModelForCausalLM).from_pretrained(model, **kwargs)

"""Load a checkpoint or an adapter, text-only or multimodal, with the class it was trained as."""

from __future__ import annotations

import warnings
from typing import Any


def load_model(model: str, **kwargs: Any):
    """Return the model of a checkpoint, or of an adapter on its base model.

    Args:
        model: a folder or a Hub id.
        **kwargs: passed to `from_pretrained`. An adapter's `revision` does not apply to its base, whose revision is in
            the adapter's configuration.

    Raises:
        ValueError: if an adapter does not name its base, or does not fit it.
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
        # With missing keys, the base or a mixture of base and adapter would be evaluated.
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
    """Return the model as the class that the checkpoint's configuration names, as in training.

    `AutoModelForCausalLM` rejects some multimodal models and loads only the text part of others, with other module
    names, which adapters of the whole model do not fit.
    """
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {name: kwargs[name] for name in ("revision", "trust_remote_code") if kwargs.get(name) is not None}
    names = AutoConfig.from_pretrained(model, **known).architectures or [None]
    return (getattr(transformers, names[0] or "", None) or AutoModelForCausalLM).from_pretrained(model, **kwargs)

"""Load a checkpoint or an adapter with the class it was trained as, and identify checkpoints by their weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from huggingface_hub import snapshot_download

from ..prompts.images import load_processing_class
from ..utils.adapters import ADAPTER_CONFIG, adapter_of, find_adapter, load_adapter

# Files of a model: weights, configuration, tokenizer; not critics and training samples of a run.
_MODEL_FILES = "*model*.safetensors* *model*.bin *config.json *token* vocab* merges.txt *.model *.jinja".split()


def load_model(model: str, **kwargs: Any):
    """Return the model of a checkpoint, or of an adapter on its base model, from a folder or the Hub.

    `kwargs` are passed to `from_pretrained`; an adapter's configuration has the `revision` of its base. Raises
    `G2POError` if an adapter does not name its base, or does not fit it.
    """
    revision = kwargs.pop("revision", None)
    adapter = adapter_of(model, revision)
    if adapter is None:
        return _load_checkpoint(model, revision=revision, **kwargs)
    return load_adapter(adapter, partial(_load_checkpoint, **kwargs), revision)


def _load_checkpoint(model: str, **kwargs: Any):
    """Return the model as the class that its configuration names: AutoModelForCausalLM loads only a part of some."""
    import transformers

    known = {name: kwargs[name] for name in ("revision", "trust_remote_code") if kwargs.get(name) is not None}
    (name, *_) = transformers.AutoConfig.from_pretrained(model, **known).architectures or [""]
    return getattr(transformers, name, transformers.AutoModelForCausalLM).from_pretrained(model, **kwargs)


def load_tokenizer(model: str, loaded: Any):
    """Return the tokenizer, padded on the left, or the processor of images and text of a model from `load_model`.

    An adapter without one has that of the folder above it, its run's, or of its base.
    """
    adapter = getattr(loaded, "active_peft_config", None)
    places = [model] if adapter is None else [model, str(Path(model).parent), adapter.base_model_name_or_path]
    for place in places[:-1]:
        with suppress(OSError, ValueError):
            return load_processing_class(place, padding_side="left")
    return load_processing_class(places[-1], padding_side="left")


def weights_hash(model: str, revision: str | None = None) -> str:
    """Return a hash of a folder's model, an adapter's with its base's; for a Hub id, its commit."""
    folder = Path(model)
    if not folder.is_dir():
        snapshot = snapshot_download(model, revision=revision, allow_patterns="*config.json")
        return f"{model}@{Path(snapshot).name}"
    adapter = find_adapter(folder)
    found = {path for place in (folder, adapter or folder) for name in _MODEL_FILES for path in place.glob(name)}
    hashed = files_hash(path for path in found if path.is_file())
    if adapter is None:
        return hashed
    base = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    return f"{hashed} on {weights_hash(base)}"


def files_hash(paths: Iterable[str | Path]) -> str:
    """Return a hash of files' names and contents, in any order; about 5 GB/s from a fast disk."""
    digest = xxhash.xxh3_128()
    for path in sorted(map(Path, paths), key=lambda path: (path.name, path.stat().st_size, str(path))):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, xxhash.xxh3_128).digest())
    return digest.hexdigest()

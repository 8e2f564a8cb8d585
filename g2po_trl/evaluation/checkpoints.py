"""Identify checkpoints by their weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import xxhash
from huggingface_hub import snapshot_download

from ..utils.adapters import ADAPTER_CONFIG, find_adapter

# Files of a model: weights, configuration, tokenizer; not critics and training samples of a run.
_MODEL_FILES = "*model*.safetensors* *model*.bin *config.json *token* vocab* merges.txt *.model *.jinja".split()


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

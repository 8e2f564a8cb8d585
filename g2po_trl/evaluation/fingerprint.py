"""Fingerprints of an evaluation's weights and data, by content and not by path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import xxhash

from ..utils.adapter_files import ADAPTER_CONFIG, find_adapter
from ..utils.json import to_json

# Files of a model: weights, configuration, tokenizer; not critics and training samples of a run.
_MODEL_FILES = (
    "*model*.safetensors*",
    "*model*.bin",
    "*config.json",
    "*token*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.jinja",
)


def fingerprint_data(data: Any) -> str:
    """Return the fingerprint of JSON-serializable data."""
    return xxhash.xxh3_128_hexdigest(to_json(data, sort_keys=True).encode())


def fingerprint_files(paths: Iterable[str | Path]) -> str:
    """Return the fingerprint of files' names and contents, in any order; about 5 GB/s from a fast disk."""
    digest = xxhash.xxh3_128()
    for path in sorted(map(Path, paths), key=lambda path: (path.name, path.stat().st_size, str(path))):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(2**24):
                digest.update(block)
    return digest.hexdigest()


def without_folders(data: Any) -> Any:
    """Return data with `file.py:NAME` for `/folder/file.py:NAME`, and other files' names and contents for paths.

    An evaluation is the same wherever its project is.
    """
    if isinstance(data, Mapping):
        return {name: without_folders(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [without_folders(value) for value in data]
    if not isinstance(data, str) or not data.startswith("/"):
        return data
    if re.search(r"\.py:\w+$", data):
        return data.rpartition("/")[2]
    return f"{Path(data).name} ({fingerprint_files([data])})" if Path(data).is_file() else data


def fingerprint_weights(model: str, revision: str | None = None) -> str:
    """Return the fingerprint of a folder's model, an adapter with its base; for a Hub id, its commit.

    Raises:
        ValueError: for a folder without a model.
        OSError: for an id that is neither on the Hub nor in its cache.
    """
    folder = Path(model)
    if not folder.is_dir():
        from transformers.utils.hub import cached_file, extract_commit_hash

        options = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
        found = [cached_file(model, name, **options) for name in ("config.json", ADAPTER_CONFIG)]
        commit = next((extract_commit_hash(path, None) for path in found if path), None)
        if commit is None:
            raise OSError(f"model is {model!r}: it is not a folder, and the Hub has no configuration of that name")
        return f"{model}@{commit}"
    adapter = find_adapter(folder)
    places = {folder, adapter or folder}
    files = [path for place in places for path in place.iterdir() if path.is_file()]
    files = [path for path in files if any(fnmatch(path.name, pattern) for pattern in _MODEL_FILES)]
    if adapter is None and not any(path.name == "config.json" for path in files):
        raise ValueError(f"model is {model!r}: the folder holds no config.json and no adapter_config.json")
    if adapter is None:
        return fingerprint_files(files)
    base = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    return f"{fingerprint_files(files)} on {fingerprint_weights(base) if base else 'no base'}"

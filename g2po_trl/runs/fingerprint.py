"""Short names of what an evaluation depends on: by content, not by path, so that numbers belong to what gave them."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from ..json_text import to_json
from ..rollout.prompting import PromptTemplate
from .run_description import describe_prompt

# What a folder's model is made of: weights, configuration, tokenizer, code of its own. Not optimizers and logs.
_MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "adapter_model.bin", "config.json"),
    *("adapter_config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "*.model", "chat_template*", "*.jinja", "*.py"),
)
_NOT_THE_MODEL = ("step_samples_*", "critic.safetensors")
_BLOCK = 2**24


def fingerprint_data(data: Any) -> str:
    """Of plain data."""
    return xxhash.xxh3_128_hexdigest(to_json(data, sort_keys=True).encode())


def fingerprint_files(paths: Iterable[str | Path]) -> str:
    """Of files' names and contents, in any order. Some 5 GB a second where the disk gives them."""
    digest = xxhash.xxh3_128()
    for path in sorted(map(Path, paths), key=lambda path: (path.name, str(path))):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def fingerprint_weights(model: str, revision: str | None = None) -> str:
    """Of a folder's model, by content, an adapter with its base; of one on the Hub, its commit.

    Raises:
        ValueError: for a folder without a model in it.
        OSError: for an id that the Hub, or its cache, does not have.
    """
    folder = Path(model)
    if not folder.is_dir():
        from transformers.utils.hub import cached_file, extract_commit_hash

        names = ("config.json", "adapter_config.json")
        options = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
        found = [cached_file(model, name, **options) for name in names]
        commit = next((extract_commit_hash(path, None) for path in found if path), None)
        if commit is None:
            raise OSError(f"model is {model!r}: it is not a folder, and the Hub has no configuration of that name")
        return f"{model}@{commit}"
    files = [
        path
        for path in folder.iterdir()
        if path.is_file()
        and any(fnmatch(path.name, pattern) for pattern in _MODEL_FILES)
        and not any(fnmatch(path.name, pattern) for pattern in _NOT_THE_MODEL)
    ]
    names = {path.name for path in files}
    if not names & {"config.json", "adapter_config.json"}:
        raise ValueError(f"model is {model!r}: the folder holds no config.json and no adapter_config.json")
    own = fingerprint_files(files)
    if "adapter_config.json" not in names:
        return own
    base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    return f"{own} on {fingerprint_weights(base) if base else 'no base'}"


def fingerprint_prompt(template: PromptTemplate) -> str:
    """Of a template's words and of its parser's code."""
    return fingerprint_data([describe_prompt(template), _source(template.parse_reply)])


def fingerprint_code(factory: Callable) -> str:
    """Of an environment's code: its package, or its file and those beside it that it imports."""
    factory = _unwrapped(factory)
    module = sys.modules.get(getattr(factory, "__module__", ""))
    file = getattr(module, "__file__", None)
    if file is None:
        return fingerprint_data(_source(factory))
    path = Path(file).resolve()
    return fingerprint_files(path.parent.rglob("*.py") if module.__package__ else _with_imports(path))


def _with_imports(path: Path) -> set[Path]:
    found, left = set(), [path]
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                beside = path.parent / name.split(".")[0]
                left += [beside.with_suffix(".py")] if beside.with_suffix(".py").is_file() else []
                found |= set(beside.rglob("*.py")) if (beside / "__init__.py").is_file() else set()
    return found


def _unwrapped(value: Any) -> Any:
    while isinstance(value, partial):
        value = value.func
    return value


def _source(value: Any) -> str:
    try:
        return inspect.getsource(_unwrapped(value))
    except (OSError, TypeError):
        return repr(type(value))

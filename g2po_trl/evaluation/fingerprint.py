"""Fingerprints of an evaluation's inputs (weights, code, prompts, data), by content and not by path."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatch
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from ..environments.validation import unwrap_factory
from ..prompts.template import PromptTemplate
from ..runs.run_json import describe_prompt
from ..utils.adapter_files import ADAPTER_CONFIG, find_adapter
from ..utils.json import to_json

# Files of a model: weights, configuration, tokenizer, custom code.
_MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "adapter_model.bin", "config.json"),
    *("adapter_config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "*.model", "chat_template*", "*.jinja", "*.py"),
)
_NOT_THE_MODEL = ("step_samples_*", "critic.safetensors")
_BLOCK = 2**24


def fingerprint_data(data: Any) -> str:
    """Return the fingerprint of JSON-serializable data."""
    return xxhash.xxh3_128_hexdigest(to_json(data, sort_keys=True).encode())


def fingerprint_files(paths: Iterable[str | Path]) -> str:
    """Return the fingerprint of files' names and contents, in any order; about 5 GB/s from a fast disk."""
    digest = xxhash.xxh3_128()
    for path in sorted(map(Path, paths), key=lambda path: (path.name, path.stat().st_size, str(path))):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def without_folders(data: Any) -> Any:
    """Return the data with `file.py:NAME` for `/folder/file.py:NAME`, and with a file's name and content for its path.

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
    return f"{Path(data).name} ({fingerprint_files([data])})" if os.path.isfile(data) else data


def fingerprint_weights(model: str, revision: str | None = None) -> str:
    """Return the fingerprint of a folder's model, an adapter with its base; for a Hub id, its commit.

    Raises:
        ValueError: for a folder without a model.
        OSError: for an id that is neither on the Hub nor in its cache.
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
    adapter = find_adapter(folder)
    files = [
        path
        for place in dict.fromkeys((folder, adapter or folder))
        for path in place.iterdir()
        if path.is_file()
        and any(fnmatch(path.name, pattern) for pattern in _MODEL_FILES)
        and not any(fnmatch(path.name, pattern) for pattern in _NOT_THE_MODEL)
    ]
    names = {path.name for path in files}
    if adapter is None and "config.json" not in names:
        raise ValueError(f"model is {model!r}: the folder holds no config.json and no adapter_config.json")
    own = fingerprint_files(files)
    if adapter is None:
        return own
    base = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    return f"{own} on {fingerprint_weights(base) if base else 'no base'}"


def fingerprint_prompt(template: PromptTemplate) -> str:
    """Return the fingerprint of a template's text and of the code of its functions and its class."""
    described = [without_folders(describe_prompt(template))]
    for one in (template.parse_completion, template.show_observation, type(template)):
        described += [_source(one), _own_code(one)]
    return fingerprint_data(described)


def _own_code(value: Callable) -> str | None:
    """Return the fingerprint of a user's code; `None` for this package's, whose version is recorded."""
    return None if _is_ours(getattr(value, "__module__", None)) else fingerprint_code(value)


def fingerprint_code(factory: Callable | list) -> str:
    """Return the fingerprint of an environment's code: its package or file, and everything that it imports.

    A list has further modules, or names "module:name", whose code belongs to it.

    Imports are followed to any depth outside site-packages and the standard library. So are the modules that an
    adapter's arguments name: classes, functions, "module:name", and Gymnasium's ids. Data files, installed libraries
    and code behind a server are not covered.
    """
    modules = _named_modules(factory)
    files = set().union(*(_files_of(name) for name in modules))
    if not files:
        return fingerprint_data(_source(factory))
    return fingerprint_files(_with_imports(files))


def _named_modules(value: Any) -> set[str]:
    """Return the names of the modules that a factory and its arguments come from."""
    if isinstance(value, partial):
        return _named_modules([value.func, *value.args, *value.keywords.values()])
    if isinstance(value, str):
        named = re.fullmatch(r"([A-Za-z_][\w.]*):[\w./-]+", value)
        return {named.group(1)} if named else set()
    if isinstance(value, (list, tuple)):
        return set().union(*map(_named_modules, value))
    if isinstance(value, ModuleType):
        return {value.__name__}
    module = getattr(value, "__module__", None) if callable(value) else type(value).__module__
    return {module} if isinstance(module, str) else set()


def _is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] == __package__.partition(".")[0]


def _files_of(module: str) -> set[Path]:
    """Return the files of a module's package; for this package, whose version is recorded, the module's file."""
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if file is not None and (_is_ours(module) or not loaded.__package__):
        return {Path(file).resolve()}
    spec = _spec(module.partition(".")[0])
    return set() if spec is None else _files_at(spec)


def _spec(name: str) -> ModuleSpec | None:
    """Return the spec of a top-level module without importing it; `None` if not found, or in the standard library."""
    if name in sys.stdlib_module_names or name == "__main__":
        return None
    try:
        return find_spec(name)
    except (ImportError, ValueError):
        return None


def _files_at(spec: ModuleSpec) -> set[Path]:
    if spec.submodule_search_locations is None:
        file = Path(spec.origin or "").resolve()
        return {file} if file.suffix == ".py" and file.is_file() else set()
    return _files_in(spec.submodule_search_locations)


def _files_in(folders: Iterable[str | Path]) -> set[Path]:
    """Return the source files of a package's folders."""
    found = {path.resolve() for folder in folders for path in Path(folder).rglob("*.py")}
    outside = [path for path in found if not _is_installed(path)]
    return set(outside) or found  # a virtual environment inside a package's folder does not belong to it


def _is_installed(path: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _comes_installed(spec: ModuleSpec) -> bool:
    places = spec.submodule_search_locations or [spec.origin or ""]
    return all(_is_installed(Path(place)) for place in places)


def _with_imports(files: set[Path]) -> set[Path]:
    """Return the files and all files that they import from outside site-packages, to any depth."""
    found, queue = set(), set(files)
    while queue:
        path = queue.pop()
        found.add(path)
        for name in _imported(path) if not _is_installed(path) else ():
            beside = path.with_name(f"{name}.py")
            more = {beside} if beside.is_file() else _files_in([path.with_name(name)])
            if not more and not _is_ours(name) and (spec := _spec(name)) is not None and not _comes_installed(spec):
                more = _files_at(spec)
            queue |= more - found
    return found


def _imported(path: Path) -> set[str]:
    """Return the top-level modules that a file imports, or names as "module:name" like registries of games do."""
    names: set[str] = set()
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return names
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = re.fullmatch(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*", node.value)
            names |= {named.group(1)} if named else set()
    return {name.partition(".")[0] for name in names}


def _source(value: Any) -> str:
    try:
        return inspect.getsource(unwrap_factory(value))
    except (OSError, TypeError):
        return repr(type(value))

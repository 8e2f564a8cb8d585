"""Checks of a command line that take less than a second, before torch and TRL are imported.

Flags and keys are known, have valid values and an effect; the rollout strategy accepts its options; the model exists;
packages that the options need are installed; the tasks can be read and split; output_dir holds no other run. Recipes
check everything else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..environments.loading import resolve_agent_name
from ..environments.tasks import split_tasks
from ..runs.ownership import check_free
from ..utils.adapter_files import find_adapter
from ..utils.dependent_options import check_given
from ..utils.extras import extra_of, install_command
from ..utils.options import as_mapping
from ..utils.parser import read_config, refuse_removed, take_options
from .flags import Field, fields_of, make_parser, read_flags, read_keys

# The first word of a recipe's name -> a module that it needs.
_NEEDED_BY = {"alfworld": "alfworld", "textworld": "textworld"}
_NEEDED_WITH = {"use_vllm": "vllm", "load_in_4bit": "bitsandbytes", "load_in_8bit": "bitsandbytes"}
_TRACKERS = {"wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow", "swanlab": "swanlab", "comet_ml": "comet_ml"}


def recipe_fields(script: Path) -> dict[str, Field]:
    """Return the fields that are flags of a bundled recipe."""
    name = script.stem
    config = "SFTConfig" if name.startswith("teach_") else "PPOConfig" if name.endswith("_ppo") else "G2POConfig"
    source = script.with_name(f"{name.removesuffix('_ppo')}.py")
    top = Path(__file__).parents[1] / "__init__.py"
    trl = _package("trl")
    config_file = trl if config == "SFTConfig" else top
    classes = ((source, "ScriptArguments"), (config_file, config), (trl, "ModelConfig"))
    return {name: one for file, kind in classes for name, one in fields_of(file, kind).items()}


def recipe_settings(script: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Return every field of a bundled recipe: as given, else as in its default configuration, else its default."""
    fields = recipe_fields(script)
    parser = make_parser(list(fields.values()))
    options, words = take_options(arguments, ("config",))
    keys = read_config(options["config"]) if options else _default_config(script)
    refuse_removed(keys, words)
    defaults = {name: one.default for name, one in fields.items()}
    return {**defaults, **dict(read_keys(parser, keys)), **read_flags(parser, words)}


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"{name} is not installed: reinstall g2po-trl")
    return Path(spec.origin)


def check_command(script: Path, arguments: Sequence[str]) -> None:
    """Check the flags of a bundled recipe. Raises `ValueError` for an invalid one, or one without effect."""
    parser = make_parser(list(recipe_fields(script).values()))
    options, words = take_options(arguments, ("config",))
    keys = read_config(options.get("config"))
    refuse_removed(keys, words)
    given = {**dict(read_keys(parser, keys)), **read_flags(parser, words)}
    check_given(given)
    as_mapping("estimator_kwargs", given.get("estimator_kwargs"))
    defaults = {} if options else _default_config(script)
    _check_installed(script, {**defaults, **given})
    _check_strategy(recipe_fields(script), {**defaults, **given})
    module = str(given.get("environment") or "").partition(":")[0]
    if re.fullmatch(r"[\w.]+(?<!\.py)", module) and not _is_module(module.partition(".")[0]):
        raise ValueError(f"environment is {given['environment']!r}: there is no module {module} here")
    if script.stem in ("train_environment", "teach_environment"):
        training = read_config(given.get("train_config"))  # of teach_environment: what holds for both
        given = {name: training[name] for name in recipe_fields(script).keys() & training.keys()} | given
        _check_agent(given)
        if given.get("model_name_or_path") is None and script.stem == "train_environment":
            raise ValueError("model_name_or_path is None: pass --model, a folder or a Hub id")
        if given.get("tasks") is None:
            raise ValueError("tasks is None: pass --tasks FILE, one task a line, as JSON")
        split_tasks(given["tasks"], given.get("eval_tasks"), given.get("num_eval_tasks"))
    for name in ("model_name_or_path", "critic_model_name_or_path"):
        if given.get(name) is not None:
            check_model(name, str(given[name]))
    if given.get("load_in_4bit") and given.get("load_in_8bit"):
        raise ValueError("load_in_4bit and load_in_8bit are both True: choose one")
    if (given.get("load_in_4bit") or given.get("load_in_8bit")) and not given.get("use_peft"):
        raise ValueError("load_in_4bit or load_in_8bit is True: rounded weights cannot be trained, add --use_peft")
    folder = given.get("output_dir", defaults.get("output_dir"))
    if script.stem.startswith("train_") and isinstance(folder, str):
        check_free(folder, given.get("resume_from_checkpoint"), bool(given.get("overwrite")))


def _check_agent(given: Mapping[str, Any]) -> None:
    agent, environment = given.get("agent"), given.get("environment")
    if agent is None and environment is None:
        raise ValueError("environment is None: pass --environment FILE.py:Class, or --agent FILE.py:NAME")
    if agent is None and given.get("agent_state_key") is not None:
        raise ValueError("agent_state_key has no effect without agent: set Observation.state_key in the environment")
    if agent is not None:
        if environment is not None:
            raise ValueError(f"agent is {agent!r} and environment is {environment!r}: pass one of them")
        if given.get("prompt") is not None:
            raise ValueError(f"prompt is {given['prompt']!r}: an agent writes its prompts itself, leave it out")
        resolve_agent_name(str(agent))


def _default_config(script: Path) -> dict[str, Any]:
    """Return the fields of the configuration that a recipe reads without `--config`."""
    kind, _, method = script.stem.removeprefix("train_").partition("_")
    path = script.with_name(kind) / f"tiny{'-' * bool(method)}{method}.yaml"
    if not path.is_file():  # of a recipe without a tiny model
        path = next(iter(sorted(path.parent.glob("*.yaml"))), None)
    return read_config(path)


def _check_strategy(fields: Mapping[str, Field], given: Mapping[str, Any]) -> None:
    if not {"rollout_strategy", "rollout_strategy_kwargs"} & set(given):
        return
    from ..experimental.strategies import check_strategy  # numpy, half a second

    values = {name: one.default for name, one in fields.items()} | dict(given)
    for name in ("rollout_strategy_kwargs", "estimator_kwargs"):
        values[name] = as_mapping(name, values[name])
    check_strategy(SimpleNamespace(**values))


def _check_installed(script: Path, given: Mapping[str, Any]) -> None:
    wanted = [(f"{script.stem}.py", module) for name, module in _NEEDED_BY.items() if name in script.stem]
    wanted += [(f"{name} is True", module) for name, module in _NEEDED_WITH.items() if given.get(name)]
    for why, module in wanted:
        if find_spec(module) is None:
            raise ValueError(f"{why}: {module} is not installed: {install_command(extra_of(module))}")
    report_to = given.get("report_to")
    for name in report_to if isinstance(report_to, list) else [report_to]:
        if name in _TRACKERS and find_spec(_TRACKERS[name]) is None:
            raise ValueError(f"report_to is {name}: it is not installed: pip install {_TRACKERS[name]}")


def _is_module(name: str) -> bool:
    return Path(name).is_dir() or Path(f"{name}.py").is_file() or find_spec(name) is not None


def check_model(field: str, name: str) -> None:
    """Check that a name is a folder with a model or can be a Hub id. Raises `ValueError` if it is neither."""
    path = Path(name)
    if path.is_dir():
        try:
            has_model = (path / "config.json").is_file() or find_adapter(path) is not None
        except ValueError as error:
            raise ValueError(f"{field} is {name!r}: {error}") from error
        if not has_model:
            inside = sorted(one.name for one in path.glob("checkpoint-*") if (one / "trainer_state.json").is_file())
            remedy = f"it has {', '.join(inside)}: pass one of these" if inside else "pass a model's folder"
            raise ValueError(f"{field} is {name!r}, a folder without a model (no config.json): {remedy}")
        return
    if path.is_file():
        raise ValueError(f"{field} is {name!r}, which is a file: pass the folder that holds the model")
    first, slash, rest = name.partition("/")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or (slash and (not rest or Path(first).is_dir())):
        raise ValueError(f"{field} is {name!r}: there is no such folder")
    if _offline() and not _cached(name):
        raise ValueError(f"{field} is {name!r}: no folder has this name, and HF_HUB_OFFLINE is set: pass a folder")


def _offline() -> bool:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON") for name in names)


def _cached(name: str) -> bool:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface").expanduser()
    folders = (os.environ.get("HF_HUB_CACHE"), os.environ.get("TRANSFORMERS_CACHE"), str(home / "hub"))
    return any(folder and (Path(folder) / f"models--{name.replace('/', '--')}").is_dir() for folder in folders)

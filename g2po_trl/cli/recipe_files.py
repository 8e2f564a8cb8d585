"""Files and names that commands take: recipes, configurations, environments, agents, runs, tasks and models."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..engines.registry import ENGINES
from ..environments.loading import beside
from ..environments.tasks import read_tasks
from ..utils.adapters import ADAPTER_CONFIG, find_adapter
from ..utils.errors import G2POError
from ..utils.extras import extra_of, install_command
from ..utils.options import require
from .parser import Keys, read_config

RECIPES = Path(find_spec("g2po_recipes").origin).parent  # scripts, and their YAML files in folders
OWN_RECIPE = "environment"
ENVIRONMENT, AGENT = "environment.py", "agent.py"
_TRACKERS = ("wandb", "trackio", "mlflow", "swanlab", "comet_ml", "tensorboard", "neptune", "clearml")
_OF_ADAPTERS = (("lora_r", 1, math.inf), ("lora_alpha", 1, math.inf), ("lora_dropout", 0, 1))  # least, and below
# Keys of a configuration that are paths.
_PATHS = ("output_dir", "model_name_or_path", "tasks", "eval_tasks", "chat_template", "train_config", "demonstrations")


def recipes_of(command: str) -> dict[str, Path]:
    """Return the scripts of `g2po train` or `g2po teach` by name, with that of a user's own environment or agent."""
    scripts = sorted(RECIPES.glob(f"{command}_*.py"))
    return {path.stem.removeprefix(f"{command}_").replace("_", "-"): path for path in scripts}


def find_config(name: str, option: str = "config", kind: str = "") -> Path:
    """Return a YAML file by its path, or a bundled one by name: `alfworld/tiny`, or `tiny` with `kind="alfworld"`."""
    file = f"{name.removesuffix('.yaml')}.yaml"
    for path in (Path(name), RECIPES / kind / file, RECIPES / file):
        if path.is_file():
            return path
    names = ", ".join(sorted(f"{path.parent.name}/{path.stem}" for path in RECIPES.glob(f"{kind or '*'}/*.yaml")))
    raise G2POError(f"{option} is {name!r}, which is not a file: pass one, or one of {names}", option, name)


def config_keys(default: str | Callable[[Keys], Keys] | None, kind: str, name: str | None, flags: Keys) -> Keys:
    """Return the keys of a configuration, by default of `default`, a name or a function from flags to keys.

    Names are those of `find_config`; its `kind` is by default that of `default`.
    """
    if name is None and callable(default):
        return default(flags)
    kind = kind or (default.partition("/")[0] if isinstance(default, str) else "")
    return read_config(find_config(name or default, kind=kind)) if name or default else {}


def keys_beside(flags: Keys, name: str = "config.yaml") -> dict[str, Any]:
    """Return the keys of a configuration next to the file of the `environment` or `agent` in `flags`.

    Relative paths in it start in that folder.
    """
    if (path := beside(flags.get("environment") or flags.get("agent"), name)) is None:
        return {}
    keys, folder = read_config(path), Path(os.path.relpath(path.parent))
    for key, value in keys.items():
        if key in _PATHS and isinstance(value, str) and (key == "output_dir" or (folder / value).exists()):
            keys[key] = str(folder / value)
    return keys


def environment_or_agent(environment: str | None, agent: str | None) -> tuple[str | None, str | None]:
    """Return an environment's name or an agent's, by default environment.py, else agent.py, if it is there."""
    require(None in (environment, agent), "agent", agent, f"{environment} is given, too: leave one of them out")
    if environment is None and agent is None:
        environment = ENVIRONMENT if Path(ENVIRONMENT).is_file() else None
        agent = AGENT if environment is None and Path(AGENT).is_file() else None
    return environment, agent


def tasks_of(name: str, given: Sequence[dict[str, Any]] = (), file: Path | None = None) -> list[dict[str, Any]]:
    """Return the tasks given and of a file, by default tasks.jsonl next to file.py; else one without arguments."""
    file = beside(name, "tasks.jsonl") if file is None and not given else file
    return [*given, *(read_tasks(file) if file else [])] or [{}]


def check_files_and_packages(values: Mapping[str, Any]) -> None:
    """Raise `G2POError` for a field that names a missing file, model or package, or an adapter that cannot train."""
    row = ENGINES.get(values.get("engine"))
    needed = [("engine", row.extra)] if row and row.extra else []
    needed += [("report_to", name) for name in values.get("report_to") or () if name in _TRACKERS]
    needed += [(name, "bitsandbytes") for name in ("load_in_4bit", "load_in_8bit") if values.get(name)]
    for field, package in needed:
        command = install_command(extra) if (extra := extra_of(package)) else f"pip install {package}"
        require(find_spec(package) is not None, field, values[field], f"install it, {command}")
    for field, least, below in _OF_ADAPTERS if values.get("use_peft") else ():
        value = values.get(field, least)
        require(least <= value < below, field, value, f"set it to {least} or more, and below {below}")
    for name in filter(values.get, ("model_name_or_path", "critic_model_name_or_path")):
        policy = name == "model_name_or_path"
        options = {"trust_remote_code": bool(values.get("trust_remote_code"))}
        options |= (policy and values.get("model_init_kwargs")) or {}
        check_model(name, str(values[name]), policy and values.get("chat_template") is None, **options)
    for name in (name for name in ("tasks", "eval_tasks", "chat_template") if values.get(name) is not None):
        require(Path(values[name]).is_file(), name, str(values[name]), "there is no such file")


def check_model(field: str, name: str, needs_template: bool = True, **options: Any) -> None:
    """Raise `G2POError` unless a folder's model can be loaded with `options`, or the Hub or its cache has the name."""
    from huggingface_hub import model_info, try_to_load_from_cache

    path = Path(name)
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists()
    require(path.is_dir() or not is_path, field, name, "there is no such folder")
    is_model = not path.is_dir() or (path / "config.json").is_file() or find_adapter(path) is not None
    require(is_model, field, name, "pass a model's folder, with a config.json, such as a run's checkpoint-N")
    try:
        if path.is_dir():
            load_without_numbers(path, needs_template, options)
        elif not any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", ADAPTER_CONFIG)):
            model_info(name, timeout=10)  # at once, where loading tries five times
    except Exception as error:  # of a name that is no id, of the Hub, the network, JSON, Rust, and transformers
        told = f"{field} is {name!r}, which cannot be loaded ({' '.join(str(error).split())[:300]}): restore its files"
        raise G2POError(f"{told}, or pass another folder or id of the Hub", field, name) from error


def load_without_numbers(folder: Path, needs_template: bool, options: Keys) -> None:
    """Load a folder's model without the numbers of its weights, and its tokenizer. Raises whatever that raises."""
    from peft import PeftConfig
    from transformers import PreTrainedConfig
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    from ..evaluation.chat_models import load_model, load_tokenizer
    from ..prompts.tokenization import get_chat_template, get_tokenizer

    of_adapter = PeftConfig.from_pretrained(adapter) if (adapter := find_adapter(folder)) else None
    needs_numbers = isinstance(getattr(of_adapter, "init_lora_weights", None), str)  # such as PiSSA's
    config, _ = PreTrainedConfig.get_config_dict(getattr(of_adapter, "base_model_name_or_path", None) or folder)
    if is_deepspeed_zero3_enabled() or needs_numbers or "quantization_config" in config:
        return  # it needs a device or a package, and ZeRO-3 takes no `device_map`
    of_files = {"trust_remote_code": options.get("trust_remote_code", False), "variant": options.get("variant")}
    loaded = load_model(str(folder), device_map="meta", **of_files)
    if needs_template:
        processing_class = load_tokenizer(str(folder), loaded, trust_remote_code=of_files["trust_remote_code"])
        tokenizer, template = get_tokenizer(processing_class), get_chat_template(processing_class)
        spells = len(tokenizer) > len(tokenizer.added_tokens_decoder)
        require(spells and template is not None, "chat_template" if spells else "tokenizer", None, "save one there")

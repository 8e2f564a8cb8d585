"""Checks of a recipe's arguments before tasks and models are loaded: do files exist, are packages installed?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..engines.registry import ENGINES
from ..utils.adapters import find_adapter
from ..utils.errors import G2POError
from ..utils.extras import extra_of, install_command
from ..utils.options import require

_TRACKERS = ("wandb", "trackio", "mlflow", "swanlab", "comet_ml", "tensorboard", "neptune", "clearml")
_OF_ADAPTERS = (  # field, its least value, what it must be below, and the remedy
    ("lora_r", 1, math.inf, "set it to at least 1"),
    ("lora_alpha", 1, math.inf, "the adapter would change nothing; raise it"),
    ("lora_dropout", 0, 1, "set it in [0, 1)"),
)
_FILES = ("tasks", "eval_tasks", "chat_template", "demonstrations", "train_config")


def check_files_and_packages(values: Mapping[str, Any]) -> None:
    """Raise `G2POError` for a field that names a missing file, model or package."""
    for name in ("load_in_4bit", "load_in_8bit"):
        is_installed = not values.get(name) or find_spec("bitsandbytes") is not None
        require(is_installed, name, values.get(name), install_command(extra_of("bitsandbytes")))
    check_engine(values.get("engine"))
    for name, least, below, remedy in _OF_ADAPTERS if values.get("use_peft") else ():
        value = values.get(name, least)
        require(least <= value < below, name, value, remedy)
    report_to = values.get("report_to") or ()
    for name in (report_to,) if isinstance(report_to, str) else report_to:
        is_installed = name not in _TRACKERS or find_spec(name) is not None
        require(is_installed, "report_to", name, f"install it, pip install {name}")
    for name in ("model_name_or_path", "critic_model_name_or_path"):
        if values.get(name) is not None:
            check_model(name, str(values[name]))
    for name in _FILES:
        file = values.get(name)
        require(file is None or Path(file).is_file(), name, str(file), "there is no such file")


def check_engine(name: str | None) -> None:
    """Raise `G2POError` if the package of an engine is not installed."""
    row = ENGINES.get(name)
    if row and row.extra:
        require(find_spec(row.extra) is not None, "engine", name, f"install it, {install_command(row.extra)}")


def check_model(field: str, name: str) -> None:
    """Raise `G2POError` unless a name is a folder with a model, or is on the Hub or in its cache."""
    path = Path(name)
    looks_like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists()
    require(path.is_dir() or not looks_like_a_path, field, name, "there is no such folder")
    if path.is_dir():
        is_model = (path / "config.json").is_file() or find_adapter(path) is not None
        require(is_model, field, name, "pass a model's folder, with a config.json, such as a run's checkpoint-N")
        return
    from huggingface_hub import model_info, try_to_load_from_cache

    try:
        files = ("config.json", "adapter_config.json")
        if not any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
            model_info(name, timeout=10)  # at once, where loading tries five times
    except Exception as error:  # of a name that is no id, of the Hub, and of the network
        reason = str(error).strip().partition("\n")[0]
        what = f"{field} is {name!r}: there is no such folder, and none on the Hub ({reason})"
        raise G2POError(what, field) from error

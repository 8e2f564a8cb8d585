"""Checks of a recipe's arguments before tasks and models are loaded: do files exist, are packages installed?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..engines.registry import ENGINES
from ..utils.adapters import find_adapter
from ..utils.errors import G2POError
from ..utils.extras import extra_of, install_command
from ..utils.options import require

_NEEDED_WITH = {"load_in_4bit": "bitsandbytes", "load_in_8bit": "bitsandbytes"}
_TRACKERS = ("wandb", "trackio", "mlflow", "swanlab", "comet_ml", "tensorboard", "neptune", "clearml")
_FILES = ("tasks", "eval_tasks", "chat_template", "demonstrations", "train_config")


def check_files_and_packages(values: Mapping[str, Any]) -> None:
    """Raise `G2POError` for a field that names a missing file, model or package."""
    for name, module in _NEEDED_WITH.items():
        if values.get(name) and find_spec(module) is None:
            raise G2POError(f"{name} is True, and {module} is not installed: {install_command(extra_of(module))}")
    check_engine(values.get("engine"))
    if values.get("use_peft"):
        require(values["lora_r"] >= 1, "lora_r", values["lora_r"], "set it to at least 1")
        require(0 <= values["lora_dropout"] < 1, "lora_dropout", values["lora_dropout"], "set it in [0, 1)")
    report_to = values.get("report_to")
    for name in report_to if isinstance(report_to, list) else [report_to]:
        if name not in (None, "none", "all", *_trackers()):
            raise G2POError(f"report_to is {name!r}: choose none, or any of {', '.join(sorted(_trackers()))}")
        if name in _TRACKERS and find_spec(name) is None:
            raise G2POError(f"report_to is {name}, which is not installed: pip install {name}")
    for name in ("model_name_or_path", "critic_model_name_or_path"):
        if values.get(name) is not None:
            check_model(name, str(values[name]))
    for name in _FILES:
        if values.get(name) is not None and not Path(values[name]).is_file():
            raise G2POError(f"{name} is {str(values[name])!r}: there is no such file")


def _trackers() -> Iterable[str]:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK  # with torch

    return INTEGRATION_TO_CALLBACK


def check_engine(name: str | None) -> None:
    """Raise `G2POError` if the package of an engine is not installed."""
    if (row := ENGINES.get(name)) and row.extra and find_spec(row.extra) is None:
        raise G2POError(f"engine is {name!r}, which is not installed: {install_command(row.extra)}")


def check_model(field: str, name: str) -> None:
    """Raise `G2POError` unless a name is a folder with a model or can be a Hub id."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file() and find_adapter(path) is None:
            inside = sorted(one.name for one in path.glob("checkpoint-*") if (one / "trainer_state.json").is_file())
            remedy = f"it has {', '.join(inside)}: pass one of these" if inside else "pass a model's folder"
            raise G2POError(f"{field} is {name!r}, a folder without a model (no config.json): {remedy}")
        return
    first, slash, rest = name.partition("/")
    looks_like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists()
    if looks_like_a_path or (slash and (not rest or Path(first).is_dir())):
        raise G2POError(f"{field} is {name!r}: there is no such folder")

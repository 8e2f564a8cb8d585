"""Defaults of an evaluation that come from a run: its panel, its prompt, and the settings of its evaluations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..environments.pool.limits import PoolLimits
from ..runs.run_json import AGENT_ENVIRONMENT, FILE, name_of_agent, with_moved_files

_RESTORE = (
    "it was edited, or written by another version of g2po_trl; write the value that the run was trained with, or move "
    "the file away and pass all settings as options"
)
# Types of the entries of a run's "play". An evaluation's numbers depend on them, so none has a default.
_OPTIONAL = (type(None),)
_SAMPLING = {"temperature": (float, int), "top_p": (float, int), "top_k": (int,), "min_p": (float, int, *_OPTIONAL)}
_SAMPLING["repetition_penalty"] = (float, int)
_LENGTHS = {"max_turns": (int,), "history_length": (int,), "max_prompt_length": (int, *_OPTIONAL)}
_LENGTHS |= {"max_completion_length": (int,), "stop_sequences": (list, *_OPTIONAL)}
HISTORIES = ("window", "conversation")
# Limits of environment workers. They do not change the numbers, so a missing one gets the usual default.
_WORKERS = [field.name for field in fields(PoolLimits)]


def run_defaults(run: Mapping[str, Any], folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that evaluate a run's model as it was trained.

    Args:
        run: content of its run.json.
        folder: its folder.
        asked: the user's arguments. Only the agent "direct" uses the run's prompts; other agents keep their own
            lengths and history. With another environment than the run's, only `chat_template_kwargs` is used.

    Raises:
        ValueError: if an entry that the numbers depend on is missing or of the wrong type, or if the run does not have
            the panel.
    """
    file = folder / FILE
    if "play" not in run and "trainer" not in run:
        return {}  # another program's run.json
    run = _with_files_of(asked, run)
    play = _part(run, "play", file)
    template = _value(play, "chat_template_kwargs", (dict, *_OPTIONAL), file)
    defaults: dict[str, Any] = {"chat_template_kwargs": template or {}}
    trained_on = dict(run.get("evaluation") or {})
    own_panels = not trained_on and run.get("environment") is not None
    if own_panels:
        described = _part(run, "environment", file)
        if described.get("args"):
            raise ValueError(f"environment.args is {described['args']} in {file}: give them by name in its kwargs")
        trained_on = {
            "environment": _value(described, "import", (str,), file, "environment"),
            "environment_options": _value({"kwargs": {}, **described}, "kwargs", (dict,), file, "environment"),
        }
    if not _is_asked_for(asked, trained_on):
        return defaults
    defaults |= trained_on
    defaults |= {name: play[name] for name in _WORKERS if name in play}
    defaults["environment_variables"] = defaults.get("environment_variables") or []
    defaults |= {name: _value(play, name, types, file) for name, types in _SAMPLING.items()}
    defaults["generation_kwargs"] = _engine_options(run, play, file, asked.agent)
    defaults |= {f"trained_{name}": play.get(name) for name in ("dtype", "autocast")}
    if asked.agent == "direct":
        lengths = {name: _value(play, name, types, file) for name, types in _LENGTHS.items()}
        defaults |= {
            "prompt": _part(run, "prompt", file),
            "max_turns": lengths["max_turns"],
            "history": _history(play, file),
            "trained_history_length": lengths["history_length"],
            "max_prompt_length": lengths["max_prompt_length"],
            "max_tokens": lengths["max_completion_length"],
            "stop_after": lengths["stop_sequences"] or [],
        }
    if own_panels and asked.tasks is None:
        defaults["tasks"] = panel_file(folder, asked.panel)
    return defaults


def _with_files_of(asked: argparse.Namespace, run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the run; if its environment's file was moved, with files of the folder of the one that is asked for."""
    described, given = run.get("environment"), asked.own_agent or asked.environment
    if not isinstance(described, Mapping) or given is None or ".py:" not in given:
        return run
    there = missing_file(name_of_agent(described.get("kwargs")) or described.get("import"))
    folder = Path(given.rpartition(":")[0]).resolve().parent
    return with_moved_files(run, Path(there).parent, folder) if there else run


def _is_asked_for(asked: argparse.Namespace, trained_on: Mapping[str, Any]) -> bool:
    """Return whether the environment, or the agent, that the user asks for is the run's."""
    if asked.own_agent is not None:
        of_run = name_of_agent(trained_on.get("environment_options"))
        unnamed = of_run is None and trained_on.get("environment") == AGENT_ENVIRONMENT
        return unnamed or same_environment(asked.own_agent, of_run)
    return asked.environment is None or same_environment(asked.environment, trained_on.get("environment"))


def _history(play: Mapping[str, Any], file: Path) -> str:
    value = play.get("history", "window")  # the only one before runs recorded it
    if value not in HISTORIES:
        raise ValueError(f"play.history is {value!r} in {file}: write {' or '.join(HISTORIES)}, as the run used")
    return value


def same_environment(asked: str, of_run: str | None) -> bool:
    """Return whether a name means the run's environment.

    Equivalent names: `game.py:Game`, `/path/to/game.py:Game`, `game:Game`, and `game.py`; any file's `Game` if the
    run's file is not there any more.
    """
    if of_run is None or asked == of_run:
        return of_run is not None
    (file, name), (of_file, of_name) = _located(asked), _located(of_run)
    if missing_file(of_run):
        return file.endswith(".py") and name in ("", of_name)
    return file == of_file and name in ("", of_name)


def missing_file(name: str | None) -> str | None:
    """Return the file of `file.py:NAME` if it does not exist."""
    file = (name or "").rpartition(":")[0]
    return file if file.endswith(".py") and not Path(file).is_file() else None


def check_is_there(name: str, flag: str) -> None:
    """Raise `ValueError` if the file of a run's environment or agent does not exist any more."""
    if missing_file(name):
        raise ValueError(
            f"the run's {flag} is {name}, and there is no such file any more: pass --{flag} FILE.py:NAME, where it is "
            "now; the run's settings and tasks stay"
        )


def _located(name: str) -> tuple[str, str]:
    module, _, attribute = name.partition(":")
    path = Path(module if module.endswith(".py") else f"{module}.py")
    return str(path.resolve()) if path.is_file() else module, attribute


def panel_file(folder: Path, name: str | None) -> Path:
    """Return the file of a run's panel; with `None`, of its only panel."""
    panels = {path.stem: path for path in sorted((folder / "panels").glob("*.jsonl"))}
    if not panels:
        raise ValueError(f"{folder} had no evaluation tasks (no file in panels/): pass --tasks FILE")
    if name is None and len(panels) > 1:
        raise ValueError(f"{folder} has the panels {', '.join(panels)}: choose one with --panel, or pass --tasks FILE")
    if name is not None and name not in panels:
        raise ValueError(f"--panel is {name!r}: {folder} has {', '.join(panels)}; or pass --tasks FILE")
    return panels[name] if name is not None else next(iter(panels.values()))


def _engine_options(run: Mapping[str, Any], play: Mapping[str, Any], file: Path, agent: str) -> dict[str, Any]:
    """Return `generation_kwargs`; for the direct agent, with the run's `vllm_structured_outputs_regex`."""
    recorded = {**(run.get("trainer") or {}), **play}
    options = _value({"generation_kwargs": None, **recorded}, "generation_kwargs", (dict, *_OPTIONAL), file) or {}
    regex = recorded.get("vllm_structured_outputs_regex") if agent == "direct" else None
    return options if regex is None else {**options, "structured_outputs": {"regex": regex}}


def describe_run_settings(args: argparse.Namespace) -> str | None:
    """Return a line with the settings taken from a run and the settings that override it; `None` without a run."""
    if args.run_folder is None:
        return None
    run, taken, instead = args.run_defaults, [], []
    if "temperature" not in run:
        asked = args.own_agent or args.environment
        return f"{asked} is not the environment of {args.run_folder}: prompt and settings are not the run's"
    shown = {"temperature": None, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    shown |= {"generation_kwargs": {}, "max_turns": None, "history": "window"}
    shown |= {"history_length": None, "max_prompt_length": None}
    shown |= {"max_tokens": None, "stop_after": [], "chat_template_kwargs": {}, "environment_episode_timeout": None}
    for name, neutral in shown.items():
        of_run = run.get("trained_history_length" if name == "history_length" else name, neutral)
        used = getattr(args, name)
        used = of_run if name == "history_length" and used is None else used
        flag = f"--{name.replace('_', '-')}"
        if used != of_run:
            instead.append(f"{flag} {_shown(used)} (the run: {_shown(of_run)})")
        elif used != neutral:
            taken.append(f"{flag} {_shown(used)}")
    if "prompt" in run:
        (taken if args.prompt == run["prompt"] else instead).append("its prompt")
    line = f"From {args.run_folder}: {', '.join(taken) or 'nothing'}"
    return line + (f"; other than the run: {', '.join(instead)}" if instead else "")


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def _part(run: Mapping[str, Any], name: str, file: Path) -> Mapping[str, Any]:
    if not isinstance(part := run.get(name), Mapping):
        found = "is missing" if part is None else f"is {part!r}"
        raise ValueError(f"{name} {found} in {file}: {_RESTORE}")
    return part


def _value(part: Mapping[str, Any], name: str, types: tuple[type, ...], file: Path, of: str = "play") -> Any:
    if name not in part:
        raise ValueError(f"{of}.{name} is missing in {file}: {_RESTORE}")
    value = part[name]
    if not isinstance(value, types) or isinstance(value, bool):
        names = " or ".join(kind.__name__ for kind in types).replace("NoneType", "null")
        raise ValueError(f"{of}.{name} is {value!r} in {file}: write the value that the run used ({names})")
    return value

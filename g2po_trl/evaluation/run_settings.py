"""Settings of a run with which its model is evaluated: environment, tasks, prompt, sampling, lengths, limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..agents.agent import AGENT_ENVIRONMENT
from ..engines.sampling import Sampling
from ..environments.loading import file_of
from ..environments.pool.limits import PoolLimits
from ..runs.run_json import FILE, find_run, name_of_agent, panels_in, read_run
from ..utils.masking import masked
from ..utils.options import require
from .options import EvaluateOptions, asked_for

# Of these a prompted agent has its own.
_GROUPS = ("agent", "Episodes", "Prompts and completions")
_LENGTHS = [one.name for one in fields(EvaluateOptions) if one.metadata["plays"] and one.metadata["group"] in _GROUPS]


def run_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that evaluate a model as it was trained, from the description of its run; `{}` without one.

    Only the agent "direct" uses the run's prompts and lengths. In another environment than the run's, only
    `chat_template_kwargs` is used. What a description of an earlier version lacks has its default.

    Args:
        given: the options that the user set.

    Raises:
        G2POError: if the description does not say what was played, or the run does not have the evaluation set.
    """
    agent = given.get("agent", "direct")
    environment, own_agent = asked_for(agent, given.get("environment"))
    place = given.get("run") or (None if given.get("base_url") else given.get("model"))
    folder = find_run(place) if place else None
    remedy = f"there is no {FILE}, which the trainer writes into its output_dir"
    require(folder is not None or not given.get("run"), "run", str(given.get("run")), remedy)
    run = read_run(folder) if folder else {}
    if not {"play", "trainer"} & run.keys():
        return {}  # another program's run.json, or none
    play = run.get("play")
    require(isinstance(play, Mapping), "play", play, f"{folder / FILE} has to describe it; pass --environment")
    trained_on = dict(run.get("evaluation") or {}) or _environment(run, folder)
    of_run, asked = trained_on.get("environment"), own_agent or environment
    if own_agent is not None and of_run == AGENT_ENVIRONMENT:  # one without a name in run.json is taken for the asked
        of_run = name_of_agent(trained_on.get("environment_options")) or own_agent
    is_gone = file_of(of_run).suffix == ".py" and not file_of(of_run).is_file()  # then the asked one stands for it
    if asked not in (None, of_run) and not is_gone:
        return {"chat_template_kwargs": play.get("chat_template_kwargs")}
    settings = trained_on | {one.name: play[one.name] for one in fields(EvaluateOptions) if one.name in play}
    settings["precision"] = {name: play[name] for name in ("dtype", "autocast") if name in play}
    if agent in ("react", "reflexion"):
        settings = {name: value for name, value in settings.items() if name not in _LENGTHS}
    else:
        settings |= {"prompt": run["prompt"]} if run.get("prompt") else {}
        regex = play.get("vllm_structured_outputs_regex")
        more = {} if regex is None else {"structured_outputs": {"regex": regex}}
        settings["generation_kwargs"] = {**(play.get("generation_kwargs") or {}), **more}
    if "environment" in run and not run.get("evaluation") and given.get("tasks") is None:
        settings["tasks"] = _panel_file(folder, given.get("panel"))
    return settings


def describe_settings(options: EvaluateOptions, settings: Mapping[str, Any]) -> str | None:
    """Return a line with the settings taken from a run, those that override them, and those that it lacks.

    `None` without a run.
    """
    if not settings:
        return None
    folder = find_run(options.run or options.model)
    if "precision" not in settings:
        return f"{options.played} is not the environment of {folder}: prompt and settings are not the run's"
    quiet = {"environment", "tasks", "prompt", "precision", "panel_options", *(one.name for one in fields(PoolLimits))}
    quiet |= {"environment_options"} if options.environment == AGENT_ENVIRONMENT else set()
    taken, instead = [], []
    for name in [name for name in settings if name not in quiet]:
        used, of_run = getattr(options, name), settings[name]
        text = f"--{name.replace('_', '-')} {_shown(used)}"
        if used != of_run:
            instead.append(f"{text} (the run: {_shown(of_run)})")
        elif of_run not in (None, {}, []):
            taken.append(text)
    if "prompt" in settings:
        (taken if options.prompt == settings["prompt"] else instead).append("its prompt")
    expected = {one.name for one in fields(Sampling)} | {"max_turns", "history_length", "max_prompt_length"}
    expected -= set() if options.agent == "direct" else {*_LENGTHS}
    missing = [f"{name} {_shown(getattr(options, name))}" for name in sorted(expected - settings.keys())]
    parts = {f"From {folder}": taken or ["nothing"], "other than the run": instead, f"not in its {FILE}": missing}
    return "; ".join(f"{head}: {', '.join(part)}" for head, part in parts.items() if part)


def _shown(value: Any) -> str:
    return json.dumps(masked(value)) if isinstance(value, (dict, list)) else str(value)


def _environment(run: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options that name the environment of a run."""
    if (described := run.get("environment")) is None:
        return {}
    is_named = isinstance(described, Mapping) and "import" in described and not described.get("args")
    remedy = f"{folder / FILE} has to name its import, and arguments in kwargs; or pass --environment"
    require(is_named, "environment", described, remedy)
    return {"environment": described["import"], "environment_options": described.get("kwargs", {})}


def _panel_file(folder: Path, name: str | None) -> Path:
    """Return the file of a run's evaluation set; with `None`, of its only one."""
    panels = panels_in(folder)
    is_one = name in panels or (name is None and len(panels) == 1)
    require(is_one, "panel", name, f"{folder} has {', '.join(panels)}; choose one with --panel, or pass --tasks FILE")
    return panels[name or next(iter(panels))]

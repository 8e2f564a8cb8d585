"""Settings of a run with which its model is evaluated: environment, tasks, prompt, sampling, lengths, limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..engines.sampling import Sampling
from ..environments.episode_limits import EpisodeLimits
from ..environments.loading import file_of
from ..environments.pool.limits import PoolLimits
from ..runs.run_json import AGENT_ENVIRONMENT, FILE, find_run, name_of_agent, panels_in, read_run, with_files
from ..utils.errors import G2POError
from ..utils.masking import masked
from .options import EvaluateOptions, asked_for, is_missing, same_object

_LENGTHS = ("history", "history_length", "max_prompt_length", "max_completion_length", "stop_sequences")
_LENGTHS += tuple(one.name for one in fields(EpisodeLimits))


def run_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that evaluate a model as it was trained, from the description of its run; `{}` without one.

    Only the agent "direct" uses the run's prompts and lengths. In another environment than the run's, only
    `chat_template_kwargs` is used.

    Args:
        given: the options that the user set.

    Raises:
        G2POError: if an entry that the results depend on is missing, or if the run does not have the evaluation set.
    """
    agent = given.get("agent", "direct")
    environment, own = asked_for(agent, given.get("environment"))
    place = given.get("run") or (None if given.get("base_url") else given.get("model"))
    folder = find_run(place) if place else None
    if given.get("run") and folder is None:
        raise G2POError(
            f"run is {str(given['run'])!r}: there is no {FILE}, which the trainer writes into its output_dir"
        )
    run = read_run(folder) if folder else {}
    if not {"play", "trainer"} & run.keys():
        return {}  # another program's run.json, or none
    run = _in_file_of_today(run, own or environment)
    play = _part(run, "play", folder)
    trained_on = dict(run.get("evaluation") or {}) or _environment(run, folder)
    if not _is_asked_for(environment, own, trained_on):
        return {"chat_template_kwargs": play.get("chat_template_kwargs")}
    names = {one.name for one in fields(EvaluateOptions)} - (
        set(_LENGTHS) if agent in ("react", "reflexion") else set()
    )
    required = {one.name for one in fields(Sampling)} | {"max_turns", "history_length", "max_prompt_length"}
    if missing := sorted((required & names) - play.keys()):
        raise G2POError(f"play.{missing[0]} is missing in {folder / FILE}: {_RESTORE}")
    settings = {**trained_on, **{name: value for name, value in play.items() if name in names}}
    settings["precision"] = {name: play[name] for name in ("dtype", "autocast") if name in play}
    if "history" in names:
        settings["prompt"] = _part(run, "prompt", folder)
        regex = play.get("vllm_structured_outputs_regex")
        more = {} if regex is None else {"structured_outputs": {"regex": regex}}
        settings["generation_kwargs"] = {**(play.get("generation_kwargs") or {}), **more}
    if "environment" in run and not run.get("evaluation") and given.get("tasks") is None:
        settings["tasks"] = _panel_file(folder, given.get("panel"))
    return settings


_RESTORE = "write the value that the run was trained with, or move the file away and pass all settings as options"


def describe_settings(options: EvaluateOptions, settings: Mapping[str, Any]) -> str | None:
    """Return a line with the settings taken from a run and those that override them; `None` without a run."""
    if not settings:
        return None
    folder = find_run(options.run or options.model)
    if "temperature" not in settings:
        return f"{options.played} is not the environment of {folder}: prompt and settings are not the run's"
    quiet = {"environment", "tasks", "prompt", "precision", "panel_options"}
    quiet |= {"environment_options"} if options.environment == AGENT_ENVIRONMENT else set()
    quiet |= {one.name for one in fields(PoolLimits)}
    taken, instead = [], []
    for name, of_run in settings.items():
        used, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if used != of_run and name not in quiet:
            instead.append(f"{flag} {_shown(used)} (the run: {_shown(of_run)})")
        elif name not in quiet and of_run not in (None, {}, []):
            taken.append(f"{flag} {_shown(used)}")
    if "prompt" in settings:
        (taken if options.prompt == settings["prompt"] else instead).append("its prompt")
    line = f"From {folder}: {', '.join(taken) or 'nothing'}"
    return line + (f"; other than the run: {', '.join(instead)}" if instead else "")


def _shown(value: Any) -> str:
    return json.dumps(masked(value)) if isinstance(value, (dict, list)) else str(value)


def _environment(run: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options that name the environment of a run."""
    if run.get("environment") is None:
        return {}
    described = _part(run, "environment", folder)
    if described.get("args"):
        raise G2POError(f"environment.args is {described['args']} in {folder / FILE}: give them by name in its kwargs")
    if "import" not in described:
        raise G2POError(f"environment.import is missing in {folder / FILE}: {_RESTORE}")
    return {"environment": described["import"], "environment_options": described.get("kwargs", {})}


def _part(run: Mapping[str, Any], name: str, folder: Path) -> Mapping[str, Any]:
    if not isinstance(part := run.get(name), Mapping):
        raise G2POError(f"{name} is {'missing' if part is None else repr(part)} in {folder / FILE}: {_RESTORE}")
    return part


def _in_file_of_today(run: Mapping[str, Any], given: str | None) -> Mapping[str, Any]:
    """Return the run. If its environment's file was moved, objects in it, e.g. a parser, come from the given one."""
    described = run.get("environment")
    of_run = isinstance(described, Mapping) and (name_of_agent(described.get("kwargs")) or described.get("import"))
    if not of_run or given is None or not is_missing(of_run) or not same_object(given, of_run):
        return run
    before, now = (f"{file_of(name)}:" for name in (of_run, given))
    return with_files(run, lambda text: now + text.removeprefix(before) if text.startswith(before) else text)


def _is_asked_for(environment: str | None, own: str | None, trained_on: Mapping[str, Any]) -> bool:
    """Return whether the environment or agent that the user names is the run's."""
    if own is not None:
        of_run = name_of_agent(trained_on.get("environment_options"))
        unnamed = of_run is None and trained_on.get("environment") == AGENT_ENVIRONMENT
        return unnamed or same_object(own, of_run)
    return environment is None or same_object(environment, trained_on.get("environment"))


def _panel_file(folder: Path, name: str | None) -> Path:
    """Return the file of a run's evaluation set; with `None`, of its only one."""
    panels = panels_in(folder)
    if name is None and len(panels) > 1:
        raise G2POError(
            f"{folder} has the evaluation sets {', '.join(panels)}: choose one with --panel, or pass --tasks FILE"
        )
    if name is not None and name not in panels:
        raise G2POError(f"panel is {name!r}: {folder} has {', '.join(panels)}; or pass --tasks FILE")
    return panels[name or next(iter(panels))]

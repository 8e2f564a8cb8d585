"""Settings of a run with which its model is evaluated: environment, tasks, prompt, sampling, lengths, limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..agents.agent import AGENT_ENVIRONMENT
from ..environments.loading import file_of
from ..runs.run_json import FILE, find_run, name_of_agent, panels_in, read_run
from ..utils.json import to_json
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
    settings = dict(run.get("evaluation") or _environment(run.get("environment"), folder))
    of_run, asked = settings.get("environment"), own_agent or environment
    if own_agent is not None and of_run == AGENT_ENVIRONMENT:  # one without a name in run.json is taken for the asked
        of_run = name_of_agent(settings["environment_options"]) or own_agent
    is_gone = file_of(of_run).suffix == ".py" and not file_of(of_run).is_file()  # then the asked one stands for it
    if asked not in (None, of_run) and not is_gone:
        return {"chat_template_kwargs": play.get("chat_template_kwargs")}
    settings |= {one.name: play[one.name] for one in fields(EvaluateOptions) if one.name in play}
    settings["precision"] = {name: play[name] for name in ("dtype", "autocast") if name in play}
    if agent in ("react", "reflexion"):
        settings = {name: value for name, value in settings.items() if name not in _LENGTHS}
    else:
        settings |= {"prompt": run["prompt"]} if run.get("prompt") else {}
        regex, kwargs = play.get("vllm_structured_outputs_regex"), settings.get("generation_kwargs") or {}
        settings["generation_kwargs"] = kwargs | ({"structured_outputs": {"regex": regex}} if regex else {})
    if "environment" in run and not run.get("evaluation") and given.get("tasks") is None:
        settings["tasks"] = _panel_file(folder, given.get("panel"))
    return settings


def describe_settings(options: EvaluateOptions, settings: Mapping[str, Any]) -> str | None:
    """Return a line with the settings that are not the defaults, and the run's where they differ; `None`: no run."""
    if not settings:
        return None
    folder = find_run(options.run or options.model)
    if "precision" not in settings:
        return f"{options.played} is not the environment of {folder}: prompt and settings are not the run's"
    told = ["its prompt" if options.prompt == settings.get("prompt") else "another prompt"]
    for one in fields(options):
        if one.name in settings and one.name != "prompt" and one.metadata["group"] not in ("model", "tasks"):
            used, of_run = (to_json(masked(value)) for value in (getattr(options, one.name), settings[one.name]))
            instead = f" (the run: {of_run})" if used != of_run else ""
            if instead or used not in (to_json(one.default), "null", "{}", "[]"):
                told.append(f"--{one.name.replace('_', '-')} {used}{instead}")
    return f"From {folder}: {', '.join(told)}"


def _environment(described: Any, folder: Path) -> dict[str, Any]:
    """Return the options that name the environment of a run."""
    if described is None:
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

"""Changes of settings when a run is resumed: what changed at which step, and the settings of an earlier step.

`run.json` describes the newest part of a run. Its `parts` say where each part began and what was otherwise before:

    "parts": [{"first_step": 1}, {"first_step": 7, "changed": {"trainer.gamma": [0.95, 0.5]}}]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from ..utils.json import to_json

# Entries and fields about the place and start of a run, which do not affect training.
_NOT_SETTINGS = {"parts", "run_id", "identity", "folder"}
_NOT_FIELDS = {"output_dir", "logging_dir", "resume_from_checkpoint", "overwrite", "eval_on_start", "run_name"}
_NOT_FIELDS |= {"hub_token"}  # masked, in a way that depends on the version
_OF_VERSION = ("trainer", "play", "estimator", "prompt")  # names on one side only come from another version


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return how two descriptions of a run differ: "section.name" -> [value before, value after], `None` for none."""
    before, after = (json.loads(to_json(one)) for one in (before, after))
    changed = {}
    for section in sorted({*before} & {*after} - _NOT_SETTINGS):
        old, new = before[section], after[section]
        if not isinstance(old, dict) or not isinstance(new, dict):
            if old != new:
                changed[section] = [old, new]
            continue
        names = {*old, *new} - _NOT_FIELDS if section not in _OF_VERSION else ({*old} & {*new}) - _NOT_FIELDS
        changed |= {
            f"{section}.{name}": [old.get(name), new.get(name)]
            for name in sorted(names)
            if old.get(name) != new.get(name)
        }
    return changed


def next_parts(run: Mapping[str, Any], step: int, description: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a run that is resumed after `step` with the settings of `description`.

    Parts that began after `step` are dropped.
    """
    parts = [part for part in parts_of(run) if part["first_step"] <= step]
    changed = changes(settings_at(run, step), description)
    return parts + ([{"first_step": step + 1, "changed": changed}] if changed else [])


def parts_of(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a run, at least one."""
    return list(run.get("parts") or [{"first_step": 1}])


def settings_at(run: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return the description of a run at an optimizer step, counted from 1."""
    description = deepcopy(dict(run))
    for part in reversed(parts_of(run)):
        if part["first_step"] <= step:
            break
        for name, (value, _) in part.get("changed", {}).items():
            section, _, key = name.partition(".")
            place, key = (description.setdefault(section, {}), key) if key else (description, section)
            if value is None:
                place.pop(key, None)
            else:
                place[key] = value
    return description


def description_at(run: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """Return the description of a run at the first step of an iteration, counted from 1."""
    steps = run.get("optimizer_steps_per_iteration") or 1
    return settings_at(run, (iteration - 1) * steps + 1)


def changed_lines(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each changed field with its old and new value, once for a field in several sections."""
    for part in parts:
        seen = set()
        for name, (before, after) in part.get("changed", {}).items():
            leaf = name.rpartition(".")[2]
            if (leaf, str(before), str(after)) not in seen:
                seen.add((leaf, str(before), str(after)))
                yield f"{leaf}: {before!r} -> {after!r} from step {part['first_step']} on"

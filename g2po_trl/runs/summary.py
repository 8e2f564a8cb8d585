"""Statistics of finished episodes (success by task type, turns, valid completions), as numbers and as a table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import isnan
from typing import Any

from ..environments.validation import is_score
from ..trajectory import Trajectory

FEWEST = 5  # groups from which a standard error is estimated
OPTIONAL = (
    "success_rate_error",
    "admissible_action_ratio",
    "tool_call_ratio",
    "readable_call_ratio",
    "known_call_ratio",
)
OF_ENVIRONMENTS = ("success_rate", "reward", "turns")  # what is reported of each, if there are several
# Ends of the names of metrics that are better if they are lower.
LESS_IS_BETTER = ("loss", "turns", "turns_to_success", "runtime")
LESS_IS_BETTER += ("truncated_rate", "failure_reason_rate", "error_rate", "lost_rate")
REPORT = "report"  # name of evaluations of a panel that chose nothing


def summarize(trajectories: Sequence[Trajectory], task_types: Sequence[str | None] | None = None) -> dict[str, Any]:
    """Return the statistics of one evaluation or rollout.

    Args:
        trajectories: the episodes.
        task_types: type of each trajectory's task, for success by type; `None` where there is none.

    Returns:
        `success_rate`, `truncated_rate`, `failure_reason_rate`: fractions of the episodes with a result.
        `error_rate`, `lost_rate`: fractions of all episodes.
        `success_rate_error`: standard error of `success_rate` over tasks, see `careful_error`; absent below
            `FEWEST` tasks.
        `reward`, `turns`, `turns_to_success`: means; the last over successful episodes.
        `valid_action_ratio`: fraction of completions with the required format.
        `admissible_action_ratio`: fraction of actions among those that the environment listed, of steps for which
            it listed any; absent if there are none.
        `tool_call_ratio`: fraction of completions that call a tool, of those whose prompt offers tools.
        `readable_call_ratio`: fraction of these calls that could be parsed; `known_call_ratio`: of the parsed ones,
            those of tools that exist. The three are absent if there are none to count.
        `score`, `score_…`: means of these entries of `info`; episodes without one count as 0.
        `episodes`: number of all episodes.
        `success_rate_by_type`, `episodes_by_type`: by task type, and by environment if there are several.
        `by_environment`: `success_rate`, `reward` and `turns` of each environment; absent if there is one.
        `failure_reasons`: number of episodes by kind of `failure_reason`, the part before its first colon.

        A mean or a fraction of no episodes is `nan`.
    """
    finished = [t for t in trajectories if t.counted]
    names = sorted({name for t in finished for name in t.info if is_score(name)})
    scores = {name: _mean([float(t.info.get(name, 0.0)) for t in finished]) for name in names}
    listed = [a for t in finished for step in t.steps if (a := step.admissible) is not None]
    reasons = Counter(t.failure_reason.split(":")[0].strip() for t in finished if t.failure_reason)
    of_task = defaultdict(list)
    for trajectory in finished:
        of_task[trajectory.task_id].append(trajectory)
    by_type = defaultdict(list)
    for trajectory, kind in zip(trajectories, task_types or [None] * len(trajectories)):
        for name in {kind, trajectory.environment} - {None} if trajectory.counted else ():
            by_type[name].append(trajectory.success)
    environments = sorted({t.environment for t in trajectories if t.environment is not None})
    parts = {name: _means([t for t in finished if t.environment == name]) for name in environments}
    means, error = _means(finished), careful_error(list(of_task.values()))
    return {
        "success_rate": means["success_rate"],
        **({} if isnan(error) else {"success_rate_error": error}),
        "reward": means["reward"],
        **scores,
        "turns": means["turns"],
        "turns_to_success": _mean([len(t.steps) for t in finished if t.success]),
        "valid_action_ratio": _mean([step.valid for t in finished for step in t.steps]),
        **({"admissible_action_ratio": _mean(listed)} if listed else {}),
        **_calls(Counter(step.call for t in finished for step in t.steps)),
        "truncated_rate": _mean([t.outcome == "truncated" for t in finished]),
        "failure_reason_rate": _mean([t.failure_reason is not None for t in finished]),
        "error_rate": _mean([t.outcome == "error" for t in trajectories]),
        "lost_rate": _mean([t.outcome == "lost" for t in trajectories]),
        "episodes": len(trajectories),
        "success_rate_by_type": {kind: _mean(successes) for kind, successes in sorted(by_type.items())},
        "episodes_by_type": {kind: len(successes) for kind, successes in sorted(by_type.items())},
        "failure_reasons": dict(sorted(reasons.items())),
        **({"by_environment": parts} if parts else {}),
    }


def careful_error(groups: Sequence[Sequence[Trajectory]]) -> float:
    """Return `success_error`, but at least the error of independent episodes: groups may be equal by chance.

    nan for fewer than `FEWEST` groups with a result.
    """
    counted = [[t.success for t in group if t.counted] for group in groups]
    if sum(map(bool, counted)) < FEWEST:
        return float("nan")
    return max(success_error(groups), error_of_share(sum(map(sum, counted)), sum(map(len, counted))))


def error_of_share(won: float, number: float) -> float:
    """Return the standard error of a share, by Agresti and Coull: it is not 0 even if none or all succeeded."""
    share = (won + 1) / (number + 2)
    return (share * (1 - share) / (number + 2)) ** 0.5


def _calls(calls: Counter[str | None]) -> dict[str, float]:
    """Return the ratios of tool calls, from the number of completions by `Step.call`."""
    offered = calls.total() - calls[None]
    made = offered - calls["none"]
    named = calls["known"] + calls["unknown"]
    found = {
        "tool_call_ratio": (made, offered),
        "readable_call_ratio": (made - calls["unreadable"], made),
        "known_call_ratio": (calls["known"], named),
    }
    return {name: part / whole for name, (part, whole) in found.items() if whole}


def _means(finished: Sequence[Trajectory]) -> dict[str, float]:
    """Return `OF_ENVIRONMENTS` of episodes with a result."""
    values = [t.success for t in finished], [t.reward for t in finished], [len(t.steps) for t in finished]
    return dict(zip(OF_ENVIRONMENTS, map(_mean, values)))


def success_error(groups: Sequence[Sequence[Trajectory]]) -> float | None:
    """Return the standard error of the success rate of a rollout, whose groups are the sample.

    Episodes of a group share their task: if treated as independent, they would make the error too small. `None` for
    fewer than two groups with a result.
    """
    counted = [[t.success for t in group if t.counted] for group in groups]
    counted = [group for group in counted if group]
    if len(counted) < 2:
        return None
    number = sum(map(len, counted))
    rate = sum(map(sum, counted)) / number
    squares = sum((sum(group) - rate * len(group)) ** 2 for group in counted)
    return float((len(counted) / (len(counted) - 1) * squares) ** 0.5 / number)


def at_temperature(panel: str, temperature: float) -> str:
    """Return the name of a set's evaluations at one of `other_eval_temperatures`."""
    return f"{panel}_t{temperature:g}".replace(".", "_")


def before_and_after(evaluations: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first and the last evaluation of the reported panel.

    The reported panel is "report" if there is one, since the best checkpoint was chosen on another. Otherwise it is
    the panel of the last evaluation.
    """
    by_panel = before_and_after_by_panel(evaluations)
    return by_panel[REPORT if REPORT in by_panel else evaluations[-1]["name"]]


def before_and_after_by_panel(
    evaluations: Sequence[dict[str, Any]],
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the first and the last evaluation of each panel, by the panel's name; of "report" alone if there is one.

    The first is the first one of the same tasks at the same temperature as the last.
    """
    by_panel: dict[str, list[dict[str, Any]]] = {}
    for entry in evaluations:
        by_panel.setdefault(entry["name"], []).append(entry)
    found = {}
    for name, entries in by_panel.items():
        last = entries[-1]
        alike = (one for one in entries if all(one.get(key) == last.get(key) for key in ("panel", "temperature")))
        found[name] = next(alike), last
    return {name: pair for name, pair in found.items() if REPORT not in found or is_reported(name)}


def is_reported(panel: str) -> bool:
    """Return whether evaluations of this name are of the reported panel, at any temperature."""
    return panel == REPORT or panel.startswith(f"{REPORT}_t")


def at_other_temperatures(evaluations: Sequence[dict[str, Any]], panel: str, temperatures: Sequence[float]) -> str:
    """Return a sentence for each further temperature: success of a panel before and after, in percent.

    A temperature that a resumed run has not evaluated yet is left out.
    """
    lines, played = [], before_and_after_by_panel(evaluations)
    for temperature in temperatures:
        if (name := at_temperature(panel, temperature)) in played:
            first, last = (100 * _number(one["success_rate"]) for one in played[name])
            change = f"{first:.1f} before, {last:.1f} after, change {last - first:+.1f}"
            is_one = played[name][0] is played[name][1]
            lines.append(f"At temperature {temperature}, success: {f'{last:.1f}' if is_one else change}")
    return "\n".join(lines)


def format_table(columns: dict[str, dict[str, Any]]) -> str:
    """Return summaries side by side, e.g. `{"before": …, "after": …}`, as a text table with their difference."""
    summaries = list(columns.values())
    kinds = sorted({kind for summary in summaries for kind in summary["success_rate_by_type"]})
    rows = [(f"success: {kind}", [s["success_rate_by_type"].get(kind) for s in summaries], 100) for kind in kinds]
    names = {"success: all": "success_rate", "score": "score", "reward": "reward", "mean turns": "turns"}
    names |= {"valid completions": "valid_action_ratio", "tool calls": "tool_call_ratio"}
    names |= {"admissible actions": "admissible_action_ratio"}
    for label, name in {**names, "episodes": "episodes"}.items():
        if all(name in summary for summary in summaries):
            scale = {"reward": 1, "turns": 1, "episodes": 0}.get(name, 100)
            rows.append((label, [summary[name] for summary in summaries], scale))
    has_errors = all(_number(one.get("success_rate_error")) >= 0 for one in summaries)
    width = max(len(label) for label in [*["  ± standard error"] * has_errors, *(label for label, _, _ in rows)])
    header = " " * width + "".join(f"{name:>10}" for name in [*columns, *["change"] * (len(columns) == 2)])
    lines = [header, "-" * len(header)]
    for label, values, scale in rows:
        values = [_number(value) for value in values]
        cells = [f"{value * scale:10.1f}" if scale else f"{value:10.0f}" for value in values]
        if len(columns) == 2 and scale:
            cells.append(f"{(values[1] - values[0]) * scale:+10.1f}")
        lines.append(f"{label:<{width}}" + "".join(cells))
        if label == "success: all" and has_errors:
            errors = [100 * one["success_rate_error"] for one in summaries]
            errors += [(errors[0] ** 2 + errors[1] ** 2) ** 0.5] if len(errors) == 2 else []
            lines.append(f"{'  ± standard error':<{width}}" + "".join(f"{error:10.1f}" for error in errors))
    return "\n".join(lines)


def _number(value: float | None) -> float:
    """Return a number from a file, in which a number without episodes is `None`."""
    return float("nan") if value is None else value


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values)) if values else float("nan")

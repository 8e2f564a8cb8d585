"""Which λ do a run's data prefer, and are its state keys good? The test that `g2po report` prints.

The value of a state predicts the return of an episode that visits it. Each episode of a group is left out once, and
its returns are predicted by the values that the other episodes give to its states. λ < 1 assumes that the continuation
of a state does not depend on how it was reached. Keys hide relevant differences if the same action from the same state
leads to states of different values (or the environment is random), or if λ = 0 predicts worse where λ = 1 has enough
returns to average, or over all states. Errors are compared as ratios of sums over groups, which are independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from ..credit.graph import StateGraph
from ..credit.values import lambda_values
from ..runs.iterations import Iteration
from ..trajectory import Trajectory

LAMBDAS = (1.0, 0.9, 0.8, 0.5, 0.0)
OFTEN = 8  # visits by other episodes
LOSES, PREFERRED = 2.0, 1.0  # standard errors by which λ = 0 predicts worse, and another λ is preferred to it
# Share of `same_action_spread`: in benchmarks/credit/tabular.py right keys have 0, and wrong ones 0.03 to 0.58.
HIDDEN = 0.02
# Share of steps from states visited again that repeat an action: of fewer, as of free text, nothing is known.
REPEATED = 0.1
LEAST_GROUPS = 8  # an interval of fewer is too narrow to be called one
KEYS_HELP = 'page "State keys and rewards"'


@dataclass(frozen=True)
class LeftOutErrors:
    """Squared errors (P, L) of P predicted returns, by L values of λ, of `num_steps` counted steps.

    `visits`: (P,) visits of the state by the group's other episodes, at least 1. `group`: (P,) group of the step.
    """

    errors: np.ndarray
    visits: np.ndarray
    group: np.ndarray
    num_steps: int

    def by_group(self, least_visits: int = 1) -> np.ndarray:
        """Return (groups, L) sums of the errors at states with at least `least_visits` visits of other episodes."""
        groups, asked = int(self.group.max(initial=-1)) + 1, self.visits >= least_visits
        sums = [np.bincount(self.group[asked], column[asked], minlength=groups) for column in self.errors.T]
        return np.column_stack(sums)


def left_out_errors(graph: StateGraph, lambdas: Sequence[float] = LAMBDAS) -> LeftOutErrors:
    """Return the errors of all steps whose state another episode of their group visited; rounding counts as 0."""
    used = graph.counted
    node, next_node, trajectory = graph.node[used], graph.next_node[used], graph.trajectory[used]
    returns = graph.returns[used]
    # Place of a trajectory among those of its group that count: one of each group is left out at a time.
    counted = graph.trajectory_counted.astype(int)
    before = np.cumsum(counted) - counted
    place = (before - before[np.searchsorted(graph.trajectory_group, graph.trajectory_group)])[trajectory]

    rounding = 1e-9 * np.abs(graph.rewards).max(initial=0.0)
    errors, visits, group = [np.zeros((0, len(lambdas)))], [np.zeros(0, int)], [np.zeros(0, int)]
    for left_out in range(int(place.max(initial=-1)) + 1):
        others = place != left_out
        seen = np.bincount(node[others], minlength=graph.num_nodes)
        asked = ~others & (seen[node] > 0)
        values = [_values(graph, node[others], next_node[others], returns[others], seen, of) for of in lambdas]
        distance = np.abs(np.column_stack(values)[node[asked]] - returns[asked, None])
        errors.append(np.where(distance > rounding, distance, 0.0) ** 2)
        visits.append(seen[node[asked]])
        group.append(graph.node_group[node[asked]])
    return LeftOutErrors(np.concatenate(errors), np.concatenate(visits), np.concatenate(group), int(used.sum()))


def _values(graph, node, next_node, returns, visits, value_lambda) -> np.ndarray:
    """Return the values that some of the graph's episodes give, (N,)."""
    if value_lambda == 1:
        return np.bincount(node, returns, minlength=graph.num_nodes) / np.maximum(visits, 1)
    return lambda_values(node, next_node, graph.rewards, graph.node_group, graph.gamma, value_lambda)


def same_actions(graph: StateGraph, groups: Sequence[Sequence[Trajectory]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of the steps that lead to a known state, and a number for each one's state and action.

    The last step of an episode that the turn limit ended leads to none: no key shows how many turns are left. `graph`:
    of the groups, with actions.
    """
    truncated = np.array([one.outcome == "truncated" for group in groups for one in group], bool)
    used = np.flatnonzero(graph.counted & ~(truncated[graph.trajectory] & (graph.next_node >= graph.num_nodes)))
    _, action = np.unique(graph.action[used], return_inverse=True)
    _, pair = np.unique(graph.node[used] * (action.max(initial=0) + 1) + action, return_inverse=True)
    return used, pair


def same_action_spread(graph: StateGraph, groups: Sequence[Sequence[Trajectory]]) -> np.ndarray:
    """Return how far next values of steps from one state differ: of the same action, and of all.

    Returns:
        (groups, 2) sums of squares, about the mean of each state and action, and of each state. The first is 0 if the
        keys show all relevant differences and nothing is random. Both are 0 if too few actions are repeated, see
        `REPEATED`.
    """
    used, pair = same_actions(graph, groups)
    node, values = graph.node[used], graph.next_values[used]
    again = np.bincount(node)[node] > 1
    if (np.bincount(pair)[pair] > 1).sum() < REPEATED * again.sum():
        return np.zeros((graph.num_groups, 2))

    def squares(sets: np.ndarray) -> np.ndarray:
        means = np.bincount(sets, values) / np.maximum(np.bincount(sets), 1)
        return np.bincount(graph.group[used], (values - means[sets]) ** 2, minlength=graph.num_groups)

    return np.column_stack([squares(pair), squares(node)])


def hidden_share(spread: np.ndarray) -> float | None:
    """Return the share of `same_action_spread`, over all groups, within the same action; `None` if the total is 0."""
    same, total = spread.sum(axis=0)
    return float(same / total) if total > 0 else None


def standard_errors(differences: np.ndarray) -> float:
    """Return a sum of independent differences (groups,) in its own standard errors; 0 when all are 0."""
    spread = float(np.sqrt((differences**2).sum()))
    return float(differences.sum()) / spread if spread > 0 else 0.0


def best_lambda(errors: np.ndarray, spread: np.ndarray) -> float:
    """Return the λ to recommend, from (groups, L) sums of left-out errors and (groups, 2) `same_action_spread`.

    It is 1 unless the keys are trusted, see `HIDDEN`. Otherwise it is 0, unless another λ is `PREFERRED`.
    """
    hidden = hidden_share(spread)
    if hidden is None or hidden > HIDDEN:
        return 1.0
    above = errors - errors[:, -1:]
    better = [number for number in range(len(LAMBDAS)) if standard_errors(above[:, number]) < -PREFERRED]
    return LAMBDAS[min(better, key=lambda number: errors[:, number].sum(), default=len(LAMBDAS) - 1)]


def measure(iterations: Sequence[Iteration], graphs: Sequence[StateGraph]) -> tuple[LeftOutErrors, np.ndarray]:
    """Return errors and `same_action_spread` of all iterations as one batch of groups."""
    parts = [left_out_errors(graph) for graph in graphs]
    starts = np.cumsum([0, *(graph.num_groups for graph in graphs)])
    errors = LeftOutErrors(
        np.concatenate([part.errors for part in parts]),
        np.concatenate([part.visits for part in parts]),
        np.concatenate([part.group + start for part, start in zip(parts, starts)]),
        sum(part.num_steps for part in parts),
    )
    return errors, np.concatenate([same_action_spread(g, one.groups) for g, one in zip(graphs, iterations)])


def examine(errors: LeftOutErrors, spread: np.ndarray) -> dict[str, Any]:
    """Return the part `prediction` of `analysis.json`.

    Returns:
        `unpredicted_share`: share of the steps whose state no other episode of the group visited; `all`, `often`: see
        `row`; `often_standard_errors`, `lost_standard_errors`: by how many λ = 0 predicts worse than λ = 1 at states
        visited often, and over all; `value_lambda`: the recommended λ. `None` where nothing could be compared.
    """
    everywhere, often = errors.by_group(), errors.by_group(OFTEN)
    lost, lost_often = everywhere[:, -1] - everywhere[:, 0], often[:, -1] - often[:, 0]
    compared = bool((errors.errors != errors.errors[:, :1]).any())
    return {
        "lambdas": list(LAMBDAS),
        "steps": errors.num_steps,
        "unpredicted_share": 1 - len(errors.errors) / errors.num_steps if errors.num_steps else None,
        "all": row(everywhere, len(errors.errors)),
        "often": row(often, int((errors.visits >= OFTEN).sum())),
        "hidden_share": hidden_share(spread),
        "often_standard_errors": standard_errors(lost_often) if lost_often.any() else None,
        "lost_standard_errors": standard_errors(lost) if compared else None,
        "value_lambda": best_lambda(everywhere, spread) if compared else None,
    }


def row(sums: np.ndarray, steps: int) -> dict[str, Any]:
    """Return statistics of some predicted steps, from their (groups, L) sums of errors.

    Of each λ, `relative` is the difference of its `mean_squared_error` to that of λ = 1, by that of λ = 1, and
    `interval` its 95 % interval, `None` from fewer than `LEAST_GROUPS` groups.
    """
    total, groups = sums.sum(axis=0), int((sums > 0).any(axis=1).sum())
    known = steps > 0 and total[0] > 0
    return {
        "steps": steps,
        "groups": groups,
        "mean_squared_error": (total / steps).tolist() if steps else None,
        "relative": (total / total[0] - 1).tolist() if known else None,
        "interval": intervals(sums).tolist() if known and groups >= LEAST_GROUPS else None,
    }


def intervals(sums: np.ndarray) -> np.ndarray:
    """Return (L, 2) 95 % intervals of sum / first sum - 1, of (groups, L) sums: by the delta method, paired."""
    total = sums.sum(axis=0)
    ratio = total / total[0]
    error = np.sqrt(((sums - ratio * sums[:, :1]) ** 2).sum(axis=0)) / total[0]
    return (ratio - 1)[:, None] + np.outer(error, [-1.96, 1.96])


def in_short(found: dict[str, Any], used: float | None = 1.0) -> tuple[str, str]:
    """Return a finding and advice; either may be empty. `used`: value_lambda of the run, `None` if it has none."""
    whole, share = found["all"], found["hidden_share"]
    if not found["steps"]:
        return "", ""
    if not whole["steps"]:
        return "No state was visited by two episodes of a group.", f"Use coarser state keys ({KEYS_HELP})."
    if found["value_lambda"] is None or whole["interval"] is None:
        return "Too little data to test the state keys.", ""
    keep = f"If success stalls, add to the state keys what they hide ({KEYS_HELP})."
    keep = keep if used in (1, None) else f"Set value_lambda 1. {keep}"
    if share is not None and share > HIDDEN:
        return "Equal states led to different outcomes: state keys hide something, or the environment is random.", keep
    if max(found[name] or 0.0 for name in ("often_standard_errors", "lost_standard_errors")) > LOSES:
        return "Outcomes of equal states depend on how they were reached: state keys hide something.", keep
    is_better = whole["interval"][LAMBDAS.index(found["value_lambda"])][1] < 0
    best = found["value_lambda"] if is_better else 1.0
    return "The state keys look right.", "" if used in (best, None) else f"Try --value-lambda {best:g}."


def text(found: dict[str, Any]) -> str:
    """Return the test as lines: errors by λ, over all states and at those visited often, and findings on the keys."""
    lines = [
        "test of the state keys: how well a group's values predict the returns of an episode that is left out",
        f"{found['unpredicted_share'] or 0.0:.1%} of steps are not predicted: no other episode of their group visited "
        "their state",
    ]
    for name, lost, part in (
        ("all states", found["lost_standard_errors"], found["all"]),
        (f"states with {OFTEN} or more visits by others", found["often_standard_errors"], found["often"]),
    ):
        if part["relative"] is not None:
            lines.append(f"{name}: {part['steps']} steps, squared error {part['mean_squared_error'][0]:.3g} at λ = 1")
            ranges = [f", 95 % interval {low:+.1%} to {high:+.1%}" for low, high in part["interval"] or ()]
            rows = zip_longest(LAMBDAS, part["relative"], ranges, fillvalue="")
            lines += [f"  λ = {of:g}: error {error:+.1%}{interval}" for of, error, interval in rows][1:]
        if lost is not None:
            limit = f"(correct keys: at most {LOSES:g})"
            lines.append(f"  λ = 0 predicts worse than λ = 1 by {lost:.1f} standard errors {limit}")
    if found["hidden_share"] is not None:
        limit = f"(correct keys: at most {HIDDEN:.0%})"
        lines.append(f"{found['hidden_share']:.0%} of the variance of next values lies within the same action {limit}")
    return "\n".join([*lines, " ".join(filter(None, in_short(found, None)))])

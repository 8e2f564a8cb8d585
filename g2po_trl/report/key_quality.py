"""Which λ do a run's data prefer, and are its state keys good? The test that `g2po report` prints.

The value of a state predicts the return of an episode that visits it. Each episode of a group is left out once, and
its returns are predicted by the values that the other episodes give to its states. λ < 1 assumes that the continuation
of a state does not depend on how it was reached; if it predicts better, values with this λ may be better. Keys hide
relevant differences if the same action from the same state leads to states of different values (or the environment is
random), or if λ = 0 predicts worse at states that were visited often, where λ = 1 has enough returns to average, or
even over all states.

Groups are independent, but their steps are not, so errors are compared as ratios of sums over groups, in standard
errors over groups, and intervals come from a bootstrap that draws groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..credit.graph import StateGraph
from ..credit.values import lambda_values
from ..runs.iterations import Iteration

LAMBDAS = (1.0, 0.9, 0.8, 0.5, 0.0)
# A state is visited often from so many visits by other episodes on. λ = 0 predicts worse where it loses by more than
# so many standard errors; a smaller error is preferred to that of λ = 0 from so many on.
OFTEN, LOSES, PREFERRED = 8, 2.0, 1.0
# Keys are trusted up to such a share of `same_action_spread`. On the task of benchmarks/credit/tabular.py right keys
# have 0, or with 10 % random actions 0.05, and wrong ones 0.03 to 0.58.
HIDDEN = 0.02
# Nothing is known about the keys where fewer of the steps from states visited again repeat an action (on that task at
# least 0.24 do): where actions are free text, each is another, and no two can disagree.
REPEATED = 0.1
RESAMPLES = 2000
LEAST_GROUPS = 8  # a percentile interval of fewer is too narrow to be called one
_TOGETHER = 512  # groups whose values are solved for together: more are faster, and take memory
KEYS_HELP = '"State keys" on the page "Your environment"'


@dataclass(frozen=True)
class LeftOutErrors:
    """Squared errors of P predicted returns, by L values of λ.

    Args:
        errors: (P, L) squared error, in units of reward squared.
        visits: (P,) visits of the state by the group's other episodes, at least 1.
        group: (P,) group of the step.
        num_steps: number of counted steps of the graph; steps without a prediction are in states of one episode only.
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


def same_actions(graph: StateGraph, truncated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of the steps that lead to a known state, and a number for each one's state and action.

    `graph`, `truncated`: as of `same_action_spread`.
    """
    used = np.flatnonzero(graph.counted & ~(truncated[graph.trajectory] & (graph.next_node >= graph.num_nodes)))
    _, action = np.unique(graph.action[used], return_inverse=True)
    _, pair = np.unique(graph.node[used] * (action.max(initial=0) + 1) + action, return_inverse=True)
    return used, pair


def same_action_spread(graph: StateGraph, truncated: np.ndarray) -> np.ndarray:
    """Return how far next values of steps from one state differ: of the same action, and of all.

    Args:
        graph: state graph with actions.
        truncated: (M,) trajectories that a turn limit ended. Their last steps, which lead to no state, are left out,
            since no key shows how many turns are left.

    Returns:
        (groups, 2) sums of squares, about the mean of each state and action, and of each state. The first is 0 if the
        keys show all relevant differences and nothing is random. Both are 0 if too few actions are repeated, see
        `REPEATED`.
    """
    used, pair = same_actions(graph, truncated)
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
    """Return the λ to recommend for updates with such data.

    It is 1 unless the keys are trusted, see `HIDDEN`. Otherwise it is 0, unless the error of another λ is smaller by
    more than `PREFERRED` standard errors.

    Args:
        errors: (groups, L) sums of left-out errors by `LAMBDAS`.
        spread: (groups, 2) `same_action_spread`.
    """
    hidden = hidden_share(spread)
    if hidden is None or hidden > HIDDEN:
        return 1.0
    above = errors - errors[:, -1:]
    better = [number for number in range(len(LAMBDAS)) if standard_errors(above[:, number]) < -PREFERRED]
    return LAMBDAS[min(better, key=lambda number: errors[:, number].sum(), default=len(LAMBDAS) - 1)]


def measure(iterations: Sequence[Iteration], gamma: float) -> tuple[LeftOutErrors, np.ndarray]:
    """Return errors and `same_action_spread` of all iterations as one batch of groups."""
    groups = [group for iteration in iterations for group in iteration.groups]
    starts, parts, spread = range(0, len(groups), _TOGETHER), [], []
    for start in starts:
        some = groups[start : start + _TOGETHER]
        graph = StateGraph.from_groups(some, gamma, with_actions=True)
        parts.append(left_out_errors(graph))
        truncated = [t.outcome == "truncated" for group in some for t in group]
        spread.append(same_action_spread(graph, np.array(truncated, bool)))
    errors = LeftOutErrors(
        np.concatenate([part.errors for part in parts]),
        np.concatenate([part.visits for part in parts]),
        np.concatenate([part.group + start for part, start in zip(parts, starts)]),
        sum(part.num_steps for part in parts),
    )
    return errors, np.concatenate(spread)


def examine(errors: LeftOutErrors, spread: np.ndarray) -> dict[str, Any]:
    """Return the part `prediction` of `analysis.json`.

    Returns:
        `lambdas`; `steps`; `unpredicted_share`: share of the steps whose state no other episode of the group visited;
        `all`, `often`: see `row`; `hidden_share`: see the function; `often_standard_errors`: by how many λ = 0
        predicts worse than λ = 1 at states visited often, `None` if there are none or no error differs;
        `lost_standard_errors`: the same over all states; `value_lambda`: the recommended λ, `None` if nothing could be
        compared.
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

    Returns:
        `steps` predicted; `groups` that have errors; `mean_squared_error`: one for each λ, in units of reward squared;
        `relative`: its difference to that of λ = 1, by that of λ = 1; `interval`: the 95 % interval of each
        difference, `None` from fewer than `LEAST_GROUPS` groups.
    """
    total, groups = sums.sum(axis=0), int((sums > 0).any(axis=1).sum())
    known = steps > 0 and total[0] > 0
    return {
        "steps": steps,
        "groups": groups,
        "mean_squared_error": (total / steps).tolist() if steps else None,
        "relative": (total / total[0] - 1).tolist() if known else None,
        "interval": bootstrap(sums).tolist() if known and groups >= LEAST_GROUPS else None,
    }


def bootstrap(sums: np.ndarray) -> np.ndarray:
    """Return 95 % bootstrap intervals of relative differences to the first column; groups are drawn with replacement.

    Args:
        sums: (groups, L) sums of errors.

    Returns:
        (L, 2) ends of the percentile interval of sum / first sum - 1. Draws are paired: a group counts for all λ or
        for none.
    """
    groups, size, rng, drawn = len(sums), 100, np.random.default_rng(0), []
    for _ in range(RESAMPLES // size):
        places = rng.integers(0, groups, (size, groups)) + groups * np.arange(size)[:, None]
        drawn.append(np.bincount(places.ravel(), minlength=size * groups).reshape(size, groups) @ sums)
    totals = np.concatenate(drawn)
    base = np.where(totals[:, :1] > 0, totals[:, :1], np.nan)
    return np.nanpercentile(totals / base - 1, [2.5, 97.5], axis=0).T


def in_short(found: dict[str, Any], used: float | None = 1.0) -> tuple[str, str]:
    """Return a finding and advice; either may be empty. `used`: value_lambda of the run, `None` if it has none."""
    whole, share = found["all"], found["hidden_share"]
    if not found["steps"]:
        return "", ""
    if not whole["steps"]:
        return "No state was visited by two episodes of a group.", f"Use coarser state keys ({KEYS_HELP})."
    if found["value_lambda"] is None or whole["interval"] is None:
        return "Too little data to test the state keys.", ""
    keep = f"If success stalls, let the state keys show more ({KEYS_HELP})."
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
    share = 100 * (found["unpredicted_share"] or 0.0)
    lines = [
        "test of the state keys: how well a group's values predict the returns of an episode that is left out",
        f"{share:.1f} % of steps are not predicted: no other episode of their group visited their state",
    ]
    for name, lost, part in (
        ("all states", found["lost_standard_errors"], found["all"]),
        (f"states with {OFTEN} or more visits by others", found["often_standard_errors"], found["often"]),
    ):
        if part["relative"] is not None:
            lines.append(f"{name}: {part['steps']} steps, squared error {part['mean_squared_error'][0]:.3g} at λ = 1")
            lines += [f"  λ = {of:g}: {_change(part, number)}" for number, of in enumerate(LAMBDAS) if number]
        if lost is not None:
            limit = f"(correct keys: at most {LOSES:g})"
            lines.append(f"  λ = 0 predicts worse than λ = 1 by {lost:.1f} standard errors {limit}")
    if found["hidden_share"] is not None:
        hidden, limit = 100 * found["hidden_share"], f"(correct keys: at most {100 * HIDDEN:.0f} %)"
        lines.append(f"{hidden:.0f} % of the variance of next values lies within the same action {limit}")
    return "\n".join([*lines, " ".join(filter(None, in_short(found, None)))])


def _change(part: dict[str, Any], number: int) -> str:
    """Return a text such as `error -4.3 %, 95 % interval -6.0 to -2.7 %`."""
    text = f"error {100 * part['relative'][number]:+.1f} %"
    if part["interval"] is None:
        return text
    low, high = part["interval"][number]
    return f"{text}, 95 % interval {100 * low:+.1f} to {100 * high:+.1f} %"

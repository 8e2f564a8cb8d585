"""How well do a graph's values predict? Leave one episode out, and compare its returns with the others' values.

The value of a state is a forecast of the return of who comes there next. So the data of a run itself say which λ is
best: an episode of a group is left out, the values are made from the others, and the squared error of its returns is
counted at each step whose state another episode visited. Each episode is left out once.

λ < 1 trusts that what follows a state does not depend on how it was reached, and left-out errors are late to tell that
it does. Actions tell at once: where the same action from the same state leads to states of different worth, the keys
hide something that matters, or the environment is random, which looks the same.

Groups are independent of each other and episodes of a group are not, so what is compared are sums over groups, and a
difference counts by its size in standard errors over groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..credit.graph import StateGraph
from ..credit.values import lambda_values

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


@dataclass(frozen=True)
class LeftOutErrors:
    """Squared errors of P predicted returns, by L values of λ.

    Args:
        lambdas: the values of λ.
        errors: (P, L) squared error, in units of reward squared.
        visits: (P,) visits of the state by the group's other episodes, at least 1.
        group: (P,) group of the step.
        num_steps: steps of the graph that count; the others' states were visited by no other episode.
    """

    lambdas: tuple[float, ...]
    errors: np.ndarray
    visits: np.ndarray
    group: np.ndarray
    num_steps: int

    def by_group(self, least_visits: int = 1) -> np.ndarray:
        """Return (groups, L) sums of the errors at states with at least `least_visits` visits of other episodes."""
        groups, asked = int(self.group.max(initial=-1)) + 1, self.visits >= least_visits
        sums = [np.bincount(self.group[asked], column[asked], minlength=groups) for column in self.errors.T]
        return np.column_stack(sums)


def standard_errors(differences: np.ndarray) -> float:
    """Size of a sum of independent differences (groups,) in its own standard errors; 0 when all are 0."""
    spread = float(np.sqrt((differences**2).sum()))
    return float(differences.sum()) / spread if spread > 0 else 0.0


def lost_standard_errors(errors: np.ndarray) -> float:
    """By how many standard errors λ = 0 loses to λ = 1, from (groups, L) sums of errors by `LAMBDAS`."""
    return standard_errors(errors[:, LAMBDAS.index(0.0)] - errors[:, LAMBDAS.index(1.0)])


def same_action_spread(graph: StateGraph, truncated: np.ndarray | None = None) -> np.ndarray:
    """How far the next values of steps from one state differ: among steps of the same action, and among all of them.

    Args:
        graph: with actions.
        truncated: (M,) trajectories that a turn limit ended. Their last steps, which lead to no state, are left out:
            no key shows how many turns are left. `None`: there are none.

    Returns:
        (groups, 2) sums of squares, about the mean of each state and action, and of each state. The first is 0 if the
        keys show all that matters and nothing is random. Both are 0 if too few actions are taken again to tell, see
        `REPEATED`.

    Raises:
        ValueError: for a graph without actions.
    """
    if graph.action is None:
        raise ValueError("the graph has no actions: make it with_actions=True")
    used = graph.counted
    if truncated is not None:
        used = used & ~(truncated[graph.trajectory] & (graph.position == graph.lengths[graph.trajectory] - 1))
    node, values = graph.node[used], graph.next_values[used]
    _, action = np.unique(graph.action[used], return_inverse=True)
    _, pair = np.unique(node * (action.max(initial=0) + 1) + action, return_inverse=True)

    again = np.bincount(node)[node] > 1
    if (np.bincount(pair)[pair] > 1).sum() < REPEATED * again.sum():
        return np.zeros((graph.num_groups, 2))

    def squares(sets: np.ndarray) -> np.ndarray:
        means = np.bincount(sets, values) / np.maximum(np.bincount(sets), 1)
        return np.bincount(graph.group[used], (values - means[sets]) ** 2, minlength=graph.num_groups)

    return np.column_stack([squares(pair), squares(node)])


def hidden_share(spread: np.ndarray) -> float | None:
    """Return the fraction of `same_action_spread`, over all groups, among steps of one action; `None` if it is 0."""
    same, total = spread.sum(axis=0)
    return float(same / total) if total > 0 else None


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
    zero = LAMBDAS.index(0.0)
    above = errors - errors[:, zero : zero + 1]
    better = [number for number in range(len(LAMBDAS)) if standard_errors(above[:, number]) < -PREFERRED]
    return LAMBDAS[min(better, key=lambda number: errors[:, number].sum(), default=zero)]


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
        values = np.column_stack(
            [_values(graph, node[others], next_node[others], returns[others], seen, of) for of in lambdas]
        )
        distance = np.abs(values[node[asked]] - returns[asked, None])
        errors.append(np.where(distance > rounding, distance, 0.0) ** 2)
        visits.append(seen[node[asked]])
        group.append(graph.node_group[node[asked]])
    return LeftOutErrors(
        tuple(lambdas), np.concatenate(errors), np.concatenate(visits), np.concatenate(group), int(used.sum())
    )


def _values(graph, node, next_node, returns, visits, value_lambda) -> np.ndarray:
    """(N,) values made of some of the graph's episodes."""
    if value_lambda == 1:
        return np.bincount(node, returns, minlength=graph.num_nodes) / np.maximum(visits, 1)
    return lambda_values(node, next_node, graph.rewards, graph.node_group, graph.gamma, value_lambda)

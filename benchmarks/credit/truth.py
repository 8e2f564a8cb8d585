"""Credit against the truth: how near does each estimator's gradient come to the exact one?

    python -m benchmarks.credit.truth --output benchmarks/results/truth [--jobs 2] [--houses 8] [--settings default …]
        [--methods g2po …]

A fixed policy of an exactly known success rate plays the tabular household. Backward induction gives the true
advantage of every step and the exact gradient of the success rate (`exact.py`); every estimator values the same
episodes. Nothing is learned, so there are no learning curves to compare and little noise. For each estimator, house
and setting:

- `cosine`: of one iteration's gradient with the exact gradient, mean over iterations. 1: the best direction there is.
- `bias`: the same of the expected gradient, from products of different iterations: below 1 more data does not help.
- `signal`: squared length of the expected gradient / variance of an iteration's.
- `correlation`: of the advantages with the true ones, over all steps.
- `error_bias`, `error_noise`: mean squares of what is wrong with the advantages of a turn, state and action on average
  over groups, and of how they vary from group to group; relative to the mean square of the true advantages, at the
  scale that fits them best. Both are unbiased estimates, so that one of 0 may come out below it.
- `gain`: exact change of the success rate, in points, by a step of fixed length in the direction of the gradient.

`--methods` measures only these, and keeps the others of the results in the folder.

Prints and writes the command, the machine and all values by house; intervals are Student's over houses, 95 %, and
those of differences are paired by house.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse, stats

from benchmarks.common import facts, read_text, write_results
from benchmarks.credit.exact import Policy, Truth, success_rate
from benchmarks.credit.household import REWARD, Household, Rollout, play, softmax
from benchmarks.credit.tabular import KEYS
from g2po_trl import StateGraph, TrajectoryRecord, crbc, g2po, gigpo, graft, graphgpo, graphhca, grpo, hgpo, rloo
from g2po_trl.credit.estimators.common import EPSILON, episode_advantage, mean_and_std
from g2po_trl.credit.estimators.g2po import edge_advantage

DEFAULT = {
    "success": 0.4,
    "turns": 30,
    "groups": 8,
    "group_size": 8,
    "slip": 0.0,
    "gamma": 0.95,
    "key": "state",
    "mixed": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "success 3 %": {"success": 0.03},
    "success 10 %": {"success": 0.1},
    "success 70 %": {"success": 0.7},
    "success 90 %": {"success": 0.9},
    "groups of 4": {"group_size": 4},
    "groups of 16": {"group_size": 16},
    "16 groups of 4": {"groups": 16, "group_size": 4},
    "4 groups of 16": {"groups": 4, "group_size": 16},
    "15 turns": {"turns": 15},
    "60 turns": {"turns": 60},
    "slip 10 %": {"slip": 0.1},
    "slip 30 %": {"slip": 0.3},
    "gamma 1": {"gamma": 1.0},
    "key without other objects": {"key": "other objects unseen"},
    "key without processing": {"key": "processing unseen"},
    "key of the place alone": {"key": "place alone"},
    "a house a group": {"mixed": True},
}
MEASURES = ("cosine", "bias", "signal", "correlation", "error_bias", "error_noise", "gain")
REFERENCE = "g2po"
ITERATIONS = 16
STEPPED = 2  # iterations of a house whose step is also taken, and its success computed
STEP = 0.5  # its length, in logits


@dataclass(frozen=True, eq=False)
class Played:
    """One iteration's episodes, and what is true of their steps. S steps, M episodes.

    Args:
        groups: records of each group's episodes.
        gamma: discount of the graph.
        advantage, value: (S,) exact, of the probability to win. won: (S,) whether the step's episode did.
        score: (S, C * A) gradient of each step's log-probability.
        cell: (S,) equal for equal house, turn, state and action.
    """

    groups: list[list[TrajectoryRecord]]
    gamma: float
    advantage: np.ndarray
    value: np.ndarray
    won: np.ndarray
    score: sparse.csr_matrix
    cell: np.ndarray

    def graph(self, value_lambda: float = 1.0, gamma: float | None = None) -> StateGraph:
        return StateGraph.from_records(self.groups, self.gamma if gamma is None else gamma, value_lambda)

    @cached_property
    def usual(self) -> StateGraph:
        """The graph of the paper."""
        return self.graph()


def of_graph(estimator: Callable[[StateGraph], np.ndarray], **options) -> Callable[[Played], np.ndarray]:
    """An estimator of the package, on the graph with these options."""
    return lambda played: estimator(played.graph(**options) if options else played.usual)


def discounted_grpo(graph: StateGraph, **options) -> np.ndarray:
    """GRPO on gamma^T R: of the discount that graph estimators have, what an episode's reward can hold."""
    return grpo(replace(graph, rewards=graph.rewards * graph.gamma**graph.lengths), **options)


def node_term_by_group(graph: StateGraph) -> np.ndarray:
    """G2PO whose A_NC is centred within its node, as always, and divided by the deviation of the whole group."""
    used, next_values = graph.counted, graph.next_values
    mean, _ = mean_and_std(next_values[used], graph.node[used], graph.num_nodes)
    centred = next_values - mean[graph.node]
    _, deviation = mean_and_std(centred[used], graph.group[used], graph.num_groups)
    term = centred / (deviation[graph.group] + EPSILON) * (deviation[graph.group] > 1e-9)
    return episode_advantage(graph) + term + edge_advantage(graph)


def shrunk(graph: StateGraph, visits: float = 1.0) -> np.ndarray:
    """G2PO with a node's value drawn towards its group's mean return, as by so many visits with that return."""
    mean = np.bincount(graph.group, graph.returns) / np.bincount(graph.group)
    own = graph.node_values[: graph.num_nodes]
    values = (graph.node_visits * own + visits * mean[graph.node_group]) / (graph.node_visits + visits)
    return g2po(replace(graph, node_values=np.concatenate([values, graph.rewards])))


def without_aggregation_and_edge(graph: StateGraph) -> np.ndarray:
    """A_EP + A_NC of the steps' own returns: the paper's first addition to GRPO."""
    return g2po(graph, edge_centric=False, aggregate=False)


METHODS: dict[str, Callable[[Played], np.ndarray]] = {
    "rloo": of_graph(rloo),
    "grpo (A_EP)": of_graph(grpo),
    "grpo discounted": of_graph(discounted_grpo),
    "A_EP + A_NC": of_graph(without_aggregation_and_edge),
    "A_EP + A_NC, aggregated": of_graph(partial(g2po, edge_centric=False)),
    "g2po": of_graph(g2po),
    "g2po without A_NC": of_graph(partial(g2po, node_centric=False)),
    "g2po without aggregation": of_graph(partial(g2po, aggregate=False)),
    "g2po, A_NC by group": of_graph(node_term_by_group),
    "g2po, shrunk values": of_graph(shrunk),
    "g2po, λ 0.9": of_graph(g2po, value_lambda=0.9),
    "g2po, λ 0.5": of_graph(g2po, value_lambda=0.5),
    "g2po, λ 0": of_graph(g2po, value_lambda=0.0),
    "g2po without A_NC, λ 0.5": of_graph(partial(g2po, node_centric=False), value_lambda=0.5),
    "g2po, gamma 1": of_graph(g2po, gamma=1.0),
    "gigpo": of_graph(gigpo),
    "hgpo": of_graph(hgpo),
    "graphgpo": of_graph(graphgpo),
    "crbc": of_graph(crbc),
    "graft": of_graph(graft),
    "graft, gae_lambda 0": of_graph(partial(graft, gae_lambda=0.0)),
    "graphhca": of_graph(graphhca),
    "perfect critic": lambda played: played.won - played.value,
    "true advantage": lambda played: played.advantage,
}


@dataclass(eq=False)
class Task:
    """A house with a policy, and its truth. `keys`: by state, what estimators tell states apart by."""

    policy: Policy
    keys: Sequence[bytes]

    @classmethod
    def random(cls, seed: int, options: Mapping[str, Any]) -> Task:
        """A house with a policy that wins a given share."""
        house = Household.random(np.random.default_rng([seed, 0]), distractors=2)
        rng = np.random.default_rng([seed, 1])
        policy = Policy.with_success(house, options["success"], options["turns"], options["slip"], rng)
        return cls(policy, KEYS[options["key"]](house))

    @property
    def house(self) -> Household:
        return self.policy.house

    @cached_property
    def truth(self) -> Truth:
        return Truth.from_policy(self.policy)

    def play(self, episodes: int, rng: np.random.Generator) -> Rollout:
        return play(self.house, self.policy.logits, episodes, self.policy.turns, self.policy.slip, rng)


def play_iteration(tasks: Sequence[Task], options: Mapping[str, Any], rng: np.random.Generator) -> Played:
    """One group of each task."""
    size, groups, parts = options["group_size"], [], []
    for number, task in enumerate(tasks):
        rollout = task.play(size, rng)
        taken = np.arange(options["turns"]) < rollout.length[:, None]
        state, action = rollout.state[taken], rollout.action[taken]
        turn = np.broadcast_to(np.arange(options["turns"]), taken.shape)[taken]
        groups.append([record(task, rollout, episode) for episode in range(size)])
        place = (number if options["mixed"] else 0) * options["turns"] + turn
        parts.append(
            {
                "advantage": task.truth.advantages[turn, state, action].astype(float),
                "value": task.truth.values[turn, state],
                "won": np.repeat(rollout.won, rollout.length).astype(float),
                "score": score(task.policy, state, action),
                "cell": (place * len(task.house.states) + state) * task.policy.num_actions + action,
            }
        )
    joined = {name: np.concatenate([part[name] for part in parts]) for name in ("advantage", "value", "won", "cell")}
    return Played(groups, options["gamma"], score=sparse.vstack([p["score"] for p in parts], "csr"), **joined)


def record(task: Task, rollout: Rollout, episode: int) -> TrajectoryRecord:
    """What the graph reads of an episode."""
    won, length = bool(rollout.won[episode]), int(rollout.length[episode])
    keys = [task.keys[state] for state in rollout.state[episode, :length]]
    return TrajectoryRecord("task", keys, [True] * length, REWARD * won, "success" if won else "truncated")


def score(policy: Policy, state: np.ndarray, action: np.ndarray) -> sparse.csr_matrix:
    """(S, C * A) gradient of log pi(action | state) with respect to the policy's parameters."""
    values = -softmax(policy.house, policy.logits, state)
    values[np.arange(len(state)), action] += 1
    columns = policy.state_class[state][:, None] * policy.num_actions + np.arange(policy.num_actions)
    rows = np.repeat(np.arange(len(state)), policy.num_actions)
    shape = (len(state), policy.num_classes * policy.num_actions)
    return sparse.csr_matrix((values.ravel(), (rows, columns.ravel())), shape)


def measure(setting: str, seed: int, iterations: int = ITERATIONS, methods: Sequence[str] = tuple(METHODS)) -> dict:
    """[method][measure] in one house, or with `mixed` in as many houses as there are groups."""
    options = {**DEFAULT, **SETTINGS[setting]}
    number = options["groups"] if options["mixed"] else 1
    houses = [Task.random(1000 * seed + house, options) for house in range(number)]
    return compare(houses, options, np.random.default_rng([seed, 2]), iterations, methods)


def compare(
    houses: Sequence[Task],
    options: Mapping[str, Any],
    rng: np.random.Generator,
    iterations: int = ITERATIONS,
    methods: Sequence[str] = tuple(METHODS),
) -> dict[str, dict[str, float]]:
    """[method][measure] of iterations whose groups play these houses in turn; the houses share their parameters."""
    tasks = [houses[group % len(houses)] for group in range(options["groups"])]
    exact = np.mean([task.truth.gradient.ravel() for task in houses], axis=0)
    played = [play_iteration(tasks, options, rng) for _ in range(iterations)]
    result = {}
    for name in methods:
        advantages = [METHODS[name](one) for one in played]
        gradients = np.array([one.score.T @ a / len(a) for one, a in zip(played, advantages)])
        result[name] = {
            **direction(gradients, exact),
            **against_true(advantages, [one.advantage for one in played], played),
            "gain": gain(houses, gradients[:STEPPED]),
        }
    return result


def direction(gradients: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """`cosine`, `bias` and `signal` of (iterations, parameters) gradients."""
    lengths = np.linalg.norm(gradients, axis=1)
    unit = exact / np.linalg.norm(exact)
    cosines = np.divide(gradients @ unit, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    number = len(gradients)
    # Of the expected gradient; an iteration's own square would count its noise.
    expected = (np.sum(gradients.sum(axis=0) ** 2) - np.sum(lengths**2)) / (number * (number - 1))
    noise = np.mean(lengths**2) - expected
    along = float(gradients.mean(axis=0) @ unit)
    return {
        "cosine": float(cosines.mean()),
        "bias": along / np.sqrt(expected) if expected > 0 else float("nan"),
        "signal": expected / noise if noise > 0 else float("nan"),
    }


def against_true(advantages: list[np.ndarray], true: list[np.ndarray], played: list[Played]) -> dict[str, float]:
    """`correlation`, `error_bias` and `error_noise` of the advantages of several iterations."""
    estimate, exact = np.concatenate(advantages), np.concatenate(true)
    cells = np.concatenate([one.cell for one in played])
    groups, first = [], 0
    for one in played:
        groups.append(one.usual.group + first)
        first += one.usual.num_groups
    spread = estimate.std() * exact.std()
    found = {"correlation": float(np.corrcoef(estimate, exact)[0, 1]) if spread > 0 else 0.0}
    slope = float(estimate @ exact) / float(exact @ exact)
    # A group's mean in a cell, and how these means vary over the groups that were there.
    pairs, pair_of = np.unique(np.stack([cells, np.concatenate(groups)]), axis=1, return_inverse=True)
    visits = np.bincount(pair_of.ravel())
    mean = np.bincount(pair_of.ravel(), estimate) / visits
    truth = np.bincount(pair_of.ravel(), exact) / visits
    _, cell_of = np.unique(pairs[0], return_inverse=True)
    number = np.bincount(cell_of)
    center = np.bincount(cell_of, mean) / number
    several = number[cell_of] > 1
    if slope <= 0 or not several.any():
        return found | {"error_bias": float("nan"), "error_noise": float("nan")}
    correction = number[cell_of] / np.maximum(number[cell_of] - 1, 1)
    noise = float(np.mean(((mean - center[cell_of]) ** 2 * correction)[several]))
    wrong = float(np.mean(((mean - slope * truth) ** 2)[several]))
    scale = slope**2 * float(np.mean(truth[several] ** 2))
    return found | {"error_bias": (wrong - noise) / scale, "error_noise": noise / scale}


def gain(houses: Sequence[Task], gradients: np.ndarray) -> float:
    """Points of success, mean over houses and gradients, by a step along each."""
    changes = []
    for gradient in gradients:
        length = np.linalg.norm(gradient)
        for task in houses:
            shape = (task.policy.num_classes, task.policy.num_actions)
            step = STEP * gradient.reshape(shape) / length if length > 0 else np.zeros(shape)
            changes.append(100 * (success_rate(task.policy.moved(step)) - task.truth.success))
    return float(np.mean(changes))


def summary(
    by_house: Sequence[Mapping[str, Mapping[str, float]]], known: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """[method][measure]: values by house, mean, half width of its 95 % interval; of the difference to G2PO too.

    `known`: the summary of methods that were measured before, in the same houses.
    """
    by_house = [
        {method: {name: of[name]["values"][house] for name in MEASURES} for method, of in (known or {}).items()} | new
        for house, new in enumerate(by_house)
    ]
    found: dict[str, dict[str, Any]] = {}
    for method in [name for name in METHODS if name in by_house[0]]:
        found[method] = {}
        for name in MEASURES:
            values = [house[method][name] for house in by_house]
            minus = [house[method][name] - house[REFERENCE][name] for house in by_house if REFERENCE in house]
            found[method][name] = {"values": values, **interval(values), "minus_g2po": interval(minus)}
    return found


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and Student's 95 % interval, of the values that are numbers."""
    known = np.array([value for value in values if np.isfinite(value)])
    if len(known) < 2:
        return {"mean": float(known.mean()) if len(known) else float("nan"), "half_width": float("nan")}
    half = stats.t.ppf(0.975, len(known) - 1) * known.std(ddof=1) / np.sqrt(len(known))
    return {"mean": float(known.mean()), "half_width": float(half)}


def tables(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown: all measures of the first setting; then the cosine, and its difference to G2PO, of every setting."""
    first, *_ = results
    lines = [f"### {first}", "", "| estimator | " + " | ".join(MEASURES) + " |", "|---" * (len(MEASURES) + 1) + "|"]
    for method, of in results[first].items():
        cells = [f"{of[name]['mean']:.3f} ± {of[name]['half_width']:.3f}" for name in MEASURES]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    for title, cell in (
        ("Cosine with the exact gradient", lambda of: f"{of['cosine']['mean']:.3f}"),
        (
            "Cosine minus G2PO's, ± 95 %",
            lambda of: "{mean:+.3f} ± {half_width:.3f}".format(**of["cosine"]["minus_g2po"]),
        ),
        ("Gain of a step, points", lambda of: f"{of['gain']['mean']:.2f}"),
    ):
        lines += ["", f"### {title}", "", "| setting | " + " | ".join(results[first]) + " |"]
        lines.append("|---" * (len(results[first]) + 1) + "|")
        lines += [f"| {name} | {' | '.join(cell(of) for of in by.values())} |" for name, by in results.items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--houses", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), metavar="METHOD")
    args = parser.parse_args()
    started, results = time.perf_counter(), {}
    known = json.loads(read_text(args.output / "results.json"))["results"] if args.methods else {}
    options = (args.iterations, args.methods or list(METHODS))
    with ProcessPoolExecutor(args.jobs) as pool:
        jobs = {
            setting: [pool.submit(measure, setting, seed, *options) for seed in range(args.houses)]
            for setting in args.settings
        }
        for setting, of in jobs.items():
            results[setting] = summary([job.result() for job in of], known.get(setting, {}))
            print(f"{setting}: done after {time.perf_counter() - started:.0f} s", flush=True)
    lines = tables(results)
    print("\n".join(lines))
    found = {
        **facts("numpy"),
        "defaults": DEFAULT,
        "settings": {name: SETTINGS[name] for name in args.settings},
        "houses": args.houses,
        "iterations": args.iterations,
        "seconds": round(time.perf_counter() - started, 1),
    }
    write_results(args.output, {**found, "results": results}, "results.json.gz")
    (args.output / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""What `gradient_noise.py` computes without a model: advantages by method, statistics of gradients, tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from g2po_trl.credit import StateGraph, crbc, edge_advantage, g2po, gigpo, graphgpo, grpo, hgpo, node_advantage, rloo
from g2po_trl.trajectory import Trajectory

LAMBDAS, KEYS = (1.0, 0.9, 0.5, 0.0), ("released", "memory")
REFERENCE, BASE, DISCOUNTED = "rloo by state", "g2po λ=1 released", "rloo by state, discounted"
ITERATION = 8  # groups
SPLITS, DRAWS = 1000, 2000
METRICS = ("signal", "direction", "step")


# -- advantages --------------------------------------------------------------------------------------------------


def by_state(graph: StateGraph, rewards: np.ndarray) -> np.ndarray:
    """(S,) reward of a step's episode, minus the mean over visits of its state by other episodes of the group; where
    there are none, minus the mean of the other episodes. Other episodes do not know this one's actions: no bias."""
    counted = graph.trajectory_counted
    size = np.bincount(graph.trajectory_group, counted, graph.num_groups)[graph.trajectory_group]
    total = np.bincount(graph.trajectory_group, rewards * counted, graph.num_groups)[graph.trajectory_group]
    found, used = np.zeros(graph.num_steps), graph.counted
    node, episode = graph.node[used], graph.trajectory[used]
    _, own = np.unique(np.column_stack([node, episode]), axis=0, return_inverse=True)
    own, reward = own.reshape(-1), rewards[episode]
    sums = np.bincount(node, reward)[node] - np.bincount(own, reward)[own]
    visits = np.bincount(node)[node] - np.bincount(own)[own]
    others = ((total - rewards) / np.maximum(size - 1, 1))[episode]
    found[used] = np.where(size[episode] > 1, reward - np.where(visits > 0, sums / np.maximum(visits, 1), others), 0.0)
    return found


def advantages(
    groups: dict[str, Sequence[Sequence[Trajectory]]], gamma: float, penalty: float, history: int
) -> dict[str, np.ndarray]:
    """Method -> (S,) advantages.

    `groups`: the same episodes with each key's states. `penalty`: of an invalid action. `history`: HGPO's.
    """
    graphs = {(k, v): StateGraph.from_groups(groups[k], gamma, v) for k in KEYS for v in LAMBDAS}
    fine = {"invalid_action_penalty": penalty}
    graph = graphs["released", 1.0]
    found = {
        REFERENCE: by_state(graph, graph.rewards),
        DISCOUNTED: by_state(graph, graph.rewards * gamma**graph.lengths),
        "rloo": rloo(graph, **fine),
        "grpo": grpo(graph, **fine),
        "gigpo released": gigpo(graph, **fine),
        "gigpo memory": gigpo(graphs["memory", 1.0], **fine),
        "hgpo released": hgpo(graph, history_length=history, **fine),
        "graphgpo released": graphgpo(graph, **fine),
        "crbc released": crbc(graph, **fine),
    }
    found |= {f"g2po λ={value:g} {key}": g2po(graphs[key, value], **fine) for key in KEYS for value in LAMBDAS}
    for name, part in (("A_NC", node_advantage), ("A_EC", edge_advantage)):
        found |= {f"{name} λ={value:g} released": part(graphs["released", value]) for value in (1.0, 0.5, 0.0)}
    return found


# -- statistics --------------------------------------------------------------------------------------------------


def pair_mean(products: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Mean of `products[i, j]` over pairs of different groups, group i counted `weights[..., i]` times: (...)."""
    own = (weights**2 * np.diag(products)).sum(-1)
    everything = ((weights @ products) * weights).sum(-1)
    return (everything - own) / (weights.sum(-1) ** 2 - (weights**2).sum(-1))


def measure(own: np.ndarray, cross: np.ndarray, reference: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """`METRICS` from inner products (n, n) of the groups' gradients: with each other, with the reference's, and the
    reference's with each other. `weights`: (..., n)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        square = pair_mean(own, weights)
        noise = ((weights * np.diag(own)).sum(-1) / weights.sum(-1) - square) / ITERATION
        along = pair_mean(cross, weights) / np.sqrt(pair_mean(reference, weights))
        return {
            "signal": square / noise,
            "direction": along / np.sqrt(square),
            "step": along / np.sqrt(square + noise),
        }


def split_cosines(own: np.ndarray, splits: int = SPLITS, seed: int = 0) -> np.ndarray:
    """(splits,) cosines of the summed gradients of two random halves of the groups."""
    n, rng = len(own), np.random.default_rng(seed)
    order = rng.permuted(np.tile(np.arange(n), (splits, 1)), axis=1)
    first, second = order < n // 2, (order >= n // 2) & (order < n // 2 * 2)
    dot, a, b = (((x @ own) * y).sum(1) for x, y in ((first, second), (first, first), (second, second)))
    return dot / np.sqrt(a * b)


def analyse(products: dict[str, np.ndarray], names: Sequence[str], geometry: str) -> dict[str, dict]:
    """By method: values, intervals, and relative differences to `BASE` with theirs."""

    def of(name: str, weights: np.ndarray, reference: str = REFERENCE) -> dict[str, np.ndarray]:
        own, cross = products[f"{geometry}/{name}/own"], products[f"{geometry}/{name}/{reference}"]
        return measure(own, cross, products[f"{geometry}/{reference}/own"], weights)

    n = len(products[f"{geometry}/{REFERENCE}/own"])
    once = np.ones(n)
    drawn = np.random.default_rng(0).multinomial(n, once / n, DRAWS).astype(float)
    base, base_drawn, found = of(BASE, once), of(BASE, drawn), {}
    for name in names:
        value, values = of(name, once), of(name, drawn)
        found[name] = {"halves": float(split_cosines(products[f"{geometry}/{name}/own"]).mean())}
        found[name]["direction, discounted"] = float(of(name, once, DISCOUNTED)["direction"])
        for metric in METRICS:
            relative = value[metric] / base[metric] - 1
            interval, change = (
                np.nanpercentile(part, [2.5, 97.5]).tolist()
                for part in (values[metric], values[metric] / base_drawn[metric] - 1)
            )
            found[name][metric] = float(value[metric])
            found[name][f"{metric}, interval"] = interval
            found[name][f"{metric}, minus base"] = [float(relative), *change]
        # A ratio to a base that is near 0 has no interval to speak of; a difference has.
        apart = np.nanpercentile(values["signal"] - base_drawn["signal"], [2.5, 97.5])
        found[name]["signal, difference"] = [float(value["signal"] - base["signal"]), *apart.tolist()]
    return found


# -- report ------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def percent(of: Sequence[float | None]) -> str:
    """ "+3 [-1, +7]", empty where too few groups tell."""
    return "" if None in of else "{:+.0f} [{:+.0f}, {:+.0f}]".format(*(100 * value for value in of))


def difference(found: dict) -> str:
    """Of signals; in percent for a file that was made before differences were."""
    of = found.get("signal, difference")
    if of is None:
        return percent(found["signal, minus base"]) + " %"
    return "{:+.2f} [{:+.2f}, {:+.2f}]".format(*of) if None not in of else ""


def cells(of: dict[str, dict], name: str) -> list[str]:
    """Halves, signal, its difference to `BASE`; direction, that of discounted rewards, step, its difference, which are
    empty where the reference's own signal is not told apart from 0: nothing is known of the direction then."""
    found, shown = of[name], name != BASE
    low, _ = of[REFERENCE]["signal, interval"]
    made = [number(found["halves"]), number(found["signal"]), difference(found) if shown else ""]
    if low is None or low <= 0:
        return [*made, "", "", "", ""]
    made += [number(found[what]) for what in ("direction", "direction, discounted", "step")]
    return [*made, percent(found["step, minus base"]) if shown else ""]


def table(results: Path) -> str:
    """All policies that are there, as Markdown."""
    lines = []
    for path in sorted(results.glob("*.json")):
        run = json.loads(path.read_text())
        lines += [
            f"\n{run['policy']} ({run['setting']}): {run['groups']} groups, {100 * run['success']:.0f} % won, "
            f"{run['steps'] / run['groups']:.0f} steps a group; by `{run['command']}`\n",
            "| method | halves | signal | minus g2po | in Adam's | direction | of discounted | step | minus g2po, % "
            "| in Adam's, % |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for name in run["plain"]:
            columns = {geometry: cells(run[geometry], name) for geometry in ("plain", "adam")}
            (halves, loud, signal, *way, step), (_, _, signal_adam, *_, step_adam) = columns.values()
            lines.append(f"| {' | '.join([name, halves, loud, signal, signal_adam, *way, step, step_adam])} |")
    return "\n".join(lines) + "\n"

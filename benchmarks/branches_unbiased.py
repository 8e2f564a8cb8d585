"""Are the values of states the same with branches? On random decision processes, whose values are known exactly.

    python benchmarks/branches_unbiased.py [--episodes 1000000] [--groups 30000] [--processes 3] [--jobs 2]

A process has ten states, two ends, and random transitions; without loops, they lead on only. Two questions:

1. *Large groups.* A million plain episodes, and half a million of which each visit but the first is continued with the
   same probability by one of half a million branches; both in a hundred batches, the branched ones one group each. A
   node's z is the difference from the exact value, or between the two, by its standard error over the batches. Without
   a bias 4.6 % of them are beyond 2 and 0.3 % beyond 3. Once more with a limit of turns, which no state tells.
2. *Groups of eight.* Six episodes and two that a rule may make branches, against eight plain ones: the mean over
   groups of a node's value, and the mean over all its visits in all groups, each divided by the exact value.

Each process and rule is a line of RESULTS/results.jsonl, and what is there is not run again. Prints and writes
RESULTS/table.md.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from g2po_trl import StateGraph
from g2po_trl.credit.branching import RULES
from g2po_trl.credit.graph import TrajectoryRecord
from g2po_trl.credit.values import lambda_values

RESULTS = Path(__file__).with_name("results") / "branches_unbiased"
STATES, REWARD, GAMMA = 10, 8.0, 0.95
LAMBDAS = (1.0, 0.5, 0.0)
BATCHES = 100  # of episodes, and of groups
LIMIT = 6  # turns, where they are limited
SIZE, HELD_BACK = 8, 2
KEYS = [state.to_bytes(16, "little") for state in range(STATES)]
Points = list[tuple[int, int]]


class Process:
    """Transition probabilities (states, states + 2) of a fixed policy; the last two columns are a loss and a win."""

    def __init__(self, seed: int, loops: bool, winning: float = 0.3):
        draws = np.random.default_rng([seed, loops])
        going_on = np.zeros((STATES, STATES))
        for state in range(STATES):
            others = np.arange(STATES) if loops else np.arange(state + 1, STATES)
            following = draws.permutation(others)[:3]
            going_on[state, following] = draws.dirichlet(np.ones(len(following))) if len(following) else 0.0
        ending = draws.uniform(0.1, 0.3, STATES)
        ending[going_on.sum(1) == 0] = 1.0
        won = draws.uniform(0.0, winning, STATES)
        ends = np.column_stack([ending * (1 - won), ending * won])
        self.transitions = np.hstack([going_on * (1 - ending)[:, None], ends])
        self.cumulative = np.cumsum(self.transitions, 1)[:, :-1]
        paid = self.transitions[:, STATES + 1] * REWARD
        self.values = np.linalg.solve(np.eye(STATES) - GAMMA * self.transitions[:, :STATES], GAMMA * paid)

    def play(self, starts: np.ndarray, draws: np.random.Generator, limits: np.ndarray | None = None):
        """(episodes, longest) states, -1 after the end; (episodes,) lengths; (episodes,) rewards."""
        state, columns = np.array(starts), []
        live = np.ones(len(state), dtype=bool)
        while live.any() or not columns:
            columns.append(np.where(live, state, -1))
            chance = draws.random(len(state))
            following = (chance[:, None] >= self.cumulative[np.minimum(state, STATES - 1)]).sum(1)
            state = np.where(live, following, state)
            live &= state < STATES
            if limits is not None:
                live &= len(columns) < limits
        states = np.stack(columns, 1)
        return states, (states >= 0).sum(1), REWARD * (state == STATES + 1)


def records_of(played, origins=None) -> list[TrajectoryRecord]:
    states, lengths, rewards = played
    return [
        TrajectoryRecord(
            "task",
            [KEYS[s] for s in states[e, : lengths[e]].tolist()],
            [True] * int(lengths[e]),
            float(rewards[e]),
            "success" if rewards[e] else "failure",
            parent=origins[e][0] if origins else None,
            start=origins[e][1] if origins else 0,
        )
        for e in range(len(lengths))
    ]


def node_states(graph: StateGraph, records: list[TrajectoryRecord]) -> np.ndarray:
    """(N,) the state of each node."""
    found = np.zeros(graph.num_nodes, dtype=np.int64)
    found[graph.node] = [key[0] for record in records for key in record.keys]
    return found


def values_of(graph: StateGraph, value_lambda: float) -> np.ndarray:
    """(N,) values of the nodes of a graph made with lambda 1: what `StateGraph` computes, and its arrays only once."""
    if value_lambda == 1:
        return graph.node_values[: graph.num_nodes]
    ends = graph.node, graph.next_node, graph.rewards, graph.node_group
    return lambda_values(*ends, graph.gamma, value_lambda)


def large_groups(seed: int, loops: bool, limit: int | None, episodes: int) -> dict:
    """The values of a process from plain and from branched episodes: means and standard errors over batches."""
    process, draws = Process(seed, loops), np.random.default_rng([seed, loops, 1])
    plain, branched = [], {value_lambda: [] for value_lambda in LAMBDAS}
    size = episodes // BATCHES
    for _ in range(BATCHES):
        limits = None if limit is None else np.full(size, limit)
        states, lengths, rewards = process.play(np.zeros(size, dtype=np.int64), draws, limits)
        left = lengths[:, None] - np.arange(states.shape[1])
        visited = states >= 0
        returns = (GAMMA**left * rewards[:, None])[visited]
        sums = np.bincount(states[visited], returns, minlength=STATES)
        plain.append(sums / np.maximum(1, np.bincount(states[visited], minlength=STATES)))
        records = branched_group(process, draws, size // 2, limit)
        graph = StateGraph.from_records([records], GAMMA)
        state = node_states(graph, records)
        for value_lambda in LAMBDAS:
            values = np.zeros(STATES)
            values[state] = values_of(graph, value_lambda)
            branched[value_lambda].append(values)
    used = np.all(plain, 0) & np.all(branched[1.0], 0)  # some states are never come to
    if limit is not None:
        process.values = np.mean(plain, 0)
    found = {"loops": loops, "limit": limit, "exact": process.values[used].tolist(), "plain": summary(plain, used)}
    return found | {"branched": {str(key): summary(values, used) for key, values in branched.items()}}


def branched_group(process: Process, draws: np.random.Generator, roots: int, limit: int | None):
    """Episodes from the beginning, and as many branches, each from a visit drawn from all but the first ones."""
    first = process.play(np.zeros(roots, dtype=np.int64), draws, None if limit is None else np.full(roots, limit))
    episode, position = np.nonzero(first[0] >= 0)
    episode, position = episode[position > 0], position[position > 0]
    chosen = draws.integers(len(episode), size=roots)
    points = list(zip(episode[chosen].tolist(), position[chosen].tolist()))
    return records_of(first) + records_of(continued(process, first, points, draws, limit), points)


def continued(process: Process, first, points: Points, draws: np.random.Generator, limit: int | None = None):
    starts = np.array([first[0][point] for point in points], dtype=np.int64)
    limits = None if limit is None else limit - np.array([position for _, position in points])
    return process.play(starts, draws, limits)


def summary(values: list[np.ndarray], used: np.ndarray) -> list[list[float]]:
    """[mean, its standard error] of each state."""
    mean, error = np.mean(values, 0), np.std(values, 0, ddof=1) / np.sqrt(len(values))
    return np.stack([mean[used], error[used]], 1).tolist()


def everywhere(graph: StateGraph, budget: int) -> Points:
    """`least_visited` without its condition that all episodes of the group failed."""
    failed = np.zeros_like(graph.trajectory_success)
    return RULES["least_visited"](replace(graph, trajectory_success=failed), budget)


ARMS = {"plain": None, **RULES, "least_visited, in all groups": everywhere}


def groups_of_eight(seed: int, loops: bool, arm: str, groups: int) -> dict:
    """The values in each batch of groups by the exact ones: [mean over groups, mean over visits], by lambda.

    Six episodes of a group are the same for all rules.
    """
    process, size, chunk = Process(seed, loops, winning=0.12), SIZE - HELD_BACK, 50
    of_groups, of_visits = (np.zeros((BATCHES, len(LAMBDAS), 2, STATES)) for _ in range(2))  # numbers, sums
    failed = branches = 0
    for number in range(groups // chunk):
        shared, own = (np.random.default_rng([seed, loops, number, stream]) for stream in (2, 3))
        first = process.play(np.zeros(chunk * size, dtype=np.int64), shared)
        roots = records_of(first)
        grouped = [roots[i : i + size] for i in range(0, len(roots), size)]
        failed += int((~first[2].reshape(chunk, size).any(1)).sum())
        points: Points = []
        if ARMS[arm]:
            rule = partial(ARMS[arm], seed=number) if arm in ("uniform", "last_steps") else ARMS[arm]
            points = rule(StateGraph.from_records(grouped, GAMMA), HELD_BACK)
        branches += len(points)
        more = records_of(continued(process, first, points, own), [(m % size, p) for m, p in points]) if points else []
        for (m, _), record in zip(points, more):
            grouped[m // size].append(record)
        missing = [SIZE - len(group) for group in grouped]
        fresh = iter(records_of(process.play(np.zeros(sum(missing), dtype=np.int64), own)))
        for group, number_missing in zip(grouped, missing):
            group += [next(fresh) for _ in range(number_missing)]
        graph = StateGraph.from_records(grouped, GAMMA)
        state = node_states(graph, [record for group in grouped for record in group])
        for place, value_lambda in enumerate(LAMBDAS):
            values = values_of(graph, value_lambda)
            for sums, weights in ((of_groups, np.ones(len(values))), (of_visits, graph.node_visits)):
                here = sums[number % BATCHES, place]
                here[0] += np.bincount(state, weights, minlength=STATES)
                here[1] += np.bincount(state, weights * values, minlength=STATES)
    played = groups // chunk * chunk
    used = of_groups[:, 0, 0].sum(0) > played / 20  # of the others little is known
    found = {"loops": loops, "arm": arm, "failed": failed / played, "branches": branches / played}
    for place, value_lambda in enumerate(LAMBDAS):
        ratios = []
        for sums in (of_groups, of_visits):
            number, total = sums[:, place, 0][:, used], sums[:, place, 1][:, used]
            exact = np.where(number > 0, process.values[used], 0.0)
            ratios.append((total / np.maximum(1, number)).sum(1) / exact.sum(1))
        found[str(value_lambda)] = np.stack(ratios, 1).tolist()
    return found


def beyond(z: np.ndarray) -> str:
    return f"{len(z)} | {100 * np.mean(np.abs(z) > 2):.1f} % | {100 * np.mean(np.abs(z) > 3):.1f} % | {z.mean():+.2f}"


def report(large: list[dict], small: list[dict]) -> str:
    lines = ["| Large groups | against | Nodes | beyond 2 | beyond 3 | mean z |", "|---|---|---|---|---|---|"]
    for limit in dict.fromkeys(found["limit"] for found in large):
        for loops in (False, True):
            some = [found for found in large if (found["loops"], found["limit"]) == (loops, limit)]
            name = ("loops" if loops else "no loops") + (f", {limit} turns" if limit else "")
            plain = np.concatenate([found["plain"] for found in some]).reshape(-1, 2)
            exact = np.concatenate([found["exact"] for found in some])
            if limit is None:
                lines.append(f"| {name}: plain | exact | {beyond((plain[:, 0] - exact) / plain[:, 1])} |")
            for value_lambda in map(str, LAMBDAS):
                values = np.concatenate([found["branched"][value_lambda] for found in some]).reshape(-1, 2)
                label = f"| {name}: branches, λ = {float(value_lambda):g} |"
                if limit is None:
                    lines.append(f"{label} exact | {beyond((values[:, 0] - exact) / values[:, 1])} |")
                difference = (values[:, 0] - plain[:, 0]) / np.hypot(values[:, 1], plain[:, 1])
                lines.append(f"{label} plain | {beyond(difference)} |")
    columns = " | ".join(f"λ = {v:g}: groups | minus plain | visits | minus plain" for v in LAMBDAS)
    lines += ["", f"| Groups of eight | failed | branches | {columns} |", "|---|---|---|" + "---|" * 12]
    for loops in (False, True):
        plain = [found for found in small if (found["loops"], found["arm"]) == (loops, "plain")]
        for arm in ARMS:
            some = [found for found in small if (found["loops"], found["arm"]) == (loops, arm)]
            cells = []
            for value_lambda in map(str, LAMBDAS):
                ratios, of_plain = (np.array([one[value_lambda] for one in those]) for those in (some, plain))
                for column in (0, 1):
                    difference = mean_and_width(ratios[..., column] - of_plain[..., column])
                    cells += [mean_and_width(ratios[..., column], ""), difference if arm != "plain" else ""]
            failed = np.mean([found["failed"] for found in some])
            branches = np.mean([found["branches"] for found in some])
            name = f"{'loops' if loops else 'no loops'}: {arm}"
            lines.append(f"| {name} | {100 * failed:.0f} % | {branches:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_and_width(values: np.ndarray, sign: str = "+") -> str:
    """(processes, batches) -> mean over all, and its 95 % interval over batches."""
    width = 1.96 * np.sqrt((values.var(1, ddof=1) / values.shape[1]).sum()) / len(values)
    return f"{values.mean():{sign}.3f} ± {width:.3f}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--episodes", type=int, default=1_000_000, help="of a process, plain and branched each")
    parser.add_argument("--groups", type=int, default=30_000, help="groups of eight, for each rule and process")
    parser.add_argument("--processes", type=int, default=3, help="random processes with and without loops each")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    kinds = [(seed, loops) for seed in range(args.processes) for loops in (False, True)]
    jobs = [("large", *kind, None, args.episodes) for kind in kinds]
    jobs += [("small", *kind, arm, args.groups) for kind in kinds[:4] for arm in ARMS]
    jobs += [("large", *kind, LIMIT, args.episodes) for kind in kinds[:2]]
    file = args.out / "results.jsonl"
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    missing = [job for job in jobs if list(job) not in [found["job"] for found in done]]
    args.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.jobs) as pool, file.open("a") as lines:
        for finished in as_completed([pool.submit(run, job) for job in missing]):
            done.append(finished.result())
            lines.write(json.dumps(done[-1]) + "\n")
            lines.flush()
    found = [next(result for result in done if result["job"] == list(job)) for job in jobs]
    text = report(*([one for one in found if one["job"][0] == size] for size in ("large", "small")))
    (args.out / "table.md").write_text(text + "\n")
    print(text)


def run(job: tuple) -> dict:
    size, *arguments = job
    return {"job": list(job), **(large_groups if size == "large" else groups_of_eight)(*arguments)}


if __name__ == "__main__":
    main()

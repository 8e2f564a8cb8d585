"""What partial rollouts (groups that continue in the next rollout) save, and that they are the same episodes.

    python -m benchmarks.speed.rolling speed --lengths recorded --output benchmarks/results/rolling
    python -m benchmarks.speed.rolling speed --lengths 50 --batches 6 --output benchmarks/results/rolling
    python -m benchmarks.speed.rolling same --output benchmarks/results/rolling

`speed`: batches of groups a second, in turns, streaming, and one and two rollouts ahead, interleaved, medians. No
model: an engine bound by latency, which takes the same time for a token of each completion, however many there are (it
sleeps). Completions have 3 to 5 tokens, environments answer at once. Episodes are as long as those of a training run
(`lengths.json` in OUTPUT: 320 groups of 8, at most 15 turns), or with `--lengths 50` four of five end after 8 to 30
turns and the others after 50. The first batches are not timed: the groups that are first complete are short.
`same`: the tiny model plays generated ALFWorld games by `generate`, every game by a group of 8, with 0 and 1 rollouts
ahead and weights that do not change. Groups that are open at the end are played to their ends, too. Success and
lengths are compared by permutation of groups. Prints and writes OUTPUT/<name>.json: command, machine, raw values.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.common import facts, interleaved, medians, write_results
from benchmarks.faults.faulty_environment import FaultyEnvironment
from g2po_trl import EnvironmentPool, PoolLimits
from g2po_trl.engines.sampling import Sampling
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.experimental.partial_rollouts import PartialRollouts
from g2po_trl.rollout.episode import Episode
from g2po_trl.rollout.player import Player
from g2po_trl.rollout.strategy import RolloutContext, SynchronousRollout

GROUP = 8
ARMS = {"in turns": (False, 0), "streaming": (True, 0), "1 ahead": (True, 1), "2 ahead": (True, 2)}


class Latency:
    """Actor and session: all that is asked gets a token every `seconds`. Ends an episode at its length."""

    is_collective, takes_seeds = False, True

    def __init__(self, seconds: float, streams: bool, lengths: dict[str, list[int]], seed: int):
        self.seconds, self.streams, self.lengths = seconds, streams, lengths
        self.random, self.length_of = random.Random(seed), {}
        self.left: dict[int, int] = {}
        self.asked: dict[int, Episode] = {}

    def rollout(self):
        return nullcontext()

    def session(self, sampling, seeds, stats):
        return self

    def close(self):
        pass

    @property
    def waiting(self) -> int:
        return len(self.asked)

    def ask(self, episodes):
        for episode in episodes:
            self.asked[episode.number], self.left[episode.number] = episode, self.random.randint(3, 5)

    def receive_steps(self, timeout):
        time.sleep(self.seconds)
        for number in self.asked:
            self.left[number] -= 1
        ready = [number for number in self.asked if not self.left[number]]
        return [(episode, self._step(episode)) for episode in map(self.asked.pop, ready)]

    def _step(self, episode: Episode):
        if not episode.steps:
            self.length_of[episode.number] = self.random.choice(self.lengths[episode.task_id])
        return episode.step("end" if len(episode.steps) + 1 == self.length_of[episode.number] else "go", None)


def lengths_of(kind: str, folder: Path) -> list[list[int]]:
    """Of groups of episodes."""
    if kind == "recorded":
        return json.loads((folder / "lengths.json").read_text())
    draws = random.Random(0)
    return [[draws.randint(8, 30) if draws.random() < 0.8 else 50 for _ in range(GROUP)] for _ in range(320)]


def one_run(arm: str, groups: list[list[int]], options: argparse.Namespace, pool: EnvironmentPool, seed: int) -> dict:
    streams, ahead = ARMS[arm]
    turns = max(map(max, groups))
    tasks = [{"task_id": str(number)} for number in range(len(groups))]
    actor = Latency(options.seconds, streams, {str(number): found for number, found in enumerate(groups)}, seed)
    player = Player(pool, actor, EpisodeLimits(turns), streams=streams)
    context = RolloutContext(player, GROUP, tasks, seed)
    strategy = PartialRollouts(context, max_off_policy_steps=ahead) if ahead else SynchronousRollout(context)
    order = random.Random(seed).sample(tasks, len(tasks))
    kept = []
    for version in range(1, options.unmeasured + options.batches + 1):
        rows = [order.pop() for _ in range(options.groups)]
        rows = [row for row in rows for _ in range(GROUP)]
        names = [place // GROUP for place in range(len(rows))]
        rollout = strategy.collect(rows, names, version)
        played, stats = rollout.trajectories, rollout.stats
        if version > options.unmeasured:
            age = [version - step.policy_version for one in played for step in one.steps] if ahead else [0]
            kept.append((stats.total_time, stats.num_steps, stats.active_fraction, mean(age)))
    pool.end()
    seconds, steps, active, ages = zip(*kept)
    return {
        "batches a second": options.batches / sum(seconds),
        "steps a second": sum(steps) / sum(seconds),
        "active fraction": sum(s * a for s, a in zip(seconds, active)) / sum(seconds),
        "mean age": mean(ages),
    }


def speed(options: argparse.Namespace) -> dict[str, Any]:
    groups = lengths_of(options.lengths, options.output)
    with EnvironmentPool(FaultyEnvironment, PoolLimits(2)) as pool:

        def play(arm: str, repetition: int) -> dict[str, float]:
            run = one_run(arm, groups, options, pool, repetition)
            kept = {name: round(value, 4) for name, value in run.items()}
            print(repetition, arm, json.dumps(kept), file=sys.stderr, flush=True)
            return kept

        raw = interleaved({arm: partial(play, arm) for arm in ARMS}, options.repetitions, warm_up=0)
    by_name = {arm: {name: [run[name] for run in runs] for name in runs[0]} for arm, runs in raw.items()}
    paired = {
        f"{arm} by streaming": median(
            run["batches a second"] / other["batches a second"] for run, other in zip(raw[arm], raw["streaming"])
        )
        for arm in ARMS
    }
    every = [length for group in groups for length in group]
    return {
        "lengths": {
            "mean": mean(every),
            "most": max(every),
            "share of the longest": every.count(max(every)) / len(every),
        },
        "medians": {arm: medians(values) for arm, values in by_name.items()},
        "batches a second, medians of the ratios": {name: round(value, 3) for name, value in paired.items()},
        "raw": raw,
    }


def same(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, AlfworldEnvironment, Manifest, generate_games
    from g2po_envs.alfworld.tiny import tiny_model_path
    from g2po_trl.engines.transformers import TransformersEngine
    from g2po_trl.rollout.actor import PromptActor

    torch.manual_seed(0)
    path = str(tiny_model_path())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    engine = TransformersEngine.from_model(model, tokenizer, batch_tokens=16384)
    actor = PromptActor.from_engine(engine, ALFWORLD_COMPACT_PROMPT)
    sampling = Sampling(max_completion_length=24, stop_sequences=("</action>",))
    with tempfile.TemporaryDirectory() as folder:
        generate_games(folder, "train", options.games, seed=0, size="tiny")
        tasks = Manifest.scan(Path(folder)).rows()
        hidden = ("help", "look", "inventory", "examine")
        factory = partial(AlfworldEnvironment, Manifest.scan(Path(folder)), hidden_actions=hidden, intro=False)
        with EnvironmentPool(factory, PoolLimits(2)) as pool:
            player, places = Player(pool, actor, EpisodeLimits(15)), options.groups * GROUP
            context = RolloutContext(player, GROUP, tasks, sampling=sampling)
            rolling, ages, ahead = PartialRollouts(context), [], []
            for version in range(1, options.batches + 1):
                rows = tasks[(version - 1) * options.groups : version * options.groups]
                played = rolling.collect([row for row in rows for _ in range(GROUP)], [], version).trajectories
                ages += [version - step.policy_version for one in played for step in one.steps]
                ahead += played
                print(version, len(ahead), file=sys.stderr, flush=True)
            opened, loop = rolling.groups, rolling._loop
            with player.rollout():
                while rolling._fill(loop, places, len(opened), version) or loop.running:
                    loop.observe()
                    loop.ask()
                    loop.act()
            ahead += [episode.trajectory() for group in opened for episode in group.members]
            rows = {row["task_id"]: row for row in tasks}
            names = [played.task_id for played in ahead]
            beside = []
            for first in range(0, len(names), places):
                batch = names[first : first + places]
                groups = [place // GROUP for place in range(len(batch))]
                beside += player.play([rows[name] for name in batch], sampling, groups)[0]
    both = [
        [
            [(len(one.steps), one.outcome == "success") for one in arm[first : first + GROUP]]
            for first in range(0, len(arm), GROUP)
        ]
        for arm in (beside, ahead)
    ]
    return {
        "episodes with 0 and with 1 ahead": [len(beside), len(ahead)],
        "mean age": round(mean(ages), 3),
        **compared(*both, options.permutations),
        "raw: [turns, success] by group": dict(zip(("0", "1"), both)),
    }


def compared(one: list[list[tuple[int, bool]]], other: list[list[tuple[int, bool]]], number: int) -> dict[str, Any]:
    """Two-sample tests: groups of the same game change sides at random."""
    turns = np.array([[[turns for turns, _ in group] for group in arm] for arm in (one, other)])
    won = np.array([[[won for _, won in group] for group in arm] for arm in (one, other)], dtype=float)
    most = turns.max()

    def statistics(sides: np.ndarray) -> tuple[float, float]:
        picked = [np.where(sides[:, None], turns[1 - k], turns[k]) for k in (0, 1)]
        shares = [np.bincount(found.ravel(), minlength=most + 1).cumsum() / found.size for found in picked]
        wins = [np.where(sides[:, None], won[1 - k], won[k]).mean() for k in (0, 1)]
        return abs(wins[1] - wins[0]), np.abs(shares[1] - shares[0]).max()

    found = statistics(np.zeros(len(one), dtype=bool))
    rng = np.random.default_rng(0)
    drawn = np.array([statistics(rng.random(len(one)) < 0.5) for _ in range(number)])
    p = (1 + (drawn >= np.array(found) - 1e-12).sum(0)) / (1 + number)
    return {
        "success": [round(float(side), 4) for side in won.mean((1, 2))],
        "mean turns": [round(float(side), 3) for side in turns.mean((1, 2))],
        "difference of success, p": [round(float(found[0]), 4), round(float(p[0]), 4)],
        "Kolmogorov-Smirnov of turns, p": [round(float(found[1]), 4), round(float(p[1]), 4)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "same"])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--lengths", choices=["recorded", "50"], default="recorded")
    parser.add_argument("--groups", type=int, default=8, help="of 8 episodes each, in a batch")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--unmeasured", type=int, default=3, help="batches before those that are timed")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.02, help="of a token")
    parser.add_argument("--games", type=int, default=80)
    parser.add_argument("--permutations", type=int, default=2000)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    do: Callable[[argparse.Namespace], dict[str, Any]] = {"speed": speed, "same": same}[options.what]
    name = options.what if options.what == "same" else f"speed_{options.lengths}"
    result = {
        **facts(),
        **do(options),
    }
    write_results(options.output, result, f"{name}.json")
    print(json.dumps({key: value for key, value in result.items() if not key.startswith("raw")}, indent=1))


if __name__ == "__main__":
    main()

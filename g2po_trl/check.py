"""What is to be known of an environment before it is trained on, each finding a sentence with its remedy.

    python -m g2po_trl.check module:Environment --task '{"seed": 1}' [--tasks tasks.jsonl] [--episodes 8] [--turns 30]

The environment may be a `TextEnvironment`, a class in TRL's style (random calls are made of its tools then), or the
address of an OpenEnv server, `http://127.0.0.1:8000`.

`check_environment` says whether an environment keeps its contract; `examine` plays random episodes besides and says
whether it will train well: does a task start the same in another process, are admissible actions admissible, how fast
is a step, do states repeat so that there is a graph, does chance ever win? Exit code 1 when something is broken.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from .environment import TextEnvironment
from .environment_check import EnvironmentContractError, check_environment, checked_observation, checked_step
from .environment_pool import EnvironmentFailure, EnvironmentPool
from .graph import StateGraph
from .tool_environment import ToolEnvironment, random_call, text_environment_factory
from .trajectory import Step, Trajectory

LEVELS = ("broken", "doubtful", "good")
SLOW_STEP = 0.2  # seconds
LONG_TEXT = 8_000  # characters, about 2,000 tokens: the default max_prompt_length


@dataclass(frozen=True)
class Finding:
    """One thing that was found. `level`: "broken", "doubtful" or "good"."""

    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:9} {self.text}"


def examine(
    environment_factory: Callable[[], TextEnvironment],
    tasks: Sequence[dict[str, Any]],
    episodes: int = 8,
    turns: int = 30,
    seed: int = 0,
) -> list[Finding]:
    """Play random episodes of each task and say what was found, worst first.

    Args:
        environment_factory: as given to the trainer.
        tasks: dataset rows.
        episodes: of each task; as many as a group will have.
        turns: steps of an episode at most.
    """
    try:
        environment_factory = text_environment_factory(environment_factory, turns)
    except ValueError as error:
        return [Finding("broken", str(error))]
    findings: list[Finding] = []
    for task in tasks:
        try:
            check_environment(environment_factory, task)
        except (EnvironmentContractError, ValueError) as error:
            return [Finding("broken", f"{error} (task {task})")]
    findings.append(Finding("good", "keeps the contract of reset, step and close, also when an action is nonsense."))
    findings += _in_a_worker(environment_factory, tasks)
    if any(finding.level == "broken" for finding in findings):
        return sorted(findings, key=lambda finding: LEVELS.index(finding.level))
    environment = environment_factory()
    try:
        findings += _admissible(environment, tasks[0])
        played = _play(environment, tasks, episodes, turns, random.Random(seed))
    except Exception as error:
        return [Finding("broken", f"a random episode raised {type(error).__name__}: {error}. Answer, do not raise.")]
    finally:
        environment.close()
    findings += [*_speed(played), *_texts(played), *_after_the_end(played)]
    if played.lists_actions:
        findings += [*_graph(played, episodes), *_outcomes(played, turns)]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


@dataclass
class _Played:
    groups: list[list[Trajectory]]
    reset_seconds: list[float]
    step_seconds: list[float]
    has_task: bool
    lists_actions: bool
    paid_after_the_end: float | None = None


def _in_a_worker(environment_factory: Callable, tasks: Sequence[dict[str, Any]]) -> list[Finding]:
    """Does it travel to a worker process, and does a task start there as it does here?"""
    try:
        with EnvironmentPool(environment_factory, num_workers=1) as pool:
            there = pool.reset(tasks)
    except ValueError as error:
        return [Finding("broken", str(error))]
    environment = environment_factory()
    for task, observation in zip(tasks, there):
        if isinstance(observation, EnvironmentFailure):
            return [Finding("broken", f"in a worker process it fails ({observation.kind}): {observation.message}")]
        here = checked_observation(environment.reset(**task), "reset")
        if here != observation:
            environment.close()
            return [
                Finding(
                    "broken",
                    f"a task starts differently in another process: {here.text[:80]!r} and {observation.text[:80]!r}. "
                    "Seed all chance from the task; hash() of a string and the order of a set differ by process.",
                )
            ]
    environment.close()
    return [Finding("good", "travels to worker processes, and tasks start there as they do here.")]


def _admissible(environment: TextEnvironment, task: dict[str, Any]) -> list[Finding]:
    """Play every action the first observation lists, and one that no environment knows."""
    first = checked_observation(environment.reset(**task), "reset")
    if not first.admissible_actions:
        return []

    def answer(action: str) -> tuple[str, float, bool]:
        environment.reset(**task)
        result = checked_step(environment.step(action), "step")
        return result.observation.text, result.reward, result.terminated

    nonsense = answer("xyzzy plugh")
    refused = [action for action in first.admissible_actions if answer(action) == nonsense]
    if not refused:
        return [Finding("good", "admissible actions are answered otherwise than nonsense.")]
    shown = ", ".join(map(repr, refused[:3])) + (" …" if len(refused) > 3 else "")
    return [
        Finding(
            "doubtful",
            f"{len(refused)} of {len(first.admissible_actions)} admissible actions are answered as nonsense is "
            f"({nonsense[0][:60]!r}): {shown}. List only what can be done, or let the answer say what was done.",
        )
    ]


def _play(
    environment: TextEnvironment, tasks: Sequence[dict[str, Any]], episodes: int, turns: int, rng: random.Random
) -> _Played:
    played = _Played([], [], [], True, True)
    for number, task in enumerate(tasks):
        group = []
        for _ in range(episodes):
            started = time.perf_counter()
            observation = checked_observation(environment.reset(**task), "reset")
            played.reset_seconds.append(time.perf_counter() - started)
            played.has_task &= bool(observation.task)
            steps, reward, outcome = [], 0.0, "truncated"
            for _ in range(turns):
                if isinstance(environment, ToolEnvironment):
                    action = random_call(environment.described, rng)
                else:
                    played.lists_actions &= observation.admissible_actions is not None
                    action = rng.choice(observation.admissible_actions or ["look"])
                steps.append(Step(observation.text, action, state_key=observation.state_key))
                started = time.perf_counter()
                result = checked_step(environment.step(action), "step")
                played.step_seconds.append(time.perf_counter() - started)
                reward, observation = reward + result.reward, result.observation
                if result.terminated or result.truncated:
                    won = result.info.get("success", reward > 0)
                    outcome = "truncated" if result.truncated else "success" if won else "failure"
                    if played.paid_after_the_end is None:
                        played.paid_after_the_end = _paid_after_the_end(environment, action)
                    break
            group.append(Trajectory(str(number), steps, reward, outcome))
        played.groups.append(group)
    return played


def _paid_after_the_end(environment: TextEnvironment, action: str) -> float:
    """What the last action pays when it is played again; nothing when the environment refuses."""
    try:
        return checked_step(environment.step(action), "step").reward
    except Exception:  # to refuse is fine
        return 0.0


def _after_the_end(played: _Played) -> list[Finding]:
    if not played.paid_after_the_end:
        return []
    return [
        Finding(
            "doubtful",
            f"a step after the end pays {played.paid_after_the_end:g}: the pool never plays one, but whoever drives "
            "the environment by hand may. Remember the end in step.",
        )
    ]


def _speed(played: _Played) -> list[Finding]:
    step, reset = median(played.step_seconds), median(played.reset_seconds)
    text = f"a step takes {1000 * step:.3g} ms, a reset {1000 * reset:.3g} ms (medians)."
    if step > SLOW_STEP:
        remedy = "keep in the environment what it works out anew, or give num_environment_workers more cores."
        return [Finding("doubtful", f"{text} That is slow: {remedy}")]
    return [Finding("good", text)]


def _texts(played: _Played) -> list[Finding]:
    findings = []
    longest = max(len(step.observation) for group in played.groups for t in group for step in t.steps)
    if longest > LONG_TEXT:
        findings.append(
            Finding(
                "doubtful",
                f"an observation has {longest} characters: prompts beyond max_prompt_length tokens lose their middle. "
                "Shorten it, or raise max_prompt_length.",
            )
        )
    if not played.has_task:
        findings.append(
            Finding(
                "doubtful",
                "reset gives no Observation.task: after the first step only the history says what is to be done. Set "
                "it, or repeat the goal in every observation.",
            )
        )
    if not played.lists_actions:
        findings.append(
            Finding(
                "doubtful",
                "no admissible actions are listed: random play said 'look', and the model has to know what can be "
                "done. Say it in the observation or the prompt template.",
            )
        )
    return findings


def _graph(played: _Played, episodes: int) -> list[Finding]:
    """Will states be compared at all?"""
    graph = StateGraph.from_groups(played.groups)
    statistics = graph.statistics()
    size, alone = statistics["mean_group_size"], statistics["singleton_step_fraction"]
    text = (
        f"{episodes} random episodes of a task visit a state {size:.1f} times on average; {100 * alone:.0f} % of the "
        "steps are in a state visited once"
    )
    if graph.num_nodes == len(played.groups) and graph.num_steps > len(played.groups):
        return [
            Finding("doubtful", f"{text}: a task has one state only. Let state_key or the text tell states apart.")
        ]
    if alone > 0.5:
        return [
            Finding(
                "doubtful",
                f"{text}: most actions are compared with no other, and G2PO is little more than GRPO. Give equal "
                "states an equal state_key (leave out counters and clocks), or see state_key_ignores and "
                "state_similarity.",
            )
        ]
    return [Finding("good", f"{text}: there is a graph to learn from.")]


def _outcomes(played: _Played, turns: int) -> list[Finding]:
    everyone = [t for group in played.groups for t in group]
    won = sum(t.success for t in everyone)
    ended = sum(t.outcome != "truncated" for t in everyone)
    text = f"chance wins {won} of {len(everyone)} episodes of at most {turns} turns, {ended} come to an end"
    rewards = {t.reward for t in everyone}
    if len(rewards) == 1:
        return [
            Finding(
                "doubtful",
                f"{text}, all with reward {rewards.pop():g}: a model that plays by chance learns nothing. Start from "
                "one that sometimes wins, or from easier tasks.",
            )
        ]
    return [Finding("good", f"{text}; rewards from {min(rewards):g} to {max(rewards):g}.")]


def load(name: str) -> Callable[[], TextEnvironment]:
    """`module:Class`, `package.module:function`, `file.py:Class`, or the address of an OpenEnv server.

    Raises:
        SystemExit: when there is no such thing.
    """
    if name.startswith(("http://", "https://")):
        from .openenv import RemoteEnvironment

        return partial(RemoteEnvironment, [name])
    module, _, attribute = name.partition(":")
    if not attribute:
        raise SystemExit(f"{name!r} names no environment: write module:Class, e.g. my_game:MyEnvironment")
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).resolve().parent))
        module = Path(module).stem
    else:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{name!r} cannot be loaded: {error}") from error


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m g2po_trl.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", help="module:Class, file.py:Class, or an OpenEnv server's address")
    parser.add_argument("--task", action="append", default=[], help="a dataset row as JSON; may be repeated")
    parser.add_argument("--tasks", type=Path, help="a file with one row a line; the first 5 are played")
    parser.add_argument("--episodes", type=int, default=8, help="of each task")
    parser.add_argument("--turns", type=int, default=30, help="of an episode, at most")
    args = parser.parse_args(argv)
    lines = [*args.task, *(args.tasks.read_text().splitlines()[:5] if args.tasks else [])]
    try:
        tasks = [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:
        raise SystemExit(f"a task is no JSON ({error}): write it as '{{\"seed\": 1}}'") from error
    findings = examine(load(args.environment), tasks or [{}], args.episodes, args.turns)
    print(*findings, sep="\n")
    sys.exit(any(finding.level == "broken" for finding in findings))


if __name__ == "__main__":
    main()

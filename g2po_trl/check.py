"""What is to be known of an environment before it is trained on, each finding a sentence with its remedy.

    g2po check [environment.py] [--tasks tasks.jsonl]
    g2po check module:Environment --task '{"seed": 1}' [--episodes 8] [--turns 30]

The environment may be a `TextEnvironment`, a class in TRL's style (random calls are made of its tools then), or the
address of an OpenEnv server, `http://127.0.0.1:8000`. Exit code 1 when something is broken.
`python -m g2po_trl.check` is the same.

`check_environment` says, in this process, whether an environment keeps its contract; `examine` lets worker processes
with time limits say it, as in training, and plays random episodes besides and says whether it will train well: does a
task start the same in another process, are admissible actions admissible, how fast is a step, do states repeat so that
there is a graph, does chance ever win?
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from .credit.graph import StateGraph
from .environments.checks import (
    check_environment,
    check_task_columns,
    checked_step,
    factory_name,
)
from .environments.contract import Observation, StepResult, TextEnvironment
from .environments.pool import EnvironmentFailure, EnvironmentPool
from .environments.tools import ToolEnvironment, random_call, text_environment_factory
from .objects import load
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
    timeout: float = 60.0,
    environment_variables: Sequence[str] = (),
) -> list[Finding]:
    """Play random episodes of each task, all in worker processes, and say what was found, worst first.

    Args:
        environment_factory: as given to the trainer.
        tasks: dataset rows.
        episodes: of each task; as many as a group will have.
        turns: steps of an episode at most.
        timeout: seconds a reset or a step may take.
        environment_variables: see `EnvironmentPool`.
    """
    options = {"num_workers": 1, "step_timeout": timeout, "environment_variables": environment_variables}
    findings: list[Finding] = []
    try:
        environment_factory = text_environment_factory(environment_factory, turns)
        for task in tasks:
            check_task_columns(environment_factory, task)
        with EnvironmentPool(environment_factory, reset_timeout=timeout, **options) as pool:
            starts, failures = _tried(pool, tasks)
        for failure in failures:
            if failure.kind in ("timeout", "crash"):
                return [Finding("broken", f"in a worker process it {_said(failure)}")]
        with _Remote(environment_factory, reset_timeout=10 * timeout, **options) as environment:
            findings += _contract(environment, tasks, starts, failures)
            if not any(finding.level == "broken" for finding in findings):
                findings += _admissible(environment, tasks[0])
                played = _play(environment, tasks, episodes, turns, random.Random(seed))
                findings += [*_speed(played), *_texts(played), *_after_the_end(played)]
                if played.lists_actions:
                    findings += [*_graph(played, episodes), *_outcomes(played, turns)]
    except _FailedError as failed:
        return [Finding("broken", f"a random episode {_said(failed.failure)}. Answer, do not raise.")]
    except ValueError as error:
        return [Finding("broken", str(error))]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


class _FailedError(Exception):
    def __init__(self, failure: EnvironmentFailure):
        self.failure = failure


class _Examined(TextEnvironment):
    """In a worker: an environment whose contract is checked when it is reset to a task for the first time, and whose
    last action is played once more, to see what that pays."""

    def __init__(self, environment_factory: Callable[[], TextEnvironment]):
        self.factory, self.environment, self.checked = environment_factory, None, []

    def reset(self, **task) -> Observation | str:
        if task not in self.checked:
            check_environment(self.factory, task)
            self.checked.append(deepcopy(task))  # reset may change what it is given
        self.environment = self.environment or self.factory()
        return self.environment.reset(**task)

    def step(self, action: str) -> StepResult:
        result = checked_step(self.environment.step(action), "step")
        if result.terminated or result.truncated:
            try:
                again = checked_step(self.environment.step(action), "step").reward
            except Exception:  # to refuse is fine
                again = 0.0
            result.info["paid_after_the_end"] = again
        return result

    def close(self) -> None:
        if self.environment:
            self.environment.close()


class _Remote:
    """One environment in a worker, as if it were here, but with time limits."""

    def __init__(self, environment_factory: Callable[[], TextEnvironment], **options: Any):
        def examined() -> TextEnvironment:
            return _Examined(environment_factory)

        examined.__name__ = factory_name(environment_factory)
        self.described: str | None = None  # the tools of a class in TRL's style
        if isinstance(environment_factory, partial) and environment_factory.func is ToolEnvironment:
            self.described = (*environment_factory.args, None)[2]
        self.pool = EnvironmentPool(examined, **options)

    def reset(self, **task: Any) -> Observation:
        return self._answer(self.pool.reset([task])[0])

    def step(self, action: str) -> StepResult:
        return self._answer(self.pool.step({0: action})[0])

    def _answer(self, answer: Any) -> Any:
        if isinstance(answer, EnvironmentFailure):
            raise _FailedError(answer)
        return answer

    def __enter__(self) -> _Remote:
        return self

    def __exit__(self, *exception) -> None:
        self.pool.close()


@dataclass
class _Played:
    groups: list[list[Trajectory]]
    reset_seconds: list[float]
    step_seconds: list[float]
    has_task: bool
    lists_actions: bool
    paid_after_the_end: float | None = None


def _tried(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]]) -> tuple[list, list[EnvironmentFailure]]:
    """What each task starts with; and what fails when an action and nonsense are played."""
    starts = pool.reset([*tasks, *tasks])
    live = [slot for slot, answer in enumerate(starts) if not isinstance(answer, EnvironmentFailure)]
    actions = {slot: (starts[slot].admissible_actions or ["look"])[0] for slot in live}
    actions |= {slot: "no such action" for slot in live if slot >= len(tasks)}
    answers = [*starts, *pool.step(actions).values()]
    return starts, [answer for answer in answers if isinstance(answer, EnvironmentFailure)]


def _contract(
    environment: _Remote, tasks: Sequence[dict[str, Any]], starts: Sequence[Any], failures: list[EnvironmentFailure]
) -> list[Finding]:
    """Does it keep its contract, and does a task start in this process as it did in another?"""
    for task, there in zip(tasks, starts):
        try:
            here = environment.reset(**task)
        except _FailedError as failed:
            return [Finding("broken", f"{_said(failed.failure)} (task {task})")]
        if failures:  # only sometimes, then
            return [Finding("broken", f"in a worker process it {_said(failures[0])}")]
        if here != there:
            return [
                Finding(
                    "broken",
                    f"a task starts differently in another process: {here.text[:80]!r} and {there.text[:80]!r}. "
                    "Seed all chance from the task; hash() of a string and the order of a set differ by process.",
                )
            ]
    return [
        Finding("good", "keeps the contract of reset, step and close, also when an action is nonsense."),
        Finding("good", "travels to worker processes, and tasks start the same in each."),
    ]


def _said(failure: EnvironmentFailure) -> str:
    """What an environment did, in a line."""
    message = failure.message.rpartition("\nslot ")[0]
    if failure.kind == "exception":
        return f"raised {message.strip().splitlines()[-1]}"
    return {"timeout": "hangs: ", "crash": "dies: "}.get(failure.kind, "") + message


def _admissible(environment: _Remote, task: dict[str, Any]) -> list[Finding]:
    """Play every action the first observation lists, and one that no environment knows."""
    first = environment.reset(**task)
    if not first.admissible_actions:
        return []

    def answer(action: str) -> tuple[str, float, bool]:
        environment.reset(**task)
        result = environment.step(action)
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
    environment: _Remote, tasks: Sequence[dict[str, Any]], episodes: int, turns: int, rng: random.Random
) -> _Played:
    played = _Played([], [], [], True, True)
    for number, task in enumerate(tasks):
        group = []
        for _ in range(episodes):
            started = time.perf_counter()
            observation = environment.reset(**task)
            played.reset_seconds.append(time.perf_counter() - started)
            played.has_task &= bool(observation.task)
            steps, reward, outcome = [], 0.0, "truncated"
            for _ in range(turns):
                if environment.described is not None:
                    action = random_call(environment.described, rng)
                else:
                    played.lists_actions &= observation.admissible_actions is not None
                    action = rng.choice(observation.admissible_actions or ["look"])
                steps.append(Step(observation.text, action, state_key=observation.state_key))
                started = time.perf_counter()
                result = environment.step(action)
                played.step_seconds.append(time.perf_counter() - started)
                reward, observation = reward + result.reward, result.observation
                if result.terminated or result.truncated:
                    won = result.info.get("success", reward > 0)
                    outcome = "truncated" if result.truncated else "success" if won else "failure"
                    if played.paid_after_the_end is None:
                        played.paid_after_the_end = result.info["paid_after_the_end"]
                    break
            group.append(Trajectory(str(number), steps, reward, outcome))
        played.groups.append(group)
    return played


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
    text = f"a step takes {1000 * step:.3g} ms, a reset {1000 * reset:.3g} ms (medians, to a worker and back)."
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="g2po check",
        description=__doc__.partition("\n\n`check_env")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "environment",
        nargs="?",
        default="environment.py",
        help="file.py, file.py:Class, module:Class, or an OpenEnv server's address; default: %(default)s",
    )
    parser.add_argument(
        "--environment-options", type=json.loads, default={}, help="arguments of the environment, as a JSON object"
    )
    parser.add_argument("--task", action="append", default=[], help="a dataset row as JSON; may be repeated")
    parser.add_argument(
        "--tasks",
        type=Path,
        help="a file with one row a line; the first 5 are played. Default: tasks.jsonl beside file.py",
    )
    parser.add_argument("--episodes", type=int, default=8, help="of each task")
    parser.add_argument("--turns", type=int, default=30, help="of an episode, at most")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a reset or a step may take")
    parser.add_argument(
        "--environment_variables", nargs="*", default=[], help="variables like HF_TOKEN that the environment needs"
    )
    args = parser.parse_args(argv)
    if args.environment == "environment.py" and not Path(args.environment).is_file():
        parser.error("there is no environment.py here: name an environment, as file.py or module:Class")
    beside = Path(args.environment.partition(".py")[0]).with_name("tasks.jsonl")
    if not args.task and args.tasks is None and ".py" in args.environment and beside.is_file():
        args.tasks = beside
    lines = [*args.task, *(args.tasks.read_text().splitlines()[:5] if args.tasks else [])]
    try:
        tasks = [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:
        raise SystemExit(f"a task is no JSON ({error}): write it as '{{\"seed\": 1}}'") from error
    environment = load(args.environment)
    findings = examine(
        partial(environment, **args.environment_options) if args.environment_options else environment,
        tasks or [{}],
        args.episodes,
        args.turns,
        timeout=args.timeout,
        environment_variables=args.environment_variables,
    )
    print(*findings, sep="\n")
    sys.exit(any(finding.level == "broken" for finding in findings))


if __name__ == "__main__":
    main()

"""Check an environment before training: play it at random and report findings, each with a remedy.

    g2po check [environment.py] [--tasks tasks.jsonl]
    g2po check module:Environment --task '{"seed": 1}' [--episodes 8] [--turns 30]

The environment may be a `TextEnvironment`, a tool-based class as for TRL (its tools are then called at random), or the
address of an OpenEnv server, `http://127.0.0.1:8000`. Exit code 1 if there is an error.
`python -m g2po_trl.check` is the same.

`check_environment` checks the contract in this process. `examine` checks it in worker processes with time limits, as
in training, and plays random episodes to find out whether the environment can be learned: does a task start the same
in another process, are admissible actions admissible, how fast is a step, do states recur so that there is a graph,
do random actions ever succeed, do the same actions lead to the same states (as branches need them to)?
"""

from __future__ import annotations

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

from .arguments import Parser
from .credit.graph import StateGraph
from .environments.checks import check_task_columns
from .environments.contract import TextEnvironment
from .environments.in_worker import FailedError, WorkerEnvironment
from .environments.pool import EnvironmentFailure, EnvironmentPool
from .environments.tasks import read_tasks
from .environments.tools import random_call, text_environment_factory
from .objects import load
from .rollout.returning import rehearse
from .trajectory import Step, Trajectory

LEVELS = ("error", "warning", "ok")
SLOW_STEP = 0.2  # seconds
LONG_TEXT = 8_000  # characters, about 2,000 tokens: the default max_prompt_length


@dataclass(frozen=True)
class Finding:
    """A finding. `level`: "error", "warning" or "ok"."""

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
    """Play random episodes of each task in worker processes and return the findings, worst first.

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
        with EnvironmentPool(environment_factory, reset_timeout=timeout, saves_states=True, **options) as pool:
            starts, failures = _tried(pool, tasks)
            for failure in failures:
                if failure.kind in ("timeout", "crash"):
                    return [Finding("error", f"in a worker process it {_said(failure)}")]
            with WorkerEnvironment(environment_factory, reset_timeout=10 * timeout, **options) as environment:
                findings += _contract(environment, tasks, starts, failures)
                if not any(finding.level == "error" for finding in findings):
                    findings += _admissible(environment, tasks[0])
                    played = _play(environment, tasks, episodes, turns, random.Random(seed))
                    findings += [*_speed(played), *_texts(played), *_after_the_end(played)]
                    findings += _returned_to(pool, tasks, played)
                    if played.lists_actions:
                        findings += [*_graph(played, episodes), *_outcomes(played, turns)]
    except FailedError as failed:
        return [
            Finding("error", f"a random episode {_said(failed.failure)}. Return an observation instead of raising.")
        ]
    except ValueError as error:
        return [Finding("error", str(error))]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


@dataclass
class _Played:
    groups: list[list[Trajectory]]
    reset_seconds: list[float]
    step_seconds: list[float]
    has_task: bool
    lists_actions: bool
    paid_after_the_end: float | None = None


def _tried(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]]) -> tuple[list, list[EnvironmentFailure]]:
    """What each task starts with; and what fails when a valid and an invalid action are played."""
    starts = pool.reset([*tasks, *tasks])
    live = [slot for slot, answer in enumerate(starts) if not isinstance(answer, EnvironmentFailure)]
    actions = {slot: (starts[slot].admissible_actions or ["look"])[0] for slot in live}
    actions |= {slot: "no such action" for slot in live if slot >= len(tasks)}
    answers = [*starts, *pool.step(actions).values()]
    return starts, [answer for answer in answers if isinstance(answer, EnvironmentFailure)]


def _contract(
    environment: WorkerEnvironment,
    tasks: Sequence[dict[str, Any]],
    starts: Sequence[Any],
    failures: list[EnvironmentFailure],
) -> list[Finding]:
    """Does it keep its contract, and does a task start in this process as it did in another?"""
    for task, there in zip(tasks, starts):
        try:
            here = environment.reset(**task)
        except FailedError as failed:
            return [Finding("error", f"{_said(failed.failure)} (task {task})")]
        if failures:  # only sometimes, then
            return [Finding("error", f"in a worker process it {_said(failures[0])}")]
        if here != there:
            return [
                Finding(
                    "error",
                    f"a task starts differently in another process: {here.text[:80]!r} and {there.text[:80]!r}. "
                    "Seed all randomness from the task; hash() of a string and the order of a set differ by process.",
                )
            ]
    return [
        Finding("ok", "keeps the contract of reset, step and close, also for an invalid action."),
        Finding("ok", "can be sent to worker processes, and tasks start the same in each."),
    ]


def _said(failure: EnvironmentFailure) -> str:
    """What an environment did, in a line."""
    message = failure.message.rpartition("\nslot ")[0]
    if failure.kind == "exception":
        return f"raised {message.strip().splitlines()[-1]}"
    return {"timeout": "times out: ", "crash": "crashes: "}.get(failure.kind, "") + message


def _admissible(environment: WorkerEnvironment, task: dict[str, Any]) -> list[Finding]:
    """Play every action that the first observation lists, and an invalid one."""
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
        return [Finding("ok", "admissible actions get other responses than an invalid action.")]
    shown = ", ".join(map(repr, refused[:3])) + (" …" if len(refused) > 3 else "")
    return [
        Finding(
            "warning",
            f"{len(refused)} of {len(first.admissible_actions)} admissible actions get the same response as an "
            f"invalid action ({nonsense[0][:60]!r}): {shown}. List only executable actions, or describe their effect.",
        )
    ]


def _play(
    environment: WorkerEnvironment, tasks: Sequence[dict[str, Any]], episodes: int, turns: int, rng: random.Random
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
                steps.append(
                    Step(
                        observation.text,
                        action,
                        state_key=observation.state_key,
                        admissible_actions=observation.admissible_actions,
                    )
                )
                started = time.perf_counter()
                result = environment.step(action)
                played.step_seconds.append(time.perf_counter() - started)
                reward, observation, steps[-1].reward = reward + result.reward, result.observation, result.reward
                if result.terminated or result.truncated:
                    won = result.info.get("success", reward > 0)
                    outcome = "truncated" if result.truncated else "success" if won else "failure"
                    if played.paid_after_the_end is None:
                        played.paid_after_the_end = result.info["paid_after_the_end"]
                    break
            group.append(Trajectory(str(number), steps, reward, outcome))
        played.groups.append(group)
    return played


def _returned_to(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]], played: _Played) -> list[Finding]:
    """Do the actions of each task's longest episode lead to the same states again, in another process?"""
    restores = False
    for task, group in zip(tasks, played.groups):
        steps = max((trajectory.steps for trajectory in group), key=len)
        different, restores = rehearse(pool, task, steps)
        if different and restores:
            return [
                Finding(
                    "warning",
                    f"restore does not come back to what save saved: {different}. Branches (branch_share) need it: "
                    "save all that a step depends on, or remove both, and actions are played again.",
                )
            ]
        if different:
            return [
                Finding(
                    "warning",
                    f"the same actions do not lead to the same states again: {different}. Branches (branch_share) and "
                    "episodes whose worker is lost need it: seed all randomness from the task, and leave clocks and "
                    "random names out of observations.",
                )
            ]
    how = "by restore, and by playing their actions again" if restores else "by playing their actions again"
    return [Finding("ok", f"states can be returned to {how}, also in another process (branch_share).")]


def _after_the_end(played: _Played) -> list[Finding]:
    if not played.paid_after_the_end:
        return []
    return [
        Finding(
            "warning",
            f"a step after the end returns a reward of {played.paid_after_the_end:g}: training never plays one, but "
            "code that calls the environment directly may. Return 0 in step once the episode has ended.",
        )
    ]


def _speed(played: _Played) -> list[Finding]:
    step, reset = median(played.step_seconds), median(played.reset_seconds)
    text = f"a step takes {1000 * step:.3g} ms, a reset {1000 * reset:.3g} ms (medians, to a worker and back)."
    if step > SLOW_STEP:
        remedy = "cache what the environment recomputes, or raise num_environment_workers on more cores."
        return [Finding("warning", f"{text} That is slow: {remedy}")]
    return [Finding("ok", text)]


def _texts(played: _Played) -> list[Finding]:
    findings = []
    longest = max(len(step.observation) for group in played.groups for t in group for step in t.steps)
    if longest > LONG_TEXT:
        findings.append(
            Finding(
                "warning",
                f"an observation has {longest} characters: prompts beyond max_prompt_length tokens lose their middle. "
                "Shorten it, or raise max_prompt_length.",
            )
        )
    if not played.has_task:
        findings.append(
            Finding(
                "warning",
                "reset gives no Observation.task: after the first step only the history shows the goal. Set it, or "
                "repeat the goal in every observation.",
            )
        )
    if not played.lists_actions:
        findings.append(
            Finding(
                "warning",
                "no admissible actions are listed: random episodes played 'look', and the model has to know the "
                "possible actions. List them in the observation or describe them in the prompt template.",
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
            Finding("warning", f"{text}: a task has one state only. Let state_key or the text distinguish states.")
        ]
    if alone > 0.5:
        return [
            Finding(
                "warning",
                f"{text}: most actions are compared with no other, and G2PO is little more than GRPO. Give equal "
                "states an equal state_key (leave out counters and clocks), or see state_key_ignores and "
                "state_similarity.",
            )
        ]
    return [Finding("ok", f"{text}: there is a graph to learn from.")]


def _outcomes(played: _Played, turns: int) -> list[Finding]:
    everyone = [t for group in played.groups for t in group]
    won = sum(t.success for t in everyone)
    ended = sum(t.outcome != "truncated" for t in everyone)
    text = f"random actions succeed in {won} of {len(everyone)} episodes; {ended} end within {turns} turns"
    rewards = {t.reward for t in everyone}
    if len(rewards) == 1:
        return [
            Finding(
                "warning",
                f"{text}, all with reward {rewards.pop():g}: a model that acts randomly learns nothing here. Start "
                "from one that sometimes succeeds, or from easier tasks.",
            )
        ]
    return [Finding("ok", f"{text}; rewards from {min(rewards):g} to {max(rewards):g}.")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="g2po check", description=__doc__.partition("\n\n`check_env")[0])
    parser.add_argument(
        "environment",
        nargs="?",
        default="environment.py",
        help="file.py, file.py:Class, module:Class, or an OpenEnv server's address; default: %(default)s",
    )
    given = "arguments of the environment, as a JSON object"
    parser.add_argument("--environment-options", metavar="JSON", type=json.loads, default={}, help=given)
    given = "a dataset row as JSON; may be repeated"
    parser.add_argument("--task", metavar="JSON", action="append", default=[], help=given)
    parser.add_argument(
        "--tasks",
        metavar="FILE",
        type=Path,
        help="a file with one row per line; the first 5 are played. Default: tasks.jsonl next to file.py",
    )
    parser.add_argument("--episodes", metavar="N", type=int, default=8, help="episodes of each task; default: 8")
    parser.add_argument("--turns", metavar="N", type=int, default=30, help="maximum turns of an episode; default: 30")
    given = "maximum seconds of a reset or a step; default: 60"
    parser.add_argument("--timeout", metavar="S", type=float, default=60.0, help=given)
    given = "pass these variables (HF_TOKEN, …) to the environment although they look like secrets"
    parser.add_argument("--environment-variables", metavar="NAME", nargs="*", default=[], help=given)
    args = parser.parse_args(argv)
    if args.environment == "environment.py" and not Path(args.environment).is_file():
        parser.error("there is no environment.py here: name an environment, as file.py or module:Class")
    beside = Path(args.environment.partition(".py")[0]).with_name("tasks.jsonl")
    if not args.task and args.tasks is None and ".py" in args.environment and beside.is_file():
        args.tasks = beside
    try:
        tasks = [json.loads(line) for line in args.task if line.strip()]
    except ValueError as error:
        raise SystemExit(f"a task is not valid JSON ({error}): write it as '{{\"seed\": 1}}'") from error
    try:
        tasks += read_tasks(args.tasks)[:5] if args.tasks else []
    except ValueError as error:
        raise SystemExit(str(error)) from error
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
    sys.exit(any(finding.level == "error" for finding in findings))


if __name__ == "__main__":
    main()

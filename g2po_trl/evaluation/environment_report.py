"""Examine an environment before training: play it at random and return findings, each with a remedy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..environments.adapters.trl_tools import text_environment_factory
from ..environments.contract import TextEnvironment
from ..environments.contract_violations import where_raised
from ..environments.pool.limits import PoolLimits
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..environments.pool.single import EnvironmentFailedError, RemoteProcessEnvironment
from ..environments.validation import check_task_columns
from ..rollout.replay import replay_difference
from .random_episodes import (
    LEVELS,
    Finding,
    RandomRollouts,
    constant_findings,
    episode_findings,
    learning_findings,
    play_at_random,
)


def examine(
    environment_factory: Callable[[], TextEnvironment],
    tasks: Sequence[dict[str, Any]],
    episodes: int = 8,
    turns: int = 30,
    seed: int = 0,
    timeout: float = 60.0,
    environment_variables: Sequence[str] = (),
) -> list[Finding]:
    """Return the findings of random episodes of each task in worker processes, the worst first.

    Args:
        environment_factory: as passed to the trainer.
        tasks: dataset rows.
        episodes: episodes per task, e.g. the group size.
        turns: maximum turns of an episode.
        seed: seed of the random actions.
        timeout: maximum seconds of a reset or a step.
        environment_variables: see `EnvironmentPool`.
    """
    try:
        limits = PoolLimits(1, timeout, timeout, environment_variables=list(environment_variables))
        environment_factory = text_environment_factory(environment_factory, turns)
        findings, tasks = _check_columns(environment_factory, tasks)
        if tasks:
            rng = random.Random(seed)
            findings += _check_episodes(environment_factory, tasks, episodes, turns, rng, limits)
    except ValueError as error:  # e.g. tools without a description, variables that are not set
        findings = [Finding("error", str(error))]
    return sorted(dict.fromkeys(findings), key=lambda finding: LEVELS.index(finding.level))


def _check_episodes(
    environment_factory: Callable,
    tasks: Sequence[dict[str, Any]],
    episodes: int,
    turns: int,
    rng: random.Random,
    limits: PoolLimits,
) -> list[Finding]:
    findings: list[Finding] = []
    with EnvironmentPool(environment_factory, limits) as pool:
        starts, failures = _first_steps(pool, tasks)
        for failure in failures:
            if failure.kind in ("timeout", "crash"):  # each further check would take as long
                return [*findings, Finding("error", f"in a worker process it {describe_failure(failure)}")]
        whole = replace(limits, environment_reset_timeout=10 * limits.environment_reset_timeout)
        with RemoteProcessEnvironment(environment_factory, whole) as environment:
            findings += _check_contract(environment, tasks, starts, failures)
            playable = [task for task, start in zip(tasks, starts) if not isinstance(start, EnvironmentFailure)]
            if playable:
                findings += _check_learning(environment, pool, playable, episodes, turns, rng, findings)
    return findings


def _check_columns(environment_factory: Callable, tasks: Sequence[dict[str, Any]]) -> tuple[list[Finding], list[dict]]:
    """Return findings about tasks that do not fit `reset`, and the tasks that do."""
    findings, fitting = [], []
    for number, task in enumerate(tasks, 1):
        try:
            check_task_columns(environment_factory, task)
            fitting.append(task)
        except ValueError as error:
            findings.append(Finding("error", f"task {number}: {error}" if len(tasks) > 1 else str(error)))
    return findings, fitting


def _check_learning(
    environment: RemoteProcessEnvironment,
    pool: EnvironmentPool,
    tasks: Sequence[dict[str, Any]],
    episodes: int,
    turns: int,
    rng: random.Random,
    so_far: Sequence[Finding],
) -> list[Finding]:
    """Return findings about whether a model can learn in the environment, as far as episodes can be played."""
    findings = []
    with suppress(EnvironmentFailedError):  # reported by the random episodes
        findings += _check_admissible(environment, tasks[0])
    rollouts = play_at_random(environment, tasks, episodes, turns, rng)
    findings += _failure_findings(rollouts.failures)
    if not rollouts.step_seconds:
        return findings
    findings += episode_findings(rollouts)
    if any(finding.level == "error" for finding in [*so_far, *findings]):
        return findings  # the remaining checks would repeat the error
    findings += _check_replay(pool, tasks, rollouts)
    if rollouts.lists_actions:
        return findings + learning_findings(rollouts, episodes, turns)
    return findings + constant_findings(rollouts.groups)


def _first_steps(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]]) -> tuple[list, list[EnvironmentFailure]]:
    """Return the first observations, and the failures of resets and of a valid and an invalid action per task."""
    starts = pool.reset([*tasks, *tasks])
    running = [slot for slot, result in enumerate(starts) if not isinstance(result, EnvironmentFailure)]
    actions = {slot: (starts[slot].admissible_actions or ["look"])[0] for slot in running}
    actions |= {slot: "no such action" for slot in running if slot >= len(tasks)}
    results = [*starts, *pool.step(actions).values()]
    return starts, [result for result in results if isinstance(result, EnvironmentFailure)]


def _check_contract(
    environment: RemoteProcessEnvironment,
    tasks: Sequence[dict[str, Any]],
    starts: Sequence[Any],
    failures: list[EnvironmentFailure],
) -> list[Finding]:
    """Return findings about the contract, and about tasks that start differently in another process."""
    findings: dict[str, Finding] = {}
    for task, start in zip(tasks, starts):
        try:
            again = environment.reset(**task)
        except EnvironmentFailedError as failed:
            shown = f" (task {task})" if len(tasks) > 1 else ""
            for text in describe_failure(failed.failure).splitlines():
                findings.setdefault(text, Finding("error", f"{text}{shown}"))
            if failed.failure.kind in ("timeout", "crash"):
                break
            continue
        if not isinstance(start, EnvironmentFailure) and again != start:
            text = (
                f"a task starts differently in another process: {again.text[:80]!r} and {start.text[:80]!r}. "
                "Seed all randomness from the task; hash() of a string and the order of a set differ by process."
            )
            findings.setdefault("starts differently", Finding("error", text))
    if not findings:  # failures that did not happen again
        findings = {
            text: Finding("error", f"in a worker process it {text}") for text in map(describe_failure, failures)
        }
    return list(findings.values()) or [
        Finding("ok", "keeps the contract of reset, step and close, also for actions that are not admissible."),
        Finding("ok", "can be sent to worker processes, and tasks start the same in each."),
    ]


def _failure_findings(failures: Sequence[EnvironmentFailure]) -> list[Finding]:
    """Return one finding per distinct failure of random episodes."""
    remedies = {"exception": ". Return an observation instead of raising."}
    texts = (f"a random episode {describe_failure(failure)}{remedies.get(failure.kind, '')}" for failure in failures)
    return [Finding("error", text) for text in dict.fromkeys(texts)]


def describe_failure(failure: EnvironmentFailure) -> str:
    """Return the predicate of a sentence about a failure, e.g. "times out: …"."""
    message = failure.message.rpartition("\nslot ")[0]
    if failure.kind == "exception":
        return f"raised {message.strip().splitlines()[-1]}{where_raised(message)}"
    return {"timeout": "times out: ", "crash": "crashes: "}.get(failure.kind, "") + message


def _check_admissible(environment: RemoteProcessEnvironment, task: dict[str, Any]) -> list[Finding]:
    """Return findings about listed actions that get the same response as an invalid action."""
    first = environment.reset(**task)
    if not first.admissible_actions:
        return []

    def respond(action: str) -> tuple[str, float, bool]:
        environment.reset(**task)
        result = environment.step(action)
        return result.observation.text, result.reward, result.terminated

    invalid = respond("xyzzy plugh")
    refused = [action for action in first.admissible_actions if respond(action) == invalid]
    if not refused:
        return [Finding("ok", "admissible actions get other responses than an invalid action.")]
    shown = ", ".join(map(repr, refused[:3])) + (" …" if len(refused) > 3 else "")
    return [
        Finding(
            "warning",
            f"{len(refused)} of {len(first.admissible_actions)} admissible actions get the same response as an "
            f"invalid action ({invalid[0][:60]!r}): {shown}. List only executable actions, or describe their effect.",
        )
    ]


def _check_replay(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]], rollouts: RandomRollouts) -> list[Finding]:
    """Return findings about replaying the actions of each task's longest episode in another process."""
    for task, group in zip(tasks, rollouts.groups):
        steps = max((trajectory.steps for trajectory in group), key=len)
        if different := replay_difference(pool, task, steps):
            return [
                Finding(
                    "warning",
                    f"the same actions do not lead to the same states again: {different}. Episodes "
                    "whose worker is lost need it: seed all randomness from the task, and leave clocks and "
                    "random names out of observations.",
                )
            ]
    return [
        Finding(
            "ok",
            "states can be returned to by playing their actions again, also in another process.",
        )
    ]

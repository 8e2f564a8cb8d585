"""Examine an environment before training: play it at random and return findings, each with a remedy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..environments.adapters.trl_tools import text_environment_factory
from ..environments.contract import TextEnvironment
from ..environments.contract_violations import where_raised
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..environments.pool.single import EnvironmentFailedError, RemoteProcessEnvironment
from ..environments.validation import check_task_columns
from ..rollout.replay import rehearse
from .random_episodes import LEVELS, Finding, Played, findings_of, learnable, play_at_random


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
    try:
        environment_factory = text_environment_factory(environment_factory, turns)
        findings, tasks = _columns(environment_factory, tasks)
        if tasks:
            findings += _played(environment_factory, tasks, episodes, turns, random.Random(seed), timeout, options)
    except ValueError as error:  # tools that cannot be described, variables that are not set
        findings = [Finding("error", str(error))]
    return sorted(dict.fromkeys(findings), key=lambda finding: LEVELS.index(finding.level))


def _played(
    environment_factory: Callable,
    tasks: Sequence[dict[str, Any]],
    episodes: int,
    turns: int,
    rng: random.Random,
    timeout: float,
    options: dict[str, Any],
) -> list[Finding]:
    findings: list[Finding] = []
    with EnvironmentPool(environment_factory, reset_timeout=timeout, **options) as pool:
        starts, failures = _tried(pool, tasks)
        for failure in failures:
            if failure.kind in ("timeout", "crash"):  # each further look would take as long
                return [*findings, Finding("error", f"in a worker process it {_said(failure)}")]
        with RemoteProcessEnvironment(environment_factory, reset_timeout=10 * timeout, **options) as environment:
            findings += _contract(environment, tasks, starts, failures)
            playable = [task for task, start in zip(tasks, starts) if not isinstance(start, EnvironmentFailure)]
            if playable:
                findings += _learnable(environment, pool, playable, episodes, turns, rng, findings)
    return findings


def _columns(environment_factory: Callable, tasks: Sequence[dict[str, Any]]) -> tuple[list[Finding], list[dict]]:
    """Do the tasks fit `reset`? And those that do."""
    findings, fitting = [], []
    for number, task in enumerate(tasks, 1):
        try:
            check_task_columns(environment_factory, task)
            fitting.append(task)
        except ValueError as error:
            findings.append(Finding("error", f"task {number}: {error}" if len(tasks) > 1 else str(error)))
    return findings, fitting


def _learnable(
    environment: RemoteProcessEnvironment,
    pool: EnvironmentPool,
    tasks: Sequence[dict[str, Any]],
    episodes: int,
    turns: int,
    rng: random.Random,
    so_far: Sequence[Finding],
) -> list[Finding]:
    """Can a model learn here? As far as episodes can be played at all."""
    findings = []
    with suppress(EnvironmentFailedError):  # random episodes meet it, and say so
        findings += _admissible(environment, tasks[0])
    played = play_at_random(environment, tasks, episodes, turns, rng)
    findings += _failed(played.failures)
    if not played.step_seconds:
        return findings
    findings += findings_of(played)
    if any(finding.level == "error" for finding in [*so_far, *findings]):
        return findings  # what follows would only say the same in other words
    findings += _returned_to(pool, tasks, played)
    if played.lists_actions:
        findings += learnable(played, episodes, turns)
    return findings


def _tried(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]]) -> tuple[list, list[EnvironmentFailure]]:
    """What each task starts with; and what fails when a valid and an invalid action are played."""
    starts = pool.reset([*tasks, *tasks])
    live = [slot for slot, answer in enumerate(starts) if not isinstance(answer, EnvironmentFailure)]
    actions = {slot: (starts[slot].admissible_actions or ["look"])[0] for slot in live}
    actions |= {slot: "no such action" for slot in live if slot >= len(tasks)}
    answers = [*starts, *pool.step(actions).values()]
    return starts, [answer for answer in answers if isinstance(answer, EnvironmentFailure)]


def _contract(
    environment: RemoteProcessEnvironment,
    tasks: Sequence[dict[str, Any]],
    starts: Sequence[Any],
    failures: list[EnvironmentFailure],
) -> list[Finding]:
    """Does it keep its contract, and does a task start in one process as it did in another?"""
    findings: dict[str, Finding] = {}
    for task, there in zip(tasks, starts):
        try:
            here = environment.reset(**task)
        except EnvironmentFailedError as failed:
            shown = f" (task {task})" if len(tasks) > 1 else ""
            for text in _said(failed.failure).splitlines():
                findings.setdefault(text, Finding("error", f"{text}{shown}"))
            if failed.failure.kind in ("timeout", "crash"):
                break
            continue
        if not isinstance(there, EnvironmentFailure) and here != there:
            text = (
                f"a task starts differently in another process: {here.text[:80]!r} and {there.text[:80]!r}. "
                "Seed all randomness from the task; hash() of a string and the order of a set differ by process."
            )
            findings.setdefault("starts differently", Finding("error", text))
    if not findings:  # only sometimes, then
        findings = {text: Finding("error", f"in a worker process it {text}") for text in map(_said, failures)}
    return list(findings.values()) or [
        Finding("ok", "keeps the contract of reset, step and close, also for actions that are not admissible."),
        Finding("ok", "can be sent to worker processes, and tasks start the same in each."),
    ]


def _failed(failures: Sequence[EnvironmentFailure]) -> list[Finding]:
    """Each way in which random episodes failed, once."""
    remedies = {"exception": ". Return an observation instead of raising."}
    texts = (f"a random episode {_said(failure)}{remedies.get(failure.kind, '')}" for failure in failures)
    return [Finding("error", text) for text in dict.fromkeys(texts)]


def _said(failure: EnvironmentFailure) -> str:
    """What an environment did, in a line."""
    message = failure.message.rpartition("\nslot ")[0]
    if failure.kind == "exception":
        return f"raised {message.strip().splitlines()[-1]}{where_raised(message)}"
    return {"timeout": "times out: ", "crash": "crashes: "}.get(failure.kind, "") + message


def _admissible(environment: RemoteProcessEnvironment, task: dict[str, Any]) -> list[Finding]:
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


def _returned_to(pool: EnvironmentPool, tasks: Sequence[dict[str, Any]], played: Played) -> list[Finding]:
    """Do the actions of each task's longest episode lead to the same states again, in another process?"""
    for task, group in zip(tasks, played.groups):
        steps = max((trajectory.steps for trajectory in group), key=len)
        if different := rehearse(pool, task, steps):
            return [
                Finding(
                    "warning",
                    f"the same actions do not lead to the same states again: {different}. Branches (branch_share) and "
                    "episodes whose worker is lost need it: seed all randomness from the task, and leave clocks and "
                    "random names out of observations.",
                )
            ]
    return [
        Finding(
            "ok",
            "states can be returned to by playing their actions again, also in another process (branch_share).",
        )
    ]

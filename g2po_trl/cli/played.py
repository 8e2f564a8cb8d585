"""Environments, agents and runs that commands play, by name, and their tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..environments.causes import describe_failure
from ..environments.episode_limits import EpisodeLimits
from ..environments.loading import beside, load
from ..environments.pool.limits import PoolLimits
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..environments.several import mixed
from ..environments.tasks import check_task_columns, read_tasks
from ..rollout.actor import Actor
from ..rollout.player import Player
from ..runs.run_json import FILE, load_object, panels_in, read_run
from ..trajectory import Trajectory
from ..utils.errors import G2POError
from ..utils.options import require
from ..utils.show import printable

ENVIRONMENT, AGENT = "environment.py", "agent.py"


def environment_or_agent(environment: str | None, agent: str | None) -> tuple[str | None, str | None]:
    """Return an environment's name or an agent's, by default environment.py, else agent.py, if it is there."""
    require(None in (environment, agent), "agent", agent, f"{environment} is given, too: leave one of them out")
    if environment is None and agent is None:
        environment = ENVIRONMENT if Path(ENVIRONMENT).is_file() else None
        agent = AGENT if environment is None and Path(AGENT).is_file() else None
    return environment, agent


def environment_and_tasks(
    name: str, given: Sequence[dict[str, Any]] = (), file: Path | None = None
) -> tuple[Callable, list[dict[str, Any]]]:
    """Return an environment's factory, by the names that `load` takes or a run's folder, and its tasks.

    See `tasks_of`; for a run, the default is its first evaluation set.
    """
    if not Path(name).is_dir():
        return mixed(load(name)), tasks_of(name, given, file)
    described = read_run(name).get("environment")
    remedy = f"{name}/{FILE} does not name what can be imported; pass FILE.py:Class and --task"
    require(bool(described), "environment", described, remedy)
    panels = [] if file or given else panels_in(name).values()
    return load_object(described), tasks_of(name, given, next(iter(panels), file))


def tasks_of(name: str, given: Sequence[dict[str, Any]] = (), file: Path | None = None) -> list[dict[str, Any]]:
    """Return the tasks given and of a file, by default tasks.jsonl next to file.py; else one without arguments."""
    file = beside(name, "tasks.jsonl") if file is None and not given else file
    return [*given, *(read_tasks(file) if file else [])] or [{}]


def task_at(tasks: Sequence[dict[str, Any]], line: int) -> dict[str, Any]:
    """Return one of the tasks, counted from 1."""
    require(1 <= line <= len(tasks), "line", line, f"there are {len(tasks)} tasks; choose one of them")
    return dict(tasks[line - 1])


def play(
    factory: Callable, task: dict[str, Any], actor: Actor, limits: EpisodeLimits, of_pool: Any, **options: Any
) -> Trajectory:
    """Return an episode of a task, played in one worker with the fields of `PoolLimits` that `of_pool` has.

    `options` are those of `Player.play`.
    """
    check_task_columns(factory, task)
    with EnvironmentPool(factory, PoolLimits.of(of_pool, num_environment_workers=1)) as pool:
        ((played,), _) = Player(pool, actor, limits).play([task], **options)
    if not played.counted:
        failure = EnvironmentFailure(*played.error.split(": ", 1))
        raise G2POError(f"the environment {describe_failure(failure)}", "environment")
    return played


def end_of(played: Trajectory) -> str:
    """Return the last observation, and how the episode ended."""
    number = len(played.steps)
    end = f"{played.outcome} after {number} step{'s' * (number != 1)}, reward {played.reward:g}"
    why = f": {played.failure_reason}" if played.failure_reason else ""
    return printable(f"\n{played.final_observation or ''}\n\n{end}{why}")

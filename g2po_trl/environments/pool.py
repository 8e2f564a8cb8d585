"""Environments in worker processes: many episodes in few processes, and no environment can end a run.

An episode has a *slot*, from one `reset` of the pool to the next. If an environment raises, times out, crashes or
returns an invalid result, an `EnvironmentFailure` takes the place of its result. A worker that is lost is replaced,
and its other episodes are replayed: reset, the same actions, and every answer compared with the first one. Those whose
answers are equal continue; the others are `"lost"`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from .checks import EnvironmentContractError, factory_name
from .contract import Observation, StepResult, TextEnvironment
from .fleet import Fleet, pickled
from .placement import place_episodes
from .process import end_all, usable_cores, withheld_variables
from .replay import EnvironmentFailure, Episode

__all__ = ["EnvironmentFailure", "EnvironmentPool"]


class EnvironmentPool:
    """Plays environments in worker processes. A failing environment cannot end the run.

    Episodes are numbered by *slots*: `reset` opens slots 0 to n - 1 and ends all episodes before. Use it as a context
    manager, or call `close`.

    Args:
        environment_factory: makes an environment. Pickled by cloudpickle; classes of scripts and notebooks work.
        num_workers: number of processes. `None`: one per usable core.
        reset_timeout, step_timeout: maximum seconds of one episode's reset or step.
        max_observation_characters: a longer observation is an `"invalid"` failure.
        episode_timeout: maximum seconds of all resets and steps of one episode together. `None`: no limit.
        max_worker_resets: replace a worker after this many resets, to bound memory leaks. `None`: never.
        max_worker_memory: replace a worker that exceeds this many bytes. `None`: never.
        spread_groups: divide groups among workers, which costs resets but saves time if steps are slow. `None`: decide
            by the measured times. Results do not depend on it.
        load_timeout: maximum seconds to import the environment. `None`: `reset_timeout`, at least 60.
        environment_variables: names of variables to pass although they look like secrets (`HF_TOKEN`, …).

    Raises:
        ValueError: if the factory cannot be pickled, a number is out of range, or a variable is not set.
    """

    def __init__(
        self,
        environment_factory: Callable[[], TextEnvironment],
        num_workers: int | None = None,
        reset_timeout: float = 120.0,
        step_timeout: float = 60.0,
        max_observation_characters: int | None = 1_000_000,
        episode_timeout: float | None = None,
        max_worker_resets: int | None = None,
        max_worker_memory: float | None = None,
        spread_groups: bool | None = None,
        load_timeout: float | None = None,
        environment_variables: Sequence[str] = (),
    ):
        num_workers = usable_cores() if num_workers is None else num_workers
        for name, value in (
            ("num_workers", num_workers),
            ("reset_timeout", reset_timeout),
            ("step_timeout", step_timeout),
            ("episode_timeout", episode_timeout),
            ("load_timeout", load_timeout),
            ("max_worker_resets", max_worker_resets),
            ("max_worker_memory", max_worker_memory),
        ):
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}: set it above 0")
        withheld = withheld_variables(environment_variables)
        try:
            setup = cloudpickle.dumps((environment_factory, max_observation_characters, episode_timeout))
        except Exception as error:
            raise ValueError(
                f"environment_factory {factory_name(environment_factory)} cannot be sent to worker processes "
                f"({error}): pass a class, a function or a functools.partial that makes it from plain data"
            ) from error
        self.name = factory_name(environment_factory)
        self.max_worker_resets, self.max_worker_memory = max_worker_resets, max_worker_memory
        self.spread_groups = spread_groups
        self.recycled = 0  # workers replaced for their age or size
        load_timeout = max(60.0, reset_timeout) if load_timeout is None else load_timeout
        self._fleet = Fleet(setup, withheld, num_workers, reset_timeout, step_timeout, load_timeout, self.name)
        self._finalizer = weakref.finalize(self, end_all, self._fleet.workers, os.getpid())

    @property
    def num_workers(self) -> int:
        return len(self._fleet.workers)

    @property
    def worker_pids(self) -> list[int]:
        """Processes that are running now."""
        return [worker.pid for worker in self._fleet.workers if worker is not None]

    @property
    def withheld(self) -> list[str]:
        """Environment variables that workers do not get, for they look like a secret."""
        return list(self._fleet.withheld)

    def describe(self, episodes: int) -> str:
        """A line on what was started: `episodes` at a time will be played."""
        withheld = ", ".join(self.withheld)
        return (
            f"Environments: {self.name} in {self.num_workers} worker processes a rank, "
            f"{max(self.memory()) / 2**20:.0f} MB each after one episode, {episodes} episodes at a time"
            + (f"; they do not get {withheld} (environment_variables)" if withheld else "")
        )

    @property
    def replayed(self) -> int:
        """Number of episodes that were replayed after their worker was lost, and continued."""
        return self._fleet.replayed

    def reset(
        self, tasks: Sequence[Mapping[str, Any]], groups: Sequence[int] | None = None
    ) -> list[Observation | EnvironmentFailure]:
        """Open an episode of each task; episode i is in slot i.

        Args:
            tasks: keyword arguments of `reset`, one mapping per episode.
            groups: group of each episode. Members share a worker unless steps are slow. `None`: no groups.

        Returns:
            The first observation of each episode, or why there is none.

        Raises:
            ValueError: if the numbers of tasks and groups differ, or a task cannot be pickled.
        """
        self._check_open()
        groups = list(range(len(tasks))) if groups is None else list(groups)
        if len(groups) != len(tasks):
            raise ValueError(f"{len(tasks)} tasks and {len(groups)} groups: give one group for each task")
        episodes = [
            Episode(slot, dict(task), pickled(dict(task)), group)
            for slot, (task, group) in enumerate(zip(tasks, groups))
        ]
        self._recycle()
        homes = place_episodes(groups, self.num_workers, self._fleet.times, self.spread_groups)
        answers = self._fleet.open(episodes, homes)
        return [answers[slot] for slot in range(len(tasks))]

    def step(self, actions: Mapping[int, str]) -> dict[int, StepResult | EnvironmentFailure]:
        """Play one action in each of the given slots, in parallel.

        Args:
            actions: slot -> action.

        Raises:
            ValueError: if a slot has no live episode.
        """
        self._check_open()
        for slot in actions:
            if slot not in self._fleet.episodes:
                raise ValueError(f"slot {slot} has no live episode: it ended, failed, or was never reset")
        answers = self._fleet.play(actions)
        return {slot: answers[slot] for slot in actions}

    def check(self, task: Mapping[str, Any]) -> None:
        """Reset one environment in a worker and play one step, to find a broken one before work is lost.

        Raises:
            EnvironmentContractError: if reset or step fails; the message contains the worker's error.
        """
        (result,) = self.reset([task])
        if not isinstance(result, EnvironmentFailure):
            result = self.step({0: (result.admissible_actions or ["look"])[0]})[0]
        self._fleet.episodes.clear()
        if isinstance(result, EnvironmentFailure):
            raise EnvironmentContractError(f"{self.name} fails ({result.kind}): {result.message}")

    def close(self) -> None:
        """End all workers. The pool cannot be used afterwards."""
        self._finalizer()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def memory(self) -> list[int]:
        """Bytes each running worker holds, with what it started."""
        return [worker.memory() for worker in self._fleet.workers if worker is not None]

    def _recycle(self) -> None:
        """Replace workers that are old or big. Called while no episode is live."""
        for index, worker in enumerate(self._fleet.workers):
            if worker is None:
                continue
            old = self.max_worker_resets is not None and worker.resets >= self.max_worker_resets
            big = self.max_worker_memory is not None and worker.memory() > self.max_worker_memory
            if old or big:
                self._fleet.workers[index] = None
                worker.end(patience=2.0)
                self.recycled += 1

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise ValueError("this EnvironmentPool is closed")

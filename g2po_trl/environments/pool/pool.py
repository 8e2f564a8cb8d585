"""Environments in worker processes: many episodes in few processes, and no environment can end a run.

Each episode has a *slot*. If an environment raises, times out, crashes or returns an invalid result, an
`EnvironmentFailure` replaces its result. A lost worker is replaced, and its other episodes are replayed: the reset and
all actions, with every answer compared with the first one. Episodes with equal answers continue; the others are
`"lost"`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle

from ...utils.errors import G2POError
from ...utils.masking import withheld_variables
from ..contract import Observation, StepResult, TextEnvironment
from ..validation import factory_name
from .episode_log import EnvironmentFailure
from .limits import PoolLimits
from .scheduler import WorkerScheduler
from .worker_process import pickled

__all__ = ["EnvironmentFailure", "EnvironmentPool"]


class EnvironmentPool:
    """Pool of worker processes that play environments.

    Episodes are numbered by *slots*. `reset` and `step` wait for all answers. For streaming, `begin` opens episodes,
    `send` sends actions, and `receive` returns the answers that have arrived, independently of other episodes:

    ```py
    pool.begin(tasks)
    while answers := pool.receive(timeout=None):
        pool.send({slot: act(seen) for slot, seen in answers.items() if is_running(seen)})
    ```

    Use it as a context manager, or call `close`; and from one thread at a time.

    Args:
        environment_factory: constructs an environment. Pickled by cloudpickle; classes of scripts and notebooks work.
        limits: number and limits of workers; by default `PoolLimits()`.

    Raises:
        G2POError: if the factory cannot be pickled, or a variable is not set.
    """

    def __init__(self, environment_factory: Callable[[], TextEnvironment], limits: PoolLimits | None = None):
        limits = PoolLimits() if limits is None else limits
        withheld = withheld_variables(limits.environment_variables or ())
        self.name = factory_name(environment_factory)
        try:
            setup = cloudpickle.dumps(
                (environment_factory, limits.max_observation_characters, limits.environment_episode_timeout)
            )
        except Exception as error:
            raise G2POError(
                f"environment_factory {self.name} cannot be sent to worker processes ({error}): pass a class, a "
                "function or a functools.partial with plain data"
            ) from error
        self._scheduler = WorkerScheduler(setup, withheld, limits, self.name)

    @property
    def num_workers(self) -> int:
        return len(self._scheduler.workers)

    @property
    def worker_pids(self) -> list[int]:
        """Ids of the running processes."""
        return [worker.process.pid for worker in self._scheduler.in_service]

    @property
    def withheld(self) -> list[str]:
        """Names of environment variables that workers do not get because they look like secrets."""
        return list(self._scheduler.withheld)

    def describe(self, episodes: int) -> str:
        """Return a line about the workers. `episodes`: number of concurrent episodes."""
        withheld = ", ".join(self.withheld)
        return (
            f"Environments: {self.name} in {self.num_workers} worker processes per rank, "
            f"{max(self.memory()) / 2**20:.0f} MB each after one episode, {episodes} episodes at a time"
            + (f"; they do not get {withheld} (environment_variables)" if withheld else "")
        )

    @property
    def replayed(self) -> int:
        """Number of episodes that were replayed after their worker was lost or replaced, and continued."""
        return self._scheduler.replayed

    @property
    def recycled(self) -> int:
        """Number of workers that were replaced for their resets or memory."""
        return self._scheduler.recycled

    def reset(
        self, tasks: Sequence[Mapping[str, Any]], groups: Sequence[Hashable] | None = None
    ) -> list[Observation | EnvironmentFailure]:
        """End all episodes, open one per task (the i-th in slot i), and return first observations or failures."""
        prepared, groups = self._prepared(tasks, groups)
        self.end()
        return list(self.collect(self._scheduler.begin(prepared, groups, [None] * len(prepared))).values())

    def step(self, actions: Mapping[int, str]) -> dict[int, StepResult | EnvironmentFailure]:
        """Play one action in each of the given slots, in parallel, and return all results. Errors as of `send`."""
        self.send(actions)
        return self.collect(list(actions))

    def begin(
        self,
        tasks: Sequence[Mapping[str, Any]],
        groups: Sequence[Hashable] | None = None,
        retry_group: Hashable | None = None,
    ) -> list[int]:
        """Open an episode per task in addition to running ones, without waiting; return their slots.

        `receive` returns their first observations. A slot is free once its episode's last answer was received.

        Args:
            tasks: keyword arguments of `reset`, one mapping per episode.
            groups: group of each episode. Members share a worker if all workers are busy then. Use a new name if a
                group is played again. `None`: one group per episode.
            retry_group: after two resets of a task in a retry group ended their workers, other episodes of that task
                and retry group fail. `None`: each group is a retry group.

        Raises:
            G2POError: if the numbers of tasks and groups differ, or a task cannot be pickled.
        """
        prepared, names = self._prepared(tasks, groups)
        return self._scheduler.begin(prepared, names, names if retry_group is None else [retry_group] * len(prepared))

    def send(self, actions: Mapping[int, str]) -> None:
        """Send actions, by slot, to running episodes, without waiting. `receive` returns the results.

        Raises:
            G2POError: if a slot has no running episode, or its answer is pending. Nothing is sent then.
        """
        self._check_open()
        for slot, action in actions.items():
            if slot in self._scheduler.pending or slot in self._scheduler.answers:
                raise G2POError(f"slot {slot} has a pending answer: receive it before the next action")
            if slot not in self._scheduler.episodes:
                raise G2POError(f"slot {slot} has no running episode: it ended, failed, or was never reset")
            if type(action) is not str:
                pickled(action)
        self._scheduler.send(actions)

    def receive(self, timeout: float | None = 0.0) -> dict[int, Observation | StepResult | EnvironmentFailure]:
        """Return all answers that have arrived, by slot: first observations, results and failures.

        It waits `timeout` seconds for the first one (`None`: while one is pending). Time limits run continuously, but
        are enforced only here: call it about every second. An exception such as Ctrl-C in the call ends all episodes.
        """
        self._check_open()
        self._scheduler.wait(timeout)
        return self._scheduler.collect()

    def collect(self, slots: Sequence[int]) -> dict[int, Observation | StepResult | EnvironmentFailure]:
        """Wait for the answers of these slots and return them in this order; other answers stay.

        Raises:
            G2POError: if a slot has no pending answer.
        """
        self._check_open()
        for slot in slots:
            if slot not in self._scheduler.pending and slot not in self._scheduler.answers:
                raise G2POError(f"slot {slot} has no pending answer: send an action first")
        self._scheduler.wait(None, slots)
        return self._scheduler.collect(slots)

    def end(self, slots: Iterable[int] | None = None) -> None:
        """End episodes early, free their slots and drop their answers. `slots=None`: all episodes."""
        self._check_open()
        self._scheduler.end([*self._scheduler.episodes, *self._scheduler.answers] if slots is None else slots)

    def close(self) -> None:
        """End all workers. The pool cannot be used afterwards."""
        self._scheduler.close()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def memory(self) -> list[int]:
        """Return the resident bytes of each worker, with its child processes."""
        return [worker.memory() for worker in self._scheduler.in_service]

    def _prepared(
        self, tasks: Sequence[Mapping[str, Any]], groups: Sequence[Hashable] | None
    ) -> tuple[list[tuple[dict[str, Any], bytes]], list[Hashable]]:
        """Return the tasks with their pickles, and the group of each."""
        self._check_open()
        names = [object() for _ in tasks] if groups is None else list(groups)
        if len(names) != len(tasks):
            raise G2POError(f"{len(tasks)} tasks and {len(names)} groups: give one group for each task")
        return [(dict(task), pickled(dict(task))) for task in tasks], names

    def _check_open(self) -> None:
        if not self._scheduler.close.alive:
            raise G2POError("this EnvironmentPool is closed")

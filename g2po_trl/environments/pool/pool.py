"""Environments in worker processes: many episodes in few processes, and no environment can end a run.

An episode has a *slot*. If an environment raises, times out, crashes or returns an invalid result, an
`EnvironmentFailure` takes the place of its result. A worker that is lost is replaced, and its other episodes are
replayed: reset, the same actions, and every answer compared with the first one. Those whose answers are equal
continue; the others are `"lost"`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle

from ..contract import Observation, StepResult, TextEnvironment
from ..validation import EnvironmentContractError, factory_name
from .episode_log import EnvironmentFailure
from .fault_policy import WorkerLimits
from .scheduler import WorkerScheduler
from .worker_process import pickled, usable_cores, withheld_variables

__all__ = ["EnvironmentFailure", "EnvironmentPool"]


class EnvironmentPool:
    """Plays environments in worker processes. A failing environment cannot end the run.

    Episodes are numbered by *slots*. `reset` and `step` wait for all answers. Or nothing waits: `begin` opens
    episodes, `send` sends actions, and `receive` gives the answers that have come by then, whatever other episodes do:

    ```py
    pool.begin(tasks)
    while answers := pool.receive(timeout=None):
        pool.send({slot: act(seen) for slot, seen in answers.items() if goes_on(seen)})
    ```

    Use it as a context manager, or call `close`; and from one thread at a time.

    Args:
        environment_factory: makes an environment. Pickled by cloudpickle; classes of scripts and notebooks work.
        num_workers: number of processes. Each plays one reset or step at a time, in the order in which they were asked
            for: so many environments are at work at once, and a slow one delays those of its own worker that were
            asked later, and no others. `None`: one per usable core; more than cores pay if environments wait for
            something else, as a network.
        reset_timeout, step_timeout: maximum seconds of one episode's reset or step.
        max_observation_characters: a longer observation is an `"invalid"` failure.
        episode_timeout: maximum seconds of all resets and steps of one episode together. `None`: no limit.
        max_worker_resets: replace a worker after this many resets, to bound memory leaks. `None`: never. It first
            plays its live episodes to their ends, beside the worker that takes its place.
        max_worker_memory: replace a worker that exceeds this many bytes. `None`: never. Its live episodes are replayed
            in others.
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
        load_timeout = max(60.0, reset_timeout) if load_timeout is None else load_timeout
        limits = WorkerLimits(max_worker_resets, max_worker_memory)
        self._fleet = WorkerScheduler(
            setup,
            withheld,
            num_workers,
            reset_timeout,
            step_timeout,
            load_timeout,
            self.name,
            limits,
            spread_groups,
        )

    @property
    def num_workers(self) -> int:
        return len(self._fleet.workers)

    @property
    def worker_pids(self) -> list[int]:
        """Processes that are running now."""
        return [worker.process.pid for worker in self._fleet.in_service]

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
        """Number of episodes that were replayed after their worker was lost or replaced, and continued."""
        return self._fleet.replayed

    @property
    def recycled(self) -> int:
        """Number of workers that were replaced for their age or size."""
        return self._fleet.recycled

    def reset(
        self, tasks: Sequence[Mapping[str, Any]], groups: Sequence[Hashable] | None = None
    ) -> list[Observation | EnvironmentFailure]:
        """End all episodes and open one of each task; episode i is in slot i.

        Args:
            tasks: keyword arguments of `reset`, one mapping per episode.
            groups: group of each episode. Members share a worker unless steps are slow. `None`: no groups.

        Returns:
            The first observation of each episode, or why there is none.

        Raises:
            ValueError: if the numbers of tasks and groups differ, or a task cannot be pickled.
        """
        prepared, groups = self._prepared(tasks, groups)
        self.end()
        return list(self.take(self._fleet.begin(prepared, groups, [None] * len(prepared))).values())

    def step(self, actions: Mapping[int, str]) -> dict[int, StepResult | EnvironmentFailure]:
        """Play one action in each of the given slots, in parallel, and wait for all results.

        Args:
            actions: slot -> action.

        Raises:
            ValueError: if a slot has no live episode, or owes an answer.
        """
        self.send(actions)
        return self.take(list(actions))

    def begin(
        self,
        tasks: Sequence[Mapping[str, Any]],
        groups: Sequence[Hashable] | None = None,
        family: Hashable | None = None,
    ) -> list[int]:
        """Open an episode of each task beside those that are live, without waiting. `receive` gives their first
        observations.

        A slot is free once the last answer of its episode was received, or `end` was called.

        Args:
            tasks: keyword arguments of `reset`, one mapping per episode.
            groups: group of each episode, which may have members already. Members share a worker unless steps are
                slow. Give a new name to a group that is played again. `None`: a group each.
            family: when two episodes of a family have lost their worker in the reset of equal tasks, its others of
                that task fail. `None`: each group is one.

        Returns:
            The slot of each episode.

        Raises:
            ValueError: if the numbers of tasks and groups differ, or a task cannot be pickled.
        """
        prepared, names = self._prepared(tasks, groups)
        return self._fleet.begin(prepared, names, names if family is None else [family] * len(prepared))

    def send(self, actions: Mapping[int, str]) -> None:
        """Send actions to live episodes, without waiting. `receive` gives the results.

        Args:
            actions: slot -> action.

        Raises:
            ValueError: if a slot has no live episode, or owes an answer. Nothing is sent then.
        """
        self._check_open()
        for slot, action in actions.items():
            if slot in self._fleet.owing or slot in self._fleet.answers:
                raise ValueError(f"slot {slot} owes an answer: take it by receive, then send the next action")
            if slot not in self._fleet.episodes:
                raise ValueError(f"slot {slot} has no live episode: it ended, failed, or was never reset")
            if type(action) is not str:
                pickled(action)
        self._fleet.send(actions)

    def receive(self, timeout: float | None = 0.0) -> dict[int, Observation | StepResult | EnvironmentFailure]:
        """Take all answers that have come: first observations, results, and failures.

        Time limits pass whether or not this is called, but what exceeds one is ended, and what it held up is played
        elsewhere, only here and in `wait`: call it about every second. If it is interrupted by an exception (Ctrl-C),
        all episodes end.

        Args:
            timeout: seconds to wait for the first answer, if there is none yet. `None`: as long as one is owed.

        Returns:
            slot -> answer, in the order in which they came. Empty if the time passed, or nothing is owed.
        """
        self._check_open()
        self._fleet.wait(timeout)
        return self._fleet.take()

    def take(self, slots: Sequence[int]) -> dict[int, Observation | StepResult | EnvironmentFailure]:
        """Wait for the answers of these slots, and take them; others are left there.

        Args:
            slots: of episodes that owe an answer, or whose answer was not received yet.

        Returns:
            slot -> answer, in the order of `slots`.

        Raises:
            ValueError: if a slot owes no answer.
        """
        self._check_open()
        for slot in slots:
            if slot not in self._fleet.owing and slot not in self._fleet.answers:
                raise ValueError(f"slot {slot} owes no answer: send an action first")
        self._fleet.wait(None, slots)
        return self._fleet.take(slots)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as `receive` does, and leave the answers there. Are there any?"""
        self._check_open()
        return self._fleet.wait(timeout)

    def fileno(self) -> int:
        """A file descriptor that can be read when `receive` has something to do: for loops that wait for something
        else as well, with `selectors` or asyncio.

        It does not tell that a time limit passed, nor that there are answers which were not received: call `receive`
        first and then wait, at most about a second. What has become readable need not be a whole answer yet.
        """
        self._check_open()
        return self._fleet.fileno()

    def end(self, slots: Iterable[int] | None = None) -> None:
        """End live episodes early: their slots are free, and answers they owe will not come. `None`: all."""
        self._check_open()
        self._fleet.end([*self._fleet.episodes, *self._fleet.answers] if slots is None else slots)

    def check(self, task: Mapping[str, Any]) -> None:
        """Reset one environment in a worker and play one step, to find a broken one before work is lost.

        Raises:
            EnvironmentContractError: if reset or step fails; the message contains the worker's error.
        """
        (result,) = self.reset([task])
        if not isinstance(result, EnvironmentFailure):
            result = self.step({0: (result.admissible_actions or ["look"])[0]})[0]
        self.end()
        if isinstance(result, EnvironmentFailure):
            raise EnvironmentContractError(f"{self.name} fails ({result.kind}): {result.message}")

    def close(self) -> None:
        """End all workers. The pool cannot be used afterwards."""
        self._fleet.close()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def memory(self) -> list[int]:
        """Bytes each running worker holds, with what it started."""
        return [worker.memory() for worker in self._fleet.in_service]

    def _prepared(
        self, tasks: Sequence[Mapping[str, Any]], groups: Sequence[Hashable] | None
    ) -> tuple[list[tuple[dict[str, Any], bytes]], list[Hashable]]:
        """Tasks with their pickles, and the group of each."""
        self._check_open()
        names = [object() for _ in tasks] if groups is None else list(groups)
        if len(names) != len(tasks):
            raise ValueError(f"{len(tasks)} tasks and {len(names)} groups: give one group for each task")
        return [(dict(task), pickled(dict(task))) for task in tasks], names

    def _check_open(self) -> None:
        if not self._fleet.close.alive:
            raise ValueError("this EnvironmentPool is closed")

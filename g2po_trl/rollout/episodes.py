"""Many episodes at once: what is live is asked for an action, the pool plays it. Who answers is not known here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from ..environments.contract import Observation, StepResult
from ..environments.pool import EnvironmentFailure, EnvironmentPool
from ..trajectory import Step, Trajectory


@dataclass
class Episode:
    """An episode under way.

    `number`: its place among those played together; `history`: (observation, action) of each step; `outcome`: `None`
    while it is live.
    """

    task_id: str
    number: int = 0
    observation: Observation | None = None
    task: str = ""
    steps: list[Step] = field(default_factory=list)
    history: list[tuple[str, str]] = field(default_factory=list)
    reward: float = 0.0
    outcome: str | None = None
    error: str | None = None
    failure_reason: str | None = None
    info: dict[str, Any] = field(default_factory=dict)

    def open(self, seen: Observation | EnvironmentFailure) -> None:
        """Take what the environment's reset answered."""
        if isinstance(seen, EnvironmentFailure):
            self._end_without_result(seen)
        else:
            self.observation, self.task = seen, seen.task or ""

    def step(self, action: str, reply: str | None, **facts: Any) -> Step:
        """The step that answers the observation; `facts` are other fields of it."""
        seen = self.observation
        return Step(
            observation=seen.text,
            action=action,
            state_key=seen.state_key,
            reply=reply,
            admissible_actions=seen.admissible_actions,
            **facts,
        )

    def advance(self, result: StepResult | EnvironmentFailure) -> None:
        """Take what the environment answered to the last step."""
        if isinstance(result, EnvironmentFailure):
            self._end_without_result(result)
            return
        self.history.append((self.observation.text, self.steps[-1].action))
        self.observation = result.observation
        self.steps[-1].reward = result.reward
        self.reward += result.reward
        if result.terminated or result.truncated:
            self.info = result.info
            success = result.info.get("success", self.reward > 0)
            self.outcome = "truncated" if not result.terminated else "success" if success else "failure"
            if self.outcome != "success" and (reason := result.info.get("failure_reason")):
                self.failure_reason = str(reason)

    def fail(self, reason: str) -> None:
        """End without a result: it is in no statistic."""
        self.outcome, self.error = "error", reason

    def give_up(self, reason: str) -> None:
        """End as a failure of the agent, with the reward paid so far. `reason`: "kind" or "kind: detail"."""
        self.outcome, self.failure_reason = "failure", reason

    def _end_without_result(self, failure: EnvironmentFailure) -> None:
        self.fail(f"{failure.kind}: {failure.message}")
        if failure.kind == "lost":
            self.outcome = "lost"

    def trajectory(self) -> Trajectory:
        """What it leaves behind. An episode without an outcome ran out of turns."""
        final = self.observation.text if self.observation else None
        return Trajectory(
            self.task_id,
            self.steps,
            self.reward,
            self.outcome or "truncated",
            final,
            self.error,
            self.info,
            self.failure_reason,
        )


@dataclass
class Turns:
    """What playing took: turns, steps of all episodes, seconds of waiting for environments."""

    turns: int = 0
    live_steps: int = 0
    environment_time: float = 0.0


def play_turns(
    pool: EnvironmentPool,
    act: Callable[[list[Episode]], list[Step | None]],
    tasks: Sequence[dict[str, Any]],
    task_ids: Sequence[str],
    groups: Sequence[int],
    max_turns: int,
    any_live: Callable[[bool], bool] = bool,
    on_turn: Callable[[int, int], None] | None = None,
    on_end: Callable[[Episode], None] | None = None,
    prepare: Callable[[list[Episode]], None] | None = None,
    overlap: bool = False,
) -> tuple[list[Trajectory], Turns]:
    """Play one episode of each task, all at once.

    Args:
        act: live episodes -> the next step of each; `None` for one that it has ended by `Episode.fail`.
        tasks: keyword arguments of `reset`, one dict an episode.
        task_ids, groups: names the task, and the group, of each episode.
        any_live: this process has live episodes -> any has: when `act` must be called on all of them together.
        on_turn: called after each turn with (turn, live episodes).
        on_end: called once with each episode, as soon as it is over.
        prepare: called with live episodes before `act` is, as soon as their observations are there; may end some of
            them by `Episode.fail`.
        overlap: play in two halves: while `act` is asked about one, the environments of the other are at work and it
            is prepared, in a thread of their own.

    Returns:
        One trajectory a task, in order. Environment failures are data: such a trajectory has outcome `"error"` or
        `"lost"`.
    """
    cost = Turns()
    episodes = [Episode(task_id, number) for number, task_id in enumerate(task_ids)]
    told: set[int] = set()

    def tell_ended(members: list[Episode], all_of_them: bool = False) -> None:
        for episode in members:
            if episode.number not in told and (all_of_them or episode.outcome is not None):
                told.add(episode.number)
                if on_end:
                    on_end(episode)

    def get_ready(members: list[Episode]) -> None:
        live = [episode for episode in members if episode.outcome is None]
        if prepare and live:
            prepare(live)

    def step(actions: dict[int, str], asked_again: list[Episode]) -> float:
        """What the environments answer; seconds it took. Then get those ready that there is another turn for."""
        clock = time.perf_counter()
        for slot, result in pool.step(actions).items():
            episodes[slot].advance(result)
        seconds = time.perf_counter() - clock
        get_ready(asked_again)
        return seconds

    def wait_for(part: int) -> None:
        clock = time.perf_counter()
        if part in stepping:
            stepping.pop(part).result()
        cost.environment_time += time.perf_counter() - clock
        tell_ended(parts[part])

    clock = time.perf_counter()
    for episode, seen in zip(episodes, pool.reset(tasks, groups)):
        episode.open(seen)
    cost.environment_time += time.perf_counter() - clock
    get_ready(episodes)
    parts = [episodes[::2], episodes[1::2]] if overlap else [episodes]
    stepping: dict[int, Future[float]] = {}
    with ThreadPoolExecutor(1) if overlap else nullcontext() as thread:
        while cost.turns < max_turns:
            acted = False
            for part, members in enumerate(parts):
                wait_for(part)
                live = [episode for episode in members if episode.outcome is None]
                if not any_live(bool(live)):
                    continue
                acted, actions = True, {}
                for episode, step_taken in zip(live, act(live)):
                    if step_taken is not None:
                        episode.steps.append(step_taken)
                        actions[episode.number] = step_taken.action
                cost.live_steps += len(actions)
                asked_again = members if cost.turns + 1 < max_turns else []
                if actions and overlap:
                    stepping[part] = thread.submit(step, actions, asked_again)
                elif actions:
                    cost.environment_time += step(actions, asked_again)
            if not acted:
                break
            cost.turns += 1
            if on_turn:
                on_turn(cost.turns, sum(episode.outcome is None for episode in episodes))
        for part in range(len(parts)):
            wait_for(part)
    tell_ended(episodes, all_of_them=True)
    return [episode.trajectory() for episode in episodes], cost

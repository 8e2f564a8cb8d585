"""Groups of episodes that go on from one rollout to the next, so that no place for an episode is ever empty.

A rollout of `B` groups ends when `B` of up to `(1 + ahead) B` open groups are complete. The others rest while the
policy is updated, and go on with the new one: their steps are by several policies, each a little older than the one
that is trained. How old they get is decided by who is admitted, and nothing that was played is thrown away.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engines.sampling import Sampling, derived_seed
from ..environments.tasks import own_columns, task_id_of
from ..rollout.episode import Episode
from ..rollout.loop import Loop
from ..rollout.player import SET_ASIDE, Player
from ..rollout.replay import return_to_start
from ..rollout.stats import RolloutStats
from ..trajectory import Trajectory
from .branching.branching import Branching

Row = dict[str, Any]


@dataclass
class OpenGroup:
    """A group that was not trained on yet.

    Args:
        number: groups are numbered as they are opened.
        version: of the policy, when it was opened.
        members: its episodes. left: how many of them are not over.
        held_back: of these, those that may be branches and begin when the others have ended.
        completed: its place in the order in which groups are completed; `None` while it is played.
    """

    number: int
    version: int
    task: Row = field(default_factory=dict)
    members: list[Episode] = field(default_factory=list)
    left: int = 0
    held_back: list[Episode] = field(default_factory=list)
    completed: int | None = None


def next_batch(groups: Sequence[OpenGroup], size: int, version: int, ahead: int) -> list[OpenGroup] | None:
    """The `size` groups that a policy is updated with, once they are complete: those completed first, as far as no
    other group, to be trained on in a later batch of that size, would then be more than `ahead` versions old.

    There must not be more than `(1 + ahead) size` groups at any time.

    Returns:
        The groups in the order of their numbers, or `None` while the groups that are needed are played.
    """
    complete = sorted((g for g in groups if g.completed is not None), key=lambda g: g.completed)
    chosen: list[OpenGroup] = []
    for later in range(ahead):
        # They must be trained on by `version + later`, and `later` batches after this one can take some of them.
        due = [g.number for g in groups if g.version + ahead <= version + later]
        needed = len(due) - later * size - sum(g.number in due for g in chosen)
        ready = [g for g in complete if g.number in due and g not in chosen]
        if len(ready) < needed:
            return None
        chosen += ready[: max(0, needed)]
    chosen += [g for g in complete if g not in chosen][: size - len(chosen)]
    return sorted(chosen, key=lambda g: g.number) if len(chosen) == size else None


class Rolling:
    """Plays batches of groups, and keeps the groups that are not complete for the next one. For one rank.

    Args:
        player: hosts the environments, and knows who answers.
        group_size: episodes of a group, all of one task.
        ahead: how many versions of the policy a step may be old when it is trained on; at least 1.
        tasks: the rows that tasks are drawn from, for the groups that the first rollout has open beside its own.
        seed: of these draws, and of completions where the engine takes seeds.
        rank, gather: this process, and a list of each rank -> the lists of all, joined.
        branching: which episodes of a group are held back until its others have ended, and where they begin then.
    """

    def __init__(
        self,
        player: Player,
        group_size: int,
        ahead: int,
        tasks: Sequence[Row],
        seed: int,
        rank: int = 0,
        gather: Callable[[list], list] = list,
        branching: Branching | None = None,
    ):
        self.player, self.group_size, self.ahead = player, group_size, ahead
        self.tasks, self.seed, self.rank, self.gather = tasks, seed, rank, gather
        self.branching = branching
        self.queue: deque[Row] = deque()
        self.groups: list[OpenGroup] = []
        self._to_begin: deque[Episode] = deque()
        self._group_of: dict[int, OpenGroup] = {}  # by the numbers of episodes that are not over
        self._seeds: dict[int, int] = {}
        self._episode_numbers, self._group_numbers = itertools.count(), itertools.count()
        self._completed = itertools.count()
        self._loop: Loop | None = None
        player.before_play = self.settle

    def play(
        self,
        rows: Sequence[Row],
        sampling: Sampling,
        version: int,
        on_progress: Callable[[int, int], None] | None = None,
        batches_left: int | None = None,
    ) -> tuple[list[Trajectory], RolloutStats]:
        """Play until a batch of groups is complete, at most `len(rows)` episodes at a time.

        Args:
            rows: a batch's tasks, `group_size` times each. They are played after those that wait already.
            version: of the policy; it grows by one from batch to batch.
            on_progress: called with (complete groups, live episodes) now and then.
            batches_left: to be trained on, this one included; no groups are opened that would be left over. `None`:
                many.

        Returns:
            The trajectories of `len(rows) / group_size` groups, group by group, not in general of these tasks; and
            what was played for this batch and later ones.
        """
        size, stats = len(rows) // self.group_size, RolloutStats(places=len(rows))
        most = size * min(1 + self.ahead, batches_left or math.inf)
        self.queue.extend(dict(row) for row in rows[:: self.group_size])
        self._draw(most - len(self.groups) - len(self.queue))
        try:
            with self.player.rollout():
                started = time.perf_counter()
                loop = self._go_on(sampling, stats, version)
                while (batch := self._observe(loop, size, most, version)) is None:
                    self._timed(loop, loop.ask)
                    self._timed(loop, loop.act)
                    if on_progress:
                        on_progress(sum(group.completed is not None for group in self.groups), len(loop.live))
                self._timed(loop, loop.rest)
                stats.total_time = time.perf_counter() - started
        except BaseException:
            self.drop()
            raise
        self.groups = [group for group in self.groups if group not in batch]
        return [episode.trajectory() for group in batch for episode in group.members], stats

    def settle(self) -> None:
        """Wait for what environments are doing, so that others can play in the pool."""
        try:
            if self._loop is not None:
                self._loop.rest(environments=True)
        except BaseException:  # the pool has ended everything
            self.drop()
            raise

    def drop(self) -> None:
        """End what is open. Its tasks will be played again, before all others."""
        if self._loop is not None:
            self.player.pool.end(self._loop.live)
        self.queue.extendleft(group.task for group in reversed(self.groups))
        self.groups, self._loop = [], None
        for of_episodes in (self._to_begin, self._group_of, self._seeds):
            of_episodes.clear()

    def state_dict(self) -> list[list[str]]:
        """What a checkpoint keeps: of each rank the tasks that a resumed run plays first. All ranks call it."""
        tasks = [*(group.task for group in self.groups), *self.queue]
        return self.gather([[_name_of(task) for task in tasks]])

    def load_state_dict(self, state: Sequence[Sequence[str]]) -> None:
        """Restore what `state_dict` returned, by any number of ranks."""
        ranks = len(self.gather([0]))
        names = state[self.rank] if len(state) == ranks else list(itertools.chain(*state))[self.rank :: ranks]
        self.drop()
        wanted = set(names)
        rows = {name: dict(row) for row in self.tasks if (name := _name_of(row)) in wanted}
        self.queue = deque(rows[name] for name in names if name in rows)

    def _go_on(self, sampling: Sampling, stats: RolloutStats, version: int) -> Loop:
        """Return the loop, with the episodes that are open, for a rollout of this version of the policy."""
        player = self.player
        session = player.actor.session(sampling, self._seeds, stats)
        if self._loop is None:
            together = not (player.streams and player.actor.streams)
            self._loop = Loop(player.pool, session, player.max_turns, stats, together, prelude=return_to_start)
            self._loop.on_end = self._ended
        self._loop.session, self._loop.stats, self._loop.policy_version = session, stats, version
        return self._loop

    def _observe(self, loop: Loop, size: int, most: int, version: int) -> list[OpenGroup] | None:
        """What environments have answered, also for episodes that follow those that have ended by it: who answers is
        asked about all of them together. The batch, if there is one now."""
        places = size * self.group_size
        self._fill(loop, places, most, version)
        self._timed(loop, loop.observe)
        while self._fill(loop, places, most, version):
            self._timed(loop, loop.observe)
        return next_batch(self.groups, size, version, self.ahead)

    def _timed(self, loop: Loop, do: Callable[[], None]) -> None:
        live, clock = len(loop.live), time.perf_counter()
        do()
        loop.stats.place_seconds += live * (time.perf_counter() - clock)

    def _fill(self, loop: Loop, places: int, most: int, version: int) -> bool:
        """Begin episodes where there are places, of groups that are open or may be opened. Did any begin?"""
        begun: list[Episode] = []
        while len(loop.live) + len(begun) < places:
            if self._to_begin:
                begun.append(self._to_begin.popleft())
            elif self.queue and len(self.groups) < most:
                self._open(self.queue.popleft(), version)
            else:
                break
        if begun:
            groups = [self._group_of[episode.number] for episode in begun]
            names = [(id(self), group.number) for group in groups]
            loop.begin(begun, [group.task for group in groups], names)
        return bool(begun)

    def _open(self, task: Row, version: int) -> None:
        name, number = task_id_of(task), next(self._group_numbers)
        members = [Episode(name, next(self._episode_numbers)) for _ in range(self.group_size)]
        first = self.branching.first if self.branching else len(members)
        group = OpenGroup(number, version, task, members, len(members), members[first:])
        self.groups.append(group)
        self._group_of |= {episode.number: group for episode in members}
        # By the version, too: a resumed run numbers its groups from 0 again.
        self._seeds |= {
            episode.number: derived_seed(self.seed, self.rank, version, number, place)
            for place, episode in enumerate(members)
        }
        if name not in self.player.set_aside:
            self._to_begin.extend(members[:first])
            return
        group.held_back = []
        for episode in members:
            episode.fail(SET_ASIDE)
            self._ended(episode)

    def _ended(self, episode: Episode) -> None:
        group = self._group_of.pop(episode.number)
        del self._seeds[episode.number]
        group.left -= 1
        if group.held_back and group.left == len(group.held_back):
            self._begin_held_back(group)
        if group.left == 0:
            group.completed = next(self._completed)
            if self.branching:
                self.branching.note([member.trajectory() for member in group.members])

    def _begin_held_back(self, group: OpenGroup) -> None:
        """Its first episodes have ended. The others are next, but for those of older groups."""
        first = group.members[: -len(group.held_back)]
        (branches,) = self.branching.branches([[episode.trajectory() for episode in first]])
        for episode, branch in zip(group.held_back, branches):
            episode.branch = branch
        waiting = [*group.held_back, *self._to_begin]
        self._to_begin = deque(sorted(waiting, key=lambda episode: self._group_of[episode.number].number))
        group.held_back = []

    def _draw(self, number: int) -> None:
        """Queue so many more tasks, each before any is queued again."""
        draws = random.Random(derived_seed(self.seed, self.rank, next(self._group_numbers)))
        while number > 0:
            places = draws.sample(range(len(self.tasks)), min(number, len(self.tasks)))
            self.queue.extend(own_columns(self.tasks[place]) for place in places)
            number -= len(places)


def _name_of(row: Row) -> str:
    """Of its whole content: rows may share a `task_id`."""
    return task_id_of({"row": row})


def ages(trajectories: Sequence[Trajectory], version: int) -> Mapping[str, float]:
    """`rollout/mean_age` and `rollout/max_age` of the steps that are trained on by a version of the policy."""
    found = [version - step.policy_version for played in trajectories for step in played.steps]
    if not found:
        return {}
    return {"rollout/mean_age": sum(found) / len(found), "rollout/max_age": max(found)}

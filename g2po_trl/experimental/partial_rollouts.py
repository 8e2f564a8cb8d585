"""Partial rollouts: groups of episodes continue from one rollout to the next, so that no slot is ever idle.

A rollout of `B` groups ends when `B` of up to `(1 + max_off_policy_steps) B` unfinished groups are complete. The
other groups pause while the policy is updated, and continue with the new one, so their steps are from several
policies. The number of groups that may begin bounds the age of steps. No step is discarded.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engines.sampling import derived_seed
from ..environments.tasks import task_id_of
from ..rollout.episode import Episode
from ..rollout.loop import Loop
from ..rollout.player import EXCLUDED
from ..rollout.stats import RolloutStats
from ..rollout.strategy import Rollout, RolloutContext, Row
from ..utils.errors import G2POError
from ..utils.options import require


@dataclass(eq=False)
class UnfinishedGroup:
    """A group that has not been trained on; compared by identity.

    Args:
        number: number of the group, in the order of their beginnings.
        version: version of the policy when it began.
        task: row of its task.
        members: episodes of the group.
        left: number of members that have not ended.
        completed: its place in the order in which groups are completed; `None` while it is played.
    """

    number: int
    version: int
    task: Row = field(default_factory=dict)
    members: list[Episode] = field(default_factory=list)
    left: int = 0
    completed: int | None = None


def next_batch(
    groups: Sequence[UnfinishedGroup], size: int, version: int, max_off_policy_steps: int
) -> list[UnfinishedGroup] | None:
    """Return the `size` groups that a policy is updated with, ordered by number; `None` if they are not complete.

    Groups are taken in the order of completion, unless another group, trained on in a later batch of this size, would
    then be more than `max_off_policy_steps` versions old. There must not be more than
    `(1 + max_off_policy_steps) size` groups at any time.
    """
    complete = sorted((g for g in groups if g.completed is not None), key=lambda g: g.completed)
    if len(complete) < size:
        return None
    chosen: dict[UnfinishedGroup, None] = {}
    for later in range(max_off_policy_steps):
        # They must be trained on by `version + later`, and `later` batches after this one can take some of them.
        due = {g for g in groups if g.version + max_off_policy_steps <= version + later}
        needed = len(due) - later * size - len(due & chosen.keys())
        ready = [g for g in complete if g in due and g not in chosen]
        if len(ready) < needed:
            return None
        chosen |= dict.fromkeys(ready[: max(0, needed)])
    chosen |= dict.fromkeys([g for g in complete if g not in chosen][: size - len(chosen)])
    return sorted(chosen, key=lambda g: g.number) if len(chosen) == size else None


class PartialRollouts:
    """Ends a rollout when a batch of groups is complete, and continues the other groups in the next one.

    At most `batch_size` episodes run at a time on this rank. Steps of a batch may be from earlier policies, and are
    corrected by the importance weights that `vllm_importance_sampling_mode` selects.

    Args:
        context: the parts of the run. From its `tasks`, the groups are drawn that the first rollout plays in addition
            to its own.
        max_off_policy_steps: maximum difference, in policy updates, between the policy that a step was sampled from
            and the policy that is trained on it; at least 1.

    Raises:
        G2POError: if the engine generates for several ranks together.
    """

    def __init__(self, context: RolloutContext, *, max_off_policy_steps: int = 1):
        if context.player.actor.is_collective:
            raise G2POError(
                "rollout_strategy is 'partial_rollouts', and this engine generates for several processes together, "
                "but their groups are not complete together: set engine='vllm_servers', or 'vllm' with "
                "vllm_mode='colocate' and vllm_tensor_parallel_size=1 on models that are not sharded"
            )
        self.context, self.max_off_policy_steps = context, max_off_policy_steps
        self.player, self.tasks = context.player, context.tasks
        self.queue: deque[Row] = deque()
        self.groups: list[UnfinishedGroup] = []
        self._to_begin: deque[Episode] = deque()
        self._group_of: dict[int, UnfinishedGroup] = {}  # by the numbers of episodes that have not ended
        self._seeds: dict[int, int] = {}
        self._episode_numbers, self._group_numbers = itertools.count(), itertools.count()
        self._completed = itertools.count()
        self._loop: Loop | None = None
        self._iteration = 0
        self.player.before_play = self.settle

    @classmethod
    def check(cls, args: Any, max_off_policy_steps: int = 1) -> None:
        if max_off_policy_steps not in (1, 2):
            raise G2POError(
                f"max_off_policy_steps (rollout_strategy_kwargs) is {max_off_policy_steps!r}: set it to 1 or 2, or "
                "use rollout_strategy='synchronous' to train on-policy"
            )
        episodes = args.per_device_train_batch_size * args.steps_per_generation
        require(
            episodes % args.num_generations == 0,
            "rollout_strategy",
            args.rollout_strategy,
            f"a process plays per_device_train_batch_size x steps_per_generation = {episodes} episodes, which are not "
            f"whole groups of num_generations={args.num_generations}: make it a multiple",
        )
        mode = args.vllm_importance_sampling_mode
        if args.loss_type == "vespo" and mode in ("sequence_truncate", "sequence_mask"):
            raise G2POError(
                f"vllm_importance_sampling_mode is {mode!r}: loss_type='vespo' takes token_truncate or token_mask"
            )

    def collect(self, rows: Sequence[Row], groups: Sequence[int], iteration: int) -> Rollout:
        """Play until a batch of groups is complete, and return their trajectories. `rows` follow waiting tasks."""
        size, stats = len(rows) // self.context.group_size, RolloutStats(places=len(rows))
        # No group is begun that would be left over after the last batch.
        most = size * min(1 + self.max_off_policy_steps, self.context.batches_left() or math.inf)
        self._iteration = iteration
        self.queue.extend(dict(row) for row in rows[:: self.context.group_size])
        self._draw(most - len(self.groups) - len(self.queue))
        try:
            with self.player.rollout(), self.context.progress(size, len(rows), "group") as on_progress:
                started = time.perf_counter()
                loop = self._continue(stats, iteration)
                while (batch := self._observe(loop, size, most, iteration)) is None:
                    self._timed(loop, loop.ask)
                    self._timed(loop, loop.act)
                    if on_progress:
                        on_progress(sum(group.completed is not None for group in self.groups), len(loop.running))
                self._timed(loop, loop.drain)
                stats.total_time = time.perf_counter() - started
        except BaseException:
            self.reset()
            raise
        trained = set(batch)
        self.groups = [group for group in self.groups if group not in trained]
        return Rollout([episode.trajectory() for group in batch for episode in group.members], stats)

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        ages = [self._iteration - step.policy_version for played in rollout.trajectories for step in played.steps]
        return {"rollout/mean_age": sum(ages) / len(ages), "rollout/max_age": max(ages)} if ages else {}

    def settle(self) -> None:
        """Wait for the environments, so that other users of the pool can play."""
        try:
            if self._loop is not None:
                self._loop.drain(environments=True)
        except BaseException:  # the pool has ended everything
            self.reset()
            raise

    def reset(self) -> None:
        """End unfinished groups. Their tasks will be played again, before all others."""
        if self._loop is not None:
            self.player.pool.end(self._loop.running)
        self.queue.extendleft(group.task for group in reversed(self.groups))
        self.groups, self._loop = [], None
        for of_episodes in (self._to_begin, self._group_of, self._seeds):
            of_episodes.clear()

    def state_dict(self) -> list[list[str]]:
        """Return, for each rank, the tasks that a resumed run plays first."""
        tasks = [*(group.task for group in self.groups), *self.queue]
        return self.context.gather([[_name_of(task) for task in tasks]])

    def load_state_dict(self, state: Sequence[Sequence[str]]) -> None:
        """Queue the tasks of `state_dict`; they are redistributed if the number of ranks has changed.

        Raises:
            G2POError: on every rank, if the dataset lacks one of them.
        """
        names = list(itertools.chain(*state))
        wanted = set(names)
        rows = {name: dict(row) for row in self.tasks if (name := _name_of(row)) in wanted}
        if missing := sorted(wanted - set(rows)):
            raise G2POError(
                "the checkpoint has unfinished groups of tasks that are not rows of train_dataset "
                f"(hashes of the rows: {', '.join(missing)}): use the run's dataset, or start a new run from its "
                "weights (model_name_or_path)"
            )
        rank, ranks = self.context.rank, len(self.context.gather([0]))
        self.reset()
        self.queue = deque(rows[name] for name in (state[rank] if len(state) == ranks else names[rank::ranks]))

    def _continue(self, stats: RolloutStats, version: int) -> Loop:
        """Return the loop, with its running episodes, for a rollout of this version of the policy."""
        player = self.player
        session = player.actor.session(self.context.sampling, self._seeds, stats)
        if self._loop is None:
            together = not (player.streams and player.actor.streams)
            self._loop = Loop(player.pool, session, player.limits, stats, together, on_end=self._ended)
        self._loop.session, self._loop.stats, self._loop.policy_version = session, stats, version
        return self._loop

    def _observe(self, loop: Loop, size: int, most: int, version: int) -> list[UnfinishedGroup] | None:
        """Take the environments' answers and return the batch, if it is complete.

        Episodes that replace ended ones are observed as well, so that the actor gets all of them at once.
        """
        places = size * self.context.group_size
        self._fill(loop, places, most, version)
        self._timed(loop, loop.observe)
        while self._fill(loop, places, most, version):
            self._timed(loop, loop.observe)
        return next_batch(self.groups, size, version, self.max_off_policy_steps)

    def _timed(self, loop: Loop, do: Callable[[], None]) -> None:
        running, clock = len(loop.running), time.perf_counter()
        do()
        loop.stats.place_seconds += running * (time.perf_counter() - clock)

    def _fill(self, loop: Loop, places: int, most: int, version: int) -> bool:
        """Begin episodes in free slots, of new groups while there are too few, and return whether any began."""
        begun: list[Episode] = []
        while len(loop.running) + len(begun) < places:
            if self._to_begin:
                begun.append(self._to_begin.popleft())
            elif self.queue and len(self.groups) < most:
                self._begin_group(self.queue.popleft(), version)
            else:
                break
        if begun:
            groups = [self._group_of[episode.number] for episode in begun]
            names = [(id(self), group.number) for group in groups]
            loop.begin(begun, [group.task for group in groups], names)
        return bool(begun)

    def _begin_group(self, task: Row, version: int) -> None:
        name, number = task_id_of(task), next(self._group_numbers)
        members = [self.player.episode(task, next(self._episode_numbers)) for _ in range(self.context.group_size)]
        self.groups.append(UnfinishedGroup(number, version, task, members, len(members)))
        self._group_of |= {episode.number: self.groups[-1] for episode in members}
        # By the version, too: a resumed run numbers its groups from 0 again.
        self._seeds |= {
            episode.number: derived_seed(self.context.seed, self.context.rank, version, number, place)
            for place, episode in enumerate(members)
        }
        if name not in self.player.excluded:
            self._to_begin.extend(members)
            return
        for episode in members:
            episode.fail(EXCLUDED)
            self._ended(episode)

    def _ended(self, episode: Episode) -> None:
        group = self._group_of.pop(episode.number)
        del self._seeds[episode.number]
        group.left -= 1
        if group.left == 0:
            group.completed = next(self._completed)

    def _draw(self, number: int) -> None:
        """Queue `number` more tasks, each of them before any is queued again."""
        draws = random.Random(derived_seed(self.context.seed, self.context.rank, next(self._group_numbers)))
        while number > 0:
            places = draws.sample(range(len(self.tasks)), min(number, len(self.tasks)))
            self.queue.extend(self.tasks[place] for place in places)
            number -= len(places)


def _name_of(row: Row) -> str:
    """Return a name of a row from its whole content, since rows may share a `task_id`."""
    return task_id_of({"row": row})

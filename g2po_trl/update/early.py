"""Gradients of complete groups while the rest of the rollout still plays, with the same weights: exactly on-policy.

All that is compared in a group is in it, so its advantages are known when its last episode has ended. Its loss and
gradient are, too, up to what divides them: the rows or reply tokens of the whole rollout. They are computed with an
estimate of that, and at the end the gradient is multiplied by what the estimate was wrong by. The rows that are left
go the usual way, count those that are done in every denominator, and the optimizer makes one step on the sum.

Nothing here is a collective operation: ranks play at their own pace, and each computes what it has. Passes go through
the bare model, which exchanges no gradients; the last pass of the rest exchanges the sum, as always.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..sdpa import without_cudnn_attention
from ..trajectory import Trajectory
from .batch import StepBatch, collate_plan, loss_scale, rescale
from .iteration import Iteration, merge
from .ordering import Ordering
from .planning import Load
from .update import Update

_TOLERANCE = 1e-5  # of an advantage: sums over a group do not depend on the others but by rounding


class EarlyUpdate:
    """The part of an update that is made during the rollout.

    Args:
        update: the way from step samples to micro-batches.
        iteration: gets the metrics.
        model: the trained one, without what wraps it for several ranks.
        reference: its log-probabilities are compared with, see `LogProbs.add`.
        advantages_of: all trajectories of a group -> the advantages of their steps; may not change them.
        train: forward and backward of a micro-batch -> its loss.
        members: trajectories of a group.
        mask_truncated: see `StepBatch.from_trajectories`.
    """

    def __init__(
        self,
        update: Update,
        iteration: Iteration,
        model: Callable[[], torch.nn.Module],
        reference: torch.nn.Module | None,
        advantages_of: Callable[[Sequence[Trajectory]], np.ndarray],
        train: Callable[[dict[str, Any]], torch.Tensor],
        members: int,
        mask_truncated: bool,
    ):
        self.update, self.iteration, self._model, self.reference = update, iteration, model, reference
        self.advantages_of, self.train = advantages_of, train
        self.members, self.mask_truncated = members, mask_truncated
        self._reset()

    @property
    def model(self) -> torch.nn.Module:
        return self._model()

    def _reset(self) -> None:
        self._done: dict[int, tuple[Trajectory, np.ndarray]] = {}  # by the trajectory's place
        self._load = Load(np.zeros(1), 0, 0)
        self._logged: list[tuple[dict[str, float], int]] = []  # of each micro-batch, and its reply tokens
        self._totals: tuple[float, float] | None = None  # rows and reply tokens of the rollout, as estimated
        self._loss = torch.zeros((), device=self.update.accelerator.device)
        self.seconds = 0.0

    # -- while others play -----------------------------------------------------------------------------------------

    def learn(self, ended: Callable[[bool], Sequence[tuple[int, Trajectory]] | None], groups: Sequence[int]) -> None:
        """Compute the gradient of groups that are complete, until the rollout is over.

        Args:
            ended: (place, trajectory) of those that have ended since the last time; told whether to wait until there
                is one. `None`: the rollout is over.
            groups: group of each place of this rank. One with members on other ranks waits for the end.
        """
        self._reset()
        self.model.zero_grad()  # of a rollout that was broken off
        whole = {group for group, number in Counter(groups).items() if number == self.members}
        members: dict[int, dict[int, Trajectory]] = defaultdict(dict)
        complete: list[dict[int, Trajectory]] = []
        while (trajectories := ended(not complete)) is not None:
            for place, trajectory in trajectories:
                group = members[groups[place]]
                group[place] = trajectory
                if groups[place] in whole and len(group) == self.members:
                    complete.append(dict(sorted(group.items())))
            if complete:
                started = time.perf_counter()
                self._learn_some(complete, len(groups))
                self.seconds += time.perf_counter() - started

    def _learn_some(self, complete: list[dict[int, Trajectory]], num_places: int) -> None:
        """Of the first groups, as many as fill a micro-batch: what is left when the rollout ends, ranks share."""
        parts: list[StepBatch] = []
        num_tokens = num_trajectories = 0
        while complete and num_tokens < self.update.max_tokens:
            group = complete.pop(0)
            trajectories = list(group.values())
            advantages = self.advantages_of(trajectories)
            part = StepBatch.from_trajectories(trajectories, advantages, self.mask_truncated)
            lengths = [sum(pair) for pair in part.lengths(range(len(part)))]
            if not self.update.layout.knows(self.model, max(lengths, default=0)):
                continue  # to compare the layout on sequences so long, all ranks are needed
            ends = np.cumsum([len(trajectory.steps) for trajectory in trajectories])
            for place, trajectory, own in zip(group, trajectories, np.split(advantages, ends[:-1])):
                self._done[place] = trajectory, own
            parts.append(part)
            num_tokens, num_trajectories = num_tokens + sum(lengths), num_trajectories + len(trajectories)
        if parts:
            self._pass(StepBatch.concatenate(parts), num_places / num_trajectories)

    @without_cudnn_attention()
    def _pass(self, batch: StepBatch, share: float) -> None:
        """Forward and backward. `share`: how many times as much the rank will have in all, about."""
        update, rows, cut = self.update, batch.summary, self.update.cut_into(1)
        if not rows.with_gradient(cut.kl).any():
            return
        ranks = update.accelerator.num_processes
        if self._totals is None:
            self._totals = round(len(rows) * share * ranks), max(1, round(batch.num_tokens * share * ranks))
        plan, _ = cut.plan(rows, Ordering.of(batch.sequences()), np.random.default_rng(0))
        load = Load.of(plan, 1, cut.pad_to_multiple_of)
        self._load = Load(
            self._load.tokens + load.tokens,
            self._load.forwarded + load.forwarded,
            self._load.micro_batches + load.micro_batches,
        )
        (micro_batches,) = collate_plan(plan, batch, {row: row for row in range(len(batch))}, rows, 0, cut)
        update.log_probs.add(self.model, self.reference, micro_batches)
        for micro_batch in micro_batches:
            micro_batch["num_items_in_batch"] = torch.tensor(self._totals[1])
            micro_batch["loss_scale"] = loss_scale(cut.loss_type, micro_batch, *self._totals, ranks, update.num_slices)
            with self.iteration.logged_aside() as logged, _alone(update.accelerator):
                self._loss += self.train(micro_batch)
            self._logged.append((logged, micro_batch["weight"]))

    # -- when all have ended ---------------------------------------------------------------------------------------

    def finish(self, batch: StepBatch, trajectories: Sequence[Trajectory], advantages: np.ndarray) -> StepBatch:
        """The gradient as if it had been computed now, and what is left to be done. All ranks call it together.

        Args:
            batch: all rows of this rank. trajectories: they are of. advantages: of all their steps, in order.

        Returns:
            The batch, with those rows marked whose gradient is there.

        Raises:
            RuntimeError: if what was computed early is not what would be now.
        """
        ends = np.cumsum([len(trajectory.steps) for trajectory in trajectories])
        for place, (trajectory, own) in enumerate(zip(trajectories, np.split(advantages, ends[:-1]))):
            if place in self._done:
                self._check(place, trajectory, own)
        done = [
            np.full(len(trajectory.steps), place in self._done)
            for place, trajectory in enumerate(trajectories)
            if trajectory.counted
        ]
        batch = replace(batch, done=np.concatenate([np.zeros(0, dtype=bool), *done]), done_load=self._load)
        own = _merged(self._logged), sum(tokens for _, tokens in self._logged)
        ranks = gather_object([(len(batch), batch.num_tokens, own, self.seconds)])
        rows, tokens = (sum(rank[i] for rank in ranks) for i in (0, 1))
        if self._totals is not None:
            factor = rescale(self.update.loss_type, *self._totals, rows, tokens)
            self._loss *= factor
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        logged = [rank[2] for rank in ranks if rank[2][1]]
        self.iteration.log({"time/update_while_playing": max(rank[3] for rank in ranks)})
        self.iteration.begin_with(_merged(logged), sum(tokens for _, tokens in logged))
        self._done, self._logged = {}, []
        return batch

    def _check(self, place: int, trajectory: Trajectory, advantages: np.ndarray) -> None:
        early, own = self._done[place]
        if early.steps is not trajectory.steps or not np.allclose(own, advantages, _TOLERANCE, _TOLERANCE):
            raise RuntimeError(
                f"update_while_playing: an episode of task {trajectory.task_id} has other advantages now than when "
                "its group was complete, and its gradient is computed already. Something compares groups with one "
                "another: set update_while_playing=False"
            )

    def take_loss(self) -> torch.Tensor:
        """The loss of what was computed early; 0 the next time."""
        loss, self._loss = self._loss, torch.zeros_like(self._loss)
        return loss


def _merged(logged: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """One value of each metric, for parts with so many tokens."""
    names = {name for values, _ in logged for name in values}
    found = {name: [(values[name], tokens) for values, tokens in logged if name in values] for name in sorted(names)}
    return {name: merge(name, *zip(*pairs)) for name, pairs in found.items()}


@contextmanager
def _alone(accelerator: Accelerator) -> Iterator[None]:
    """TRL's loss gathers what it logs over ranks, once a micro-batch; here each rank has a number of its own."""
    if accelerator.num_processes == 1:
        yield
        return
    accelerator.gather = accelerator.reduce = lambda tensor, *args, **kwargs: tensor
    try:
        yield
    finally:
        del accelerator.gather, accelerator.reduce

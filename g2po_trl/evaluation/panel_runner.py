"""Play an evaluation set with a prompted agent, in batches and trials; resume from the file of finished episodes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engines.sampling import Sampling, derived_seed
from ..environments.episode_limits import EpisodeLimits
from ..environments.pool.pool import EnvironmentPool
from ..rollout.episode import Episode
from ..rollout.player import Player
from ..runs.callbacks import RolloutBar
from ..trajectory import Trajectory, read_jsonl, write_jsonl
from .actors import EvaluationActor
from .agents import Agent
from .chat_models import ChatCompletion, ChatModel, TokenBudget
from .panel import Panel


@dataclass
class PanelPlayer:
    """A player of an evaluation set's tasks: one episode per task and trial.

    Each trajectory is appended to `path` when it ends, with `panel_index`, `trial`, tokens and reflections in its
    `info`. Calling `play` again resumes: finished episodes are kept, and environment errors are played again. If a
    completion depends on the rest of its batch, batches are written and repeated as a whole. Without `limits`, the
    set's turns are the only limit.
    """

    panel: Panel
    pool: EnvironmentPool
    chat: ChatModel
    agent: Agent
    sampling: Sampling
    seed: int
    path: Path
    budget: TokenBudget
    batch_size: int = 32
    limits: EpisodeLimits | None = None

    def play(self) -> list[Trajectory]:
        """Return the last trial of each task, in order; resume where the file ends."""
        self.finished = read_finished(self.path)
        actor = EvaluationActor(self.chat, self.agent, self._notes, self.budget.check, self._count)
        self.player = Player(self.pool, actor, self.limits or EpisodeLimits(self.panel.max_turns))
        everything = range(len(self.panel.rows))
        for start in everything[:: self.batch_size]:
            indices = everything[start : start + self.batch_size]
            left = [index for index in indices if index not in self.finished]
            if left:
                indices = left if self.chat.independent else indices
                _remove_episodes(self.path, indices)  # errors, and the unfinished batch of a killed process
                self._play_batch(indices)
        return [self.finished[index] for index in everything]

    def _play_batch(self, indices: Sequence[int]) -> None:
        self.notes: dict[int, list[str]] = {}
        self.unwritten: list[Trajectory] = []
        for trial in range(self.agent.trials):
            self.trial, self.indices = trial, indices
            self.tokens = {index: [0, 0] for index in indices}
            self.tasks: dict[int, str] = {}
            with closing(RolloutBar(f"seed {self.seed}", self.player.max_turns, enabled=True)) as bar:
                trajectories, _ = self.player.play(
                    [self.panel.rows[index] for index in indices],
                    self.sampling,
                    seeds=[self._seed(index) for index in indices],
                    on_turn=bar,
                    on_end=self._on_end,
                )
            failed = [i for i, t in zip(indices, trajectories) if t.outcome in ("failure", "truncated")]
            if not failed or trial == self.agent.trials - 1:
                break
            self._reflect(failed, dict(zip(indices, trajectories)))
            indices = failed
        write_jsonl(self.path, self.unwritten, append=True)

    def _count(self, episode: Episode, completion: ChatCompletion) -> None:
        self.budget.count(completion)
        tokens = self.tokens[self.indices[episode.number]]
        tokens[0] += completion.prompt_tokens
        tokens[1] += completion.completion_tokens

    def _reflect(self, indices: Sequence[int], trajectories: dict[int, Trajectory]) -> None:
        self.budget.check()
        asked = [(trajectories[index], self.tasks.get(index, ""), self.notes.get(index, ())) for index in indices]
        requests = [self.agent.reflect(*facts) for facts in asked]
        seeds = [derived_seed(self._seed(index), -1) for index in indices]
        for index, completion in zip(indices, self.chat.generate(requests, self.sampling, seeds)):
            self.budget.count(completion)
            if not completion.error:
                self.notes.setdefault(index, []).append(" ".join(completion.text.split()))

    def _on_end(self, episode: Episode) -> None:
        """Record an ended episode, and write the task's trials to the file if no further trial or batch is needed."""
        index = self.indices[episode.number]
        self.tasks[index] = episode.task
        trajectory = episode.trajectory()
        is_last = trajectory.success or not trajectory.counted or self.trial == self.agent.trials - 1
        facts: dict[str, Any] = {"panel_index": index, "trial": self.trial, "last_trial": is_last}
        facts |= dict(zip(("prompt_tokens", "completion_tokens"), self.tokens[index]))
        trajectory.info = {**trajectory.info, **facts, "reflections": list(self.notes.get(index, ()))}
        self.unwritten.append(trajectory)
        if not is_last:
            return
        self.finished[index] = trajectory
        if self.chat.independent:
            trials = [t for t in self.unwritten if t.info["panel_index"] == index]
            self.unwritten = [t for t in self.unwritten if t.info["panel_index"] != index]
            write_jsonl(self.path, trials, append=True)

    def _notes(self, episode: Episode) -> Sequence[str]:
        return self.notes.get(self.indices[episode.number], ())

    def _seed(self, index: int) -> int:
        """Return an episode's seed; in the first trial it equals the seed of a training run with `eval_seed`."""
        return derived_seed(self.seed, index, *([self.trial] if self.trial else []))


def read_finished(path: Path) -> dict[int, Trajectory]:
    """Return the last trials that are not errors, by the task's index; truncate the file after its last whole line."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))  # in place: rewriting the file could lose it to another kill
    trajectories = [Trajectory.from_dict(json.loads(line)) for line in whole.splitlines()]
    return {t.info["panel_index"]: t for t in trajectories if t.info["last_trial"] and t.counted}


def _remove_episodes(path: Path, indices: Sequence[int]) -> None:
    trajectories = list(read_jsonl(path)) if path.exists() else []
    kept = [t for t in trajectories if t.info["panel_index"] not in indices]
    if len(kept) < len(trajectories):
        write_jsonl(path, kept)

"""Play an evaluation set with a prompted agent, in batches and trials; resume from the file of finished episodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ..engines.sampling import Sampling, derived_seed
from ..environments.episode_limits import EpisodeLimits
from ..environments.pool.pool import EnvironmentPool
from ..rollout.episode import Episode
from ..rollout.player import Player
from ..runs.callbacks import RolloutBar
from ..trajectory import Trajectory, write_jsonl
from ..utils.json import atomic_write, write_json
from ..utils.options import require
from .actors import EvaluationActor
from .agents import Agent
from .chat_models import ChatCompletion, ChatModel
from .panel import Panel


@dataclass
class TokenBudget:
    """A count of tokens with a limit.

    Args:
        limit: maximum number of prompt and completion tokens. `None`: no limit.
        path: file that keeps the counts, so that a resumed evaluation continues to count. Written before each turn: a
            kill loses the count of at most one turn.
        read: prompt tokens so far.
        written: completion tokens so far.
    """

    limit: int | None
    path: Path
    read: int = 0
    written: int = 0

    def __post_init__(self):
        if self.path.is_file():
            vars(self).update(json.loads(self.path.read_text(encoding="utf-8")))

    def save(self) -> None:
        """Write the counts to `path`."""
        write_json(self.path, {"read": self.read, "written": self.written})

    def check(self) -> None:
        """Save the counts. Raises `G2POError` if the limit is reached."""
        self.save()
        used = self.read + self.written
        remedy = f"{used} tokens were used; run the same command with a larger one to resume"
        require(self.limit is None or used < self.limit, "max_total_tokens", self.limit, remedy)

    def count(self, completion: ChatCompletion) -> None:
        """Add the tokens of a completion and its prompt. Raises `G2POError` if tokens are limited and not reported."""
        is_reported = bool(completion.prompt_tokens or completion.completion_tokens or completion.error)
        remedy = "the server reports no token usage to count; remove it, and limit the costs at the provider"
        require(self.limit is None or is_reported, "max_total_tokens", self.limit, remedy)
        self.read += completion.prompt_tokens
        self.written += completion.completion_tokens


@dataclass
class PanelPlayer:
    """A player of an evaluation set's tasks: one episode per task and trial.

    Each trajectory is appended to a file when it ends, with `panel_index`, `trial`, tokens and reflections in its
    `info`. Playing into the same file again resumes: finished episodes are kept, and environment errors are played
    again. If a completion depends on the rest of its batch, batches are repeated as a whole.
    """

    panel: Panel
    pool: EnvironmentPool
    chat: ChatModel
    agent: Agent
    sampling: Sampling
    budget: TokenBudget
    batch_size: int
    limits: EpisodeLimits

    def __post_init__(self):
        actor = EvaluationActor(self.chat, self.agent, self._notes_of, self.budget.check, self._count)
        self.player = Player(self.pool, actor, self.limits)

    def play(self, seed: int, path: Path) -> list[Trajectory]:
        """Return the last trial of each task with a seed, in order; resume where the file ends."""
        indices = range(len(self.panel.rows))
        batches = [indices[start : start + self.batch_size] for start in indices[:: self.batch_size]]
        self.seed, self.path = seed, path
        self.finished = _resume(path, batches=() if self.chat.independent else batches)
        for batch in batches:
            if left := [index for index in batch if index not in self.finished]:
                self._play_batch(left)
        return [self.finished[index] for index in indices]

    def _play_batch(self, indices: Sequence[int]) -> None:
        self.notes: dict[int, list[str]] = {index: [] for index in indices}
        for trial in range(self.agent.trials):
            self.trial, self.indices, self.tokens = trial, indices, {index: [0, 0] for index in indices}
            with closing(RolloutBar(f"seed {self.seed}", self.player.max_turns, enabled=True)) as bar:
                rows, seeds = [self.panel.rows[index] for index in indices], list(map(self._seed, indices))
                trajectories, _ = self.player.play(rows, self.sampling, None, seeds, bar, self._on_end)
            failed = {i: t for i, t in zip(indices, trajectories) if t.outcome in ("failure", "truncated")}
            if not failed or trial == self.agent.trials - 1:
                return
            self._reflect(failed)
            indices = list(failed)

    def _reflect(self, failed: dict[int, Trajectory]) -> None:
        self.budget.check()
        requests = [self.agent.reflect(trajectory, self.notes[index]) for index, trajectory in failed.items()]
        seeds = [derived_seed(self._seed(index), -1) for index in failed]
        for index, completion in zip(failed, self.chat.generate(requests, self.sampling, seeds)):
            self.budget.count(completion)
            if not completion.error:
                self.notes[index].append(" ".join(completion.text.split()))

    def _on_end(self, episode: Episode) -> None:
        index, trajectory = self.indices[episode.number], episode.trajectory()
        is_last = trajectory.success or not trajectory.counted or self.trial == self.agent.trials - 1
        facts = dict(zip(("prompt_tokens", "completion_tokens"), self.tokens[index]), reflections=[*self.notes[index]])
        facts = {"panel_index": index, "trial": self.trial, "last_trial": is_last, **facts}
        trajectory.info = {**trajectory.info, **facts}
        write_jsonl(self.path, [trajectory], append=True)
        if is_last:
            self.finished[index] = trajectory

    def _count(self, episode: Episode, completion: ChatCompletion) -> None:
        self.budget.count(completion)
        tokens = self.tokens[self.indices[episode.number]]
        tokens[0] += completion.prompt_tokens
        tokens[1] += completion.completion_tokens

    def _notes_of(self, episode: Episode) -> Sequence[str]:
        return self.notes[self.indices[episode.number]]

    def _seed(self, index: int) -> int:
        """Return an episode's seed; in the first trial it equals the seed of a training run with `eval_seed`."""
        return derived_seed(self.seed, index, *([self.trial] if self.trial else []))


def _resume(path: Path, batches: Sequence[Sequence[int]]) -> dict[int, Trajectory]:
    """Return the finished last trials by the task's index, and remove other episodes from the file.

    These are errors, interrupted ones, and those of unfinished `batches`.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    trajectories = [Trajectory.from_dict(json.loads(line)) for line in lines if line.endswith(b"\n")]
    finished = {t.info["panel_index"]: t for t in trajectories if t.info["last_trial"] and t.counted}
    for batch in batches:
        if not finished.keys() >= set(batch):
            finished = {index: trajectory for index, trajectory in finished.items() if index not in batch}
    kept = [line.decode() for line, t in zip(lines, trajectories) if t.info["panel_index"] in finished]
    if len(kept) < len(lines):
        with atomic_write(path) as file:
            file.writelines(kept)
    return finished

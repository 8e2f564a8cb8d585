"""Play an evaluation set in batches and trials; resume from the file of finished episodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from ..engines.sampling import Sampling, derived_seed
from ..environments.episode_limits import EpisodeLimits
from ..environments.pool.pool import EnvironmentPool
from ..rollout.episode import Episode
from ..rollout.player import Player
from ..runs.callbacks import RolloutBar
from ..trajectory import Trajectory, write_jsonl
from ..utils.json import atomic_write
from .agents import Agent, ChatActor
from .chat_models import ChatModel
from .panel import Panel


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
    batch_size: int
    limits: EpisodeLimits

    def __post_init__(self):
        self.player = Player(self.pool, ChatActor.of(self.chat, self.agent), self.limits)

    def play(self, seed: int, path: Path) -> list[Trajectory]:
        """Return the last trial of each task with a seed, in order; resume where the file ends."""
        indices = range(len(self.panel.rows))
        batches = [indices[start : start + self.batch_size] for start in indices[:: self.batch_size]]
        is_independent = self.chat.engine is None or self.chat.engine.takes_seeds
        finished = _resume(path, () if is_independent else batches)
        for batch in batches:
            if left := [index for index in batch if index not in finished]:
                self._play_batch(left, seed, path, finished)
        return [finished[index] for index in indices]

    def _play_batch(self, indices: list[int], seed: int, path: Path, finished: dict[int, Trajectory]) -> None:
        """Play tasks, those that fail again after a reflection, and add their last trials to the finished ones."""
        player, notes = self.player, {index: [] for index in indices}

        def record(episode: Episode) -> None:
            index, trajectory = indices[episode.number], episode.trajectory()
            is_last = trajectory.success or not trajectory.counted or trial == self.agent.trials - 1
            tokens = dict(zip(("prompt_tokens", "completion_tokens"), map(sum, zip((0, 0), *episode.usage))))
            facts = {"panel_index": index, "trial": trial, "last_trial": is_last, "reflections": [*notes[index]]}
            trajectory.info = {**trajectory.info, **facts, **tokens}
            for step in trajectory.steps:
                if step.prompt_ids and step.messages is None:  # the folder has no tokenizer for the viewer
                    step.prompt = self.chat.encode.tokenizer.decode(step.prompt_ids)
            write_jsonl(path, [trajectory], append=True)
            if is_last:
                finished[index] = trajectory

        for trial in range(self.agent.trials):
            # In the first trial a seed equals that of a training run with `eval_seed`.
            seeds = {index: derived_seed(seed, index, *([trial] if trial else [])) for index in indices}
            rows = [self.panel.rows[index] for index in indices]
            with closing(RolloutBar(f"seed {seed}", player.max_turns, enabled=True)) as bar:
                trajectories, _ = player.play(rows, self.sampling, None, [*seeds.values()], bar, record)
            failed = {index: t for index, t in zip(indices, trajectories) if index not in finished}
            if not failed:
                return
            indices = list(failed)
            requests = [self.agent.reflect(trajectory, notes[index]) for index, trajectory in failed.items()]
            again = [derived_seed(seeds[index], -1) for index in indices]
            for index, completion in zip(indices, self.chat.generate(requests, self.sampling, again)):
                notes[index] += [] if completion.error else [" ".join(completion.text.split())]
            told = replace(self.agent, notes=[notes[index] for index in indices])
            player = replace(player, actor=ChatActor(self.chat, told))


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

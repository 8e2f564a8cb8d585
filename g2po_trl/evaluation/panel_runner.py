"""A panel played by a prompted agent: batches of episodes, trials, seeds, and a file that it can go on from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..engines.sampling import derived_seed
from ..environments.pool.pool import EnvironmentPool
from ..prompts.fitting import PromptTooLongError
from ..rollout.episode import Episode
from ..rollout.player import Player
from ..rollout.stats import RolloutStats
from ..runs.panel import Panel
from ..trajectory import Step, Trajectory, read_jsonl, write_jsonl
from .agents import Agent
from .chat_models import ChatModel, ChatReply, ChatSettings, Conversation, TokenBudget


@dataclass
class PanelPlayer:
    """Plays a panel with a prompted agent: for each task one episode, of as many trials as the agent has.

    Each trajectory is appended to `path` when it ends, with `panel_index`, `trial`, tokens and reflections in its
    `info`. Calling `play` again resumes: episodes with a result are not repeated, errors of the environment are. If a
    model's completions depend on the rest of their batch, batches are written and repeated as a whole.

    Args:
        panel: the tasks.
        pool: hosts the panel's environment.
        chat: the model.
        agent: how the model is prompted.
        settings: how completions are sampled.
        seed: seed of the completions.
        path: file of the trajectories.
        budget: tokens used so far, and their limit.
        batch_size: number of concurrent episodes.
        on_turn: called after each turn with its number and the number of running episodes.
    """

    panel: Panel
    pool: EnvironmentPool
    chat: ChatModel
    agent: Agent
    settings: ChatSettings
    seed: int
    path: Path
    budget: TokenBudget
    batch_size: int = 32
    on_turn: Callable[[int, int], None] | None = None

    def play(self) -> list[Trajectory]:
        """Play, or resume.

        Returns:
            The last trial of each task, in the order of the panel.

        Raises:
            TokenBudgetSpentError: if the token budget is spent; finished episodes are in the file.
        """
        self.done = read_finished(self.path)
        number_of_tasks = len(self.panel.rows)
        for start in range(0, number_of_tasks, self.batch_size):
            numbers = list(range(start, min(start + self.batch_size, number_of_tasks)))
            if self.chat.independent:
                numbers = [number for number in numbers if number not in self.done]
            if all(number in self.done for number in numbers):
                continue
            _take_out(self.path, numbers)  # errors, and what a process wrote before it died
            self._play_batch(numbers)
        return [self.done[number] for number in range(number_of_tasks)]

    def _play_batch(self, numbers: Sequence[int]) -> None:
        self.notes: dict[int, list[str]] = {}
        self.waiting: list[Trajectory] = []  # not written yet
        for trial in range(self.agent.trials):
            self.trial, self.numbers = trial, numbers
            self.tokens = {number: [0, 0] for number in numbers}
            self.tasks: dict[int, str] = {}
            rows = [self.panel.rows[number] for number in numbers]
            player = Player(self.pool, _Asked(self._act), self.panel.max_turns)
            trajectories, _ = player.play(rows, on_turn=self.on_turn, on_end=self._ended)
            failed = [n for n, t in zip(numbers, trajectories) if t.outcome in ("failure", "truncated")]
            if not failed or trial == self.agent.trials - 1:
                break
            self._reflect(failed, dict(zip(numbers, trajectories)))
            numbers = failed
        write_jsonl(self.path, self.waiting, append=True)

    def _act(self, live: list[Episode]) -> list[Step | None]:
        self.budget.check()
        numbers = [self.numbers[episode.number] for episode in live]
        asked = [self._ask(episode, self.notes.get(number, ())) for episode, number in zip(live, numbers)]
        answered = [i for i, conversation in enumerate(asked) if conversation is not None]
        replies: dict[int, ChatReply] = {}
        if answered:
            seeds = [self._seed(numbers[i], len(live[i].steps)) for i in answered]
            replies = dict(
                zip(answered, self.chat.reply([asked[i] for i in answered], self._with_stops(), seeds), strict=True)
            )
        steps: list[Step | None] = []
        for i, (episode, number, conversation) in enumerate(zip(live, numbers, asked)):
            if conversation is None:
                steps.append(None)
                continue
            reply = replies[i]
            self._count(number, reply)
            if reply.error:
                episode.give_up(f"context overflow: {reply.error}")
                steps.append(None)
                continue
            action, valid = self.agent.read(reply.text, reply.prompt_end, episode.observation.admissible_actions)
            steps.append(
                episode.step(
                    action,
                    reply.text,
                    valid=valid,
                    completion_truncated=not reply.complete,
                    prompt=conversation[-1]["content"],
                )
            )
        return steps

    def _ask(self, episode: Episode, notes: Sequence[str]) -> Conversation | None:
        """What the next reply answers; `None` for a prompt that cannot be made to fit, which ends its episode."""
        try:
            return self.agent.ask(episode, notes)
        except PromptTooLongError as error:
            episode.give_up(f"prompt too long: {error}")
            return None

    def _reflect(self, numbers: Sequence[int], played: dict[int, Trajectory]) -> None:
        self.budget.check()
        asked = {
            number: conversation
            for number in numbers
            if (
                conversation := self.agent.reflect(
                    played[number], self.tasks.get(number, ""), self.notes.get(number, ())
                )
            )
        }
        seeds = [self._seed(number, -1) for number in asked]
        replies = self.chat.reply(list(asked.values()), replace(self.settings, stop=()), seeds)
        for number, reply in zip(asked, replies):
            self.budget.count(reply)
            if not reply.error:
                self.notes.setdefault(number, []).append(" ".join(reply.text.split()))

    def _ended(self, episode: Episode) -> None:
        """Note an episode; write it down once it is known to be the task's last and nothing else is waited for."""
        number = self.numbers[episode.number]
        self.tasks[number] = episode.task
        trajectory = episode.trajectory()
        over = trajectory.success or not trajectory.counted or self.trial == self.agent.trials - 1
        read, written = self.tokens[number]
        facts: dict[str, Any] = {
            "panel_index": number,
            "trial": self.trial,
            "last_trial": over,
            "prompt_tokens": read,
            "reply_tokens": written,
            "reflections": list(self.notes.get(number, ())),
        }
        trajectory.info = {**trajectory.info, **facts}
        self.waiting.append(trajectory)
        if not over:
            return
        self.done[number] = trajectory
        if self.chat.independent:
            mine = [t for t in self.waiting if t.info["panel_index"] == number]
            self.waiting = [t for t in self.waiting if t.info["panel_index"] != number]
            write_jsonl(self.path, mine, append=True)

    def _count(self, number: int, reply) -> None:
        self.budget.count(reply)
        self.tokens[number][0] += reply.prompt_tokens
        self.tokens[number][1] += reply.reply_tokens

    def _with_stops(self) -> ChatSettings:
        return replace(self.settings, stop=(*self.settings.stop, *self.agent.stop))

    def _seed(self, number: int, turn: int) -> int:
        """Of a first trial those of a training run's panel with `eval_seed`."""
        return derived_seed(derived_seed(self.seed, number, *([self.trial] if self.trial else [])), turn)


@dataclass
class _Asked:
    """An agent as a `Player` knows who acts."""

    act: Callable[[list[Episode]], list[Step | None]]
    asked: list[Episode] = field(default_factory=list)
    is_collective = False
    streams = False

    def rollout(self) -> AbstractContextManager[None]:
        return nullcontext()

    def session(self, sampling: Any, seeds: Any, stats: RolloutStats) -> _Asked:
        return self

    def close(self) -> None:
        """It holds nothing."""

    @property
    def waiting(self) -> int:
        return len(self.asked)

    def ask(self, episodes: Sequence[Episode]) -> None:
        self.asked += episodes

    def answers(self, timeout: float) -> list[tuple[Episode, Step | None]]:
        asked, self.asked = self.asked, []
        return list(zip(asked, self.act(asked))) if asked else []


def read_finished(path: Path) -> dict[int, Trajectory]:
    """Last trials that came to a result, by their place in the panel. A line that a kill left half is cut off."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))  # a kill while it was written anew would lose it all
    trajectories = [Trajectory.from_dict(json.loads(line)) for line in whole.splitlines()]
    return {t.info["panel_index"]: t for t in trajectories if t.info["last_trial"] and t.counted}


def _take_out(path: Path, numbers: Sequence[int]) -> None:
    if not path.exists():
        return
    trajectories = list(read_jsonl(path))
    kept = [t for t in trajectories if t.info["panel_index"] not in numbers]
    if len(kept) == len(trajectories):
        return
    write_jsonl(path, kept)

"""Examine an environment or an agent before training: play it in worker processes and return findings."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..credit.state_keys import assign_keys, make_state_key
from ..engines.sampling import Sampling, derived_seed
from ..environments.episode_limits import EpisodeLimits
from ..environments.pool.limits import PoolLimits
from ..environments.pool.pool import EnvironmentFailure, EnvironmentPool
from ..environments.setup import default_history, first_steps, played_as, text_environment_factory
from ..environments.several import COLUMN, check_limits, check_mixture, environments_of, player_of
from ..environments.tasks import check_task_columns
from ..environments.validation import is_agent
from ..evaluation.agents import ChatActor, DirectAgent
from ..prompts.template import PromptTemplate
from ..rollout.player import Player
from . import measure
from .contract import contract_findings
from .findings import Finding, Kind, has_errors, worst_first
from .play import TEXTS, Answer, Played, play, random_answer, replay_difference, slow

if TYPE_CHECKING:
    from ..evaluation.chat_models import ChatModel


@dataclass
class Examination:
    """An environment or an agent, examined by episodes in worker processes.

    Several environments are examined one by one, each with its own tasks.

    Args:
        environment_factory: as passed to the trainer; for an agent, as `agent_factory` makes it.
        tasks: dataset rows.
        episodes: episodes per task, e.g. the group size.
        episode_limits: limits of an episode.
        limits: limits of environment workers.
        state_key_ignores: details that keys leave out, as in training.
        texts: an agent's random responses without tool calls.
        model: folder of the model whose tokenizer should know the words of the episodes.
        name: name of the environment in a run with several.
    """

    environment_factory: Callable
    tasks: Sequence[dict[str, Any]]
    episodes: int = 8
    episode_limits: EpisodeLimits = field(default_factory=lambda: EpisodeLimits(max_turns=30))
    limits: PoolLimits = field(default_factory=PoolLimits)
    state_key_ignores: Sequence[str] | None = None
    texts: Sequence[str] = TEXTS
    model: str | Path | None = None
    name: str | None = None

    def __post_init__(self):
        self.turns = self.episode_limits.max_turns
        self.one_worker = replace(self.limits, num_environment_workers=1)
        self.is_agent = is_agent(self.environment_factory)

    def at_random(self) -> list[Finding]:
        """Return the findings of random episodes, the worst first; errors of the environment are findings, too."""
        try:
            return self._of_each(Examination._at_random)
        except ValueError as error:  # e.g. tools without a description, variables that are not set, unknown tasks
            return [Kind.REFUSED.found(error=str(error))]

    def with_model(
        self, chat: ChatModel, sampling: Sampling, settings: Any, prompt_template: PromptTemplate | None = None
    ) -> list[Finding]:
        """Return the findings of episodes that a model plays concurrently, as in training, the worst first.

        `settings` has `history`, `history_length` and `max_prompt_length`; the last is not for servers. Raises
        `G2POError` if a server rejects requests or cannot be reached, or a task has no known environment.
        """
        return self._of_each(lambda part: part._model(chat, sampling, settings, prompt_template))

    def with_expert(self, answer: Answer) -> list[Finding]:
        """Return the findings of an expert's episodes. `answer`: an episode -> an action, a response, or `None`."""
        with EnvironmentPool(self.environment_factory, self.one_worker) as pool:
            played = play(pool, self.tasks, self.episodes, self.episode_limits, answer)
        words = measure.spelled_words(played.steps, self.model, with_actions=True)
        return [measure.expert_finding(played, self.turns), *words]

    def _of_each(self, find: Callable[[Examination], list[Finding]]) -> list[Finding]:
        environments = environments_of(self.environment_factory)
        if not environments:
            return worst_first(find(self))
        check_limits(self.episode_limits, self.environment_factory)
        check_mixture(self.environment_factory, {"check": self.tasks})
        findings = []
        for name, factory in environments.items():
            rows = [dict(player_of(self.environment_factory, row)[1]) for row in self.tasks if row[COLUMN] == name]
            own = {"tasks": rows, "episode_limits": self.episode_limits.by(name), "name": name}
            part = replace(self, environment_factory=factory, **own)
            findings += [replace(finding, environment=name) for finding in find(part)]
        return worst_first(findings)

    def _at_random(self) -> list[Finding]:
        """Return findings about the contract, states and rewards."""
        history = default_history(self.environment_factory, None)
        factory = text_environment_factory(self.environment_factory, self.episode_limits, history)
        findings, tasks = [], []
        for number, task in enumerate(self.tasks, 1):
            try:
                check_task_columns(factory, task)
                tasks.append(task)
            except ValueError as error:
                findings.append(Kind.REFUSED.found(error=f"task {number}: {error}"))
        with EnvironmentPool(factory, self.one_worker) as pool, EnvironmentPool(factory, self.one_worker) as second:
            starts, failures = (tasks, []) if self.is_agent else first_steps(pool, tasks, tasks)
            playable = [task for task, start in zip(tasks, starts) if not isinstance(start, EnvironmentFailure)]
            answer = random_answer(random.Random(0), self.texts)
            played = play(second, [] if slow(failures) else playable, self.episodes, self.episode_limits, answer)
            failures += played.failures
            if self.is_agent:
                findings += measure.failures(failures)
            elif slow(failures):  # which the test of the contract, in this process, would suffer from
                return measure.failures(slow(failures)[:1], "it")
            else:
                for task in tasks:
                    findings += contract_findings(factory, task, max_steps=self.turns)
                findings += [] if has_errors(findings) else measure.failures(failures, "it")
            findings += measure.environment_findings(played)
            if not played.episodes or (has_errors(findings) and not self.is_agent):
                return findings
            again = [] if failures else [self._replayed(pool, playable, played)]
        findings += measure.agent_findings(played, self.turns) if self.is_agent else []
        findings += self._states(played)
        # Of words that an agent does not understand nothing is expected.
        if played.has_tools or (self.texts is not TEXTS if self.is_agent else played.lists_actions):
            who = "random responses" if self.is_agent else "random actions"
            findings.append(measure.outcomes(played, self.turns, who))
        return findings + again

    def _replayed(self, pool: EnvironmentPool, tasks: Sequence[dict[str, Any]], played: Played) -> Finding:
        """Return a finding about playing each task's longest episode in another process, there twice in one object."""
        for task, group in zip(tasks, played.groups):
            longest = max(group, key=lambda trajectory: len(trajectory.steps), default=None)
            for _ in range(2 if longest else 0):
                if different := replay_difference(pool, task, longest.steps, longest.final_observation):
                    return different
        return Kind.CONTRACT_KEPT.found()

    def _states(self, played: Played, kind: str = "random ") -> list[Finding]:
        """Return findings about what training compares, with the keys of training, and further ones."""
        if self.state_key_ignores:
            assign_keys(played.episodes, make_state_key(None, self.state_key_ignores))
        findings = measure.faults(played)
        if not any(finding.kind is Kind.SINGLE_STATE for finding in findings):
            findings += measure.recurrence(played, kind, self.is_agent)
        if self.is_agent:
            findings += measure.recurrence_by_key(played)
        return findings + measure.spelled_words(played.steps, self.model)

    def _model(
        self, chat: ChatModel, sampling: Sampling, settings: Any, template: PromptTemplate | None
    ) -> list[Finding]:
        template, lengths, played = template and template.of(self.name), [], Played()
        playing = played_as(self.environment_factory, self.episode_limits, template, settings.history)
        factory, template, history = playing
        agent = DirectAgent(template, settings.history_length, settings.max_prompt_length, history)
        rows = [task for task in self.tasks for _ in range(self.episodes)]
        groups = [number // self.episodes for number in range(len(rows))]
        seeds = [derived_seed(0, number) for number in range(len(rows))]
        with EnvironmentPool(factory, self.limits) as pool:
            player = Player(pool, ChatActor.of(chat, agent), self.episode_limits)
            trajectories, _ = player.play(
                rows, sampling, groups, seeds, on_end=lambda episode: lengths.extend(episode.usage)
            )
        for start in range(0, len(rows), self.episodes):
            played.groups.append([])
            played.add(trajectories[start : start + self.episodes])
        findings = measure.failures(played.failures, "the agent" if self.is_agent else "an episode")
        if not played.episodes:
            return findings
        findings += measure.agent_findings(played, self.turns) if self.is_agent else []
        findings += measure.completion_findings(played, lengths)
        had_effect = any(step.admissible is not False for step in played.steps)
        findings += self._states(played, kind="") if had_effect else measure.faults(played)
        return [*findings, measure.outcomes(played, self.turns, "the model's responses")]

"""Examine an environment or an agent before training: play it in worker processes and return findings."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..credit.state_keys import assign_keys, make_state_key
from ..engines.sampling import Sampling, derived_seed
from ..environments.episode_limits import EpisodeLimits
from ..environments.pool.limits import PoolLimits
from ..environments.pool.pool import EnvironmentPool
from ..environments.setup import first_steps, played_as
from ..environments.several import COLUMN, check_limits, check_mixture, environments_of, player_of
from ..environments.tasks import check_task_columns
from ..environments.validation import is_agent
from ..prompts.template import PromptTemplate
from ..rollout.actor import Actor
from ..rollout.player import Player
from . import measure
from .contract import contract_findings
from .findings import Finding, Kind, has_errors, worst_first
from .play import TEXTS, Answer, Played, play, random_answer, replay_difference, slow


@dataclass
class Examination:
    """An environment or an agent, examined by episodes in worker processes; several one by one, with their tasks."""

    environment_factory: Callable  # as passed to the trainer; for an agent, as `agent_factory` makes it
    tasks: Sequence[dict[str, Any]]
    episodes: int = 8  # of each task
    episode_limits: EpisodeLimits = field(default_factory=lambda: EpisodeLimits(max_turns=30))
    limits: PoolLimits = field(default_factory=PoolLimits)
    state_key: str | None = None  # the configuration's
    state_key_ignores: Sequence[str] | None = None
    texts: Sequence[str] = TEXTS  # an agent's random responses without tool calls
    model: str | Path | None = None  # folder of the model whose tokenizer should know the words of the episodes
    name: str | None = None  # of the environment, in a run with several

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
        self, actor: Actor, sampling: Sampling, settings: Any, prompt_template: PromptTemplate | None = None
    ) -> list[Finding]:
        """Return the findings of episodes that a model plays concurrently, as in training; `settings`: its options."""
        return self._of_each(lambda part: part._model(actor, sampling, settings, prompt_template))

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
        factory, _, _ = played_as(self.environment_factory, self.episode_limits)
        findings, tasks = [], []
        for number, task in enumerate(self.tasks, 1):
            try:
                check_task_columns(factory, task)
                tasks.append(task)
            except ValueError as error:
                findings.append(Kind.REFUSED.found(error=f"task {number}: {error}"))
        with EnvironmentPool(factory, self.one_worker) as pool, EnvironmentPool(factory, self.one_worker) as second:
            failures = [] if self.is_agent else first_steps(pool, tasks, tasks)[1]
            answer = random_answer(random.Random(0), self.texts)
            played = play(second, [] if slow(failures) else tasks, self.episodes, self.episode_limits, answer)
            failures += played.failures
            if self.is_agent:
                findings += measure.failures(failures)
            elif slow(failures):  # which the test of the contract, in this process, would suffer from
                return measure.failures(slow(failures)[:1], "it")
            else:
                for task in tasks:
                    findings += contract_findings(factory, task, None, self.turns)
                findings += [] if has_errors(findings) else measure.failures(failures, "it")
            findings += measure.environment_findings(played)
            if not played.episodes or (has_errors(findings) and not self.is_agent):
                return findings
            again = [] if failures else [self._replayed(pool, tasks, played)]
        findings += measure.agent_findings(played, self.turns) if self.is_agent else []
        findings += self._states(played)
        # Of words that an agent does not understand nothing is expected.
        if played.has_tools or (self.texts is not TEXTS if self.is_agent else played.lists_actions):
            who = "random responses" if self.is_agent else "random actions"
            findings.append(measure.outcomes(played, self.turns, who))
        return findings + again

    def _replayed(self, pool: EnvironmentPool, tasks: Sequence[dict[str, Any]], played: Played) -> Finding:
        """Return a finding about replays in another process: of each task's longest episode, alone and then not."""
        for task, group in zip(tasks, played.groups):
            longest = sorted(group, key=lambda trajectory: len(trajectory.steps))[-2:]
            for episodes in (longest[-1:], (longest * 2)[-2:]) if longest else ():
                if different := replay_difference(pool, task, episodes):
                    return different
        return Kind.CONTRACT_KEPT.found()

    def _states(self, played: Played, kind: str = "random ") -> list[Finding]:
        """Return findings about what training compares, with the keys of training, and further ones."""
        key = make_state_key(self.state_key, self.state_key_ignores)
        by_key = measure.recurrence_by_key(played, key) if self.is_agent else []
        if key is not None:
            assign_keys(played.episodes, key)
        findings = measure.faults(played)
        if not any(finding.kind is Kind.SINGLE_STATE for finding in findings):
            findings += measure.recurrence(played, kind, self.is_agent)
        return findings + by_key + measure.spelled_words(played.steps, self.model)

    def _model(
        self, actor: Actor, sampling: Sampling, settings: Any, template: PromptTemplate | None
    ) -> list[Finding]:
        playing = self.environment_factory, self.episode_limits, template and template.of(self.name), settings.history
        factory, template, history = played_as(*playing)
        lengths = {name: getattr(settings, name) for name in ("history_length", "max_prompt_length")}
        actor = replace(actor, template=template, history=history, **lengths)
        rows, usage = [task for task in self.tasks for _ in range(self.episodes)], []
        numbers = range(len(rows))
        groups, seeds = [n // self.episodes for n in numbers], [derived_seed(0, n) for n in numbers]
        with EnvironmentPool(factory, self.limits) as pool:
            player = Player(pool, actor, self.episode_limits)
            played, _ = player.play(rows, sampling, groups, seeds, None, lambda one: usage.extend(one.usage))
        played = Played.of(played, self.episodes)
        findings = measure.failures(played.failures, "the agent" if self.is_agent else "an episode")
        if not played.episodes:
            return findings
        findings += measure.agent_findings(played, self.turns) if self.is_agent else []
        findings += measure.completion_findings(played, usage)
        had_effect = any(step.admissible is not False for step in played.steps)
        findings += self._states(played, kind="") if had_effect else measure.faults(played)
        return [*findings, measure.outcomes(played, self.turns, "the model's responses")]

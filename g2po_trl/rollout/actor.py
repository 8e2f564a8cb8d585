"""Actors choose actions: `PromptActor` prompts a language model with each observation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..engines.sampling import Sampling, derived_seed
from ..prompts.fitting import FittedPrompt, PromptTooLongError, fit_prompt
from ..prompts.template import DEFAULT_PROMPT, PromptTemplate, last_steps
from ..prompts.tokenization import ChatEncoder
from ..trajectory import Step
from .episode import Episode
from .loop import Session
from .stats import RolloutStats

if TYPE_CHECKING:
    from ..engines.base import Completion, Engine


class Actor(Protocol):
    """Chooses the actions of a `Player`'s episodes.

    `is_collective`: every rank must call a session's `receive_steps` equally often. `streams`: its sessions return
    an episode's step without waiting for others.
    """

    is_collective: bool
    streams: bool

    def rollout(self) -> AbstractContextManager[None]:
        """Return a context for several sessions of one policy."""

    def session(self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats) -> Session:
        """Return a session that answers one rollout's episodes, with a seed per episode, by its number."""

    def close(self) -> None:
        """Free memory and processes. Nothing is answered afterwards."""


@dataclass
class PromptActor:
    """A language model whose prompt has the observation and the last steps, and whose completion names an action.

    Args:
        engine: generates completions, e.g. a `TransformersEngine`.
        encode: renders and tokenizes chat messages.
        template: the prompt's wording, and the parser of the completion.
        history_length: number of past steps in a prompt.
        max_prompt_length: maximum prompt length in tokens. Longer prompts lose history first, then the middle of the
            observation; one that is still too long ends its episode as a failure. `None`: no limit.
    """

    engine: Engine
    encode: ChatEncoder
    template: PromptTemplate = DEFAULT_PROMPT
    history_length: int = 2
    max_prompt_length: int | None = None

    @classmethod
    def from_engine(cls, engine: Engine, template: PromptTemplate = DEFAULT_PROMPT, **options: Any) -> PromptActor:
        """Return an actor that uses the chat template of the engine's tokenizer.

        Args:
            engine: generates completions.
            template: the prompt's wording, and the parser of the completion.
            **options: `history_length`, `max_prompt_length`.
        """
        return cls(engine, ChatEncoder(engine.tokenizer), template, **options)

    @property
    def is_collective(self) -> bool:
        return self.engine.is_collective

    @property
    def streams(self) -> bool:
        """Whether episodes are answered one by one: completions then must not depend on their order."""
        return self.engine.streams and self.engine.takes_seeds

    def rollout(self) -> AbstractContextManager[None]:
        return self.engine.rollout()

    def close(self) -> None:
        self.engine.close()

    def session(self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats) -> PromptSession:
        return PromptSession(self, sampling, seeds, stats)


@dataclass
class PromptSession:
    """Prompts and completions of one rollout."""

    actor: PromptActor
    sampling: Sampling
    seeds: Sequence[int] | None
    stats: RolloutStats
    prompts: dict[int, FittedPrompt] = field(default_factory=dict)  # by the episode's number
    asked: dict[int, Episode] = field(default_factory=dict)  # those whose completions are awaited

    @property
    def waiting(self) -> int:
        return len(self.asked)

    def ask(self, episodes: Sequence[Episode]) -> None:
        clock = time.perf_counter()
        self._build_prompts(episodes)
        self.stats.prompt_time += time.perf_counter() - clock
        self.asked |= {episode.number: episode for episode in episodes if episode.number in self.prompts}
        if self.actor.streams:
            for episode in episodes:
                if episode.number in self.prompts:
                    prompt, seed = self.prompts[episode.number].ids, self._seed(episode)
                    self.actor.engine.submit(episode.number, prompt, self.sampling, seed)

    def receive_steps(self, timeout: float) -> list[tuple[Episode, Step]]:
        if not self.asked and not self.actor.is_collective:
            return []
        clock = time.perf_counter()
        completions = self.actor.engine.poll(timeout) if self.actor.streams else self._generate()
        self.stats.generation_time += time.perf_counter() - clock
        prompts = [self.prompts.pop(number) for number in completions]
        self._count(prompts, list(completions.values()))
        answered = [self.asked.pop(number) for number in completions]
        return [(episode, self._step(episode, *row)) for episode, *row in zip(answered, prompts, completions.values())]

    def _generate(self) -> dict[int, Completion]:
        """Return one completion per prompt, by the episode's number."""
        prompts = [self.prompts[number].ids for number in self.asked]
        seeds = None if self.seeds is None else [self._seed(episode) for episode in self.asked.values()]
        engine = self.actor.engine
        completions = engine.generate(prompts, self.sampling, seeds)
        if len(completions) != len(prompts):
            raise RuntimeError(
                f"{type(engine).__name__}.generate returned {len(completions)} completions for {len(prompts)} "
                "prompts: return one per prompt, in order"
            )
        return dict(zip(self.asked, completions))

    def _seed(self, episode: Episode) -> int | None:
        return None if self.seeds is None else derived_seed(self.seeds[episode.number], len(episode.steps))

    def _build_prompts(self, episodes: Sequence[Episode]) -> None:
        actor = self.actor
        contents = [prompt_contents(episode, actor.history_length) for episode in episodes]
        texts = [actor.encode.text(actor.template.messages(**shown)) for shown in contents]
        for episode, ids, text, shown in zip(episodes, actor.encode.ids(texts), texts, contents):
            if actor.max_prompt_length is None or len(ids) <= actor.max_prompt_length:
                self.prompts[episode.number] = FittedPrompt(ids, text, False)
                continue
            try:
                prompt = fit_prompt(actor.template, actor.encode, actor.max_prompt_length, **shown)
            except PromptTooLongError as error:
                episode.give_up(f"prompt too long: {error}")
            else:
                self.prompts[episode.number] = prompt

    def _count(self, prompts: Sequence[FittedPrompt], completions: Sequence[Completion]) -> None:
        stats = self.stats
        stats.truncated_prompts += sum(prompt.truncated for prompt in prompts)
        stats.prompt_tokens += sum(len(prompt.ids) for prompt in prompts)
        stats.generated_tokens += sum(len(completion.ids) for completion in completions)
        stats.truncated_completions += sum(not completion.complete for completion in completions)
        stats.repeated_requests += sum(completion.repeats for completion in completions)
        stats.engine_metrics = self.actor.engine.metrics()
        for prompt, completion in zip(prompts, completions):
            if completion.cached_tokens is not None:
                stats.cacheable_tokens += len(prompt.ids)
                stats.cached_tokens += completion.cached_tokens

    def _step(self, episode: Episode, prompt: FittedPrompt, completion: Completion) -> Step:
        text = self.actor.encode.decode(completion.ids)
        admissible = episode.observation.admissible_actions
        action, valid = self.actor.template.read(text, prompt.text[-64:], admissible)
        return episode.step(
            action,
            text,
            valid=valid,
            prompt_ids=prompt.ids,
            completion_ids=completion.ids,
            logprobs=completion.logprobs,
            prompt_truncated=prompt.truncated,
            completion_truncated=not completion.complete,
        )


def prompt_contents(episode: Episode, history_length: int) -> dict[str, Any]:
    """Return the arguments of `PromptTemplate.messages` for an episode's next step."""
    return {
        "observation": episode.observation.text,
        "task": episode.task,
        "admissible_actions": episode.observation.admissible_actions,
        "history": last_steps(episode.history, history_length),
        "steps_taken": episode.turns,
    }

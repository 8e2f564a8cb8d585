"""Actors choose actions: `PromptActor` prompts a language model with each observation."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from ..engines.sampling import Sampling, derived_seed
from ..environments.contract import Observation
from ..prompts.conversation import ChatRequest
from ..prompts.conversation_encoder import ConversationEncoder
from ..prompts.images import UnreadableImageError
from ..prompts.template import DEFAULT_PROMPT, Prompt, PromptError, PromptTemplate, fit_prompt, last_steps
from ..prompts.tokenization import ChatEncoder
from ..trajectory import Step
from ..utils.errors import G2POError
from .conversations import Conversations, read_action, recorded, request_of, sampling_of
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
        """Return a context for several sessions of the same policy."""

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
        history: `"window"`: each prompt is one message with the last steps. `"conversation"`: observations and
            completions in turns, from the first one on. For environments that send chat requests, these are the
            prompts. `None`, with several environments: as `"window"`.
        max_prompt_length: maximum prompt length in tokens. Longer prompts lose history first, then the middle of the
            observation; one that is still too long ends its episode as a failure. `None`: no limit.
        context_length: maximum tokens of a prompt and its completion together. An episode whose prompt leaves no room
            for the longest completion ends as a failure. `None`: not checked.
    """

    engine: Engine
    encode: ChatEncoder
    template: PromptTemplate = DEFAULT_PROMPT
    history_length: int = 2
    max_prompt_length: int | None = None
    history: str | None = "window"
    context_length: int | None = None

    @classmethod
    def of(cls, args: Any, engine: Engine, processing_class: Any, template: PromptTemplate, **options) -> PromptActor:
        """Return the actor with the attributes of `args`. Tests that the chat template renders the prompt."""
        encode = ChatEncoder(processing_class, args.chat_template_kwargs)
        encode(template.messages("observation", "task"))
        return cls(engine, encode, template, args.history_length, args.max_prompt_length, **options)

    @cached_property
    def conversation_encoder(self) -> ConversationEncoder:
        """The encoder of chat requests and conversations."""
        return ConversationEncoder(self.encode, self.engine.stop_token_ids)

    def converses(self, seen: Observation) -> bool:
        """Return whether an observation is answered in a conversation."""
        return self.history == "conversation" or seen.request is not None

    def choose_template(self, first: Observation) -> None:
        """Choose the chat template of conversations now, if a task's first observation is to be answered in one."""
        self.check_images(first)
        if self.converses(first):
            self.conversation_encoder  # noqa: B018 (the property is cached)

    def check_images(self, seen: Observation) -> None:
        """Refuse (`G2POError`) an observation with images if the engine or the model reads text only."""
        if seen.images and (reason := self.engine.reads_text_because) is not None:
            what = f"the observation has {len(seen.images)} images, and {reason}; or let it have only text"
            raise G2POError(what, "images", seen.images)

    def saved_template(self) -> AbstractContextManager[None]:
        """Return a context in which the tokenizer is saved with the chat template that writes the prompts."""
        return self.conversation_encoder.saved() if "conversation_encoder" in vars(self) else nullcontext()

    def describe_template(self) -> dict[str, str]:
        """Return the origin of the chat template that writes the prompts, the model or TRL, and its hash."""
        encode = self.conversation_encoder.encode if "conversation_encoder" in vars(self) else self.encode
        text = json.dumps(encode.text.template, sort_keys=True)
        whose = "TRL, for training" if encode is not self.encode else "the model"
        return {"of": whose, "hash": hashlib.sha256(text.encode()).hexdigest()[:16]}

    @classmethod
    def from_engine(cls, engine: Engine, template: PromptTemplate = DEFAULT_PROMPT, **options: Any) -> PromptActor:
        """Return an actor that uses the chat template of the engine's tokenizer; `options` are its further fields."""
        return cls(engine, ChatEncoder(engine.processing_class), template, **options)

    @property
    def is_collective(self) -> bool:
        return self.engine.is_collective

    @property
    def streams(self) -> bool:
        """Whether episodes are answered one by one. Completions must then not depend on the order."""
        return self.engine.streams and self.engine.takes_seeds

    def rollout(self) -> AbstractContextManager[None]:
        return self.engine.rollout()

    def close(self) -> None:
        self.engine.close()

    def session(self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats) -> PromptSession:
        return PromptSession(self, sampling, seeds, stats)


@dataclass
class Asked:
    """A prompt whose completion is pending. `request`: for a conversation, the request that it renders."""

    episode: Episode
    prompt: Prompt
    sampling: Sampling
    request: ChatRequest | None = None


@dataclass
class PromptSession:
    """Prompts and completions of one rollout."""

    actor: PromptActor
    sampling: Sampling
    seeds: Sequence[int] | None
    stats: RolloutStats
    asked: dict[int, Asked] = field(default_factory=dict)  # by the episode's number

    @property
    def waiting(self) -> int:
        return len(self.asked)

    @cached_property
    def conversations(self) -> Conversations:
        actor = self.actor
        return Conversations(actor.conversation_encoder, actor.template, actor.max_prompt_length, self.stats)

    def ask(self, episodes: Sequence[Episode]) -> None:
        clock = time.perf_counter()
        for episode in episodes:
            self.actor.check_images(episode.observation)
        windows = self._windows([episode for episode in episodes if not self.actor.converses(episode.observation)])
        made = [self._asked(episode, windows.get(episode.number)) for episode in episodes]
        new = {asked.episode.number: asked for asked in made if asked is not None}
        self.stats.prompt_time += time.perf_counter() - clock
        self.asked |= new
        for number, asked in new.items() if self.actor.streams else ():
            more = {"images": asked.prompt.images} if asked.prompt.images else {}
            self.actor.engine.submit(number, asked.prompt.ids, asked.sampling, self._seed(asked.episode), **more)

    def receive_steps(self, timeout: float) -> list[tuple[Episode, Step]]:
        if not self.asked and not self.actor.is_collective:
            return []
        clock = time.perf_counter()
        completions = self.actor.engine.poll(timeout) if self.actor.streams else self._generate()
        self.stats.generation_time += time.perf_counter() - clock
        answered = [(self.asked.pop(number), completion) for number, completion in completions.items()]
        return [(asked.episode, self._step(asked, completion)) for asked, completion in answered]

    def _generate(self) -> dict[int, Completion]:
        """Return one completion per prompt, by the episode's number.

        One call of the engine for each sampling; a collective engine, which all ranks call equally often, gets one
        call, and its completions are cut where their requests end them.
        """
        engine, left = self.actor.engine, list(self.asked.values())
        completions: dict[int, Completion] = {}
        while left or not completions:
            sampling = self.sampling if engine.is_collective else left[0].sampling
            now = [asked for asked in left if engine.is_collective or asked.sampling == sampling]
            left = [asked for asked in left if not engine.is_collective and asked.sampling != sampling]
            seeds = None if self.seeds is None else [self._seed(asked.episode) for asked in now]
            images = [asked.prompt.images for asked in now]
            more = {"images": images} if any(images) else {}
            made = engine.generate([asked.prompt.ids for asked in now], sampling, seeds, **more)
            if len(made) != len(now):
                name, what = type(engine).__name__, "return one per prompt, in order"
                raise RuntimeError(f"{name}.generate returned {len(made)} completions for {len(now)} prompts: {what}")
            for asked, completion in zip(now, made):
                is_whole = asked.sampling == sampling
                completions[asked.episode.number] = completion if is_whole else engine.cut(completion, asked.sampling)
            if not now:
                break
        return {number: completions[number] for number in self.asked}

    def _seed(self, episode: Episode) -> int | None:
        return None if self.seeds is None else derived_seed(self.seeds[episode.number], len(episode.steps))

    def _windows(self, episodes: Sequence[Episode]) -> dict[int, tuple[dict[str, Any], Prompt]]:
        """Return contents and prompts with the last steps by the episodes' numbers, tokenized in one call."""
        encode, templates = self.actor.encode, self.actor.template
        contents = [prompt_contents(episode, self.actor.history_length) for episode in episodes]
        texts = [encode.text(templates.of(e.environment).messages(**shown)) for e, shown in zip(episodes, contents)]
        prompts = [Prompt(ids, text) for ids, text in zip(encode.ids(texts), texts)]
        return {episode.number: window for episode, *window in zip(episodes, contents, prompts)}

    def _asked(self, episode: Episode, window: tuple[dict[str, Any], Prompt] | None) -> Asked | None:
        """Return an episode's prompt, with its window or, without one, of its conversation.

        The episode ends if the prompt cannot be made, or leaves no room for the longest completion.
        """
        actor, sampling, request = self.actor, self.sampling, None
        template, limit = actor.template.of(episode.environment), actor.max_prompt_length
        try:
            if window is None:
                request = request_of(episode, template)
                prompt, sampling = self.conversations.prompt(episode, request), sampling_of(request, sampling)
            else:
                shown, prompt = window
                if "images" in shown or limit is not None and len(prompt.ids) > limit:
                    prompt = fit_prompt(template, actor.encode, limit, **shown)
        except UnreadableImageError as error:
            episode.outcome, episode.error = "error", f"invalid: {error}"
            return None
        except PromptError as error:
            return episode.give_up(str(error))
        length, most = len(prompt.ids), sampling.max_completion_length
        if actor.context_length is not None and length + most > actor.context_length:
            counted = f"{length} tokens and {most} of the completion exceed the model's {actor.context_length}"
            return episode.give_up(f"context overflow: {counted}")
        return Asked(episode, prompt, sampling, request)

    def _step(self, asked: Asked, completion: Completion) -> Step:
        episode, prompt, stats = asked.episode, asked.prompt, self.stats
        tokens, cached = len(prompt.ids), completion.cached_tokens
        stats.truncated_prompts += prompt.truncated
        stats.prompt_tokens += tokens
        stats.generated_tokens += len(completion.ids)
        stats.truncated_completions += not completion.complete
        stats.cacheable_tokens += 0 if cached is None else tokens
        stats.cached_tokens += cached or 0
        if asked.request is not None:
            return self.conversations.step(episode, asked.request, prompt, completion)
        text = self.actor.encode.decode(completion.ids, self.actor.engine.stop_token_ids)
        fields = recorded(prompt, completion) | read_action(self.actor.template, episode, text, prompt)
        return episode.step(completion=text, **fields)


def prompt_contents(episode: Episode, history_length: int) -> dict[str, Any]:
    """Return the arguments of `PromptTemplate.messages` for an episode's next step."""
    return {
        "observation": episode.observation.text,
        "task": episode.task,
        "admissible_actions": episode.observation.admissible_actions,
        "history": last_steps([(step.observation, step.action) for step in episode.steps], history_length),
        "steps_taken": episode.turns,
        **({"images": episode.observation.images} if episode.observation.images else {}),
    }

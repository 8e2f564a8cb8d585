"""Actors of an evaluation: the actor of training, with a count of tokens, and chat models that read text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from ..engines.sampling import Sampling, derived_seed
from ..prompts.conversation import ChatRequest, prefix_digests, response_action
from ..prompts.conversation_encoder import Transcript
from ..prompts.tool_calls import call_in
from ..rollout.actor import PromptActor, PromptSession
from ..rollout.episode import Episode
from ..rollout.stats import RolloutStats
from ..trajectory import Step
from ..utils.errors import G2POError
from .agents import Agent, DirectAgent
from .chat_models import ChatCompletion, ChatModel, EngineChat

Count = Callable[[Episode, ChatCompletion], None]


@dataclass
class MeteredActor(PromptActor):
    """The actor of training with a count of tokens, for a model in this process.

    Args:
        check: called before each request; an error that it raises ends the evaluation.
        count: called with each episode that gets a completion, and the completion.
    """

    check: Callable[[], None] = lambda: None
    count: Count = lambda episode, completion: None

    def session(self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats) -> MeteredSession:
        return MeteredSession(self, sampling, seeds, stats)


class MeteredSession(PromptSession):
    """Session of a `MeteredActor`."""

    def ask(self, episodes: Sequence[Episode]) -> None:
        self.actor.check()
        super().ask(episodes)

    def receive_steps(self, timeout: float) -> list[tuple[Episode, Step]]:
        steps = super().receive_steps(timeout)
        for episode, step in steps:
            if step.messages is None:  # the folder of an evaluation has no tokenizer for the viewer
                step.prompt = self.actor.encode.tokenizer.decode(step.prompt_ids)
            end = step.completion_ids[-1:]
            written = len(step.completion_ids) - (bool(end) and end[0] in self.actor.engine.stop_token_ids)
            self.actor.count(episode, ChatCompletion(step.completion, len(step.prompt_ids), written))
        return steps


@dataclass
class ChatActor:
    """An actor that asks a chat model by text, for all waiting episodes at once.

    Args:
        chat: the model.
        agent: the way it is prompted.
        notes: reflections on an episode's earlier trials.
        check, count: as in `MeteredActor`; `count` is called with failed completions as well.
    """

    chat: ChatModel
    agent: Agent
    notes: Callable[[Episode], Sequence[str]]
    check: Callable[[], None]
    count: Count
    is_collective = False
    streams = False

    def rollout(self) -> AbstractContextManager[None]:
        return nullcontext()

    def session(self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats) -> ChatSession:
        return ChatSession(self, sampling, seeds or ())

    def close(self) -> None:
        pass


@dataclass
class ChatSession:
    """Session of a `ChatActor`. `seeds`: one per episode, by its number."""

    actor: ChatActor
    sampling: Sampling
    seeds: Sequence[int]
    asked: list[Episode] = field(default_factory=list)

    @property
    def waiting(self) -> int:
        return len(self.asked)

    def ask(self, episodes: Sequence[Episode]) -> None:
        self.asked += episodes

    def receive_steps(self, timeout: float) -> list[tuple[Episode, Step | None]]:
        episodes, self.asked = self.asked, []
        if not episodes:
            return []
        actor = self.actor
        actor.check()
        for one in episodes:
            if one.observation.images:
                raise G2POError(
                    f"the observation has {len(one.observation.images)} images, and this model reads text only: "
                    "evaluate a vision-language checkpoint, with --agent direct"
                )
        requests = [actor.agent.of(one.environment).ask(one, actor.notes(one)) for one in episodes]
        seeds = [derived_seed(self.seeds[episode.number], len(episode.steps)) for episode in episodes]
        completions = actor.chat.generate(requests, self.sampling, seeds)
        return [
            (episode, self._step(episode, request, completion))
            for episode, request, completion in zip(episodes, requests, completions, strict=True)
        ]

    def _step(self, episode: Episode, request: ChatRequest, completion: ChatCompletion) -> Step | None:
        """Return the next step of an episode; without a completion the episode ends."""
        self.actor.count(episode, completion)
        episode.unseen_tokens += completion.completion_tokens
        if completion.error:
            episode.give_up(f"context overflow: {completion.error}")
            return None
        truncated = not completion.complete
        if episode.observation.request is not None:
            return _response_step(episode, request, completion, truncated)
        admissible = episode.observation.admissible_actions
        agent = self.actor.agent.of(episode.environment)
        action, valid = agent.read(completion.text, completion.prompt_end, admissible)
        shown = request.messages[-1]["content"]
        call = call_in(agent.template, action, valid) if isinstance(agent, DirectAgent) else None
        about = {"valid": valid, "call": call, "completion_truncated": truncated, "prompt": shown}
        return episode.step(action, completion.text, **about)


def _response_step(episode: Episode, request: ChatRequest, completion: ChatCompletion, truncated: bool) -> Step:
    """Return the step that answers an environment's chat request with an assistant message."""
    answer = completion.message
    transcript = episode.transcript = episode.transcript or Transcript()
    digests = prefix_digests(request.messages, request.tools)
    known = [place for place, digest in enumerate(digests) if digest in transcript.ids]
    whole = prefix_digests([*request.messages, answer], request.tools)[-1]
    transcript.ids[whole] = [], []  # a server reports no ids
    valid = request.is_valid(answer)
    return episode.step(
        response_action(answer),
        completion.text,
        valid=valid,
        call=request.call_in(answer, completion.text, valid),
        completion_truncated=truncated,
        messages=request.messages[max(known, default=0) :],
    )


def make_actor(
    chat: ChatModel,
    agent: Agent,
    notes: Callable[[Episode], Sequence[str]] = lambda episode: (),
    check: Callable[[], None] = lambda: None,
    count: Count = lambda episode, completion: None,
) -> MeteredActor | ChatActor:
    """Return the actor of an evaluation; for a model in this process that is asked as in training, training's own."""
    if not isinstance(chat, EngineChat) or not isinstance(agent, DirectAgent):
        return ChatActor(chat, agent, notes, check, count)
    return MeteredActor(
        chat.engine,
        chat.encode,
        agent.template,
        agent.history_length,
        agent.max_prompt_length,
        agent.history,
        context_length=chat.longest,
        check=check,
        count=count,
    )

"""The actor of an evaluation: training's own with a count of tokens, or one that asks a chat model by text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engines.sampling import Sampling, derived_seed
from ..prompts.conversation import ChatRequest, Message, prefix_digests, response_action
from ..prompts.conversation_encoder import Transcript
from ..prompts.tool_calls import call_in
from ..rollout.actor import PromptActor, PromptSession
from ..rollout.episode import Episode
from ..rollout.stats import RolloutStats
from ..trajectory import Step
from ..utils.options import require
from .agents import Agent, DirectAgent

if TYPE_CHECKING:
    from .chat_models import ChatCompletion, ChatModel


class TextActor:
    """Base of actors without token ids, which answer all waiting episodes at once. It is its own session."""

    is_collective = streams = False
    asked: Sequence[Episode] = ()

    @property
    def waiting(self) -> int:
        return len(self.asked)

    def rollout(self) -> AbstractContextManager[None]:
        return nullcontext()

    def session(self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats) -> Any:
        self.sampling, self.seeds, self.asked = sampling, seeds, ()
        return self

    def ask(self, episodes: Sequence[Episode]) -> None:
        self.asked = [*self.asked, *episodes]

    def receive_steps(self, timeout: float) -> list[tuple[Episode, Step | None]]:
        episodes, self.asked = self.asked, ()
        return list(zip(episodes, self.answer(episodes), strict=True)) if episodes else []

    def answer(self, episodes: Sequence[Episode]) -> list[Step | None]:
        """Return the next step of each episode, or `None` for one that has been ended."""
        raise NotImplementedError

    def close(self) -> None:
        pass


@dataclass
class EvaluationActor(TextActor):
    """An actor that asks a chat model, as training does where it can: a model in this process, without other prompts.

    Args:
        chat: the model.
        agent: the way it is prompted.
        notes: reflections on an episode's earlier trials.
        check: called before each request; an error that it raises ends the evaluation.
        count: called with each episode that gets a completion, also a failed one, and its tokens.
    """

    chat: ChatModel
    agent: Agent
    notes: Callable[[Episode], Sequence[str]] = lambda episode: ()
    check: Callable[[], None] = lambda: None
    count: Callable[[Episode, ChatCompletion], None] = lambda episode, completion: None

    def __post_init__(self):
        self.prompts = None
        if self.chat.engine is not None and isinstance(self.agent, DirectAgent):
            settings = self.agent.history_length, self.agent.max_prompt_length, self.agent.history, self.chat.longest
            self.prompts = PromptActor(self.chat.engine, self.chat.encode, self.agent.template, *settings)
            self.streams = self.prompts.streams

    def rollout(self) -> AbstractContextManager[None]:
        return self.prompts.rollout() if self.prompts else super().rollout()

    def session(self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats) -> Any:
        if self.prompts:
            return TokenSession(self.prompts, sampling, seeds, stats, owner=self)
        return super().session(sampling, seeds, stats)

    def answer(self, episodes: Sequence[Episode]) -> list[Step | None]:
        self.check()
        for episode in episodes:
            remedy = "this model reads text only; evaluate a vision-language checkpoint, with --agent direct"
            require(not episode.observation.images, "images", len(episode.observation.images), remedy)
        requests = [self.agent.ask(episode, self.notes(episode)) for episode in episodes]
        seeds = [derived_seed(self.seeds[episode.number], len(episode.steps)) for episode in episodes]
        completions = self.chat.generate(requests, self.sampling, seeds)
        return list(map(self._step, episodes, requests, completions))

    def _step(self, episode: Episode, request: ChatRequest, completion: ChatCompletion) -> Step | None:
        self.count(episode, completion)
        episode.unseen_tokens += completion.completion_tokens
        if completion.error:
            return episode.give_up(f"context overflow: {completion.error}")
        text, fields = completion.text, {"completion_truncated": not completion.complete}
        if episode.observation.request is not None:
            answer = completion.message
            action, valid = response_action(answer), request.is_valid(answer)
            fields["call"] = request.call_in(answer, text, valid)
            fields["messages"] = _new_messages(episode, request, answer)
        else:
            action, valid = self.agent.read(text, episode)
            fields["prompt"] = request.messages[-1]["content"]
            if isinstance(self.agent, DirectAgent):
                fields["call"] = call_in(self.agent.template.of(episode.environment), action, valid)
        return episode.step(action, text, valid=valid, **fields)


@dataclass(kw_only=True)
class TokenSession(PromptSession):
    """Session of training's actor, whose tokens are counted."""

    owner: EvaluationActor

    def ask(self, episodes: Sequence[Episode]) -> None:
        self.owner.check()
        super().ask(episodes)

    def receive_steps(self, timeout: float) -> list[tuple[Episode, Step]]:
        steps = super().receive_steps(timeout)
        for episode, step in steps:
            if step.messages is None:  # the folder of an evaluation has no tokenizer for the viewer
                step.prompt = self.actor.encode.tokenizer.decode(step.prompt_ids)
            self.owner.count(episode, self.owner.chat.counted(step.completion, step.prompt_ids, step.completion_ids))
        return steps


def _new_messages(episode: Episode, request: ChatRequest, answer: Message) -> Sequence[Message]:
    """Return the messages of a request that follow the last completion, and note the conversation with its answer."""
    known = episode.transcript = episode.transcript or Transcript()
    digests = prefix_digests([*request.messages, answer], request.tools)
    start = max((index for index, digest in enumerate(digests[:-1]) if digest in known.ids), default=0)
    known.ids[digests[-1]] = [], []  # a server reports no ids
    return request.messages[start:]

"""The actor of an evaluation: training's own with a count of tokens, or one that asks a chat model by text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

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
from .chat_models import ChatCompletion, ChatModel, EngineChat


@dataclass
class EvaluationActor:
    """An actor that asks a chat model, as training does where it can: a model in this process, without other prompts.

    Args:
        chat: the model.
        agent: the way it is prompted.
        notes: reflections on an episode's earlier trials.
        check: called before each request; an error that it raises ends the evaluation.
        count: called with each episode that gets a completion, also a failed one, and the completion.
    """

    chat: ChatModel
    agent: Agent
    notes: Callable[[Episode], Sequence[str]] = lambda episode: ()
    check: Callable[[], None] = lambda: None
    count: Callable[[Episode, ChatCompletion], None] = lambda episode, completion: None
    is_collective = False

    def __post_init__(self):
        self.prompts = None
        if isinstance(self.chat, EngineChat) and isinstance(self.agent, DirectAgent):
            settings = self.agent.history_length, self.agent.max_prompt_length, self.agent.history, self.chat.longest
            self.prompts = PromptActor(self.chat.engine, self.chat.encode, self.agent.template, *settings)

    @property
    def streams(self) -> bool:
        return self.prompts is not None and self.prompts.streams

    def rollout(self) -> AbstractContextManager[None]:
        return self.prompts.rollout() if self.prompts else nullcontext()

    def session(
        self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats
    ) -> TokenSession | TextSession:
        if self.prompts:
            return TokenSession(self.prompts, sampling, seeds, stats, owner=self)
        return TextSession(self, sampling, seeds or ())

    def close(self) -> None:
        pass


@dataclass(kw_only=True)
class TokenSession(PromptSession):
    """Session of training's actor, whose tokens are counted."""

    owner: EvaluationActor

    def ask(self, episodes: Sequence[Episode]) -> None:
        self.owner.check()
        super().ask(episodes)

    def receive_steps(self, timeout: float) -> list[tuple[Episode, Step]]:
        steps, engine = super().receive_steps(timeout), self.actor.engine
        for episode, step in steps:
            if step.messages is None:  # the folder of an evaluation has no tokenizer for the viewer
                step.prompt = self.actor.encode.tokenizer.decode(step.prompt_ids)
            written = len(step.completion_ids) - sum(
                token in engine.stop_token_ids for token in step.completion_ids[-1:]
            )
            self.owner.count(episode, ChatCompletion(step.completion, len(step.prompt_ids), written))
        return steps


@dataclass
class TextSession:
    """Session of a chat model that is asked for all waiting episodes at once. `seeds`: one per episode's number."""

    actor: EvaluationActor
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
        for episode in episodes:
            remedy = "this model reads text only; evaluate a vision-language checkpoint, with --agent direct"
            require(not episode.observation.images, "images", len(episode.observation.images), remedy)
        requests = [actor.agent.of(each.environment).ask(each, actor.notes(each)) for each in episodes]
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
        fields = {"completion_truncated": not completion.complete}
        if episode.observation.request is not None:
            answer = completion.message
            action, valid = response_action(answer), request.is_valid(answer)
            fields |= {
                "call": request.call_in(answer, completion.text, valid),
                "messages": _new(episode, request, answer),
            }
        else:
            agent = self.actor.agent.of(episode.environment)
            action, valid = agent.read(completion.text, completion.prompt_end, episode.observation.admissible_actions)
            fields["prompt"] = request.messages[-1]["content"]
            fields["call"] = call_in(agent.template, action, valid) if isinstance(agent, DirectAgent) else None
        return episode.step(action, completion.text, valid=valid, **fields)


def _new(episode: Episode, request: ChatRequest, answer: Message) -> Sequence[Message]:
    """Return the messages of a request that follow the last completion, and note the conversation with its answer."""
    known = episode.transcript = episode.transcript or Transcript()
    digests = prefix_digests([*request.messages, answer], request.tools)
    start = max((index for index, digest in enumerate(digests[:-1]) if digest in known.ids), default=0)
    known.ids[digests[-1]] = [], []  # a server reports no ids
    return request.messages[start:]

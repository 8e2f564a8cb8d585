"""The conversations of a rollout: chat requests become prompts, and completions their responses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..engines.sampling import Sampling
from ..prompts.conversation import ChatRequest, Message, response_action
from ..prompts.conversation_encoder import ConversationEncoder, Transcript
from ..prompts.template import Prompt, PromptTemplate
from ..prompts.tool_calls import call_in
from ..trajectory import Step
from .episode import Episode
from .stats import RolloutStats

if TYPE_CHECKING:
    from ..engines.base import Completion


@dataclass
class Conversations:
    """The conversations of running episodes. `stats` counts prompts that could continue others, and that do."""

    encoder: ConversationEncoder
    template: PromptTemplate
    max_prompt_length: int | None
    stats: RolloutStats

    def prompt(self, episode: Episode, request: ChatRequest) -> Prompt:
        """Return the prompt of an episode's request. Raises `PromptError`."""
        transcript = episode.transcript = episode.transcript or Transcript()
        prompt = self.encoder.prompt(request, transcript, self.max_prompt_length)
        if episode.steps:
            self.stats.later_prompts += 1
            self.stats.continued_prompts += prompt.continues > 0
        return prompt

    def step(self, episode: Episode, request: ChatRequest, prompt: Prompt, completion: Completion) -> Step:
        """Return the step that a completion makes."""
        text = self.encoder.decode(completion.ids)
        fields = recorded(prompt, completion) | {"prompt_images": prompt.images or None}
        if episode.observation.request is None:
            answer: Message = {"role": "assistant", "content": text}
            fields |= read_action(self.template, episode, text, prompt)
        else:
            answer, valid = self.encoder.tools.parse(text, completion.ids, prompt.ids, request.tools)
            answer["content"] = cut_before(answer["content"], request.stop)
            if not completion.complete and answer.pop("tool_calls", None):  # its arguments may be cut, too
                answer, valid = {"role": "assistant", "content": text}, False
            valid = valid and request.is_valid(answer)
            new = prompt.messages[prompt.continues + 1 :] if prompt.continues else prompt.messages
            fields |= {"action": response_action(answer), "valid": valid, "messages": list(new)}
            fields["call"] = request.call_in(answer, text, valid)
        if (shown := self._before_stop(completion.ids, request.stop)) is not None:
            episode.transcript.add(prompt, request.tools, answer, shown)
        return episode.step(completion=text, **fields)

    def _before_stop(self, ids: Sequence[int], stops: tuple[str, ...]) -> Sequence[int] | None:
        """Return the ids of a completion before the first of the stops, which is not part of its message."""
        decode = self.encoder.decode
        text = decode(ids)
        shown = cut_before(text, stops)
        if shown == text:
            return ids
        kept = ids[: bisect_right(range(len(ids)), len(shown), key=lambda end: len(decode(ids[:end]))) - 1]
        return kept if decode(kept) == shown else None


def recorded(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    """Return the fields of a step that the engine reports."""
    return {
        "prompt_ids": prompt.ids,
        "completion_ids": completion.ids,
        "logprobs": completion.logprobs,
        "prompt_truncated": prompt.truncated,
        "completion_truncated": not completion.complete,
    }


def read_action(template: PromptTemplate, episode: Episode, text: str, prompt: Prompt) -> dict[str, Any]:
    """Return the fields of a step that the template reads in a completion."""
    template = template.of(episode.environment)
    action, valid = template.read(text, prompt.text[-64:], episode.observation.admissible_actions)
    return {"action": action, "valid": valid, "call": call_in(template, action, valid)}


def request_of(episode: Episode, template: PromptTemplate) -> ChatRequest:
    """Return the environment's request or, if it sends none, the conversation of the episode so far."""
    seen = episode.observation
    if seen.request is not None:
        return seen.request
    first, *later = [*episode.steps, seen]
    text = first.text if first is seen else first.observation
    messages = template.messages(text, episode.task, first.admissible_actions, images=first.images or ())
    for step, then in zip(episode.steps, later):
        text = then.text if then is seen else then.observation
        turn = template.turn_message(text, then.admissible_actions, then.images or ())
        messages += [{"role": "assistant", "content": step.completion}, turn]
    return ChatRequest(messages, shorten=True)


def sampling_of(request: ChatRequest, sampling: Sampling) -> Sampling:
    """Return the trainer's sampling for a request's completion, with an earlier end if the request asks for one."""
    if not request.stop and request.max_tokens is None:
        return sampling
    most = min(sampling.max_completion_length, request.max_tokens or sampling.max_completion_length)
    stops = [*(sampling.stop_sequences or ()), *request.stop]
    return replace(sampling, max_completion_length=most, stop_sequences=stops)


def cut_before(text: str, stops: tuple[str, ...]) -> str:
    """Return the text before the first of the stops."""
    return text[: min([text.index(stop) for stop in stops if stop in text], default=len(text))]

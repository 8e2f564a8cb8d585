"""Demonstrations: an expert's episodes, played by the rollout's own loop and prompts, and the samples of them."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from g2po_trl.engines.base import Completion
from g2po_trl.engines.sampling import Sampling, derived_seed
from g2po_trl.prompts.conversation import Message
from g2po_trl.prompts.conversation_encoder import ConversationEncoder
from g2po_trl.prompts.template import PromptTemplate, last_steps
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.rollout.actor import Asked, PromptActor, PromptSession
from g2po_trl.rollout.episode import Episode
from g2po_trl.rollout.stats import RolloutStats
from g2po_trl.teach.experts import Expert, as_message, prose
from g2po_trl.trajectory import Step, Trajectory
from g2po_trl.utils.options import require

IMAGES = "shown_images"  # column of hashes; from a column named "images", TRL would render the prompts again
_PROBE = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "dummy"}]


@dataclass
class ExpertActor(PromptActor):
    """A `PromptActor` whose completions are an expert's answers; its engine generates nothing."""

    expert: Expert | None = None
    seed: int = 0  # of the expert's random numbers

    @property
    def streams(self) -> bool:
        return False

    def session(self, sampling: Sampling, seeds: Sequence[int] | None, stats: RolloutStats) -> ExpertSession:
        return ExpertSession(self, sampling, seeds, stats)


@dataclass
class ExpertSession(PromptSession):
    """Prompts of one rollout, and an expert's answers as their completions."""

    rngs: dict[int, random.Random] = field(default_factory=dict)  # by the episode's number

    def receive_steps(self, timeout: float) -> list[tuple[Episode, Step | None]]:
        asked, self.asked = list(self.asked.values()), {}
        return [(prompt.episode, self._answer(prompt)) for prompt in asked]

    def _answer(self, asked: Asked) -> Step | None:
        """Return the step that the expert's answer makes, or end the episode if there is none."""
        number = asked.episode.number
        rng = self.rngs.setdefault(number, random.Random(derived_seed(self.actor.seed, number)))
        answer = self.actor.expert(asked.episode, rng)
        if answer is None:
            asked.episode.give_up("no answer: the expert gave up")
            return None
        message, encoder = as_message(answer), self.actor.conversation_encoder
        calls = [call["function"] for call in message.get("tool_calls", ())]
        if asked.episode.observation.request is None:
            listed, encode = asked.episode.observation.admissible_actions, self.actor.encode
            ids = action_ids(encode, self.actor.template, prose(message), asked.prompt.text, listed, self.end)
        else:
            fits = len(calls) < 2 or not encoder.tools.native or encoder.renders_several_calls
            require(fits, "expert", answer, "the chat template writes one call a message: return one at a time")
            ids = message_ids(encoder, asked.prompt.messages, asked.request.tools, message)
        step = self._step(asked, Completion(ids))
        read = [call["function"] for call in (step.response or message).get("tool_calls", ())]
        require(step.valid and read == calls, "expert", answer, f"its completion is read otherwise: {step.action!r}")
        return step

    @cached_property
    def end(self) -> list[int]:
        return end_of_message(self.actor.encode, self.actor.engine.stop_token_ids)


def action_ids(
    encode: ChatEncoder,
    template: PromptTemplate,
    action: str,
    prompt: str,
    listed: Sequence[str] | None,
    end: list[int],
) -> list[int]:
    """Return the ids of an action in the format that the prompt template reads, with the end of the message."""
    return [*encode.ids([encode.text.as_text(template.write(action, prompt[-64:], listed))])[0], *end]


def end_of_message(encode: ChatEncoder, stops: Collection[int]) -> list[int]:
    """Return the token ids with which the chat template ends an assistant's message."""
    text = encode.text(_PROBE, add_generation_prompt=False)
    return _until_stop(encode, text[text.rindex("dummy") + len("dummy") :], stops)


def message_ids(
    encoder: ConversationEncoder, shown: Sequence[Message], tools: list[dict[str, Any]] | None, message: Message
) -> list[int]:
    """Return the ids of an assistant's message as the chat template writes it after the prompt of a request."""
    asked = encoder.encode.text(*encoder.tools.render(shown, tools))

    def spoken(*messages: Message) -> str:
        return spoken_after(asked, encoder.encode.text(*encoder.tools.render([*shown, *messages], tools), False))

    text = spoken(message)
    if encoder.stops.isdisjoint(encoder.encode.ids([text])[0]) and (calls := message.get("tool_calls")):
        # In some templates, the token that ends a call is the one that begins its result.
        text = spoken(message, {"role": "tool", "name": calls[0]["function"]["name"], "content": "dummy"})
    return _until_stop(encoder.encode, text, encoder.stops)


def spoken_after(asked: str, answered: str) -> str:
    """Return what a model writes after the prompt `asked` for a conversation to read `answered`.

    Of a prompt that opens a thought, which the template does not show in past messages, it closes the thought. Any
    other change of the prompt is refused (`G2POError`).
    """
    common = len(os.path.commonprefix([asked, answered]))
    opened, rest = asked[common:].strip(), answered[common:]
    if not opened:
        return rest
    if opened == "<think>":
        return f"</think>\n\n{rest}"
    remedy = "the template changes a prompt once an answer follows: use another model, or --chat-template FILE"
    require(re.fullmatch(r"(<think>\s*)?</think>", opened) is not None, "chat_template", asked[-40:], remedy)
    return re.sub(r"^\s*(<think>\s*)?</think>\s*", "", rest)


def _until_stop(encode: ChatEncoder, text: str, stops: Collection[int]) -> list[int]:
    """Return the ids of a text up to the first token that ends a completion."""
    ids = encode.ids([text])[0]
    end = next((index for index, token in enumerate(ids) if token in stops), None)
    tokens = encode.tokenizer.convert_ids_to_tokens(sorted(stops))
    remedy = f"none of {tokens} ends the message: add what does to eos_token_id of generation_config.json"
    require(end is not None, "chat_template", text[-40:], remedy)
    return list(ids[: end + 1])


def state_rows(
    shown: Iterable[Any], template: PromptTemplate, history_length: int, encode: ChatEncoder, stops: Collection[int]
) -> Iterator[dict[str, list[int]]]:
    """Yield a sample for each state with an expert's action, with the rollout's prompt."""
    end = end_of_message(encode, stops)
    for state in shown:
        history = last_steps(state.history, history_length)
        messages = template.messages(state.observation, state.task, state.actions, history, state.steps_taken)
        prompt, text = encode(messages)
        completion = action_ids(encode, template, state.expert, text, state.actions, end)
        yield {"input_ids": [*prompt, *completion], "labels": [-100] * len(prompt) + completion}


def build_rows(trajectories: Iterable[Trajectory]) -> list[dict[str, Any]]:
    """Return the samples of demonstrations: `input_ids`, `labels`, which are -100 on prompts, and number of `actions`.

    A step whose prompt continues the last step's prompt and completion, with the same images, is in the same row, so
    that a conversation is one row, and each prompt of a window another. If any prompt has images, rows have their
    hashes in a further column.
    """
    rows: list[dict[str, Any]] = []
    for trajectory in trajectories:
        row: dict[str, Any] | None = None
        for step in trajectory.steps:
            prompt, known = list(step.prompt_ids), 0 if row is None else len(row["input_ids"])
            images = list(map(str, step.shown_images))  # of the whole prompt, with those of earlier turns
            if row is None or prompt[:known] != row["input_ids"] or images[: len(row[IMAGES])] != row[IMAGES]:
                row, known = {"input_ids": [], "labels": [], "actions": 0, IMAGES: []}, 0
                rows.append(row)
            row["labels"] += [*[-100] * (len(prompt) - known), *step.completion_ids]
            row["input_ids"] += [*prompt[known:], *step.completion_ids]
            row["actions"] += 1
            row[IMAGES] = images
    hidden = () if any(row[IMAGES] for row in rows) else (IMAGES,)
    return [{name: value for name, value in row.items() if name not in hidden} for row in rows]

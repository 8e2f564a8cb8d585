"""Demonstrations: an expert's episodes, played by the rollout's own loop and prompts.

The expert answers in the place of the engine, and its answer is written as a completion in the format that the prompt
asks for. What is trained is then a step's own prompt and completion.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from g2po_trl.engines.base import Completion
from g2po_trl.engines.sampling import Sampling, derived_seed
from g2po_trl.prompts.conversation import Message
from g2po_trl.prompts.conversation_encoder import ConversationEncoder
from g2po_trl.rollout.actor import Asked, PromptActor, PromptSession
from g2po_trl.rollout.episode import Episode
from g2po_trl.rollout.stats import RolloutStats
from g2po_trl.teach.experts import Expert, as_message, prose
from g2po_trl.teach.images import COLUMN
from g2po_trl.trajectory import Step, Trajectory
from g2po_trl.utils.errors import G2POError

_PROBE = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "dummy"}]


@dataclass
class ExpertActor(PromptActor):
    """A `PromptActor` whose completions are an expert's answers; its engine generates nothing.

    Args:
        expert: chooses the answers.
        seed: of the expert's random numbers.
    """

    expert: Expert | None = None
    seed: int = 0

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
        return [(one.episode, self._answer(one)) for one in asked]

    def _answer(self, one: Asked) -> Step | None:
        """Return the step that the expert's answer makes, or end the episode if there is none.

        Raises:
            G2POError: if the answer cannot be written in the format of the prompt.
        """
        number = one.episode.number
        rng = self.rngs.setdefault(number, random.Random(derived_seed(self.actor.seed, number)))
        answer = self.actor.expert(one.episode, rng)
        if answer is None:
            one.episode.give_up("no answer: the expert gave up")
            return None
        message = as_message(answer)
        if one.episode.observation.request is None:
            ids = self._text_ids(one, message)
        else:
            ids = message_ids(self.actor.conversation_encoder, one.prompt.messages, one.request.tools, message)
        step = self._step(one, Completion(ids))
        if not step.valid:
            raise G2POError(
                f"the expert's answer is {answer!r:.200}, and as a completion it is not well-formed: "
                f"{step.completion!r:.200}. Return an action, a call of a tool or a whole completion"
            )
        return step

    def _text_ids(self, one: Asked, message: Message) -> list[int]:
        """Return the ids of an action in the format that the prompt template reads, with the end of the message."""
        action, listed = prose(message), one.episode.observation.admissible_actions
        encode, text = self.actor.encode, self.actor.template.write(action, one.prompt.text[-64:], listed)
        return [*encode.ids([encode.text.as_text(text)])[0], *self.end]

    @cached_property
    def end(self) -> list[int]:
        """The token ids with which the chat template ends an assistant's message."""
        encode = self.actor.encode
        text = encode.text(_PROBE, add_generation_prompt=False)
        tail = text[text.rindex("dummy") + len("dummy") :]
        return until_stop(encode.ids([tail])[0], self.actor.engine.stop_token_ids, encode.tokenizer)


def message_ids(
    encoder: ConversationEncoder, shown: Sequence[Message], tools: list[dict[str, Any]] | None, message: Message
) -> list[int]:
    """Return the ids of an assistant's message as the chat template writes it after the prompt of a request.

    Raises:
        G2POError: if the template changes the prompt once an answer follows, or does not end the message.
    """
    asked = encoder.encode.text(*encoder.tools.render(shown, tools))

    def spoken(*messages: Message) -> list[int]:
        text = encoder.encode.text(*encoder.tools.render([*shown, *messages], tools), False)
        return encoder.encode.ids([spoken_after(asked, text)])[0]

    ids = spoken(message)
    if encoder.stops.isdisjoint(ids) and (calls := message.get("tool_calls")):
        # In some templates, the token that ends a call is the one that begins its result.
        ids = spoken(message, {"role": "tool", "name": calls[0]["function"]["name"], "content": "dummy"})
    return until_stop(ids, encoder.stops, encoder.encode.tokenizer)


def spoken_after(asked: str, answered: str) -> str:
    """Return what a model writes after the prompt `asked` for a conversation to read `answered`.

    Of a prompt that opens a thought, which the template does not show in past messages, it closes the thought.

    Raises:
        G2POError: if the template changes the prompt in another way.
    """
    common = len(os.path.commonprefix([asked, answered]))
    opened, rest = asked[common:].strip(), answered[common:]
    if not opened:
        return rest
    if opened == "<think>":
        return f"</think>\n\n{rest}"
    if re.fullmatch(r"(<think>\s*)?</think>", opened):
        return re.sub(r"^\s*(<think>\s*)?</think>\s*", "", rest)
    raise G2POError(
        "chat_template: a prompt with its completion does not begin with the rollout's prompt, which ends in "
        f"{asked[-40:]!r}. Use a model whose template keeps completions unchanged, or pass --chat-template FILE"
    )


def until_stop(ids: Sequence[int], stops: Collection[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return ids up to the first token that ends a completion.

    Raises:
        G2POError: if there is none.
    """
    end = next((place for place, token in enumerate(ids) if token in stops), None)
    if end is None:
        raise G2POError(
            f"chat_template: no token that ends a completion ({tokenizer.convert_ids_to_tokens(sorted(stops))}) "
            f"follows the assistant's message, which ends in {tokenizer.decode(ids)[-40:]!r}. Add the template's end "
            "of turn to eos_token_id of the model's generation_config.json"
        )
    return list(ids[: end + 1])


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
            if row is None or prompt[:known] != row["input_ids"] or images[: len(row[COLUMN])] != row[COLUMN]:
                row, known = {"input_ids": [], "labels": [], "actions": 0, COLUMN: []}, 0
                rows.append(row)
            added = len(prompt) - known
            row["input_ids"] += [*prompt[known:], *step.completion_ids]
            row["labels"] += [*[-100] * added, *step.completion_ids]
            row["actions"] += 1
            row[COLUMN] = images
    if not any(row[COLUMN] for row in rows):
        for row in rows:
            del row[COLUMN]
    return rows

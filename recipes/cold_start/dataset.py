"""Lessons of a cold start: an expert's answers to prompts of the rollout, and whether they teach what is played."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from g2po_envs.tiny.demonstration import Demonstration
from g2po_trl.prompts.template import PromptTemplate, last_steps
from g2po_trl.prompts.tokenization import ChatEncoder

REPLY = "<think></think><action>{action}</action>"


def as_dataset(demonstrations: Iterable[Demonstration], template: PromptTemplate, history_length: int) -> Dataset:
    """Prompts as the rollout builds them, and the expert's replies, in the columns of TRL's SFTTrainer."""
    rows = []
    for shown in demonstrations:
        messages = template.messages(
            shown.observation,
            task=shown.task,
            admissible_actions=shown.actions,
            history=last_steps(shown.history, history_length),
            steps_taken=shown.steps_taken,
        )
        reply = [{"role": "assistant", "content": REPLY.format(action=shown.expert)}]
        rows.append({"prompt": messages, "completion": reply})
    return Dataset.from_list(rows)


def check_lessons(
    lessons: Dataset,
    trained: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    template: PromptTemplate,
    ends: Collection[int],
    max_length: int | None = None,
) -> None:
    """Compare what is trained with what is played.

    Args:
        lessons: see `as_dataset`. trained: their `input_ids`, as TRL makes them.
        ends: tokens that end a reply.
        max_length: tokens to which TRL cuts a lesson.

    Raises:
        ValueError: where lessons were left out or cut, or the chat template writes something else than the prompt of
            play, the reply and its end.
    """
    if len(trained) < len(lessons):
        longer = len(lessons) - len(trained)
        raise ValueError(f"max_length is {max_length}, and the prompts of {longer} lessons are longer: set it to null")
    encode = ChatEncoder(tokenizer)
    for lesson, row in zip(lessons, trained):
        prompt, text = encode(lesson["prompt"])
        begins = list(row["input_ids"][: len(prompt)]) == prompt
        reply = row["input_ids"][len(prompt) :]
        end = next((place for place, token in enumerate(reply) if token in ends), None)
        if max_length is not None and len(row["input_ids"]) >= max_length and not (begins and end is not None):
            raise ValueError(f"max_length is {max_length}, and a lesson is longer: set it to null")
        if not begins:
            raise ValueError(
                "chat_template: with the reply, it does not begin as the prompt of play does, which ends in "
                f"{text[-40:]!r}. Take a model whose template writes replies as they are"
            )
        if end is None:
            raise ValueError(
                f"chat_template: no token that ends a reply ({tokenizer.convert_ids_to_tokens(sorted(ends))}) comes "
                f"after {encode.decode(reply)[-40:]!r}. Add the template's own end of turn to eos_token_id of the "
                "model's generation_config.json"
            )
        read = encode.decode(reply[:end])
        if not template.read(read, text[-64:]).valid:
            raise ValueError(
                f"chat_template: of the reply {lesson['completion'][0]['content']!r} it writes {read!r} after "
                f"{text[-40:]!r}, which is not well-formed. Take a model whose template writes replies as they are"
            )

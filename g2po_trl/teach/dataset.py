"""Training samples of a cold start, and a check that they match the prompts of the rollout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from g2po_envs.tiny.demonstration import Demonstration
from g2po_trl.prompts.template import PromptTemplate, last_steps
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.teach.demonstrations import until_stop
from g2po_trl.utils.errors import G2POError

COMPLETION = "<think></think><action>{action}</action>"


def build_dataset(demonstrations: Iterable[Demonstration], template: PromptTemplate, history_length: int) -> Dataset:
    """Return a dataset for TRL's SFTTrainer: the rollout's prompts, with the expert's actions as completions."""
    rows = []
    for shown in demonstrations:
        messages = template.messages(
            shown.observation,
            task=shown.task,
            admissible_actions=shown.actions,
            history=last_steps(shown.history, history_length),
            steps_taken=shown.steps_taken,
        )
        completion = [{"role": "assistant", "content": COMPLETION.format(action=shown.expert)}]
        rows.append({"prompt": messages, "completion": completion})
    return Dataset.from_list(rows)


def validate_samples(
    samples: Dataset,
    trained: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    template: PromptTemplate,
    stop_token_ids: Collection[int],
    max_length: int | None = None,
) -> None:
    """Check that TRL's training tokens match the prompts and completions of the rollout.

    Args:
        samples: see `build_dataset`.
        trained: rows with the `input_ids` that TRL makes of the samples.
        tokenizer: the model's tokenizer.
        template: the prompt template of the rollout.
        stop_token_ids: tokens that end a completion.
        max_length: maximum tokens of a sample in TRL. `None`: no limit.

    Raises:
        G2POError: if samples were dropped or truncated, or the chat template does not give the rollout's prompt, the
            completion and its end.
    """
    if len(trained) < len(samples):
        longer = len(samples) - len(trained)
        raise G2POError(f"max_length is {max_length}, and the prompts of {longer} samples are longer: set it to null")
    encode = ChatEncoder(tokenizer)
    for sample, row in zip(samples, trained):
        prompt, text = encode(sample["prompt"])
        begins = list(row["input_ids"][: len(prompt)]) == prompt
        completion = row["input_ids"][len(prompt) :]
        end = next((place for place, token in enumerate(completion) if token in stop_token_ids), None)
        if max_length is not None and len(row["input_ids"]) >= max_length and not (begins and end is not None):
            raise G2POError(f"max_length is {max_length}, and a sample is longer: set it to null")
        if not begins:
            raise G2POError(
                "chat_template: a prompt with its completion does not begin with the rollout's prompt, which ends in "
                f"{text[-40:]!r}. Use a model whose template keeps completions unchanged"
            )
        read = encode.decode(until_stop(completion, stop_token_ids, tokenizer)[:-1])
        if not template.read(read, text[-64:]).valid:
            raise G2POError(
                f"chat_template: the completion {sample['completion'][0]['content']!r} becomes {read!r} after "
                f"{text[-40:]!r}, which is not well-formed. Use a model whose template keeps completions unchanged"
            )

"""One call of transformers' `generate`: what a policy is trained by, and nothing that a checkpoint brings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from .sampling import Sampling


def generation_config(
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    ends: Iterable[int],
    **options: Any,
) -> GenerationConfig:
    """The options of `generate_batch`.

    Args:
        ends: tokens that end a reply.
        options: more of `GenerationConfig`; they win.
    """
    filters: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        filters = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
        }
    if sampling.stop_sequences:
        filters["stop_strings"] = list(sampling.stop_sequences)
    return GenerationConfig(
        **{
            "max_new_tokens": sampling.max_tokens,
            "repetition_penalty": sampling.repetition_penalty,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": sorted(ends),
            "disable_compile": True,
            **filters,
            **options,
        }
    )


def check_options(options: Iterable[str]) -> None:
    """Refuse options that `GenerationConfig` does not have: it would take and ignore them.

    Raises:
        ValueError: naming the first one.
    """
    known = GenerationConfig()
    for name in options:
        if not hasattr(known, name):
            raise ValueError(
                f"generation_kwargs has {name}, which is no option of transformers' generate (GenerationConfig): "
                "remove it, or use the engine that it belongs to"
            )


def generate_batch(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    synced_gpus: bool = False,
    device: torch.device | None = None,
    record: SampledLogProbs | None = None,
) -> list[list[int]]:
    """One `generate` call: the new tokens of each prompt, in order, padded to the longest.

    What `config` leaves open is neutral: the checkpoint's own generation_config (a repetition penalty, n-grams that
    may not come again, …) has no part in it, since the probabilities that are trained know nothing of it.

    Args:
        model: in evaluation mode.
        prompts: token ids. With none, a dummy is generated: where weights are sharded every rank must make the call.
        synced_gpus: go on until all ranks are done, as sharded weights need it.
        device: of the inputs, if it is not the weights' own.
        record: takes note of the log-probabilities of the new tokens.
    """
    rows = list(prompts) or [[config.pad_token_id]]
    width = max(map(len, rows))
    input_ids = torch.full((len(rows), width), config.pad_token_id, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(rows):
        input_ids[row, width - len(ids) :] = torch.tensor(ids, dtype=torch.long)
        mask[row, width - len(ids) :] = 1
    device = device or model.device
    with _no_defaults(model):
        output = model.generate(
            input_ids=input_ids.to(device),
            attention_mask=mask.to(device),
            generation_config=config,
            synced_gpus=synced_gpus,
            tokenizer=tokenizer if config.stop_strings else None,
            logits_processor=None if record is None else LogitsProcessorList([record]),
        )
    if record is not None:
        record.sampled(output[:, -1])
    return output[: len(prompts), width:].tolist()


class SampledLogProbs(LogitsProcessor):
    """Log-probabilities of the tokens that one `generate` call samples, without keeping the logits of all.

    transformers asks it for each next token, before temperature and filters: it then sees what the last one was.
    """

    def __init__(self, temperature: float):
        self.temperature = temperature
        self._of_next: torch.Tensor | None = None  # (rows, vocabulary)
        self._found: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._of_next is not None:
            self.sampled(input_ids[:, -1])
        self._of_next = torch.log_softmax(scores.float() / self.temperature, dim=-1)
        return scores

    def sampled(self, tokens: torch.Tensor) -> None:
        """These were sampled, one a row."""
        tokens = tokens.to(self._of_next.device)
        self._found.append(self._of_next.gather(-1, tokens[:, None])[:, 0])

    def values(self) -> list[list[float]]:
        """[row][new token]."""
        return torch.stack(self._found, dim=1).tolist()


@contextmanager
def _no_defaults(model: torch.nn.Module) -> Iterator[None]:
    """`generate` fills what its configuration leaves open from the model's; here there is nothing to fill it from."""
    owners = (
        [model, model.get_base_model()] if hasattr(model, "get_base_model") else [model]
    )  # PEFT copies its own down
    defaults = [owner.generation_config for owner in owners]
    for owner in owners:
        owner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for owner, default in zip(owners, defaults):
            owner.generation_config = default

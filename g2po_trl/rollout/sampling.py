"""How replies are drawn, and one `generate` call: the same for training and for evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

if TYPE_CHECKING:
    from ..config import G2POConfig


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy; `None` and 0 switch a filter off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None

    @classmethod
    def for_training(cls, args: G2POConfig) -> Sampling:
        return cls(args.temperature, args.top_p, args.top_k, args.min_p)

    @classmethod
    def for_evaluation(cls, args: G2POConfig) -> Sampling:
        """`eval_temperature`, `eval_top_p` and `eval_top_k`; without filters of its own, those of training."""
        return cls(
            args.eval_temperature,
            args.top_p if args.eval_top_p is None else args.eval_top_p,
            args.top_k if args.eval_top_k is None else args.eval_top_k,
            args.min_p,
        )


def derived_seed(*numbers: int) -> int:
    """A seed (63 bits) that follows from numbers, such as a panel's seed and the number of an episode."""
    name = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") // 2


def generation_config(
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    stop_sequences: Sequence[str] | None = None,
    **options: Any,
) -> GenerationConfig:
    """The options of `generate_batch`.

    Args:
        stop_sequences: a reply ends where the first of them is complete.
        options: more of `GenerationConfig`; they win.
    """
    filters = {"do_sample": False}
    if sampling.temperature > 0:
        filters = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
        }
    if stop_sequences:
        filters["stop_strings"] = list(stop_sequences)
    return GenerationConfig(
        **{
            "max_new_tokens": max_new_tokens,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": list(eos_token_ids),
            "disable_compile": True,
            **filters,
            **options,
        }
    )


def generate_batch(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    synced_gpus: bool = False,
    device: torch.device | None = None,
) -> list[list[int]]:
    """One `generate` call: the new tokens of each prompt, in order, padded to the longest.

    What `config` leaves open is neutral: the checkpoint's own generation_config (a repetition penalty, n-grams that
    may not come again, …) has no part in it, since the probabilities that are trained know nothing of it.

    Args:
        model: in evaluation mode.
        prompts: token ids. With none, a dummy is generated: where weights are sharded every rank must make the call.
        synced_gpus: go on until all ranks are done, as sharded weights need it.
        device: of the inputs, if it is not the weights' own.
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
        )
    return output[: len(prompts), width:].tolist()


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

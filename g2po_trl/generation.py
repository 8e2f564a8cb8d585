"""Token ids in, token ids out. The only room that touches TRL's generation internals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import GenerationConfig
from trl.models import unwrap_model_for_generation


class TransformersEngine:
    """Replies by `model.generate`, in batches of similar length.

    Args:
        trainer: the trainer whose model, tokenizer and sampling arguments are used.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        # Under FSDP every rank must run the same generate calls, with the same number of forward passes in each.
        self.is_collective = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled

    def _generation_config(self, temperature: float) -> GenerationConfig:
        args, tokenizer = self.trainer.args, self.trainer.processing_class
        sampling = {"do_sample": False}
        if temperature > 0:
            sampling = {
                "do_sample": True,
                "temperature": temperature,
                "top_p": args.top_p,
                "top_k": args.top_k,
                "min_p": args.min_p,
            }
        return GenerationConfig(
            max_new_tokens=args.max_completion_length,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=self.trainer.eos_token_ids,
            repetition_penalty=args.repetition_penalty,
            cache_implementation=args.cache_implementation,
            disable_compile=True,
            **{**sampling, **(args.generation_kwargs or {})},
        )

    def generate(self, prompts: Sequence[Sequence[int]], temperature: float) -> list[list[int]]:
        """One reply to each prompt, in their order: token ids up to and including the end-of-turn token.

        Under a sharded model all ranks must call this together; an empty `prompts` then generates a dummy.
        """
        args, accelerator = self.trainer.args, self.trainer.accelerator
        replies: list[list[int]] = [[] for _ in prompts]
        if not prompts and not self.is_collective:
            return replies
        config = self._generation_config(temperature)
        with (
            unwrap_model_for_generation(
                self.trainer.model_wrapped,
                accelerator,
                gather_deepspeed3_params=args.ds3_gather_for_generation,
                generation_kwargs=config.to_diff_dict(),
                gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
            ) as unwrapped,
            torch.no_grad(),
        ):
            # `generate` reads weights again and again; training mode would only switch dropout on.
            was_training = unwrapped.training
            unwrapped.eval()
            for rows in self._batches(prompts):
                for row, reply in zip(rows, self._generate_batch(unwrapped, [prompts[r] for r in rows], config)):
                    replies[row] = reply
            unwrapped.train(was_training)
        return replies

    def _batches(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Row numbers of one generate call each: sorted by length, bounded in padded tokens."""
        if self.is_collective:  # one call on every rank, however many prompts each has
            yield list(range(len(prompts)))
            return
        rows = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
        start = 0
        while start < len(rows):
            width = len(prompts[rows[start]]) + self.trainer.args.max_completion_length
            size = max(1, self.trainer.args.generation_batch_tokens // width)
            yield rows[start : start + size]
            start += size

    def _generate_batch(self, model, prompts: list[Sequence[int]], config: GenerationConfig) -> list[list[int]]:
        pad, device = config.pad_token_id, self.trainer.accelerator.device
        rows = prompts or [[pad]]
        width = max(map(len, rows))
        input_ids = torch.full((len(rows), width), pad, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(rows):
            input_ids[row, width - len(ids) :] = torch.tensor(ids, dtype=torch.long)
            mask[row, width - len(ids) :] = 1
        if not prompts:
            mask[:] = 1
        output = model.generate(
            input_ids=input_ids.to(device),
            attention_mask=mask.to(device),
            generation_config=config,
            synced_gpus=self.is_collective,
        )
        ends = set(config.eos_token_id)
        return [_until_end(ids, ends) for ids in output[: len(prompts), width:].tolist()]


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    """Cut after the first end-of-turn token: what follows is padding."""
    for position, token in enumerate(ids):
        if token in ends:
            return ids[: position + 1]
    return ids

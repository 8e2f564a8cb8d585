"""Token ids in, token ids and log-probabilities out.

TRL's own options choose the engine: `generate` by default, `use_transformers_continuous_batching`, or `use_vllm` with
`vllm_mode` "colocate" or "server". All of them cut a reply in the same place: after the first end-of-turn token, or
where the first of `stop_sequences` is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from transformers import GenerationConfig
from trl.models import unwrap_model_for_generation

from .chat_template import tokenizer_of
from .sampling import Sampling, generate_batch, generation_config


@dataclass
class Reply:
    """One reply: token ids with their end-of-turn token, and their log-probabilities where the engine gives them.

    `complete` is False for a reply that ran into `max_completion_length`. `cached_tokens`: of its prompt, the tokens
    that the engine's prefix cache held already; `None` where there is no such cache, or it does not tell.
    """

    ids: list[int]
    logprobs: list[float] | None = None
    complete: bool = True
    cached_tokens: int | None = None


class Engine:
    """What the rollout knows of an engine: `with engine.rollout(): engine.generate(prompts, sampling)`, many times.

    `is_collective` says that a call holds a collective operation: every rank must make it, also with no prompts.
    """

    is_collective = False

    def __init__(self, trainer):
        self.trainer = trainer
        self.tokenizer = tokenizer_of(trainer.processing_class)
        self.ends = set(trainer.eos_token_ids)
        self.stop_sequences = list(trainer.args.stop_sequences or [])
        self._is_open = False

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Everything that is done once a rollout and not once a turn. All ranks enter and leave together.

        The policy must not change before it is left. A rollout in a rollout belongs to it: a panel is played in parts,
        and its weights are handed on once.
        """
        if self._is_open:
            yield
            return
        self._is_open = True
        try:
            with self._open():
                yield
        finally:
            self._is_open = False

    @contextmanager
    def _open(self) -> Iterator[None]:
        """What an engine does at the beginning and at the end of a rollout."""
        yield

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Reply]:
        """One reply to each prompt, in their order.

        Args:
            seeds: one for each prompt. With vLLM a reply then follows from its prompt and its seed, whoever else is
                asked; the others draw all replies from torch's random state.
        """
        raise NotImplementedError

    def _generation_config(self, sampling: Sampling, stop_sequences: Sequence[str] = ()) -> GenerationConfig:
        args = self.trainer.args
        options = {
            "repetition_penalty": args.repetition_penalty,
            "cache_implementation": args.cache_implementation,
            **(args.generation_kwargs or {}),
        }
        ends = sorted(self.ends)
        return generation_config(self.tokenizer, sampling, args.max_completion_length, ends, stop_sequences, **options)

    def _reply(self, ids: list[int], logprobs: list[float] | None = None) -> Reply:
        """Cut off what follows the end of a reply: padding."""
        end = next((position + 1 for position, token in enumerate(ids) if token in self.ends), None)
        if self.stop_sequences and self._stopped(ids[:end]):
            low, high = 1, end or len(ids)  # the shortest beginning that holds a stop sequence
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if self._stopped(ids[:middle]) else (middle + 1, high)
            end = low
        ids = ids[:end]
        return Reply(list(ids), None if logprobs is None else list(logprobs[: len(ids)]), end is not None)

    def _stopped(self, ids: Sequence[int]) -> bool:
        text = self.tokenizer.decode(ids)
        return any(stop in text for stop in self.stop_sequences)


class TransformersEngine(Engine):
    """Replies by `model.generate`, in batches of similar length."""

    def __init__(self, trainer):
        super().__init__(trainer)
        # With sharded weights every rank must run the same generate calls, with as many forward passes in each.
        self.is_collective = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Reply]:
        """One reply to each prompt, in their order. Sharded, a rank with nothing left generates dummies."""
        replies: list[Reply] = [None] * len(prompts)
        batches = self._batches(prompts)
        if not batches:
            return replies
        config = self._generation_config(sampling, self.stop_sequences)
        with _model_for_generation(self.trainer, config) as model:
            for rows in batches:
                new = generate_batch(
                    model,
                    self.tokenizer,
                    [prompts[row] for row in rows],
                    config,
                    synced_gpus=self.is_collective,
                    device=self.trainer.accelerator.device,
                )
                for row, ids in zip(rows, new):
                    replies[row] = self._reply(ids)
        return replies

    def _batches(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Row numbers of one generate call each: sorted by length, bounded in padded tokens. As many on every rank."""
        rows = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
        batches = []
        while rows:
            width = len(prompts[rows[0]]) + self.trainer.args.max_completion_length
            size = max(1, self.trainer.args.generation_batch_tokens // width)
            batches.append(rows[:size])
            rows = rows[size:]
        if self.is_collective:
            number = max(gather_object([len(batches)]))
            batches += [[]] * (number - len(batches))
        return batches


class ContinuousBatchingEngine(Engine):
    """Replies by transformers' continuous batching: a paged cache, and a finished reply makes room for the next."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Reply]:
        if not prompts:
            return []
        from transformers.generation import ContinuousBatchingConfig

        options = {
            "max_memory_percent": 0.5,  # of the memory the model leaves; training needs the rest
            "return_logprobs": True,
            "drop_unsupported_processors": False,
            "seed": int(torch.randint(2**31, ())),  # from the random state that checkpoints keep
            **(self.trainer.args.transformers_continuous_batching_config or {}),
        }
        config = self._generation_config(sampling)
        with _model_for_generation(self.trainer, config) as model:
            outputs = model.generate_batch(
                [list(prompt) for prompt in prompts],
                generation_config=config,
                continuous_batching_config=ContinuousBatchingConfig(**options),
                progress_bar=False,
            )
        failed = [output.error for output in outputs.values() if output.error is not None]
        if failed or len(outputs) != len(prompts):
            raise RuntimeError(
                f"continuous batching answered {len(outputs) - len(failed)} of {len(prompts)} prompts"
                f"{f' ({failed[0]})' if failed else ''}: see its log above, or unset "
                "use_transformers_continuous_batching"
            )
        return [self._reply(output.generated_tokens, output.logprobs or None) for output in outputs.values()]


def make_engine(trainer) -> Engine:
    """The engine that TRL's options ask for."""
    if trainer.args.use_vllm:
        from .vllm_engine import VLLMEngine

        return VLLMEngine(trainer)
    if trainer.args.use_transformers_continuous_batching:
        return ContinuousBatchingEngine(trainer)
    return TransformersEngine(trainer)


@contextmanager
def _model_for_generation(trainer, config: GenerationConfig) -> Iterator[torch.nn.Module]:
    """The bare model, gathered where ZeRO-3 sharded it, in evaluation mode: training mode means dropout."""
    with (
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            generation_kwargs=config.to_diff_dict(),
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model,
        torch.no_grad(),
    ):
        was_training = model.training
        model.eval()
        yield model
        model.train(was_training)

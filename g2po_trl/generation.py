"""Token ids in, token ids and log-probabilities out. The only room that touches TRL's and vLLM's generation internals.

TRL's own options choose the engine: `generate` by default, `use_transformers_continuous_batching`, or `use_vllm` with
`vllm_mode` "colocate" or "server". All of them cut a reply in the same place: after the first end-of-turn token, or
where the first of `stop_sequences` is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object, is_peft_model
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

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Everything that is done once a rollout and not once a turn. All ranks enter and leave together."""
        yield

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Reply]:
        """One reply to each prompt, in their order."""
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

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Reply]:
        """One reply to each prompt, in their order. Under a sharded model an empty `prompts` generates a dummy."""
        replies: list[Reply] = [None] * len(prompts)
        if not prompts and not self.is_collective:
            return replies
        config = self._generation_config(sampling, self.stop_sequences)
        with _model_for_generation(self.trainer, config) as model:
            for rows in self._batches(prompts):
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


class ContinuousBatchingEngine(Engine):
    """Replies by transformers' continuous batching: a paged cache, and a finished reply makes room for the next."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Reply]:
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


class VLLMEngine(Engine):
    """Replies by vLLM through TRL's `VLLMGeneration`, colocated or on a server.

    Weights go to vLLM once a rollout, and vLLM stays awake until its end (TRL puts it to sleep, and its weights away,
    after every call). Its prefix cache, on by vLLM's default, lives as long: what prompts begin with in common, among
    the episodes of a group and over turns, is computed once.
    """

    def __init__(self, trainer):
        super().__init__(trainer)
        self.vllm = trainer.vllm_generation
        # TRL's wrapper then gathers prompts, takes it that every rank brings as many, and slices the answers so.
        self.is_collective = self.vllm.mode == "server" or self.vllm.tensor_parallel_size > 1
        # A server's answers do not say what its cache held.
        self.tells_cached_tokens = (
            self.vllm.mode == "colocate" and self.vllm.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
        )

    @contextmanager
    def rollout(self) -> Iterator[None]:
        vllm, sleeps = self.vllm, self.vllm.mode == "colocate" and self.vllm.enable_sleep_mode
        with _base_weights_kept(self.trainer.model):
            vllm.sync_weights()
        # TRL has just done so, but does not look whether it worked: vLLM refuses while a request is unfinished, and
        # would go on with what the weights of before computed.
        if vllm.mode == "colocate" and vllm.llm.reset_prefix_cache() is False:
            raise RuntimeError(
                "vLLM still holds requests of a generation that was interrupted, and cannot forget what the previous "
                "weights computed: start again with a new trainer, in a new process"
            )
        if sleeps:
            vllm.llm.wake_up(tags=["kv_cache"])
            vllm.enable_sleep_mode = False
        try:
            yield
        finally:
            if sleeps:
                vllm.enable_sleep_mode = True
                vllm.llm.sleep(level=2)
                vllm._llm_weights_sleeping = True

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Reply]:
        number = max(gather_object([len(prompts)])) if self.is_collective else len(prompts)
        if number == 0:
            return []
        vllm, args = self.vllm, self.trainer.args
        vllm.temperature, vllm.top_p, vllm.top_k = sampling.temperature, sampling.top_p, sampling.top_k
        vllm.min_p = sampling.min_p
        vllm.generation_kwargs = {
            "stop_token_ids": sorted(self.ends),
            **({"stop": self.stop_sequences, "include_stop_str_in_output": True} if self.stop_sequences else {}),
            **(args.generation_kwargs or {}),
        }
        dummies = [[self.tokenizer.pad_token_id]] * (number - len(prompts))
        with self._cached_tokens(number) as cached:
            _, ids, logprobs, _ = vllm.generate([*map(list, prompts), *dummies], images=None, num_generations=1)
        replies = [
            self._reply(
                list(ids[row]), [token[0] if token[0] is not None else float("nan") for token in logprobs[row]]
            )
            for row in range(len(prompts))
        ]
        for reply, tokens in zip(replies, cached):
            reply.cached_tokens = tokens
        return replies

    @contextmanager
    def _cached_tokens(self, number: int) -> Iterator[list[int | None]]:
        """Afterwards, cached tokens of this rank's `number` prompts; empty where they cannot be known.

        vLLM says them in its answer, and TRL's wrapper drops them: this listens in between.
        """
        cached: list[int | None] = []
        if not self.tells_cached_tokens:
            yield cached
            return
        llm, generate = self.vllm.llm, self.vllm.llm.generate
        parallel = self.vllm.tensor_parallel_size
        first = self.trainer.accelerator.process_index % parallel * number  # ranks of one model answer for them all

        def listening(*args, **kwargs):
            outputs = generate(*args, **kwargs)
            cached.extend(output.num_cached_tokens for output in outputs[first : first + number])
            return outputs

        llm.generate = listening
        try:
            yield cached
        finally:
            llm.generate = generate


def make_engine(trainer) -> Engine:
    """The engine that TRL's options ask for."""
    if trainer.args.use_vllm:
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


@contextmanager
def _base_weights_kept(model) -> Iterator[None]:
    """TRL merges an adapter for the sync and takes it off again, which leaves rounding errors in the base."""
    kept = []
    if is_peft_model(model):
        from peft.tuners.tuners_utils import BaseTunerLayer

        weights = [m.get_base_layer().weight for m in model.modules() if isinstance(m, BaseTunerLayer)]
        # ZeRO-3 gathers weights for the merge and throws the merged ones away.
        kept = [(weight, _local(weight).detach().cpu().clone()) for weight in weights if not hasattr(weight, "ds_id")]
    yield
    with torch.no_grad():
        for weight, copy in kept:
            _local(weight).copy_(copy)


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight.data

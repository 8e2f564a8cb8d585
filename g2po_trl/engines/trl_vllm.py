"""Completions by vLLM in training, through TRL's `VLLMGeneration`, whose internals are used only here."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object, is_peft_model, set_seed
from transformers.utils import is_peft_available

from ..utils.errors import G2POError
from ..utils.options import require
from ..utils.trl_compat import gather_params_of, replaced, vllm_generation_class
from .base import Completion, EngineParts
from .sampling import Sampling, derived_seed
from .vllm_requests import RequestEngine, caches_prefixes, sampling_params

if TYPE_CHECKING:
    from vllm import SamplingParams

    from ..utils.images import Picture
    from .vllm_adapter import ServedAdapter

_SHARED = "ranks share a vLLM (tensor parallelism, or TRL's server), which accepts only text: colocate one per rank"


class VLLMEngine(RequestEngine):
    """Generates with vLLM, colocated or on TRL's server.

    A vLLM of one rank streams; ranks that share one (tensor parallelism, or TRL's server) generate together. TRL's
    server takes no seeds.

    Weights are transferred once a rollout, and vLLM stays awake until its end (TRL puts it to sleep, and discards its
    weights, after every call). Its prefix cache is kept for the same time: common beginnings of prompts, within a
    group and over turns, are computed once.

    vLLM serves an adapter separately from the base if it was started with `enable_lora`; otherwise the adapter is
    merged into vLLM's weights.

    Args:
        parts: parts of the trainer.
    """

    def __init__(self, parts: EngineParts):
        args, vllm, model = parts.args, parts.vllm, parts.model()
        super().__init__(parts.tokenizer, parts.stop_token_ids, args.generation_kwargs)
        self.vllm, self.accelerator, self._closed = vllm, parts.accelerator, False
        is_colocated = vllm.mode == "colocate"
        self.parallel = vllm.tensor_parallel_size if is_colocated else 1
        self.is_collective = not is_colocated or self.parallel > 1
        self.streams, self.takes_seeds = not self.is_collective, is_colocated
        # A server's answers do not say what its cache held.
        self.reports_cached_tokens = is_colocated and caches_prefixes(vllm.llm)
        if self.streams:
            self.core = vllm.llm.llm_engine
            self.read_images(parts.image_inputs and parts.image_inputs.encoder)
        else:
            self.reads_text_because = _SHARED
        # As it starts, vLLM seeds this process with numbers of its own; ranks that share a model share a seed.
        if is_colocated:
            set_seed(args.seed + self.accelerator.process_index // self.parallel)
        self.adapter: ServedAdapter | None = None
        if is_peft_model(model):
            from .adapter_weights import check_mergeable, merged_parameters
            from .vllm_adapter import ServedAdapter

            if not is_colocated:  # a colocated vLLM is started after this check
                check_mergeable(model)
            # TRL would merge the adapter into the base and take it off again.
            gather, device = gather_params_of(vllm), self.accelerator.device
            vllm._iter_named_params = partial(merged_parameters, model, gather, device)
            if is_colocated and vllm.llm.llm_engine.vllm_config.lora_config is not None:
                self.adapter = ServedAdapter(vllm.llm, model, gather, device, vllm.merge)
                vllm._iter_named_params = self.adapter.weights

    @classmethod
    def of_trainer(cls, parts: EngineParts, *, merge_adapter: bool | None = None) -> VLLMEngine:
        """Return the engine over TRL's vLLM.

        Args:
            parts: parts of the trainer.
            merge_adapter: how a colocated vLLM gets a LoRA adapter. `False`: separately from the base weights, without
                rounding; refused if vLLM cannot serve it (DoRA, `modules_to_save`, sleep mode, …). `True`: merged into
                vLLM's weights, which rounds it, but generates faster. `None`: merged if vLLM computes in float32 or
                cannot serve it.
        """
        return cls(parts)

    @classmethod
    def check(cls, args: Any, merge_adapter: bool | None = None) -> None:
        require(merge_adapter in (None, True, False), "merge_adapter", merge_adapter, "set it to true, false or null")
        if args.max_prompt_length is not None and args.vllm_max_model_length is not None:
            needed = args.max_prompt_length + args.max_completion_length
            remedy = f"set it to max_prompt_length + max_completion_length = {needed} or more"
            require(args.vllm_max_model_length >= needed, "vllm_max_model_length", args.vllm_max_model_length, remedy)

    @classmethod
    def starting(cls, args: Any, merge_adapter: bool | None = None) -> AbstractContextManager:
        """Return a context in which TRL starts a colocated vLLM: on a free port, with room for an adapter."""
        if args.vllm_mode != "colocate":
            return nullcontext()
        # TRL chooses a port long before vLLM listens on it: two runs that start together would choose the same one.
        if not os.environ.get("MASTER_PORT"):
            with socket.socket() as free:
                free.bind(("", 0))
                os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        if not is_peft_available():
            return nullcontext()
        from .vllm_adapter import AdapterGeneration

        return vllm_generation_class(partial(AdapterGeneration, merge=merge_adapter))

    @contextmanager
    def _open(self) -> Iterator[None]:
        vllm, sleeps = self.vllm, self.vllm.mode == "colocate" and self.vllm.enable_sleep_mode
        vllm.sync_weights()
        # TRL ignores a failure: vLLM refuses while a request is unfinished, and would keep the old weights' prefixes.
        if vllm.mode == "colocate" and vllm.llm.reset_prefix_cache() is False:
            raise RuntimeError(
                "vLLM still holds requests of an interrupted generation, so its prefix cache of the previous weights "
                "cannot be reset: start again with a new trainer, in a new process"
            )
        if self.images is not None:  # features that the previous weights made
            vllm.llm.llm_engine.reset_encoder_cache()
        self.lora = self.adapter.load() if self.adapter else None
        if sleeps:
            vllm.llm.wake_up(tags=["kv_cache"])
            vllm.enable_sleep_mode = False
        try:
            with super()._open() if self.streams else nullcontext():
                yield
        finally:
            if sleeps:
                vllm.enable_sleep_mode = True
                vllm.llm.sleep(level=2)
                vllm._llm_weights_sleeping = True

    def close(self) -> None:
        """End a colocated vLLM while its process groups exist: at Python's exit they are gone."""
        if self.vllm.mode == "colocate" and not self._closed:
            self._closed = True
            self.vllm.llm.llm_engine.engine_core.shutdown()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        images: Sequence[Sequence[Picture]] | None = None,
    ) -> list[Completion]:
        if not self.is_collective:
            return super().generate(prompts, sampling, seeds, images)
        if images and any(images):
            raise G2POError(f"prompts have images, and {_SHARED}", "images")
        return self._generate_together(prompts, sampling, seeds)

    def _parameters(self, sampling: Sampling, seed: int | None) -> SamplingParams:
        """Return the parameters that TRL's wrapper would pass, with the seed."""
        options = {"logprobs": self.vllm.logprobs, **self.to_engine(sampling)}
        if self.vllm.structured_outputs_regex is not None:
            options["structured_outputs"] = {"regex": self.vllm.structured_outputs_regex}
        return sampling_params({"seed": seed, **options})

    def _generate_together(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Completion]:
        """Generate through TRL's wrapper, together with all ranks that share a model or a server.

        The wrapper takes it that each rank brings as many prompts, so dummies fill up. It has one sampling for all
        prompts and drops cache statistics, so its call of a colocated vLLM is replaced by one with a seed per prompt.
        """
        rank, vllm = self.accelerator.process_index, self.vllm
        if seeds is None and self.parallel > 1:
            # Each rank of a tensor-parallel model samples every token, and all must sample the same; but their random
            # states diverge (dropout, unequal batches). The rank is part of a seed: while the states are equal, parts
            # of a group would otherwise be copies of each other.
            seeds = [derived_seed(draw, rank) for draw in torch.randint(2**62, (len(prompts),)).tolist()]
        ranks = gather_object([(len(prompts), seeds)])
        number = max(prompts_of_rank for prompts_of_rank, _ in ranks)
        if number == 0:
            return []
        vllm.generation_kwargs = self.to_engine(sampling)  # the wrapper lets them win over its own settings
        dummies = [[self.tokenizer.pad_token_id]] * (number - len(prompts))
        cached: list[int | None] = []
        intercepted = nullcontext()
        if vllm.mode == "colocate":
            first = rank // self.parallel * self.parallel
            of_model = [of_rank for _, of_rank in ranks[first : first + self.parallel]]
            all_seeds = [seed for of_rank in of_model for seed in [*of_rank, *[0] * (number - len(of_rank))]]
            generate = vllm.llm.generate

            def seeded(prompts: list, sampling_params: SamplingParams, **options: Any) -> list:
                each = [sampling_params.clone() for _ in prompts]
                for parameters, seed in zip(each, all_seeds, strict=True):
                    parameters.seed = seed
                options |= {} if self.lora is None else {"lora_request": self.lora}
                outputs = generate(prompts, sampling_params=each, **options)
                if self.reports_cached_tokens:
                    cached.extend(output.num_cached_tokens for output in outputs[(rank - first) * number :])
                return outputs

            intercepted = replaced(vllm.llm, generate=seeded)
        with intercepted:
            _, ids, logprobs, _ = vllm.generate([*map(list, prompts), *dummies], images=None, num_generations=1)
        completions = [
            self._completion(sampling, of_row, [math.nan if token[0] is None else token[0] for token in of_tokens])
            for of_row, of_tokens in list(zip(ids, logprobs))[: len(prompts)]
        ]
        for completion, tokens in zip(completions, cached):
            completion.cached_tokens = tokens
        return completions

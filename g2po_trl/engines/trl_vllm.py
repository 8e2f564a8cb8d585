"""Completions by vLLM in training, through TRL's `VLLMGeneration`, whose internals are used only here."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, is_peft_model, set_seed
from transformers import PreTrainedTokenizerBase
from transformers.utils import is_peft_available

from ..utils.errors import G2POError
from ..utils.options import require
from ..utils.trl_compat import gather_params_of, replaced
from .base import Completion, EngineParts
from .sampling import Sampling, derived_seed
from .vllm_requests import RequestEngine, Requests, caches_prefixes, sampling_params

if TYPE_CHECKING:
    from trl.generation.vllm_generation import VLLMGeneration
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from ..utils.images import Picture
    from .vllm_adapter import ServedAdapter

REQUESTS_AT_A_TIME = 64  # to a server, where each has a seed of its own; as many as TRL's client keeps connections for


_SHARED = "ranks share a vLLM (tensor parallelism, or TRL's server), which accepts only text: colocate one per rank"


class VLLMEngine(RequestEngine):
    """Generates with vLLM, colocated or on TRL's server.

    A vLLM of one rank streams; ranks that share one (tensor parallelism, or TRL's server) generate together.

    Weights are transferred once a rollout, and vLLM stays awake until its end (TRL puts it to sleep, and discards its
    weights, after every call). Its prefix cache is kept for the same time: common beginnings of prompts, within a
    group and over turns, are computed once.

    Args:
        tokenizer, stop_token_ids, options: see `Engine`.
        vllm: TRL's wrapper.
        accelerator: accelerator of the ranks that have prompts.
        model: the trained model. vLLM serves its adapter separately from the base if it was started with
            `enable_lora`; otherwise the adapter is merged into vLLM's weights.
        seed: seed of completions that have none of their own; ranks that share a model share it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Iterable[int],
        vllm: VLLMGeneration,
        accelerator: Accelerator,
        model: torch.nn.Module,
        seed: int,
        options: dict[str, Any] | None = None,
    ):
        super().__init__(tokenizer, stop_token_ids, options)
        self.vllm, self.accelerator, self._closed = vllm, accelerator, False
        self.parallel = vllm.tensor_parallel_size if vllm.mode == "colocate" else 1
        # TRL's wrapper then gathers prompts, takes it that every rank brings as many, and slices the answers so.
        self.is_collective = vllm.mode == "server" or self.parallel > 1
        self.streams = not self.is_collective
        # A server's answers do not say what its cache held.
        self.reports_cached_tokens = vllm.mode == "colocate" and caches_prefixes(vllm.llm)
        if self.streams:
            self.requests = Requests(vllm.llm)
        else:
            self.reads_text_because = _SHARED
        # As it starts, vLLM seeds this process with numbers of its own, whatever `seed` is.
        if vllm.mode == "colocate":
            set_seed(seed + accelerator.process_index // self.parallel)
        self.adapter: ServedAdapter | None = None
        self.lora: LoRARequest | None = None
        if is_peft_model(model):
            from .adapter_weights import check_mergeable, merged_parameters
            from .vllm_adapter import ServedAdapter

            if vllm.mode == "server":  # a colocated vLLM was started after it
                check_mergeable(model)
            # TRL would merge the adapter into the base and take it off again.
            gather = gather_params_of(vllm)
            vllm._iter_named_params = partial(merged_parameters, model, gather, accelerator.device)
            if vllm.mode == "colocate" and vllm.llm.llm_engine.vllm_config.lora_config is not None:
                self.adapter = ServedAdapter(vllm.llm, model, gather, accelerator.device, vllm.merge)
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
        args, model = parts.args, parts.model()
        options = args.generation_kwargs
        engine = cls(parts.tokenizer, parts.stop_token_ids, parts.vllm, parts.accelerator, model, args.seed, options)
        if engine.streams:
            engine.read_images(parts.image_inputs and parts.image_inputs.encoder)
        if engine.image_encoder is not None:
            place = parts.vllm.llm.llm_engine.model_config.model
            if others := engine.image_encoder.other_settings(place):
                engine.reads_text_because = (
                    f"vLLM prepares images by the processor of {place!r}, whose {', '.join(others)} are not those of "
                    "the trainer's: save the trainer's there"
                )
        return engine

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
        take_free_port()
        if not is_peft_available():
            return nullcontext()
        from .vllm_adapter import adapters_beside_the_base

        return adapters_beside_the_base(merge_adapter)

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
        if self.image_encoder is not None:  # features that the previous weights made
            vllm.llm.llm_engine.reset_encoder_cache()
        self.lora = self.adapter.load() if self.adapter else None
        if self.streams:
            self.requests.lora = self.lora
        if sleeps:
            vllm.llm.wake_up(tags=["kv_cache"])
            vllm.enable_sleep_mode = False
        try:
            yield
        finally:
            if self.streams:
                self._abandon()
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
            raise G2POError(f"prompts have images, and {_SHARED}")
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
        """Generate through TRL's wrapper, together with all ranks that share a model or a server."""
        number, requests = self._of_all_ranks(len(prompts), seeds)
        if number == 0:
            return []
        vllm = self.vllm
        vllm.generation_kwargs = self.to_engine(sampling)  # the wrapper lets them win over its own settings
        dummies = [[self.tokenizer.pad_token_id]] * (number - len(prompts))
        cached: list[int | None] = []
        with self._intercepted(number, requests, cached):
            _, ids, logprobs, _ = vllm.generate([*map(list, prompts), *dummies], images=None, num_generations=1)
        completions = [
            self._completion(
                sampling, ids[row], [token[0] if token[0] is not None else float("nan") for token in logprobs[row]]
            )
            for row in range(len(prompts))
        ]
        for completion, tokens in zip(completions, cached):
            completion.cached_tokens = tokens
        return completions

    def _of_all_ranks(self, own: int, seeds: Sequence[int] | None) -> tuple[int, list[int] | None]:
        """Return the number of prompts per rank, with dummies, and the seeds of all prompts of one call of vLLM.

        The seeds are this rank's, or those of the ranks that share a model or a server; `None` if there are none.

        Each rank of a tensor-parallel model samples every token, and all must sample the same; but their random states
        diverge (dropout, unequal batches), so their requests have seeds in training too. The rank is part of a seed:
        while the states are equal, parts of a group would otherwise be copies of each other.
        """
        if seeds is None and self.parallel > 1:
            rank = self.accelerator.process_index
            seeds = [derived_seed(draw, rank) for draw in torch.randint(2**62, (own,)).tolist()]
        ranks = gather_object([(own, seeds)]) if self.is_collective else [(own, seeds)]
        number = max(prompts for prompts, _ in ranks)
        if seeds is None:
            return number, None
        if self.parallel > 1:
            first = self.accelerator.process_index // self.parallel * self.parallel
            ranks = ranks[first : first + self.parallel]
        return number, [seed for _, of_rank in ranks for seed in [*of_rank, *[0] * (number - len(of_rank))]]

    def _intercepted(self, number: int, seeds: list[int] | None, cached: list) -> AbstractContextManager:
        """Return a context in which the wrapper's call of vLLM has a seed per prompt and reports cached tokens.

        TRL's wrapper has one sampling for all prompts, and drops cache statistics. `cached` is filled with the cached
        tokens of this rank's `number` prompts.
        """
        accelerator = self.accelerator
        if self.vllm.mode == "colocate":
            first = accelerator.process_index % self.parallel * number  # the ranks of a model answer for them all
            own = slice(first, first + number) if self.reports_cached_tokens else slice(0)
            llm = self.vllm.llm
            return replaced(llm, "generate", partial(_generate_here, seeds, own, cached, self.lora, llm.generate))
        if seeds is not None and accelerator.is_main_process:
            client = self.vllm.vllm_client
            return replaced(client, "generate", partial(_generate_there, seeds, client.generate))
        return nullcontext()


def take_free_port() -> None:
    """Set MASTER_PORT to a free port, unless a launcher has set it, for a colocated vLLM of one process.

    TRL chooses a port long before vLLM listens on it, so two runs that start together would choose the same one.
    """
    if not os.environ.get("MASTER_PORT"):
        with socket.socket() as free:
            free.bind(("", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])


def _generate_here(
    seeds: list[int] | None,
    own: slice,
    cached: list,
    lora: LoRARequest | None,
    generate: Callable,
    prompts: list,
    sampling_params: Any,
    **kwargs,
) -> list:
    """Call `LLM.generate` with a seed per prompt and the adapter, and record cached tokens."""
    if seeds is not None:
        shared, sampling_params = sampling_params, []
        for _, seed in zip(prompts, seeds, strict=True):
            sampling_params.append(shared.clone())
            sampling_params[-1].seed = seed
    if lora is not None:
        kwargs["lora_request"] = lora
    outputs = generate(prompts, sampling_params=sampling_params, **kwargs)
    cached.extend(output.num_cached_tokens for output in outputs[own])
    return outputs


def _generate_there(
    seeds: list[int], generate: Callable, prompts: list, generation_kwargs: dict | None = None, **kwargs
) -> dict[str, list]:
    """Call `VLLMClient.generate` once per prompt, because a request has one seed."""

    def ask(prompt: list[int], seed: int) -> dict[str, list]:
        return generate(prompts=[prompt], generation_kwargs={**(generation_kwargs or {}), "seed": seed}, **kwargs)

    with ThreadPoolExecutor(REQUESTS_AT_A_TIME) as threads:
        answers = list(threads.map(ask, prompts, seeds))
    return {key: [row for answer in answers for row in answer[key]] for key in answers[0]}

"""Requests to a vLLM of this process, which are submitted and finished independently of each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..utils.errors import G2POError
from .base import Completion, Engine
from .sampling import Sampling

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

    from ..utils.images import Picture


class RequestEngine(Engine):
    """An engine over a vLLM of this process, which is stepped only here.

    A subclass sets `core` (vLLM's `LLMEngine`), `lora` (the adapter of all requests) and `reports_cached_tokens`.
    """

    takes_seeds = streams = returns_logprobs = True
    core: Any
    lora: Any = None
    reports_cached_tokens = False

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._pending: dict[str, tuple[int, Sequence[int], Sampling]] = {}
        self._number = 0

    @contextmanager
    def _open(self) -> Iterator[None]:
        try:
            yield
        finally:  # what an error has left would answer the next rollout's episodes
            self._abandon()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        images: Sequence[Sequence[Picture]] | None = None,
    ) -> list[Completion]:
        none, completions = [None] * len(prompts), {}
        try:
            for key, (prompt, seed, shown) in enumerate(zip(prompts, seeds or none, images or none, strict=True)):
                self.submit(key, prompt, sampling, seed, shown)
            while len(completions) < len(prompts):
                completions |= self.poll(0.0)
        except BaseException:
            self._abandon()
            raise
        return [completions[key] for key in range(len(prompts))]

    def submit(
        self,
        key: int,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int | None = None,
        images: Sequence[Picture] | None = None,
    ) -> None:
        from vllm.sampling_params import RequestOutputKind

        parameters = self._parameters(sampling, seed)
        parameters.output_kind = RequestOutputKind.FINAL_ONLY
        request: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if images:  # vLLM expands the tokens of images itself
            request["prompt_token_ids"] = self.images.unexpanded(prompt, images)
            request["multi_modal_data"] = {"image": [image.open() for image in images]}
        name, self._number = f"g2po-{self._number}", self._number + 1
        self.core.add_request(name, request, parameters, lora_request=self.lora)
        self._pending[name] = key, prompt, sampling

    def poll(self, timeout: float) -> dict[int, Completion]:
        """Compute one more token of each request, or a part of long prompts; return the finished completions."""
        finished = [output for output in self.core.step() if output.finished] if self._pending else []
        asked = [(self._pending.pop(output.request_id), output) for output in finished]
        return {key: self._read(prompt, sampling, output) for (key, prompt, sampling), output in asked}

    def _abandon(self) -> None:
        names = list(self._pending)
        self._pending.clear()
        if names:
            self.core.abort_request(names)

    def to_engine(self, sampling: Sampling) -> dict[str, Any]:
        """Return the arguments of vLLM's `SamplingParams`."""
        options = vllm_options(sampling, self.stop_token_ids) | self.options
        if self.images is not None:  # a sampled one would stand for an image that is not there
            never = dict.fromkeys(self.images.token_ids, -100.0)
            options["logit_bias"] = {**(options.get("logit_bias") or {}), **never}
        return options

    def _parameters(self, sampling: Sampling, seed: int | None) -> SamplingParams:
        return sampling_params({"seed": seed, **self.to_engine(sampling)})

    def _read(self, prompt: Sequence[int], sampling: Sampling, output: RequestOutput) -> Completion:
        if self.images is not None and list(output.prompt_token_ids) != list(prompt):
            raise G2POError(
                f"vLLM reads {len(output.prompt_token_ids)} tokens where the prompt has {len(prompt)}: its processor, "
                "which it loads with the model, makes other tokens of images. Save the trainer's in that folder",
                "processing_class",
            )
        (answer,) = output.outputs
        logprobs = answer.logprobs and [each[token].logprob for token, each in zip(answer.token_ids, answer.logprobs)]
        completion = self._completion(sampling, answer.token_ids, logprobs)
        completion.cached_tokens = output.num_cached_tokens if self.reports_cached_tokens else None
        return completion


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Return vLLM's `SamplingParams` of these options, whose `structured_outputs` may be a dictionary."""
    from vllm import SamplingParams

    structured = options.get("structured_outputs")
    if isinstance(structured, dict):
        from vllm.sampling_params import StructuredOutputsParams

        options = {**options, "structured_outputs": StructuredOutputsParams(**structured)}
    try:
        return SamplingParams(**options)
    except TypeError as error:
        what = f"generation_kwargs has an option that vLLM's SamplingParams does not accept: {error}"
        raise G2POError(what, "generation_kwargs", options) from error


def vllm_options(sampling: Sampling, stop_token_ids: Iterable[int]) -> dict[str, Any]:
    """Return a sampling and the stop tokens as arguments of vLLM's `SamplingParams`."""
    options: dict[str, Any] = {
        "temperature": sampling.temperature,
        **sampling.filters(),  # under vLLM's own names; its defaults are neutral
        "max_tokens": sampling.max_completion_length,
        "stop_token_ids": sorted(stop_token_ids),
    }
    if sampling.stop_sequences:
        options |= {"stop": list(sampling.stop_sequences), "include_stop_str_in_output": True}
        options["skip_special_tokens"] = False  # vLLM searches the decoded text, and would not find special tokens
    return options


def caches_prefixes(llm: LLM) -> bool:
    """Return whether vLLM caches common beginnings of prompts, and reports how many tokens were cached."""
    return bool(llm.llm_engine.vllm_config.cache_config.enable_prefix_caching)

"""Requests to a vLLM of this process, which are submitted and finished independently of each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..utils.errors import G2POError
from .base import TEXT_ONLY, Completion, Engine
from .sampling import Sampling

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

    from ..utils.images import Picture


class Requests:
    """The pending requests of a vLLM.

    Args:
        llm: vLLM, whose engine is stepped only here.
        lora: adapter of all requests.
    """

    def __init__(self, llm: LLM, lora: Any = None):
        self.engine, self.lora = llm.llm_engine, lora
        self._asked: dict[str, Any] = {}
        self._number = 0

    def submit(
        self, key: Any, prompt: Sequence[int], parameters: SamplingParams, media: dict[str, Any] | None = None
    ) -> None:
        """Submit a request; `step` returns its output under `key`. `media`: vLLM's `multi_modal_data`."""
        from vllm.sampling_params import RequestOutputKind

        parameters.output_kind = RequestOutputKind.FINAL_ONLY
        name, self._number = f"g2po-{self._number}", self._number + 1
        asked = {"prompt_token_ids": list(prompt), **({"multi_modal_data": media} if media else {})}
        self.engine.add_request(name, asked, parameters, lora_request=self.lora)
        self._asked[name] = key

    def step(self) -> dict[Any, RequestOutput]:
        """Compute one more token of each request, or a part of long prompts; return the finished outputs."""
        if not self._asked:
            return {}
        outputs = [output for output in self.engine.step() if output.finished]
        return {self._asked.pop(output.request_id): output for output in outputs}

    def answer(self, requests: Iterable[Sequence[Any]]) -> list[RequestOutput]:
        """Run these requests, of `submit`'s arguments without the key, and return the outputs in order."""
        answers: dict[int, RequestOutput] = {}
        requests = list(requests)
        try:
            for number, request in enumerate(requests):
                self.submit(number, *request)
            while len(answers) < len(requests):
                answers.update(self.step())
        except BaseException:
            self.abandon()
            raise
        return [answers[number] for number in range(len(requests))]

    def abandon(self) -> None:
        """Abort the pending requests, and free what vLLM has computed for them."""
        names = list(self._asked)
        self._asked.clear()
        if names:
            self.engine.abort_request(names)


class RequestEngine(Engine):
    """An engine over `Requests`. A subclass sets `requests` and `reports_cached_tokens`; it may call `read_images`."""

    takes_seeds = streams = returns_logprobs = True
    requests: Requests
    reports_cached_tokens = False
    image_encoder: Any = None

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._submitted: dict[int, tuple[Sequence[int], Sampling]] = {}

    @property
    def processing_class(self) -> Any:
        return self.tokenizer if self.image_encoder is None else self.image_encoder.processor

    def read_images(self, encoder: Any) -> None:
        """Take prompts with images, as this `prompts.images.ImageEncoder` writes them; `None`: refuse them."""
        self.image_encoder = encoder
        self.reads_text_because = TEXT_ONLY if encoder is None else None

    @contextmanager
    def _open(self) -> Iterator[None]:
        try:
            yield
        finally:  # what an error has left would answer the next rollout's episodes
            self.requests.abandon()
            self._submitted.clear()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        images: Sequence[Sequence[Picture]] | None = None,
    ) -> list[Completion]:
        none = [None] * len(prompts)
        each = zip(prompts, seeds or none, images or none, strict=True)
        outputs = self.requests.answer(self._request(prompt, sampling, seed, of) for prompt, seed, of in each)
        return [self._read(prompt, sampling, output) for prompt, output in zip(prompts, outputs)]

    def submit(
        self,
        key: int,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int | None = None,
        images: Sequence[Picture] | None = None,
    ) -> None:
        self.requests.submit(key, *self._request(prompt, sampling, seed, images))
        self._submitted[key] = (prompt, sampling)

    def poll(self, timeout: float) -> dict[int, Completion]:
        return {key: self._read(*self._submitted.pop(key), output) for key, output in self.requests.step().items()}

    def to_engine(self, sampling: Sampling) -> dict[str, Any]:
        """Return the arguments of vLLM's `SamplingParams`."""
        options = vllm_options(sampling, self.stop_token_ids) | self.options
        if self.image_encoder is not None:  # a sampled one would stand for an image that is not there
            never = dict.fromkeys(self.image_encoder.token_ids, -100.0)
            options["logit_bias"] = {**(options.get("logit_bias") or {}), **never}
        return options

    def _parameters(self, sampling: Sampling, seed: int | None) -> SamplingParams:
        return sampling_params({"seed": seed, **self.to_engine(sampling)})

    def _request(
        self, prompt: Sequence[int], sampling: Sampling, seed: int | None, images: Sequence[Picture] | None
    ) -> tuple[Any, ...]:
        """Return the arguments of `Requests.submit` after the key. vLLM expands the tokens of images itself."""
        parameters = self._parameters(sampling, seed)
        if not images:
            return prompt, parameters
        return self.image_encoder.unexpanded(prompt, images), parameters, {"image": [image.open() for image in images]}

    def _read(self, prompt: Sequence[int], sampling: Sampling, output: RequestOutput) -> Completion:
        if self.image_encoder is not None and list(output.prompt_token_ids) != list(prompt):
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
        **{name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")},
        "min_p": sampling.min_p or 0.0,
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

"""Requests to a vLLM of this process, each of which comes and goes while others are under way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..utils.errors import G2POError
from .base import Completion, Engine
from .sampling import Sampling

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams


class Requests:
    """What a vLLM has been asked and has not answered.

    Args:
        llm: whose engine is stepped here, and by nobody else meanwhile.
        lora: adapter of all requests.
    """

    def __init__(self, llm: LLM, lora: Any = None):
        self.engine, self.lora = llm.llm_engine, lora
        self._asked: dict[str, Any] = {}
        self._number = 0

    def submit(self, key: Any, prompt: Sequence[int], parameters: SamplingParams) -> None:
        """Ask; `step` answers under `key`."""
        from vllm.sampling_params import RequestOutputKind

        parameters.output_kind = RequestOutputKind.FINAL_ONLY
        name, self._number = f"g2po-{self._number}", self._number + 1
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, parameters, lora_request=self.lora)
        self._asked[name] = key

    def step(self) -> dict[Any, RequestOutput]:
        """Compute another token of each, or a part of long prompts: what is complete thereby."""
        if not self._asked:
            return {}
        outputs = [output for output in self.engine.step() if output.finished]
        return {self._asked.pop(output.request_id): output for output in outputs}

    def answer(self, prompts: Sequence[Sequence[int]], parameters: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Run these requests to completion and return the outputs in order."""
        answers: dict[int, RequestOutput] = {}
        try:
            for place, (prompt, how) in enumerate(zip(prompts, parameters, strict=True)):
                self.submit(place, prompt, how)
            while len(answers) < len(prompts):
                answers.update(self.step())
        except BaseException:
            self.abandon()
            raise
        return [answers[place] for place in range(len(prompts))]

    def abandon(self) -> None:
        """Forget what is unanswered. What vLLM has computed for it is freed."""
        names = list(self._asked)
        self._asked.clear()
        if names:
            self.engine.abort_request(names)


class RequestEngine(Engine):
    """An engine over `Requests`. A subclass sets `requests` and `reports_cached_tokens`."""

    takes_seeds = True
    streams = True
    requests: Requests
    reports_cached_tokens = False

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._samplings: dict[int, Sampling] = {}  # of submitted prompts, by key

    @contextmanager
    def _open(self) -> Iterator[None]:
        try:
            yield
        finally:  # what an error has left would answer the next rollout's episodes
            self._abandon()

    def _abandon(self) -> None:
        self.requests.abandon()
        self._samplings.clear()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        parameters = [self._parameters(sampling, seed) for seed in seeds or [None] * len(prompts)]
        return [self._read(sampling, output) for output in self.requests.answer(prompts, parameters)]

    def submit(self, key: int, prompt: Sequence[int], sampling: Sampling, seed: int | None = None) -> None:
        self.requests.submit(key, prompt, self._parameters(sampling, seed))
        self._samplings[key] = sampling

    def poll(self, timeout: float) -> dict[int, Completion]:
        return {key: self._read(self._samplings.pop(key), output) for key, output in self.requests.step().items()}

    def to_engine(self, sampling: Sampling) -> dict[str, Any]:
        """Return the arguments of vLLM's `SamplingParams`."""
        return vllm_options(sampling, self.stop_token_ids) | self.options

    def _parameters(self, sampling: Sampling, seed: int | None) -> SamplingParams:
        return sampling_params({"seed": seed, **self.to_engine(sampling)})

    def _read(self, sampling: Sampling, output: RequestOutput) -> Completion:
        (answer,) = output.outputs
        ids, logprobs = list(answer.token_ids), None
        if answer.logprobs is not None:
            logprobs = [choices[token].logprob for token, choices in zip(ids, answer.logprobs)]
        completion = self._completion(sampling, ids, logprobs)
        completion.cached_tokens = output.num_cached_tokens if self.reports_cached_tokens else None
        return completion


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Return vLLM's object of these options, whose `structured_outputs` may be a dictionary."""
    from vllm import SamplingParams

    structured = options.get("structured_outputs")
    if isinstance(structured, dict):
        from vllm.sampling_params import StructuredOutputsParams

        options = {**options, "structured_outputs": StructuredOutputsParams(**structured)}
    try:
        return SamplingParams(**options)
    except TypeError as error:
        raise G2POError(
            f"generation_kwargs has what vLLM's SamplingParams does not take ({error}): remove it, or use the engine "
            "that it belongs to"
        ) from error


def vllm_options(sampling: Sampling, stop_token_ids: Iterable[int]) -> dict[str, Any]:
    """Return a sampling and the stop tokens as arguments of vLLM's `SamplingParams`."""
    options: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
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

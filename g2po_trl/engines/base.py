"""The interface of engines: token ids in, token ids and log-probabilities out.

Engines are transformers' `generate` and vLLM (colocated, offline, or TRL's server). All of them end a completion in
the same place: after the first stop token, or where the first of `stop_sequences` is complete.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from .sampling import Sampling

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from ..utils.images import Picture

    # Token ids (R, L), and the images of each row -> a model's further inputs; see `prompts.images.ImageInputs`.
    ImageInputs = Callable[[torch.Tensor, Sequence[Sequence[Picture]]], dict[str, torch.Tensor]]

    # Generation config -> a context that provides the bare model in evaluation mode, for calls of `generate`.
    GenerationModel = Callable[[GenerationConfig], AbstractContextManager[torch.nn.Module]]

TEXT_ONLY = (
    "the model reads only text: train a vision-language model, and pass its processor as processing_class if you "
    "pass one"
)


@dataclass
class Completion:
    """A completion as the engine sampled it."""

    ids: list[int]  # with the stop token
    logprobs: list[float] | None = None  # at the sampling's temperature, if the engine `returns_logprobs`
    complete: bool = True  # `False`: it reached `max_completion_length`
    cached_tokens: int | None = None  # of its prompt, in the engine's prefix cache; `None`: not reported


@dataclass
class EngineParts:
    """The parts of a trainer that its engine uses."""

    args: Any  # has the fields of a `G2POConfig`
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: Sequence[int]
    accelerator: Accelerator
    model: Callable[[], torch.nn.Module]  # the trained one, without accelerate's wrappers
    generation_model: GenerationModel  # for a forward pass that all ranks make
    gather: Callable[[Sequence], AbstractContextManager] = nullcontext  # of parameters that ZeRO-3 shards
    is_sharded: bool = False  # each rank has only a part of the weights
    vllm: Any = None  # TRL's wrapper of vLLM, if TRL has started vLLM
    image_inputs: ImageInputs | None = None  # `None`: the model reads only text


class Engine:
    """Base class of engines: `with engine.rollout(): engine.generate(prompts, sampling)`, many times.

    Args:
        tokenizer: the model's tokenizer.
        stop_token_ids: tokens that end a completion.
        options: further sampling options in the engine's own terms (`generation_kwargs`), except those of `Sampling`.

    Attributes:
        is_collective: a call contains a collective operation, so every rank must make it, even without prompts.
        takes_seeds: a completion depends only on its prompt and seed.
        streams: prompts may be submitted while others are being completed (`submit`, `poll`).
        is_the_model: it uses the trainer's model, not a copy in another precision.
        returns_logprobs: completions have log-probabilities, so the loss can correct for the copy's precision.
        images: the encoder of images in prompts (`read_images`).
        reads_text_because: why it accepts no images, and what to do. `None`: `generate` and `submit` have an argument
            `images`.
    """

    is_the_model = returns_logprobs = is_collective = takes_seeds = streams = False
    images: Any = None
    _is_open = False
    reads_text_because: str | None = "this engine gets only token ids: set engine='transformers'"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Iterable[int], options: dict[str, Any] | None = None
    ):
        self.tokenizer, self.stop_token_ids, self.options = tokenizer, set(stop_token_ids), options or {}

    @property
    def processing_class(self) -> Any:
        """The encoder of prompts: the tokenizer, or a processor of images and text."""
        return self.tokenizer if self.images is None else self.images.processor

    def read_images(self, images: Any) -> None:
        """Take prompts with images, by an encoder of `prompts.images`; `None`: refuse them."""
        self.images, self.reads_text_because = images, TEXT_ONLY if images is None else None

    @classmethod
    def of_trainer(cls, parts: EngineParts) -> Engine:
        """Return the engine of a trainer. Keyword-only parameters are the engine's options (`engine_kwargs`)."""

    @classmethod
    def check(cls, args: Any, **options: Any) -> None:
        """Refuse (`G2POError`) settings and options that the engine does not support, before a model is loaded."""

    @classmethod
    def starting(cls, args: Any, **options: Any) -> AbstractContextManager:
        """Return the context in which TRL's constructor runs."""
        return nullcontext()

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Give the engine the weights of the policy, once for all calls inside. All ranks enter and leave together.

        The policy must not change inside. A nested rollout belongs to the outer one: an evaluation set is played in
        parts, and the weights are transferred once.
        """
        is_outer, self._is_open = not self._is_open, True
        try:
            with self._open() if is_outer else nullcontext():
                yield
        finally:
            self._is_open = not is_outer

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Do the work at the beginning and at the end of a rollout."""
        yield

    def close(self) -> None:
        """Free memory and processes. Nothing is generated afterwards."""

    def to_engine(self, sampling: Sampling) -> Any:
        """Return the sampling, the stop tokens and `options` in the engine's own terms."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """Return one completion per prompt, in order. Without `takes_seeds`, it samples from torch's random state."""

    def submit(self, key: int, prompt: Sequence[int], sampling: Sampling, seed: int | None = None) -> None:
        """Request one completion, inside `rollout`, which cancels unfinished requests at its end."""

    def poll(self, timeout: float) -> dict[int, Completion]:
        """Return finished completions, by the keys of `submit`; wait at most `timeout` seconds for the first one.

        An engine that computes in the caller's thread samples the next token of each completion instead.
        """

    def cut(self, completion: Completion, sampling: Sampling) -> Completion:
        """Return a completion cut to another maximum length and further stop sequences."""
        cut = self._completion(sampling, completion.ids[: sampling.max_completion_length], completion.logprobs)
        return replace(completion, ids=cut.ids, logprobs=cut.logprobs, complete=cut.complete)

    def _completion(
        self, sampling: Sampling, ids: Sequence[int], logprobs: Sequence[float] | None = None
    ) -> Completion:
        """Return sampled tokens as a completion, without the padding that follows its end."""
        end = next((position + 1 for position, token in enumerate(ids) if token in self.stop_token_ids), None)
        stops = sampling.stop_sequences
        if stops and self._stopped(ids[:end], stops):  # the shortest beginning that holds a stop sequence
            lengths = range(1, (end or len(ids)) + 1)
            end = lengths[bisect_left(lengths, True, key=lambda length: self._stopped(ids[:length], stops))]
        ids = ids[:end]
        return Completion(list(ids), None if logprobs is None else list(logprobs[: len(ids)]), end is not None)

    def _stopped(self, ids: Sequence[int], stops: Sequence[str]) -> bool:
        text = self.tokenizer.decode(ids)
        return any(stop in text for stop in stops)

"""Token ids in, token ids and log-probabilities out.

An engine is transformers' `generate` or vLLM (`vllm_engine`, `offline_vllm`, `served_vllm`). All of them cut a reply
in the same place: after the first end-of-turn token, or where the first of `stop_sequences` is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..sdpa import without_cudnn_attention
from .generate import SampledLogProbs, check_options, generate_batch, generation_config
from .sampling import Sampling

if TYPE_CHECKING:
    from .stats import RolloutStats

# Lends the bare model for some calls of `generate`, in evaluation mode; told how they will be made.
LendModel = Callable[[GenerationConfig], AbstractContextManager[torch.nn.Module]]


@dataclass
class Reply:
    """One reply: token ids with their end-of-turn token, and their log-probabilities where the engine gives them.

    `complete` is False for a reply that ran into `max_tokens`. `cached_tokens`: of its prompt, the tokens that the
    engine's prefix cache held already; `None` where there is no such cache, or it does not tell. `repeats`: how often
    it was asked for again, since a server had failed.
    """

    ids: list[int]
    logprobs: list[float] | None = None
    complete: bool = True
    cached_tokens: int | None = None
    repeats: int = 0


class Engine:
    """What the rollout knows of an engine: `with engine.rollout(): engine.generate(prompts, sampling)`, many times.

    Args:
        tokenizer: the model's.
        ends: tokens that end a reply.
        options: more of the engine's own sampling options (`generation_kwargs` of the configuration): none that
            `Sampling` has.

    `is_collective` says that a call holds a collective operation: every rank must make it, also with no prompts.
    `takes_seeds`: a reply follows from its prompt and its seed, whoever else is asked.
    `streams`: prompts may come while others are being answered (`submit`, `poll`).
    """

    is_collective = False
    takes_seeds = False
    streams = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int], options: dict[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.ends = set(ends)
        self.options = options or {}
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

    def note(self, stats: RolloutStats) -> None:
        """What the engine alone knows of a rollout."""

    def close(self) -> None:
        """Free what the engine holds. Nothing is generated afterwards."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Reply]:
        """One reply to each prompt, in their order.

        Args:
            seeds: one for each prompt; an engine that takes none draws all replies from torch's random state.
        """
        raise NotImplementedError

    def submit(self, key: int, prompt: Sequence[int], sampling: Sampling, seed: int | None = None) -> None:
        """Ask for one reply, whatever else is under way. Within `rollout`, which abandons what is unanswered."""
        raise NotImplementedError

    def poll(self, timeout: float) -> dict[int, Reply]:
        """Return replies that are complete, by the keys of `submit`.

        Args:
            timeout: seconds to wait for the first one, where replies are computed elsewhere. An engine that computes
                in the caller's thread goes on by a token of each reply instead.
        """
        raise NotImplementedError

    def _reply(self, sampling: Sampling, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> Reply:
        """Cut off what follows the end of a reply: padding."""
        end = next((position + 1 for position, token in enumerate(ids) if token in self.ends), None)
        stops = sampling.stop_sequences
        if stops and self._stopped(ids[:end], stops):
            low, high = 1, end or len(ids)  # the shortest beginning that holds a stop sequence
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if self._stopped(ids[:middle], stops) else (middle + 1, high)
            end = low
        ids = ids[:end]
        return Reply(list(ids), None if logprobs is None else list(logprobs[: len(ids)]), end is not None)

    def _stopped(self, ids: Sequence[int], stops: Sequence[str]) -> bool:
        text = self.tokenizer.decode(ids)
        return any(stop in text for stop in stops)


class TransformersEngine(Engine):
    """Generates by `model.generate`, in batches of similar length.

    For a model that is not being trained, use `TransformersEngine.from_model`.

    Args:
        tokenizer: the model's tokenizer.
        ends: ids of the tokens that end a completion.
        lend_model: provides the model during some calls of `generate`.
        batch_tokens: maximum tokens of one `generate` call, padding and completions included.
        is_collective: the weights are sharded, so all ranks must make the same calls.
        device: of the inputs, if it differs from that of the weights.
        options: further fields of transformers' `GenerationConfig`.
        logprobs: replies come with their log-probabilities, at the sampling's temperature.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ends: Iterable[int],
        lend_model: LendModel,
        batch_tokens: int = 65536,
        is_collective: bool = False,
        device: torch.device | None = None,
        options: dict[str, Any] | None = None,
        logprobs: bool = False,
    ):
        super().__init__(tokenizer, ends, options)
        check_options(self.options)
        self.lend_model, self.batch_tokens, self.logprobs = lend_model, batch_tokens, logprobs
        self.is_collective, self.device = is_collective, device

    @classmethod
    def from_model(
        cls,
        model: torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        autocast: torch.dtype | None = None,
        **options: Any,
    ) -> TransformersEngine:
        """An engine for a model that is not being trained.

        Args:
            model: in evaluation or training mode; it is put into evaluation mode while it generates.
            tokenizer: the model's tokenizer.
            autocast: compute in this precision, as training in mixed precision does. `None`: in that of the weights.
            **options: further arguments of the class.
        """
        return cls(tokenizer, ends_of_turn(tokenizer, model), lent(model, autocast), **options)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Reply]:
        """One completion per prompt, in order. With sharded weights, ranks without prompts generate dummies.

        Args:
            prompts: token ids.
            sampling: how completions are sampled, and where they end.
            seeds: not supported; completions are drawn from torch's random state.
        """
        replies: list[Reply] = [None] * len(prompts)
        batches = self._batches(prompts, sampling.max_tokens)
        if not batches:
            return replies
        config = generation_config(self.tokenizer, sampling, self.ends, **self.options)
        with self.lend_model(config) as model:
            for rows in batches:
                record = SampledLogProbs(sampling.temperature) if self.logprobs and sampling.temperature else None
                new = generate_batch(
                    model,
                    self.tokenizer,
                    [prompts[row] for row in rows],
                    config,
                    synced_gpus=self.is_collective,
                    device=self.device,
                    record=record,
                )
                logprobs = [None] * len(rows) if record is None else record.values()[: len(rows)]
                for row, ids, of_ids in zip(rows, new, logprobs):
                    replies[row] = self._reply(sampling, ids, of_ids)
        return replies

    def _batches(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Row numbers of one generate call each: sorted by length, bounded in padded tokens. As many on every rank."""
        rows = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
        batches = []
        while rows:
            size = max(1, self.batch_tokens // (len(prompts[rows[0]]) + max_tokens))
            batches.append(rows[:size])
            rows = rows[size:]
        if self.is_collective:
            number = max(gather_object([len(batches)]))
            batches += [[]] * (number - len(batches))
        return batches


def lent(model: torch.nn.Module, autocast: torch.dtype | None = None) -> LendModel:
    """Return a function that lends a model that is not being trained; `autocast`: see `TransformersEngine`."""

    @contextmanager
    def lend(config: GenerationConfig) -> Iterator[torch.nn.Module]:
        was_training = model.training
        model.eval()
        try:
            mixed = nullcontext() if autocast is None else torch.autocast(model.device.type, autocast)
            with torch.no_grad(), mixed, without_cudnn_attention():
                yield model
        finally:
            model.train(was_training)

    return lend


def ends_of_turn(tokenizer: PreTrainedTokenizerBase, model: torch.nn.Module) -> set[int]:
    """Tokens that end a reply: the tokenizer's, and those the checkpoint names."""
    named = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return {end for end in ends if end is not None}

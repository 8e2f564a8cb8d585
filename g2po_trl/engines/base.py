"""Token ids in, token ids and log-probabilities out.

An engine is transformers' `generate` or vLLM (`vllm_engine`, `offline_vllm`, `served_vllm`). All of them cut a reply
in the same place: after the first end-of-turn token, or where the first of `stop_sequences` is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from .sampling import Sampling


@dataclass
class Completion:
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

    def metrics(self) -> dict[str, float]:
        """Return the engine's own numbers of this rollout, by metric name. The largest of all ranks is logged."""
        return {}

    def close(self) -> None:
        """Free what the engine holds. Nothing is generated afterwards."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """One reply to each prompt, in their order.

        Args:
            seeds: one for each prompt; an engine that takes none draws all replies from torch's random state.
        """
        raise NotImplementedError

    def submit(self, key: int, prompt: Sequence[int], sampling: Sampling, seed: int | None = None) -> None:
        """Ask for one reply, whatever else is under way. Within `rollout`, which abandons what is unanswered."""
        raise NotImplementedError

    def poll(self, timeout: float) -> dict[int, Completion]:
        """Return replies that are complete, by the keys of `submit`.

        Args:
            timeout: seconds to wait for the first one, where replies are computed elsewhere. An engine that computes
                in the caller's thread goes on by a token of each reply instead.
        """
        raise NotImplementedError

    def _reply(self, sampling: Sampling, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> Completion:
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
        return Completion(list(ids), None if logprobs is None else list(logprobs[: len(ids)]), end is not None)

    def _stopped(self, ids: Sequence[int], stops: Sequence[str]) -> bool:
        text = self.tokenizer.decode(ids)
        return any(stop in text for stop in stops)

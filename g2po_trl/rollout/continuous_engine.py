"""Replies by transformers' continuous batching, from a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .generate import check_options, generation_config
from .generation import Engine, LendModel, Reply
from .sampling import Sampling

A_WHILE = 60.0  # seconds between two looks for replies


class ContinuousBatchingEngine(Engine):
    """Replies by transformers' continuous batching: a paged cache, and a finished reply makes room for the next.

    Args:
        batching: fields of transformers' `ContinuousBatchingConfig`.
    """

    streams = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        lend_model: LendModel,
        batching: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
    ):
        super().__init__(tokenizer, ends, options)
        check_options(self.options)
        self.lend_model, self.batching = lend_model, batching or {}
        self._manager, self._sampling, self._keys = None, None, {}
        self._closing = ExitStack()

    @contextmanager
    def _open(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._end()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Reply]:
        replies: dict[int, Reply] = {}
        with self.rollout():
            for row, prompt in enumerate(prompts):
                self.submit(row, prompt, sampling)
            while len(replies) < len(prompts):
                replies.update(self.poll(A_WHILE))
        return [replies[row] for row in range(len(prompts))]

    def submit(self, key: int, prompt: Sequence[int], sampling: Sampling, seed: int | None = None) -> None:
        if self._manager is None or (sampling != self._sampling and not self._keys):
            self._end()
            self._start(sampling)
        elif sampling != self._sampling:
            raise ValueError("continuous batching samples all replies under way alike: ask for these when it is idle")
        name = self._manager.add_request(list(prompt), max_new_tokens=sampling.max_tokens)
        if name is None:
            self._fail("it takes no more prompts")
        self._keys[name] = key

    def poll(self, timeout: float) -> dict[int, Reply]:
        replies: dict[int, Reply] = {}
        until = time.monotonic() + timeout
        while self._keys:
            patience = 0.0 if replies else max(0.0, until - time.monotonic())
            output = self._manager.get_result(timeout=min(patience, 1.0))
            if output is not None and output.is_finished():
                if output.error is not None:
                    self._fail(f"a request failed: {output.error}")
                key = self._keys.pop(output.request_id)
                replies[key] = self._reply(self._sampling, output.generated_tokens, output.logprobs or None)
            elif output is None and not self._manager.is_running():
                self._fail(f"it ended with {len(self._keys)} prompts unanswered")
            elif output is None and patience <= 0:
                break
        return replies

    def _start(self, sampling: Sampling) -> None:
        from transformers.generation import ContinuousBatchingConfig

        batching = {
            "max_memory_percent": 0.5,  # of the memory the model leaves; training needs the rest
            "return_logprobs": True,
            "drop_unsupported_processors": False,
            "seed": int(torch.randint(2**31, ())),  # from the random state that checkpoints keep
            **self.batching,
        }
        config = generation_config(self.tokenizer, replace(sampling, stop_sequences=()), self.ends, **self.options)
        model = self._closing.enter_context(self.lend_model(config))
        self._manager = self._closing.enter_context(
            model.continuous_batching_context_manager(
                generation_config=config, continuous_batching_config=ContinuousBatchingConfig(**batching), timeout=5
            )
        )
        self._sampling = sampling

    def _end(self) -> None:
        """Give the model back; what is unanswered is abandoned."""
        for name in self._keys:
            self._manager.cancel_request(name)
        self._keys.clear()
        self._manager = None
        self._closing.close()

    def _fail(self, what: str) -> None:
        raise RuntimeError(
            f"continuous batching: {what}: see its log above, or unset use_transformers_continuous_batching"
        )

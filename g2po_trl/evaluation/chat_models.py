"""Chat models: requests in, completions as text out; and a budget of tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..engines.base import Completion, Engine
from ..engines.sampling import Sampling
from ..prompts.chat_template import get_tokenizer
from ..prompts.conversation import ChatRequest, Message
from ..prompts.images import ImageEncoder, ImageInputs, load_processor
from ..prompts.tokenization import ChatEncoder
from ..rollout.conversations import cut_before, sampling_of
from ..utils.json import write_json
from ..utils.options import require
from .checkpoints import load_model, load_tokenizer


@dataclass(frozen=True)
class ChatCompletion:
    """A completion.

    `error`: why there is no text, e.g. a conversation that exceeds the model's context. `message`: the assistant
    message of a server, with its tool calls.
    """

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    complete: bool = True
    prompt_end: str = ""
    error: str | None = None
    message: Message | None = None


@dataclass
class TokenBudget:
    """A count of tokens with a limit.

    Args:
        limit: maximum number of prompt and completion tokens. `None`: no limit.
        read: prompt tokens so far.
        written: completion tokens so far.
        path: file that keeps both, so that a resumed evaluation continues to count. Written before each turn: a kill
            loses the count of at most one turn.
    """

    limit: int | None = None
    read: int = 0
    written: int = 0
    path: Path | None = None

    def __post_init__(self):
        if self.path is not None and self.path.is_file():
            spent = json.loads(self.path.read_text(encoding="utf-8"))
            self.read, self.written = self.read + spent["read"], self.written + spent["written"]

    def save(self) -> None:
        """Write the counts to `path`."""
        if self.path is not None:
            write_json(self.path, {"read": self.read, "written": self.written})

    def check(self) -> None:
        """Save the counts. Raises `G2POError` if the limit is reached."""
        self.save()
        if self.limit is not None and self.read + self.written >= self.limit:
            used = f"{self.read + self.written} tokens were used"
            require(False, "max_total_tokens", self.limit, f"{used}; run the same command with a larger one to resume")

    def count(self, completion: ChatCompletion) -> None:
        """Add the tokens of a completion and its prompt. Raises `G2POError` if tokens are limited and not reported."""
        tokens = completion.prompt_tokens + completion.completion_tokens
        if self.limit is not None and not completion.error and tokens == 0:
            remedy = "the server reports no token usage to count; remove it, and limit the costs at the provider"
            require(False, "max_total_tokens", self.limit, remedy)
        self.read += completion.prompt_tokens
        self.written += completion.completion_tokens


class ChatModel(Protocol):
    """A model that reads text. `independent`: a completion depends only on its own request and seed."""

    independent: bool

    def generate(
        self, requests: Sequence[ChatRequest], sampling: Sampling, seeds: Sequence[int]
    ) -> list[ChatCompletion]:
        """Return the completion of each request, with its seed."""

    def close(self) -> None:
        """Free resources."""


def _seeded(generate: Callable[..., list[Completion]]) -> Callable[..., list[Completion]]:
    """Return the `generate` of an engine without seeds, with a random state from the seeds of each call's batch."""

    def generate_seeded(
        prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None, **more: Any
    ) -> list[Completion]:
        import torch

        combined = 0
        for seed in seeds or ():
            combined = (combined * 1_000_003 + seed) % (2**63)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(combined)
            return generate(prompts, sampling, **more)

    return generate_seeded


class EngineChat:
    """A model in this process, with an engine as in training.

    Args:
        engine: generates token ids.
        longest: maximum tokens of prompt and completion together. `None`: no limit.
        chat_template_kwargs: variables of the chat template.
    """

    def __init__(self, engine: Engine, longest: int | None = None, chat_template_kwargs: dict[str, Any] | None = None):
        self.independent, self.longest = engine.takes_seeds, longest
        self.engine = engine
        if not engine.takes_seeds:  # reproducible for equal batches
            engine.generate = _seeded(engine.generate)
        self.encode = ChatEncoder(engine.processing_class, chat_template_kwargs)

    def generate(
        self, requests: Sequence[ChatRequest], sampling: Sampling, seeds: Sequence[int]
    ) -> list[ChatCompletion]:
        """Return the completions of requests without tools, all with the stop texts of the first one."""
        texts = [self.encode.text(request.messages) for request in requests]
        prompts = self.encode.ids(texts)
        sampling = sampling_of(requests[0], sampling) if requests else sampling
        most = sampling.max_completion_length
        fitting = [i for i, ids in enumerate(prompts) if self.longest is None or len(ids) + most <= self.longest]
        error = f"tokens and {most} of the completion exceed the model's {self.longest}"
        completions = [ChatCompletion("", len(ids), error=f"{len(ids)} {error}") for ids in prompts]
        generated = self.engine.generate([prompts[i] for i in fitting], sampling, [seeds[i] for i in fitting])
        for i, completion in zip(fitting, generated):
            ids = completion.ids
            last = bool(ids) and ids[-1] in self.engine.stop_token_ids
            text = self.encode.decode(ids, self.engine.stop_token_ids)
            cut = cut_before(text, requests[i].stop)
            is_whole = completion.complete or cut != text
            completions[i] = ChatCompletion(cut, len(prompts[i]), len(ids) - last, is_whole, texts[i][-64:])
        return completions

    def close(self) -> None:
        self.engine.close()


def load_local(
    model: str,
    chat_template_kwargs: dict[str, Any] | None = None,
    generation_kwargs: dict[str, Any] | None = None,
    autocast: str | None = None,
    **model_kwargs: Any,
) -> EngineChat:
    """Return the chat model of a checkpoint or an adapter, with transformers' `generate`.

    `generation_kwargs` go to `GenerationConfig`, `model_kwargs` to `from_pretrained`. `autocast` is the precision
    of the forward pass, e.g. "bfloat16", as in mixed-precision training; `None`: that of the weights.
    """
    import torch

    from ..engines.transformers import TransformersEngine

    loaded = load_model(
        model, **{"device_map": "auto" if torch.cuda.is_available() else None, "dtype": "auto", **model_kwargs}
    )
    loaded.eval()
    processing_class = load_tokenizer(model, loaded)
    tokenizer = get_tokenizer(processing_class)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    longest = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
    precision = None if autocast is None else getattr(torch, autocast)
    options = {"batch_tokens": sys.maxsize, "options": generation_kwargs}  # who asks bounds the batch
    engine = TransformersEngine.from_model(loaded, tokenizer, precision, **options)
    engine.read_images(ImageInputs.of(processing_class, loaded))
    return EngineChat(engine, longest, chat_template_kwargs)


def load_vllm(
    model: str,
    chat_template_kwargs: dict[str, Any] | None = None,
    generation_kwargs: dict[str, Any] | None = None,
    **vllm_options: Any,
) -> EngineChat:
    """Return the chat model of a checkpoint or an adapter, with vLLM in this process.

    `generation_kwargs` go to `SamplingParams`, `vllm_options` to `vllm.LLM`.
    """
    from ..engines.vllm_offline import OfflineVLLMEngine

    engine = OfflineVLLMEngine(model, generation_kwargs, **vllm_options)
    try:
        processors = filter(None, map(load_processor, engine.images_from))
        if (processor := next(processors, None)) is not None:
            engine.read_images(ImageEncoder(processor))
        return EngineChat(engine, engine.longest, chat_template_kwargs)
    except BaseException:
        engine.close()
        raise

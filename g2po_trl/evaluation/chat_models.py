"""Chat models: requests in, completions as text out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from ..engines.base import Completion, Engine
from ..engines.sampling import Sampling, derived_seed
from ..prompts.chat_template import get_tokenizer
from ..prompts.conversation import ChatRequest, Message
from ..prompts.images import ImageEncoder, ImageInputs, load_processor
from ..prompts.tokenization import ChatEncoder
from ..rollout.conversations import cut_before, sampling_of
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
    error: str | None = None
    message: Message | None = None


class ChatModel:
    """A model that reads text.

    Attributes:
        independent: a completion depends only on its own request and seed.
        engine: the engine of a model in this process.
    """

    independent = True
    engine: Engine | None = None

    def generate(
        self, requests: Sequence[ChatRequest], sampling: Sampling, seeds: Sequence[int]
    ) -> list[ChatCompletion]:
        """Return the completion of each request, with its seed."""

    def close(self) -> None:
        """Free resources."""


class EngineChat(ChatModel):
    """A model in this process, with an engine as in training.

    Args:
        engine: generates token ids.
        longest: maximum tokens of prompt and completion together. `None`: no limit.
        chat_template_kwargs: variables of the chat template.
    """

    def __init__(self, engine: Engine, longest: int | None = None, chat_template_kwargs: dict[str, Any] | None = None):
        self.engine, self.independent, self.longest = engine, engine.takes_seeds, longest
        if not engine.takes_seeds:
            engine.generate = _with_seeded_batches(engine.generate)
        self.encode = ChatEncoder(engine.processing_class, chat_template_kwargs)

    def generate(
        self, requests: Sequence[ChatRequest], sampling: Sampling, seeds: Sequence[int]
    ) -> list[ChatCompletion]:
        """Return the completions of requests without tools, all with the stop texts of the first one."""
        prompts = self.encode.ids([self.encode.text(request.messages) for request in requests])
        sampling, stop = sampling_of(requests[0], sampling), requests[0].stop
        most = sampling.max_completion_length
        fitting = [i for i, ids in enumerate(prompts) if self.longest is None or len(ids) + most <= self.longest]
        error = f"tokens and {most} of the completion exceed the model's {self.longest}"
        completions = [ChatCompletion("", len(ids), error=f"{len(ids)} {error}") for ids in prompts]
        generated = self.engine.generate([prompts[i] for i in fitting], sampling, [seeds[i] for i in fitting])
        for i, completion in zip(fitting, generated):
            text = self.encode.decode(completion.ids, self.engine.stop_token_ids)
            cut = cut_before(text, stop)
            is_whole = completion.complete or cut != text
            completions[i] = self.counted(cut, prompts[i], completion.ids, is_whole)
        return completions

    def counted(
        self, text: str, prompt_ids: Sequence[int], ids: Sequence[int], complete: bool = True
    ) -> ChatCompletion:
        """Return a completion with its numbers of tokens, without the stop token."""
        written = len(ids) - (len(ids) > 0 and ids[-1] in self.engine.stop_token_ids)
        return ChatCompletion(text, len(prompt_ids), written, complete)

    def close(self) -> None:
        self.engine.close()


def _with_seeded_batches(generate: Callable[..., list[Completion]]) -> Callable[..., list[Completion]]:
    """Return `generate` of an engine without seeds, reproducible for equal batches."""

    @wraps(generate)
    def generate_seeded(
        prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None, **more: Any
    ) -> list[Completion]:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(derived_seed(*(seeds or ())))
            return generate(prompts, sampling, **more)

    return generate_seeded


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
    from ..engines.transformers import TransformersEngine

    device_map = "auto" if torch.cuda.is_available() else None
    loaded = load_model(model, **{"device_map": device_map, "dtype": "auto", **model_kwargs}).eval()
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
    except BaseException:  # else vLLM's processes keep this one from ending
        engine.close()
        raise

"""Chat models in this process or on a server: requests in, completions as text out."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from ..engines.base import Completion, Engine
from ..engines.sampling import Sampling, derived_seed
from ..engines.transformers import TransformersEngine
from ..prompts.conversation import ChatRequest, Message, message_text, normalize_messages
from ..prompts.images import ImageEncoder, ImageInputs, load_processing_class, load_processor
from ..prompts.tokenization import ChatEncoder, get_tokenizer
from ..rollout.conversations import cut_before, sampling_of
from ..utils.adapters import adapter_of, load_adapter
from ..utils.errors import G2POError
from ..utils.extras import import_extra
from ..utils.json import write_json
from ..utils.options import require
from ..utils.trl_compat import create_model_from_path

# Words in servers' errors about conversations that exceed the model's context.
_TOO_LONG = ("context_length", "context length", "context size", "context window", "maximum context")
_TOO_LONG += ("maximum model length", "prompt is too long", "input is too long", "input token count")
Kwargs = dict[str, Any] | None


@dataclass(frozen=True)
class ChatCompletion:
    """A completion; `error` says why there is no text, `message` is a server's message, with its tool calls."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    complete: bool = True
    error: str | None = None
    message: Message | None = None


class EngineChat:
    """A model in this process, with an engine as in training; `longest`: tokens of prompt and completion together."""

    def __init__(self, engine: Engine, longest: int | None = None, chat_template_kwargs: Kwargs = None):
        self.engine, self.longest = engine, longest
        self.encode = ChatEncoder(engine.processing_class, chat_template_kwargs)

    def generate(
        self, requests: Sequence[ChatRequest], sampling: Sampling, seeds: Sequence[int]
    ) -> list[ChatCompletion]:
        """Return the completions of requests without tools, all with the stop texts of the first one."""
        prompts = self.encode.ids([self.encode.text(request.messages) for request in requests])
        sampling, stop = sampling_of(requests[0], sampling), requests[0].stop
        most = (self.longest or inf) - sampling.max_completion_length
        completions = [ChatCompletion("", error=f"{len(ids)} tokens, at most {most} fit") for ids in prompts]
        fitting = [i for i, ids in enumerate(prompts) if len(ids) <= most]
        generated = self.engine.generate([prompts[i] for i in fitting], sampling, [seeds[i] for i in fitting])
        for i, completion in zip(fitting, generated):
            whole = self.encode.decode(completion.ids, self.engine.stop_token_ids)
            text = cut_before(whole, stop)
            lengths = len(prompts[i]), len(completion.ids)
            completions[i] = ChatCompletion(text, *lengths, completion.complete or text != whole)
        return completions

    def close(self) -> None:
        """Free memory and processes."""
        self.engine.close()


class SeededEngine(TransformersEngine):
    """transformers' `generate`, reproducible for equal batches."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None, **more: Any
    ) -> list[Completion]:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(derived_seed(*(seeds or ())))
            return super().generate(prompts, sampling, **more)


def load_model(model: str, revision: str | None = None, **kwargs: Any):
    """Return the model of a checkpoint, or of an adapter on its base model, from a folder or the Hub, as TRL loads it.

    `kwargs` are passed to `from_pretrained`; an adapter's configuration has the `revision` of its base. Raises
    `G2POError` if an adapter does not name its base, or does not fit it.
    """

    def load(name: str, revision: str | None = None):
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=kwargs.get("trust_remote_code"))
        architecture = getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM)
        return create_model_from_path(name, architecture, revision=revision, **kwargs)

    adapter = adapter_of(model, revision)
    return load(model, revision) if adapter is None else load_adapter(adapter, load, revision)


def load_tokenizer(model: str, loaded: Any):
    """Return the tokenizer, padded on the left, or the processor of images and text of a model from `load_model`.

    An adapter without one has that of the folder above it, its run's, or of its base.
    """
    adapter = getattr(loaded, "active_peft_config", None)
    places = [model] if adapter is None else [model, str(Path(model).parent), adapter.base_model_name_or_path]
    for place in places[:-1]:
        with suppress(OSError, ValueError):
            return load_processing_class(place, padding_side="left")
    return load_processing_class(places[-1], padding_side="left")


def load_local(
    model: str, chat_template_kwargs: Kwargs = None, generation_kwargs: Kwargs = None, autocast: str = "", **kwargs
) -> EngineChat:
    """Return the chat model of a checkpoint or an adapter, with transformers' `generate`.

    `generation_kwargs` go to `GenerationConfig`, `kwargs` to `from_pretrained`. `autocast` is the precision of the
    forward pass, e.g. "bfloat16", as in mixed-precision training; by default that of the weights.
    """
    device_map = "auto" if torch.cuda.is_available() else None
    loaded = load_model(model, **{"device_map": device_map, "dtype": "auto", **kwargs}).eval()
    processing_class = load_tokenizer(model, loaded)
    tokenizer = get_tokenizer(processing_class)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    options = {"batch_tokens": sys.maxsize, "options": generation_kwargs}  # who asks bounds the batch
    precision = getattr(torch, autocast) if autocast else None
    engine = SeededEngine.from_model(loaded, tokenizer, precision, **options)
    engine.read_images(ImageInputs.of(processing_class, loaded))
    longest = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
    return EngineChat(engine, longest, chat_template_kwargs)


def load_vllm(
    model: str, chat_template_kwargs: Kwargs = None, generation_kwargs: Kwargs = None, **vllm_options: Any
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


@dataclass
class ServerChat:
    """A model on a server with OpenAI's protocol: `vllm serve`, `transformers serve`, or a provider."""

    base_url: str  # up to and including `/v1`
    model: str  # name on the server
    key_variable: str = "OPENAI_API_KEY"  # environment variable that contains the key, if the server needs one
    parallel: int = 16  # concurrent requests
    chat_template_kwargs: Kwargs = None  # for servers that take them (vLLM, SGLang)
    generation_kwargs: Kwargs = None  # further fields of a request, for servers that accept them
    max_retries: int = 6  # of a request that fails because of load or network
    engine = limit = path = None
    length_field = "max_tokens"

    def __post_init__(self):
        self.openai = import_extra("openai")
        options = {"api_key": os.environ.get(self.key_variable) or "none", "timeout": 300.0}
        self.client = self.openai.AsyncOpenAI(base_url=self.base_url, max_retries=self.max_retries, **options)
        self.runner = asyncio.Runner()  # ends the requests of an interrupted evaluation
        self.free = asyncio.Semaphore(self.parallel)
        template = {"chat_template_kwargs": self.chat_template_kwargs} if self.chat_template_kwargs else {}
        self.fields, self.tokens = {**(self.generation_kwargs or {}), **template}, {"read": 0, "written": 0}

    def count_tokens(self, path: Path, limit: int | None) -> None:
        """Count the tokens of prompts and completions in a file, and refuse requests after `limit` of them."""
        self.path, self.limit = path, limit
        self.tokens |= json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def generate(
        self, requests: Sequence[ChatRequest], sampling: Sampling, seeds: Sequence[int]
    ) -> list[ChatCompletion]:
        """Return the completion of each request. Raises `G2POError` for one that is rejected, and out of tokens."""

        async def complete() -> list[ChatCompletion]:
            pairs = zip(requests, seeds, strict=True)
            return await asyncio.gather(*(self._complete(request, sampling, seed) for request, seed in pairs))

        used = sum(self.tokens.values())
        remedy = f"{used} tokens were used; run the same command with a larger one to resume"
        require(self.limit is None or used < self.limit, "max_total_tokens", self.limit, remedy)
        completions = self.runner.run(complete())
        self.tokens["read"] += sum(completion.prompt_tokens for completion in completions)
        self.tokens["written"] += sum(completion.completion_tokens for completion in completions)
        if self.path is not None:
            write_json(self.path, self.tokens)
        is_reported = any(self.tokens.values()) or all(completion.error for completion in completions)
        remedy = "the server reports no token usage to count; remove it, and limit the costs at the provider"
        require(self.limit is None or is_reported, "max_total_tokens", self.limit, remedy)
        return completions

    async def _complete(self, request: ChatRequest, sampling: Sampling, seed: int) -> ChatCompletion:
        """Return the completion of a request, with an `error` if the conversation is too long for the model."""
        # Fields that not every server supports are sent only if they are set.
        filters = {name: value for name, value in sampling.filters().items() if name != "top_p"}
        options = {"stop": list(request.stop), "extra_body": self.fields | filters, "tools": request.tools}
        length_field = self.length_field
        options[length_field] = sampling_of(request, sampling).max_completion_length
        try:
            async with self.free:
                response = await self.client.chat.completions.create(
                    model=self.model,
                    messages=api_messages(request.messages),
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    seed=seed % 2**31,  # servers accept 31 bits
                    **{name: value for name, value in options.items() if value},
                )
            return _read(response, request, sampling)
        except (self.openai.OpenAIError, ValueError) as error:  # also text that is not JSON
            is_rejected = isinstance(error, self.openai.BadRequestError)
            told = f"{error} {error.code}".lower() if is_rejected else ""
            if length_field == "max_tokens" and "max_completion_tokens" in told:  # newer servers
                self.length_field = "max_completion_tokens"
                return await self._complete(request, sampling, seed)
            if any(words in told for words in _TOO_LONG):
                return ChatCompletion("", error=f"the conversation is too long for the server's model: {error}")
            remedy = "check the address, up to /v1, and the variable with its key (key_variable)"
            message = f"base_url is {self.base_url}, which answers: {error.__cause__ or error}; {remedy}"
            raise G2POError(message, "base_url", self.base_url) from error

    def close(self) -> None:
        """End the connections."""
        self.runner.run(self.client.close())
        self.runner.close()


def _read(response: Any, request: ChatRequest, sampling: Sampling) -> ChatCompletion:
    """Return the completion in a server's response. Raises `ValueError` if there is none."""
    choice = next(iter(getattr(response, "choices", None) or ()), None)
    if choice is None or choice.message is None:
        raise ValueError(f"it answered without a chat completion ({response!s:.200})")
    message, usage = choice.message, response.usage
    text = cut_before(message.content or "", request.stop)  # some servers ignore stop texts
    ends = [text.index(stop) + len(stop) for stop in sampling.stop_sequences or () if stop in text]
    calls = [call.model_dump() for call in message.tool_calls or ()]
    said = {"role": "assistant", "content": text[: min(ends, default=None)], "tool_calls": calls}
    (answer,) = normalize_messages([said])
    text = message_text(answer)
    # The name of the field depends on the server.
    reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    if isinstance(reasoning, str) and "</think>" not in text:
        text = f"<think>{reasoning}</think>{text}"
    tokens = (usage.prompt_tokens or 0, usage.completion_tokens or 0) if usage else (0, 0)
    return ChatCompletion(text, *tokens, choice.finish_reason not in ("length", "content_filter"), message=answer)


def api_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages as OpenAI's protocol has them: arguments as JSON text, and ids that pair calls and results.

    Results without ids answer the calls before them in order.
    """
    sent, open_ids, numbers = [], [], itertools.count(1)
    for message in map(dict, messages):
        if calls := message.get("tool_calls"):
            calls = [{"id": f"call_{next(numbers)}", **call, "function": dict(call["function"])} for call in calls]
            for function in [call["function"] for call in calls]:
                if not isinstance(function["arguments"], str):
                    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            open_ids = [call["id"] for call in calls]
            message |= {"content": message["content"] or None, "tool_calls": calls}
        elif message["role"] == "tool" and open_ids:
            message.setdefault("tool_call_id", open_ids[0])
            open_ids = [other for other in open_ids if other != message["tool_call_id"]]
        sent.append(message)
    return sent


ChatModel = EngineChat | ServerChat

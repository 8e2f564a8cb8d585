"""Chat models: actors of checkpoints in this process, and servers that complete chat requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from ..engines.base import Completion
from ..engines.sampling import Sampling, derived_seed
from ..engines.transformers import TransformersEngine
from ..prompts.conversation import (
    ChatRequest,
    Message,
    message_text,
    normalize_messages,
    response_action,
    since_last_completion,
)
from ..prompts.images import ImageEncoder, ImageInputs, load_processing_class, load_processor
from ..prompts.template import DEFAULT_PROMPT, PromptTemplate
from ..prompts.tokenization import ChatEncoder, get_tokenizer
from ..prompts.tool_calls import call_in
from ..rollout.actor import PromptActor, prompt_contents
from ..rollout.conversations import cut_before, request_of, sampling_of
from ..rollout.episode import Episode
from ..trajectory import Step
from ..utils.adapters import adapter_of, load_adapter
from ..utils.errors import G2POError
from ..utils.extras import import_extra
from ..utils.options import require
from ..utils.trl_compat import create_model_from_path
from .text_actor import TextActor

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


def load_tokenizer(model: str, loaded: Any, **options: Any):
    """Return the tokenizer, padded on the left, or the processor of images and text of a model from `load_model`.

    An adapter without one has that of the folder above it, its run's, or of its base.
    """
    adapter = getattr(loaded, "active_peft_config", None)
    places = [model] if adapter is None else [model, str(Path(model).parent), adapter.base_model_name_or_path]
    for place in places[:-1]:
        with suppress(OSError, ValueError):
            return load_processing_class(place, padding_side="left", **options)
    return load_processing_class(places[-1], padding_side="left", **options)


def load_local(
    model: str, chat_template_kwargs: Kwargs = None, generation_kwargs: Kwargs = None, autocast: str = "", **kwargs
) -> PromptActor:
    """Return the actor of a checkpoint or an adapter, with transformers' `generate`.

    `generation_kwargs` go to `GenerationConfig`, `kwargs` to `from_pretrained`. `autocast` is the precision of the
    forward pass, e.g. "bfloat16", as in mixed-precision training; by default that of the weights.
    """
    device_map = "auto" if torch.cuda.is_available() else None
    loaded = load_model(model, **{"device_map": device_map, "dtype": "auto", **kwargs}).eval()
    processing_class = load_tokenizer(model, loaded, trust_remote_code=kwargs.get("trust_remote_code"))
    tokenizer = get_tokenizer(processing_class)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    options = {"batch_tokens": sys.maxsize, "options": generation_kwargs}  # who asks bounds the batch
    precision = getattr(torch, autocast) if autocast else None
    engine = SeededEngine.from_model(loaded, tokenizer, precision, **options)
    engine.read_images(ImageInputs.of(processing_class, loaded))
    longest = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
    encode = ChatEncoder(engine.processing_class, chat_template_kwargs)
    return PromptActor(engine, encode, context_length=longest)


def load_vllm(
    model: str, chat_template_kwargs: Kwargs = None, generation_kwargs: Kwargs = None, **vllm_options: Any
) -> PromptActor:
    """Return the actor of a checkpoint or an adapter, with vLLM in this process.

    `generation_kwargs` go to `SamplingParams`, `vllm_options` to `vllm.LLM`.
    """
    from ..engines.vllm_offline import OfflineVLLMEngine

    engine = OfflineVLLMEngine(model, generation_kwargs, **vllm_options)
    try:
        processors = filter(None, map(load_processor, engine.images_from))
        if (processor := next(processors, None)) is not None:
            engine.read_images(ImageEncoder(processor))
        encode = ChatEncoder(engine.processing_class, chat_template_kwargs)
        return PromptActor(engine, encode, context_length=engine.longest)
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
    length_field = "max_tokens"
    names_stops = False  # whether it is known to tell which text ended a completion, as vLLM and SGLang do

    def __post_init__(self):
        self.openai = import_extra("openai")
        options = {"api_key": os.environ.get(self.key_variable) or "none", "timeout": 300.0}
        self.client = self.openai.AsyncOpenAI(base_url=self.base_url, max_retries=self.max_retries, **options)
        self.runner = asyncio.Runner()  # ends the requests of an interrupted evaluation
        self.free = asyncio.Semaphore(self.parallel)
        template = {"chat_template_kwargs": self.chat_template_kwargs} if self.chat_template_kwargs else {}
        self.fields = {**(self.generation_kwargs or {}), **template}

    async def complete(self, request: ChatRequest, sampling: Sampling, seed: int) -> ChatCompletion:
        """Return the completion of a request, with an `error` if the conversation is too long for the model.

        Raises `G2POError` for a request that is rejected.
        """
        # Fields that not every server supports are sent only if they are set.
        filters = {name: value for name, value in sampling.filters().items() if name != "top_p"}
        ends = sampling.stop_sequences if self.names_stops else ()  # they are a part of the completion
        stops = list(dict.fromkeys([*request.stop, *(ends or ())]))
        options = {"stop": stops, "extra_body": self.fields | filters, "tools": request.tools}
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
            completion, self.names_stops = _read(response, request, sampling)
            return completion
        except (self.openai.OpenAIError, ValueError) as error:  # also text that is not JSON
            is_rejected = isinstance(error, self.openai.BadRequestError)
            told = f"{error} {error.code}".lower() if is_rejected else ""
            if length_field == "max_tokens" and "max_completion_tokens" in told:  # newer servers
                self.length_field = "max_completion_tokens"
                return await self.complete(request, sampling, seed)
            if any(words in told for words in _TOO_LONG):
                return ChatCompletion("", error=f"the conversation is too long for the server's model: {error}")
            remedy = "check the address, up to /v1, and the variable with its key (key_variable)"
            message = f"base_url is {self.base_url}, which answers: {error.__cause__ or error}; {remedy}"
            raise G2POError(message, "base_url", self.base_url) from error

    def close(self) -> None:
        """End the connections."""
        self.runner.run(self.client.close())
        self.runner.close()


def _read(response: Any, request: ChatRequest, sampling: Sampling) -> tuple[ChatCompletion, bool]:
    """Return a response's completion, and whether it would name a stop text. Raises `ValueError` if there is none."""
    choice = next(iter(getattr(response, "choices", None) or ()), None)
    if choice is None or choice.message is None:
        raise ValueError(f"it answered without a chat completion ({response!s:.200})")
    message, usage = choice.message, response.usage
    text = cut_before(message.content or "", request.stop)  # some servers ignore stop texts
    names = [getattr(choice, name) for name in ("stop_reason", "matched_stop") if hasattr(choice, name)]
    text += "".join(stop for stop in sampling.stop_sequences or () if stop in names and stop not in request.stop)
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
    complete = choice.finish_reason not in ("length", "content_filter")
    return ChatCompletion(text, *tokens, complete, message=answer), bool(names)


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


@dataclass
class ServerActor(TextActor):
    """An actor that asks a model on a server. `PromptActor` explains the fields; servers limit prompts themselves."""

    server: ServerChat
    template: PromptTemplate = DEFAULT_PROMPT
    history_length: int = 2
    history: str | None = "window"
    max_prompt_length: int | None = None  # not regarded
    stop: tuple[str, ...] = ()  # texts that end a completion, without being part of it
    engine = None

    def close(self) -> None:
        self.server.close()

    def answer(self, episodes: Sequence[Episode]) -> list[Step | None]:
        for episode in episodes:
            remedy = "a server's model reads text only; evaluate a vision-language checkpoint"
            require(not episode.observation.images, "images", len(episode.observation.images), remedy)
        requests = list(map(self._request, episodes))
        seeds = [derived_seed(self.seeds[episode.number], len(episode.steps)) for episode in episodes]

        async def complete_all() -> list[ChatCompletion]:
            pairs = zip(requests, seeds)
            return await asyncio.gather(*(self.server.complete(one, self.sampling, seed) for one, seed in pairs))

        return list(map(self._step, episodes, requests, self.server.runner.run(complete_all())))

    def _request(self, episode: Episode) -> ChatRequest:
        template = self.template.of(episode.environment)
        if self.history == "conversation" or episode.observation.request is not None:
            request = request_of(episode, template)
            return replace(request, stop=request.stop + self.stop)
        return ChatRequest(template.messages(**prompt_contents(episode, self.history_length)))

    def _step(self, episode: Episode, request: ChatRequest, completion: ChatCompletion) -> Step | None:
        if completion.error:
            return episode.give_up(f"context overflow: {completion.error}")
        episode.reported.append((completion.prompt_tokens, completion.completion_tokens))
        text, fields = completion.text, {"completion_truncated": not completion.complete}
        if episode.observation.request is not None:
            action, valid = response_action(completion.message), request.is_valid(completion.message)
            fields["call"] = request.call_in(completion.message, text, valid)
            fields["messages"] = since_last_completion(request.messages) if episode.steps else request.messages
        else:
            template = self.template.of(episode.environment)
            action, valid = template.read(text, "", episode.observation.admissible_actions)
            fields |= {"call": call_in(template, action, valid), "prompt": request.messages[-1]["content"]}
        return episode.step(action, text, valid=valid, **fields)

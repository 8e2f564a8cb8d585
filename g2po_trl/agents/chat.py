"""Chat models: conversations in, replies out. A local checkpoint, vLLM, or a server that speaks OpenAI's protocol."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..installing import how_to_install
from ..json_text import write_json
from ..rollout.encoding import ChatEncoder
from .loading import load_model

Conversation = list[dict[str, str]]
# How servers say that a conversation is longer than their model's context.
_TOO_LONG = ("context_length", "context length", "context window", "maximum context", "too long")


@dataclass(frozen=True)
class ChatSettings:
    """How replies are sampled, the same by every engine: a checkpoint's generation_config has no part in it.

    Args:
        temperature: 0 is greedy.
        top_p, top_k, min_p, repetition_penalty: 1, 0, `None` and 1 switch them off.
        stop: a reply ends before the first of these.
        stop_after: a reply ends with the first of these, as with the trainer's `stop_sequences`.
    """

    temperature: float = 0.4
    top_p: float = 1.0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    stop_after: tuple[str, ...] = ()
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def cut(self, text: str) -> str:
        """The text up to where a reply ends."""
        ends = [text.index(word) for word in self.stop if word in text]
        ends += [text.index(word) + len(word) for word in self.stop_after if word in text]
        return text[: min(ends, default=len(text))]


@dataclass(frozen=True)
class ChatReply:
    """A reply. `error`: why there is none (a conversation that is too long for the model)."""

    text: str
    prompt_tokens: int = 0
    reply_tokens: int = 0
    complete: bool = True
    prompt_end: str = ""
    error: str | None = None


class ChatError(RuntimeError):
    """A server that cannot be asked: wrong key, wrong address, unknown model."""


class TokenBudgetSpentError(RuntimeError):
    """The bound on tokens is reached. What was played is written; a larger bound goes on from there."""


@dataclass
class TokenBudget:
    """Tokens read and written so far, and how many they may be together (`None`: any number).

    With a `path`, they are kept in this file: an evaluation that goes on where it was stopped goes on counting. It is
    written before each turn, so a kill forgets one turn's tokens at most.
    """

    limit: int | None = None
    read: int = 0
    written: int = 0
    path: Path | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self):
        if self.path is not None and self.path.is_file():
            spent = json.loads(self.path.read_text(encoding="utf-8"))
            self.read, self.written = self.read + spent["read"], self.written + spent["written"]

    def save(self) -> None:
        """Write down what was used."""
        if self.path is not None:
            write_json(self.path, {"read": self.read, "written": self.written})

    def check(self) -> None:
        """Raises TokenBudgetSpentError when nothing is left."""
        self.save()
        if self.limit is not None and self.read + self.written >= self.limit:
            raise TokenBudgetSpentError(
                f"{self.read + self.written} tokens were used, {self.limit} are allowed: run the same command with a "
                "larger --max-total-tokens to go on from here"
            )

    def count(self, reply: ChatReply) -> None:
        with self._lock:
            self.read += reply.prompt_tokens
            self.written += reply.reply_tokens


class ChatModel:
    """Answers conversations.

    `independent`: a reply depends on its own conversation and seed alone, not on the others of a batch. `encode`:
    conversation -> token ids and text of the prompt; `None` where the tokenizer is elsewhere.
    """

    independent = False
    encode: Callable[[Conversation], tuple[list[int], str]] | None = None
    parallel: int | None = None  # conversations at a time; `None`: as many as there are

    def reply(
        self, conversations: Sequence[Conversation], settings: ChatSettings, seeds: Sequence[int]
    ) -> list[ChatReply]:
        """One reply each, in order."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the model holds."""


class LocalChat(ChatModel):
    """A checkpoint or an adapter, by transformers' `generate`. The same batches with the same seeds: the same text."""

    def __init__(
        self,
        model: str,
        batch_size: int = 32,
        chat_template_kwargs: dict[str, Any] | None = None,
        **model_kwargs: Any,
    ):
        import torch
        from transformers import AutoTokenizer

        kwargs = {"device_map": "auto" if torch.cuda.is_available() else None, "dtype": "auto", **model_kwargs}
        self.model = load_model(model, **kwargs)
        self.model.eval()
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        except (OSError, ValueError):  # an adapter without its tokenizer
            base = self.model.peft_config["default"].base_model_name_or_path
            self.tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.batch_size = batch_size
        self.longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.encode = ChatEncoder(self.tokenizer, chat_template_kwargs)
        ends = self.model.generation_config.eos_token_id
        ends = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        self.ends = sorted(end for end in ends if end is not None)

    def reply(
        self, conversations: Sequence[Conversation], settings: ChatSettings, seeds: Sequence[int]
    ) -> list[ChatReply]:
        import torch

        texts = [self.encode.text(conversation) for conversation in conversations]
        ids = self.encode.ids(texts)
        replies: list[ChatReply | None] = [None] * len(ids)
        for i, prompt in enumerate(ids):
            if self.longest is not None and len(prompt) + settings.max_tokens > self.longest:
                replies[i] = ChatReply(
                    "", len(prompt), error=_too_long(len(prompt), settings.max_tokens, self.longest)
                )
        left = [i for i, reply in enumerate(replies) if reply is None]
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(_combined(seeds))
            for start in range(0, len(left), self.batch_size):
                chosen = left[start : start + self.batch_size]
                for i, reply in zip(chosen, self._generate([ids[i] for i in chosen], settings)):
                    end = texts[i][-64:]
                    replies[i] = ChatReply(reply.text, reply.prompt_tokens, reply.reply_tokens, reply.complete, end)
        return replies

    def _generate(self, prompts: list[list[int]], settings: ChatSettings) -> list[ChatReply]:
        from ..rollout.sampling import Sampling, generate_batch, generation_config

        config = generation_config(
            self.tokenizer,
            Sampling(settings.temperature, settings.top_p, settings.top_k, settings.min_p),
            settings.max_tokens,
            self.ends,
            [*settings.stop, *settings.stop_after],
            repetition_penalty=settings.repetition_penalty,
        )
        replies = []
        for prompt, row in zip(prompts, generate_batch(self.model, self.tokenizer, prompts, config)):
            last = next((i for i, token in enumerate(row) if token in self.ends), None)
            written = row if last is None else row[:last]
            text = self.encode.decode(written)
            shown = settings.cut(text)
            replies.append(ChatReply(shown, len(prompt), len(written), last is not None or shown != text))
        return replies


class VLLMChat(ChatModel):
    """A checkpoint or an adapter, by vLLM in this process."""

    independent = True

    def __init__(self, model: str, chat_template_kwargs: dict[str, Any] | None = None, **engine_kwargs: Any):
        from vllm import LLM

        self.adapter = None
        self.template_kwargs = chat_template_kwargs or {}
        adapter = Path(model, "adapter_config.json")
        if adapter.is_file():
            from vllm.lora.request import LoRARequest

            settings = json.loads(adapter.read_text())
            self.adapter = LoRARequest("adapter", 1, model)
            engine_kwargs = {"enable_lora": True, "max_lora_rank": max(8, settings["r"]), **engine_kwargs}
            model = settings["base_model_name_or_path"]
        # vLLM would take temperature, top_p, … that a request leaves open from the checkpoint's generation_config.
        self.engine = LLM(model, **{"generation_config": "vllm", **engine_kwargs})
        self.ends = _ends_of(model, engine_kwargs.get("revision"))
        self.longest = self.engine.llm_engine.model_config.max_model_len
        self.encode = ChatEncoder(self.engine.get_tokenizer(), chat_template_kwargs)

    def reply(
        self, conversations: Sequence[Conversation], settings: ChatSettings, seeds: Sequence[int]
    ) -> list[ChatReply]:
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                min_p=settings.min_p or 0.0,
                repetition_penalty=settings.repetition_penalty,
                max_tokens=settings.max_tokens,
                stop=[*settings.stop, *settings.stop_after] or None,
                include_stop_str_in_output=True,
                stop_token_ids=self.ends,
                seed=seed,
            )
            for seed in seeds
        ]
        prompts = [self.encode(conversation) for conversation in conversations]
        fits = [i for i, (ids, _) in enumerate(prompts) if len(ids) + settings.max_tokens <= self.longest]
        outputs = self.engine.generate(
            [{"prompt_token_ids": prompts[i][0]} for i in fits],
            [sampling[i] for i in fits],
            lora_request=self.adapter,
            use_tqdm=False,
        )
        replies = [
            ChatReply("", len(ids), error=_too_long(len(ids), settings.max_tokens, self.longest)) for ids, _ in prompts
        ]
        for i, output in zip(fits, outputs):
            replies[i] = ChatReply(
                settings.cut(output.outputs[0].text),
                len(output.prompt_token_ids),
                len(output.outputs[0].token_ids),
                output.outputs[0].finish_reason == "stop",
                prompts[i][1][-64:],
            )
        return replies


class ServerChat(ChatModel):
    """A server that speaks OpenAI's chat completions: `vllm serve`, `transformers serve`, or a provider.

    Args:
        base_url: up to and with /v1.
        model: as the server calls it.
        key_variable: the environment variable with the key; servers of one's own need none.
        parallel: requests at a time.
        retries: of a request that failed by load or network, with growing pauses.
        timeout: seconds a request may take.
        chat_template_kwargs: for servers that know them (vLLM, SGLang).

    Raises:
        ImportError: without the package openai.
    """

    independent = True

    def __init__(
        self,
        base_url: str,
        model: str,
        key_variable: str = "OPENAI_API_KEY",
        parallel: int = 16,
        retries: int = 6,
        timeout: float = 300.0,
        chat_template_kwargs: dict[str, Any] | None = None,
    ):
        try:
            from openai import OpenAI
        except ImportError as error:
            raise ImportError(f"openai is not installed: servers need it; {how_to_install('agents')}") from error
        self.model, self.parallel, self.base_url = model, parallel, base_url
        key = os.environ.get(key_variable) or "none"
        self.client = OpenAI(base_url=base_url, api_key=key, max_retries=retries, timeout=timeout)
        self.key_variable, self.template_kwargs = key_variable, chat_template_kwargs
        self.length_field = "max_tokens"

    def reply(
        self, conversations: Sequence[Conversation], settings: ChatSettings, seeds: Sequence[int]
    ) -> list[ChatReply]:
        with ThreadPoolExecutor(max_workers=max(1, self.parallel)) as threads:
            return list(threads.map(lambda pair: self._ask(pair[0], settings, pair[1]), zip(conversations, seeds)))

    def _ask(self, conversation: Conversation, settings: ChatSettings, seed: int) -> ChatReply:
        from openai import APIConnectionError, AuthenticationError, BadRequestError, OpenAIError

        try:
            answer = self._complete(conversation, settings, seed)
        except BadRequestError as error:
            told = f"{error} {error.code} {error.body}".lower()
            if any(sign in told for sign in _TOO_LONG):
                return ChatReply("", error=f"the server's model takes no conversation as long: {error}")
            raise ChatError(f"the server at {self.base_url} refuses the request: {error}") from error
        except AuthenticationError as error:
            raise ChatError(
                f"the server at {self.base_url} refuses the key in {self.key_variable}: set this environment "
                "variable, or name another with --key-variable"
            ) from error
        except APIConnectionError as error:
            raise ChatError(
                f"no answer from {self.base_url} ({error.__cause__ or error}): is it running, and is this its address?"
            ) from error
        except OpenAIError as error:
            raise ChatError(f"the server at {self.base_url}: {error}") from error
        if not answer.choices:
            raise ChatError(f"the server at {self.base_url} answered without a choice: is it OpenAI's protocol?")
        choice, usage = answer.choices[0], answer.usage
        text = choice.message.content or ""
        return ChatReply(
            settings.cut(text),  # not every server heeds it
            usage.prompt_tokens if usage else 0,
            usage.completion_tokens if usage else 0,
            choice.finish_reason == "stop",
        )

    def _complete(self, conversation: Conversation, settings: ChatSettings, seed: int):
        """A request. OpenAI's newer models refuse `max_tokens` and name the field they want in its place."""
        from openai import BadRequestError

        # What only some servers know is sent only when it is asked for.
        body: dict[str, Any] = {"chat_template_kwargs": self.template_kwargs} if self.template_kwargs else {}
        body |= {"top_k": settings.top_k} if settings.top_k else {}
        body |= {"min_p": settings.min_p} if settings.min_p else {}
        body |= {"repetition_penalty": settings.repetition_penalty} if settings.repetition_penalty != 1 else {}
        options = {"stop": list(settings.stop)} if settings.stop else {}
        options |= {"extra_body": body} if body else {}
        length_field = self.length_field
        try:
            return self.client.chat.completions.create(
                model=self.model,
                messages=conversation,
                temperature=settings.temperature,
                top_p=settings.top_p,
                seed=seed,
                **{length_field: settings.max_tokens},
                **options,
            )
        except BadRequestError as error:
            if length_field != "max_tokens" or "max_completion_tokens" not in str(error):
                raise
            self.length_field = "max_completion_tokens"
            return self._complete(conversation, settings, seed)

    def close(self) -> None:
        self.client.close()


def _combined(seeds: Sequence[int]) -> int:
    combined = 0
    for seed in seeds:
        combined = (combined * 1_000_003 + seed) % (2**63)
    return combined


def _ends_of(model: str, revision: str | None) -> list[int]:
    """Tokens that end a reply, as the checkpoint says; vLLM knows the tokenizer's by itself."""
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(model, revision=revision).eos_token_id
    except OSError:
        return []
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _too_long(prompt: int, reply: int, longest: int) -> str:
    return f"{prompt} tokens and {reply} of the reply exceed the model's {longest}"

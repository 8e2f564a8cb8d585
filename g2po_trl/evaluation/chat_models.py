"""Chat models: conversations in, completions out. A local checkpoint, vLLM, or a server with OpenAI's protocol."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engines.sampling import Sampling
from ..prompts.tokenization import ChatEncoder
from ..utils.extras import install_command
from ..utils.json import write_json
from .checkpoints import load_model

if TYPE_CHECKING:
    from ..engines.base import Completion, Engine

Conversation = list[dict[str, str]]
# Words in servers' errors about conversations that exceed the model's context.
_TOO_LONG = ("context_length", "context length", "context window", "maximum context", "too long")


@dataclass(frozen=True)
class ChatSettings:
    """Sampling settings, the same for every engine; a checkpoint's `generation_config` is not used.

    Args:
        temperature: 0 is greedy.
        top_p, top_k, min_p, repetition_penalty: as in `Sampling`; 1, 0, `None` and 1 disable them.
        max_tokens: maximum tokens of a completion.
        stop: a completion ends before the first of these texts.
        stop_after: a completion ends after the first of these texts, as with `stop_sequences` in training.
    """

    temperature: float = 0.4
    top_p: float = 1.0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    stop_after: tuple[str, ...] = ()
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def sampling(self) -> Sampling:
        """Return the settings of an engine, whose completions end with any of the stop texts."""
        return Sampling(
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
            self.repetition_penalty,
            self.max_tokens,
            (*self.stop, *self.stop_after),
        )

    def cut(self, text: str) -> str:
        """Return the text up to the first stop text."""
        ends = [text.index(word) for word in self.stop if word in text]
        ends += [text.index(word) + len(word) for word in self.stop_after if word in text]
        return text[: min(ends, default=len(text))]


@dataclass(frozen=True)
class ChatCompletion:
    """A completion. `error`: why there is none, e.g. a conversation that exceeds the model's context."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    complete: bool = True
    prompt_end: str = ""
    error: str | None = None


class ChatError(RuntimeError):
    """A server rejects requests or cannot be reached: wrong key, wrong address, unknown model."""


class TokenBudgetSpentError(RuntimeError):
    """The token budget is spent. Finished episodes are saved; the same command with a larger budget resumes."""


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
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self):
        if self.path is not None and self.path.is_file():
            spent = json.loads(self.path.read_text(encoding="utf-8"))
            self.read, self.written = self.read + spent["read"], self.written + spent["written"]

    def save(self) -> None:
        """Write the counts to `path`."""
        if self.path is not None:
            write_json(self.path, {"read": self.read, "written": self.written})

    def check(self) -> None:
        """Save the counts.

        Raises:
            TokenBudgetSpentError: if the limit is reached.
        """
        self.save()
        if self.limit is not None and self.read + self.written >= self.limit:
            raise TokenBudgetSpentError(
                f"{self.read + self.written} tokens were used, {self.limit} are allowed: run the same command with a "
                "larger --max-total-tokens to resume"
            )

    def count(self, completion: ChatCompletion) -> None:
        """Add the tokens of a completion and of its prompt.

        Raises:
            ChatError: if there is a limit and the server does not report tokens.
        """
        tokens = completion.prompt_tokens + completion.completion_tokens
        if self.limit is not None and not completion.error and tokens == 0:
            raise ChatError(
                f"--max-total-tokens is {self.limit}, and the server reports no token usage to count: limit the costs "
                "at the provider, and run without --max-total-tokens"
            )
        with self._lock:
            self.read += completion.prompt_tokens
            self.written += completion.completion_tokens


class ChatModel:
    """Base class of chat models: a checkpoint, vLLM or a server.

    Class attributes: `independent`, whether a completion depends only on its own conversation and seed; `parallel`,
    the maximum number of concurrent conversations; `encode`, conversation -> token ids and text, or `None` for a
    server.
    """

    independent = False
    encode: Callable[[Conversation], tuple[list[int], str]] | None = None
    parallel: int | None = None

    def generate(
        self, conversations: Sequence[Conversation], settings: ChatSettings, seeds: Sequence[int]
    ) -> list[ChatCompletion]:
        """Continue conversations.

        Args:
            conversations: chat messages.
            settings: how completions are sampled.
            seeds: one per conversation.

        Returns:
            One completion per conversation, in order.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free resources."""


class EngineChat(ChatModel):
    """A model in this process, with an engine as in training.

    Args:
        engine: generates token ids.
        longest: maximum tokens of prompt and completion together. `None`: no limit.
        chat_template_kwargs: variables of the chat template.
        batch_size: conversations per `generate` call of an engine that does not support seeds; its completions are
            reproducible if the batches and their seeds are the same.
    """

    def __init__(
        self,
        engine: Engine,
        longest: int | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        batch_size: int = 32,
    ):
        self.engine, self.longest, self.batch_size = engine, longest, batch_size
        self.independent = engine.takes_seeds
        self.encode = ChatEncoder(engine.tokenizer, chat_template_kwargs)

    def generate(
        self, conversations: Sequence[Conversation], settings: ChatSettings, seeds: Sequence[int]
    ) -> list[ChatCompletion]:
        texts = [self.encode.text(conversation) for conversation in conversations]
        prompts = self.encode.ids(texts)
        most = settings.max_tokens
        before = replace(settings, stop_after=())  # the engine ends after these, with a whole token as in training
        fitting = [i for i, ids in enumerate(prompts) if self.longest is None or len(ids) + most <= self.longest]
        error = f"tokens and {most} of the completion exceed the model's {self.longest}"
        completions = [ChatCompletion("", len(ids), error=f"{len(ids)} {error}") for ids in prompts]
        for i, generated in zip(fitting, self._generate([prompts[i] for i in fitting], settings, seeds, fitting)):
            last = bool(generated.ids) and generated.ids[-1] in self.engine.stop_token_ids
            text = self.encode.decode(generated.ids[:-1] if last else generated.ids)
            cut = before.cut(text)
            complete = generated.complete or cut != text
            completions[i] = ChatCompletion(cut, len(prompts[i]), len(generated.ids) - last, complete, texts[i][-64:])
        return completions

    def _generate(
        self, prompts: Sequence[list[int]], settings: ChatSettings, seeds: Sequence[int], fitting: Sequence[int]
    ) -> list[Completion]:
        """Generate with one seed per prompt; without support for seeds, from a random state made of all seeds."""
        sampling = settings.sampling()
        if self.engine.takes_seeds:
            return self.engine.generate(prompts, sampling, [seeds[i] for i in fitting])
        import torch

        devices = range(torch.cuda.device_count())
        completions: list[Completion] = []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(_combined(seeds))
            for start in range(0, len(prompts), self.batch_size):
                completions += self.engine.generate(prompts[start : start + self.batch_size], sampling)
        return completions


def load_local(
    model: str,
    batch_size: int = 32,
    chat_template_kwargs: dict[str, Any] | None = None,
    generation_kwargs: dict[str, Any] | None = None,
    autocast: str | None = None,
    **model_kwargs: Any,
) -> EngineChat:
    """Return the chat model of a checkpoint or an adapter, with transformers' `generate`.

    Args:
        model: a folder or a Hub id.
        batch_size: conversations per `generate` call.
        chat_template_kwargs: variables of the chat template.
        generation_kwargs: further fields of transformers' `GenerationConfig`.
        autocast: precision of the forward pass, e.g. "bfloat16", as in mixed-precision training. `None`: the
            precision of the weights.
        **model_kwargs: passed to `from_pretrained`.
    """
    import torch
    from transformers import AutoTokenizer

    from ..engines.transformers import TransformersEngine

    loaded = load_model(
        model, **{"device_map": "auto" if torch.cuda.is_available() else None, "dtype": "auto", **model_kwargs}
    )
    loaded.eval()
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    except (OSError, ValueError):  # an adapter without its tokenizer
        base = loaded.peft_config["default"].base_model_name_or_path
        tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    longest = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
    precision = None if autocast is None else getattr(torch, autocast)
    options = {"batch_tokens": sys.maxsize, "options": generation_kwargs}  # `batch_size` bounds the tokens
    engine = TransformersEngine.from_model(loaded, tokenizer, precision, **options)
    return EngineChat(engine, longest, chat_template_kwargs, batch_size)


def load_vllm(
    model: str,
    chat_template_kwargs: dict[str, Any] | None = None,
    generation_kwargs: dict[str, Any] | None = None,
    **vllm_options: Any,
) -> EngineChat:
    """Return the chat model of a checkpoint or an adapter, with vLLM in this process.

    Args:
        model: a folder or a Hub id.
        chat_template_kwargs: variables of the chat template.
        generation_kwargs: further fields of vLLM's `SamplingParams`.
        **vllm_options: passed to `vllm.LLM`.
    """
    from ..engines.vllm_offline import OfflineVLLMEngine

    engine = OfflineVLLMEngine(model, generation_kwargs, **vllm_options)
    return EngineChat(engine, engine.longest, chat_template_kwargs)


class ServerChat(ChatModel):
    """A chat model on a server with OpenAI's protocol: `vllm serve`, `transformers serve`, or a provider.

    Args:
        base_url: URL up to `/v1`, included.
        model: name of the model on the server.
        key_variable: environment variable that contains the key, if the server needs one.
        parallel: maximum number of concurrent requests.
        retries: number of retries of a request that fails because of load or network, with growing pauses.
        timeout: maximum seconds of a request.
        chat_template_kwargs: variables of the chat template, for servers that take them (vLLM, SGLang).
        generation_kwargs: further fields of a request, for servers that take them.

    Raises:
        ImportError: if openai is not installed.
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
        generation_kwargs: dict[str, Any] | None = None,
    ):
        try:
            from openai import OpenAI
        except ImportError as error:
            raise ImportError(f"openai is not installed: servers need it; {install_command('agents')}") from error
        self.model, self.parallel, self.base_url = model, parallel, base_url
        key = os.environ.get(key_variable) or "none"
        self.client = OpenAI(base_url=base_url, api_key=key, max_retries=retries, timeout=timeout)
        self.key_variable, self.template_kwargs = key_variable, chat_template_kwargs
        self.generation_kwargs = generation_kwargs or {}
        self.length_field = "max_tokens"

    def generate(
        self, conversations: Sequence[Conversation], settings: ChatSettings, seeds: Sequence[int]
    ) -> list[ChatCompletion]:
        with ThreadPoolExecutor(max_workers=max(1, self.parallel)) as threads:
            return list(
                threads.map(lambda pair: self._complete(pair[0], settings, pair[1]), zip(conversations, seeds))
            )

    def _complete(self, conversation: Conversation, settings: ChatSettings, seed: int) -> ChatCompletion:
        from openai import APIConnectionError, AuthenticationError, BadRequestError, OpenAIError

        try:
            response = self._request(conversation, settings, seed)
        except BadRequestError as error:
            message = f"{error} {error.code} {error.body}".lower()
            if any(words in message for words in _TOO_LONG):
                return ChatCompletion("", error=f"the conversation is too long for the server's model: {error}")
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
        except (OpenAIError, ValueError) as error:  # ValueError: the response is not valid JSON
            raise ChatError(f"the server at {self.base_url}: {error}") from error
        return self._parse(response, settings)

    def _parse(self, response: Any, settings: ChatSettings) -> ChatCompletion:
        """Return the completion in a server's response.

        Raises:
            ChatError: if the response is not a chat completion.
        """
        choices = getattr(response, "choices", None)
        message = getattr(choices[0], "message", None) if choices else None
        if message is None:
            shown = getattr(response, "error", None) or response
            shown = shown if isinstance(shown, (str, dict)) else shown.model_dump_json(exclude_unset=True)
            raise ChatError(
                f"the server at {self.base_url} answered without a chat completion ({str(shown).strip()[:200]!r}): is "
                "this the address of its API, up to /v1?"
            )
        text, reasoning = _text_and_reasoning(message.content)
        # The name of the field depends on the server.
        reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None) or reasoning
        text = settings.cut(text)  # some servers ignore stop texts
        if reasoning and isinstance(reasoning, str) and "</think>" not in text:
            text = f"<think>{reasoning}</think>{text}"
        usage = response.usage
        return ChatCompletion(
            text,
            (usage.prompt_tokens or 0) if usage else 0,
            (usage.completion_tokens or 0) if usage else 0,
            choices[0].finish_reason not in ("length", "content_filter"),
        )

    def _request(self, conversation: Conversation, settings: ChatSettings, seed: int):
        """Return the response to a request, sent again with `max_completion_tokens` if `max_tokens` is rejected."""
        from openai import BadRequestError

        # Fields that not every server supports are sent only if they are set.
        body: dict[str, Any] = {"chat_template_kwargs": self.template_kwargs} if self.template_kwargs else {}
        body |= self.generation_kwargs
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
                seed=seed % 2**31,  # servers accept 31 bits
                **{length_field: settings.max_tokens},
                **options,
            )
        except BadRequestError as error:
            if length_field != "max_tokens" or "max_completion_tokens" not in str(error):
                raise
            self.length_field = "max_completion_tokens"
            return self._request(conversation, settings, seed)

    def close(self) -> None:
        self.client.close()


def _text_and_reasoning(content: Any) -> tuple[str, str]:
    """Return the text and the reasoning in a message's content, which is a text, a list of parts, or `None`."""
    if not isinstance(content, list):
        return str(content or ""), ""
    text, reasoning = [], []
    for part in content:
        kind, parts = (part.get("type"), part) if isinstance(part, dict) else ("text", {"text": str(part)})
        inner = parts.get(kind) if isinstance(parts.get(kind), (str, list)) else parts.get("text")
        (reasoning if kind in ("thinking", "reasoning") else text).append(_text_and_reasoning(inner)[0])
    return "".join(text), "".join(reasoning)


def _combined(seeds: Sequence[int]) -> int:
    combined = 0
    for seed in seeds:
        combined = (combined * 1_000_003 + seed) % (2**63)
    return combined

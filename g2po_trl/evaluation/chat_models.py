"""Chat models: conversations in, completions out. A checkpoint in this process, by transformers or vLLM."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..engines.base import Completion, Engine
from ..engines.sampling import Sampling
from ..prompts.conversation import ChatRequest, Message
from ..prompts.tokenization import ChatEncoder
from ..utils.json import write_json
from .checkpoints import load_model, load_tokenizer

Conversation = list[Message]


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
            [*self.stop, *self.stop_after],
        )

    def cut(self, text: str) -> str:
        """Return the text up to the first stop text."""
        ends = [text.index(word) for word in self.stop if word in text]
        ends += [text.index(word) + len(word) for word in self.stop_after if word in text]
        return text[: min(ends, default=len(text))]


@dataclass(frozen=True)
class ChatCompletion:
    """A completion.

    `error`: why there is none, e.g. a conversation that exceeds the model's context. `message`: of a `ChatRequest`,
    the assistant's message.
    """

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    complete: bool = True
    prompt_end: str = ""
    error: str | None = None
    message: Message | None = None


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
        """Save the counts. Raises `TokenBudgetSpentError` if the limit is reached."""
        self.save()
        if self.limit is not None and self.read + self.written >= self.limit:
            raise TokenBudgetSpentError(
                f"{self.read + self.written} tokens were used, {self.limit} are allowed: run the same command with a "
                "larger --max-total-tokens to resume"
            )

    def count(self, completion: ChatCompletion) -> None:
        """Add the tokens of a completion and its prompt. Raises `ChatError` if they are limited and not reported."""
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
    the maximum number of concurrent conversations.
    """

    independent = False
    parallel: int | None = None

    def generate(
        self, conversations: Sequence[Conversation | ChatRequest], settings: ChatSettings, seeds: Sequence[int]
    ) -> list[ChatCompletion]:
        """Continue conversations (of servers also requests), each with its seed; return one completion each."""
        raise NotImplementedError

    def close(self) -> None:
        """Free resources."""


class SeededBatches(Engine):
    """An engine without seeds, made reproducible: batches of a fixed size, from a random state made of all seeds.

    Args:
        engine: generates the completions.
        batch_size: prompts per call of it.
    """

    def __init__(self, engine: Engine, batch_size: int):
        super().__init__(engine.tokenizer, engine.stop_token_ids, engine.options)
        self.engine, self.batch_size = engine, batch_size

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        import torch

        completions: list[Completion] = []
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(_combined(seeds or ()))
            for start in range(0, len(prompts), self.batch_size):
                completions += self.engine.generate(prompts[start : start + self.batch_size], sampling)
        return completions

    def close(self) -> None:
        self.engine.close()


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
        self.independent, self.longest = engine.takes_seeds, longest
        self.engine = engine if engine.takes_seeds else SeededBatches(engine, batch_size)
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
        asked, their_seeds = [prompts[i] for i in fitting], [seeds[i] for i in fitting]
        for i, generated in zip(fitting, self.engine.generate(asked, settings.sampling(), their_seeds)):
            last = bool(generated.ids) and generated.ids[-1] in self.engine.stop_token_ids
            text = self.encode.decode(generated.ids, self.engine.stop_token_ids)
            cut = before.cut(text)
            complete = generated.complete or cut != text
            completions[i] = ChatCompletion(cut, len(prompts[i]), len(generated.ids) - last, complete, texts[i][-64:])
        return completions

    def close(self) -> None:
        self.engine.close()


def load_local(
    model: str,
    batch_size: int = 32,
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
    tokenizer = load_tokenizer(model, loaded)
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

    `generation_kwargs` go to `SamplingParams`, `vllm_options` to `vllm.LLM`.
    """
    from ..engines.vllm_offline import OfflineVLLMEngine

    engine = OfflineVLLMEngine(model, generation_kwargs, **vllm_options)
    try:
        return EngineChat(engine, engine.longest, chat_template_kwargs)
    except BaseException:
        engine.close()
        raise


def _combined(seeds: Sequence[int]) -> int:
    combined = 0
    for seed in seeds:
        combined = (combined * 1_000_003 + seed) % (2**63)
    return combined

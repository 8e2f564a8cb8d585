"""Chat models: conversations in, replies out. A local checkpoint, vLLM, or a server that speaks OpenAI's protocol."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..encoding import ChatEncoder

Conversation = list[dict[str, str]]


@dataclass(frozen=True)
class ChatSettings:
    """How replies are sampled. `temperature` 0 is greedy; a reply ends before the first of `stop`."""

    temperature: float = 0.4
    top_p: float = 1.0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatReply:
    """A reply. `error`: why there is none (a conversation that is too long for the model)."""

    text: str
    prompt_tokens: int = 0
    reply_tokens: int = 0
    complete: bool = True
    prompt_end: str = ""
    error: str | None = None


class TokenBudgetSpentError(RuntimeError):
    """The bound on tokens is reached. What was played is written; a larger bound goes on from there."""


@dataclass
class TokenBudget:
    """Tokens read and written so far, and how many they may be together (`None`: any number)."""

    limit: int | None = None
    read: int = 0
    written: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def check(self) -> None:
        """Raises TokenBudgetSpentError when nothing is left."""
        if self.limit is not None and self.read + self.written >= self.limit:
            raise TokenBudgetSpentError(
                f"{self.read + self.written} tokens were used, {self.limit} are allowed: run the same command with a "
                "larger --max_total_tokens to go on from here"
            )

    def count(self, reply: ChatReply) -> None:
        with self._lock:
            self.read += reply.prompt_tokens
            self.written += reply.reply_tokens


class ChatModel:
    """Answers conversations. `independent`: a reply follows from its own conversation and seed, whoever is beside."""

    independent = False
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

    def __init__(self, model: str, batch_size: int = 32, **model_kwargs: Any):
        import torch
        from transformers import AutoTokenizer

        folder = Path(model)
        kwargs = {"device_map": "auto" if torch.cuda.is_available() else None, "dtype": "auto", **model_kwargs}
        if (folder / "adapter_config.json").is_file():
            from peft import AutoPeftModelForCausalLM

            self.model = AutoPeftModelForCausalLM.from_pretrained(model, **kwargs)
        else:
            self.model = _load(model, **kwargs)
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
        self.encode = ChatEncoder(self.tokenizer)

    def reply(
        self, conversations: Sequence[Conversation], settings: ChatSettings, seeds: Sequence[int]
    ) -> list[ChatReply]:
        import torch

        texts = [self.encode.text(conversation) for conversation in conversations]
        ids = self.encode.ids(texts)
        replies: list[ChatReply | None] = [None] * len(ids)
        for i, prompt in enumerate(ids):
            if self.longest is not None and len(prompt) + settings.max_tokens > self.longest:
                room = f"{len(prompt)} tokens and {settings.max_tokens} of the reply exceed the model's {self.longest}"
                replies[i] = ChatReply("", len(prompt), error=room)
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
        batch = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(self.model.device)
        sampled = settings.temperature > 0
        options = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0} if sampled else {}
        if settings.stop:
            options |= {"stop_strings": list(settings.stop), "tokenizer": self.tokenizer}
        output = self.model.generate(
            **batch,
            do_sample=sampled,
            max_new_tokens=settings.max_tokens,
            pad_token_id=self.tokenizer.pad_token_id,
            **options,
        )
        ends = self.model.generation_config.eos_token_id
        ends = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        replies = []
        for prompt, row in zip(prompts, output[:, batch["input_ids"].shape[1] :].tolist()):
            last = next((i for i, token in enumerate(row) if token in ends), None)
            written = row if last is None else row[:last]
            text = self.tokenizer.decode(written, skip_special_tokens=True)
            shown = _before(text, settings.stop)
            replies.append(ChatReply(shown, len(prompt), len(written), last is not None or shown != text))
        return replies


class VLLMChat(ChatModel):
    """A checkpoint or an adapter, by vLLM in this process."""

    independent = True

    def __init__(self, model: str, **engine_kwargs: Any):
        import json

        from vllm import LLM

        self.adapter = None
        adapter = Path(model, "adapter_config.json")
        if adapter.is_file():
            from vllm.lora.request import LoRARequest

            settings = json.loads(adapter.read_text())
            self.adapter = LoRARequest("adapter", 1, model)
            engine_kwargs = {"enable_lora": True, "max_lora_rank": max(8, settings["r"]), **engine_kwargs}
            model = settings["base_model_name_or_path"]
        self.engine = LLM(model, **engine_kwargs)

    def reply(
        self, conversations: Sequence[Conversation], settings: ChatSettings, seeds: Sequence[int]
    ) -> list[ChatReply]:
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                temperature=settings.temperature,
                top_p=settings.top_p,
                max_tokens=settings.max_tokens,
                stop=list(settings.stop) or None,
                seed=seed,
            )
            for seed in seeds
        ]
        outputs = self.engine.chat(list(conversations), sampling, lora_request=self.adapter, use_tqdm=False)
        return [
            ChatReply(
                output.outputs[0].text,
                len(output.prompt_token_ids),
                len(output.outputs[0].token_ids),
                output.outputs[0].finish_reason == "stop",
                (output.prompt or "")[-64:],
            )
            for output in outputs
        ]


class ServerChat(ChatModel):
    """A server that speaks OpenAI's chat completions: `vllm serve`, `transformers serve`, or a provider.

    Args:
        base_url: up to and with /v1.
        model: as the server calls it.
        key_variable: the environment variable with the key; servers of one's own need none.
        parallel: requests at a time.
        retries: of a request that failed by load or network, with growing pauses.
        timeout: seconds a request may take.

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
    ):
        try:
            from openai import OpenAI
        except ImportError as error:
            raise ImportError(
                "openai is not installed: servers need it; pip install -e '.[agents]' in a clone of g2po-trl"
            ) from error
        self.model, self.parallel, self.base_url = model, parallel, base_url
        key = os.environ.get(key_variable) or "none"
        self.client = OpenAI(base_url=base_url, api_key=key, max_retries=retries, timeout=timeout)

    def reply(
        self, conversations: Sequence[Conversation], settings: ChatSettings, seeds: Sequence[int]
    ) -> list[ChatReply]:
        with ThreadPoolExecutor(max_workers=max(1, self.parallel)) as threads:
            return list(threads.map(lambda pair: self._ask(pair[0], settings, pair[1]), zip(conversations, seeds)))

    def _ask(self, conversation: Conversation, settings: ChatSettings, seed: int) -> ChatReply:
        from openai import BadRequestError

        options = {"stop": list(settings.stop)} if settings.stop else {}
        try:
            answer = self.client.chat.completions.create(
                model=self.model,
                messages=conversation,
                temperature=settings.temperature,
                top_p=settings.top_p,
                max_tokens=settings.max_tokens,
                seed=seed,
                **options,
            )
        except BadRequestError as error:
            if "context" not in str(error) and "too long" not in str(error):
                raise
            return ChatReply("", error=f"the conversation is too long for the server's model: {error}")
        choice, usage = answer.choices[0], answer.usage
        text = choice.message.content or ""
        return ChatReply(
            _before(text, settings.stop),  # not every server heeds it
            usage.prompt_tokens if usage else 0,
            usage.completion_tokens if usage else 0,
            choice.finish_reason == "stop",
        )

    def close(self) -> None:
        self.client.close()


def _load(model: str, **kwargs: Any):
    """A language model, or the multimodal one that a checkpoint holds; it reads text alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        return AutoModelForCausalLM.from_pretrained(model, **kwargs)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        return AutoModelForImageTextToText.from_pretrained(model, **kwargs)


def _combined(seeds: Sequence[int]) -> int:
    combined = 0
    for seed in seeds:
        combined = (combined * 1_000_003 + seed) % (2**63)
    return combined


def _before(text: str, stop: Sequence[str]) -> str:
    return text[: min([len(text), *(text.index(word) for word in stop if word in text)])]

"""A chat model on a server with OpenAI's protocol."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Sequence
from typing import Any

from ..engines.sampling import Sampling
from ..prompts.conversation import ChatRequest, Message, message_text, normalize_messages
from ..rollout.conversations import cut_before, sampling_of
from ..utils.errors import G2POError
from ..utils.extras import import_extra
from .chat_models import ChatCompletion, ChatModel

# Words in servers' errors about conversations that exceed the model's context.
_TOO_LONG = ("context_length", "context length", "context size", "context window", "maximum context")
_TOO_LONG += ("maximum model length", "prompt is too long", "input is too long", "input token count")


class ServerChat(ChatModel):
    """A chat model on a server with OpenAI's protocol: `vllm serve`, `transformers serve`, or a provider.

    Args:
        base_url: URL up to and including `/v1`.
        model: name of the model on the server.
        key_variable: environment variable that contains the key, if the server needs one.
        parallel: maximum number of concurrent requests.
        chat_template_kwargs: variables of the chat template, for servers that take them (vLLM, SGLang).
        generation_kwargs: further fields of a request, for servers that accept them.
        **client_options: of `openai.AsyncOpenAI`, which repeats requests that fail because of load or network.

    Raises:
        ImportError: if openai is not installed.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        key_variable: str = "OPENAI_API_KEY",
        parallel: int = 16,
        chat_template_kwargs: dict[str, Any] | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        **client_options: Any,
    ):
        self.openai = import_extra("openai")
        self.model, self.parallel, self.base_url, self.key_variable = model, parallel, base_url, key_variable
        client_options = {"max_retries": 6, "timeout": 300.0, **client_options}
        key = os.environ.get(key_variable) or "none"
        self.client = self.openai.AsyncOpenAI(base_url=base_url, api_key=key, **client_options)
        self.runner = asyncio.Runner()  # ends the requests of an interrupted evaluation
        self.fields = dict(generation_kwargs or {})
        self.fields |= {"chat_template_kwargs": chat_template_kwargs} if chat_template_kwargs else {}
        self.length_field = "max_tokens"

    def generate(
        self, requests: Sequence[ChatRequest], sampling: Sampling, seeds: Sequence[int]
    ) -> list[ChatCompletion]:
        async def complete_all() -> list[ChatCompletion]:
            free = asyncio.Semaphore(self.parallel)

            async def complete(request: ChatRequest, seed: int) -> ChatCompletion:
                async with free:
                    return await self._complete(request, sampling, seed)

            return await asyncio.gather(*map(complete, requests, seeds))

        return self.runner.run(complete_all())

    async def _complete(self, request: ChatRequest, sampling: Sampling, seed: int) -> ChatCompletion:
        """Return the completion of a request, with an `error` if the conversation is too long for the model."""
        try:
            return self._read(await self._ask(request, sampling, seed), request, sampling)
        except self.openai.AuthenticationError as error:
            remedy = f"{self.base_url} rejects its key; set this environment variable, or name another"
            message = f"key_variable is {self.key_variable}: {remedy}"
            raise G2POError(message, "key_variable", self.key_variable) from error
        except (self.openai.OpenAIError, ValueError) as error:  # also text that is not JSON
            told = f"{error} {getattr(error, 'body', '')} {getattr(error, 'code', '')}".lower()
            if isinstance(error, self.openai.BadRequestError) and any(words in told for words in _TOO_LONG):
                return ChatCompletion("", error=f"the conversation is too long for the server's model: {error}")
            message = f"the server at {self.base_url}: {error.__cause__ or error}; is this the address up to /v1?"
            raise G2POError(message, "base_url", self.base_url) from error

    async def _ask(self, request: ChatRequest, sampling: Sampling, seed: int) -> Any:
        """Return the response to a request, sent again with `max_completion_tokens` if `max_tokens` is rejected."""
        # Fields that not every server supports are sent only if they are set.
        filters = {name: value for name, value in sampling.filters().items() if name != "top_p"}
        options = {"stop": list(request.stop), "extra_body": self.fields | filters, "tools": request.tools}
        try:
            return await self.client.chat.completions.create(
                model=self.model,
                messages=api_messages(request.messages),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=seed % 2**31,  # servers accept 31 bits
                **{self.length_field: sampling_of(request, sampling).max_completion_length},
                **{name: value for name, value in options.items() if value},
            )
        except self.openai.BadRequestError as error:
            if self.length_field != "max_tokens" or "max_completion_tokens" not in str(error):
                raise
            self.length_field = "max_completion_tokens"
            return await self._ask(request, sampling, seed)

    def _read(self, response: Any, request: ChatRequest, sampling: Sampling) -> ChatCompletion:
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
        read, written = (usage.prompt_tokens or 0, usage.completion_tokens or 0) if usage else (0, 0)
        is_whole = choice.finish_reason not in ("length", "content_filter")
        return ChatCompletion(text, read, written, is_whole, message=answer)

    def close(self) -> None:
        self.runner.run(self.client.close())
        self.runner.close()


def api_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages as OpenAI's protocol has them: arguments as JSON text, and ids that pair calls and results.

    Results without ids answer the calls before them in order.
    """
    sent: list[Message] = []
    open_ids: list[str] = []
    numbers = itertools.count(1)
    for message in map(dict, messages):
        if calls := message.get("tool_calls"):
            calls = [{"type": "function", "id": f"call_{next(numbers)}", **call} for call in calls]
            for call in calls:
                arguments = call["function"]["arguments"]
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                call["function"] = {**call["function"], "arguments": text}
            open_ids = [call["id"] for call in calls]
            message |= {"content": message["content"] or None, "tool_calls": calls}
        elif message["role"] == "tool" and open_ids:
            message.setdefault("tool_call_id", open_ids[0])
            open_ids = [other for other in open_ids if other != message["tool_call_id"]]
        sent.append(message)
    return sent

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
from ..rollout.conversations import cut_before
from ..utils.errors import G2POError
from ..utils.extras import install_command
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
        retries: number of retries of a request that fails because of load or network, with growing pauses.
        timeout: maximum seconds of a request.
        chat_template_kwargs: variables of the chat template, for servers that take them (vLLM, SGLang).
        generation_kwargs: further fields of a request, for servers that accept them.

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
            from openai import AsyncOpenAI
        except ImportError as error:
            raise ImportError(f"openai is not installed: servers need it; {install_command('agents')}") from error
        self.model, self.parallel, self.base_url, self.key_variable = model, parallel, base_url, key_variable
        key = os.environ.get(key_variable) or "none"
        self.client = AsyncOpenAI(base_url=base_url, api_key=key, max_retries=retries, timeout=timeout)
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
        from openai import AuthenticationError, BadRequestError, OpenAIError

        try:
            return self._read(await self._ask(request, sampling, seed), request, sampling)
        except AuthenticationError as error:
            remedy = f"{self.base_url} rejects its key; set this environment variable, or name another"
            raise G2POError(
                f"key_variable is {self.key_variable}: {remedy}", "key_variable", self.key_variable
            ) from error
        except (
            OpenAIError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # also what is no completion
            told = str(error.__cause__ or error)
            if isinstance(error, BadRequestError):
                told = f"it rejects the request: {error}"
                if any(words in f"{error} {error.code} {error.body}".lower() for words in _TOO_LONG):
                    return ChatCompletion("", error=f"the conversation is too long for the server's model: {error}")
            remedy = "is it running, and is this the address of its API, up to /v1?"
            raise G2POError(f"the server at {self.base_url}: {told}; {remedy}", "base_url", self.base_url) from error

    async def _ask(self, request: ChatRequest, sampling: Sampling, seed: int) -> Any:
        """Return the response to a request, sent again with `max_completion_tokens` if `max_tokens` is rejected."""
        from openai import BadRequestError

        # Fields that not every server supports are sent only if they are set.
        given = {name: value for name, value in sampling.filters().items() if name != "top_p"}
        options = {"stop": list(request.stop)} if request.stop else {}
        options |= {"extra_body": body} if (body := self.fields | given) else {}
        options |= {"tools": request.tools} if request.tools else {}
        most, field = sampling.max_completion_length, self.length_field
        try:
            return await self.client.chat.completions.create(
                model=self.model,
                messages=api_messages(request.messages),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=seed % 2**31,  # servers accept 31 bits
                **{field: min(most, request.max_tokens or most)},
                **options,
            )
        except BadRequestError as error:
            if field != "max_tokens" or "max_completion_tokens" not in str(error):
                raise
            self.length_field = "max_completion_tokens"
            return await self._ask(request, sampling, seed)

    def _read(self, response: Any, request: ChatRequest, sampling: Sampling) -> ChatCompletion:
        """Return the completion in a server's response. Raises an error if there is none."""
        if not getattr(response, "choices", None) or response.choices[0].message is None:
            raise ValueError(f"it answered without a chat completion ({response!s:.200})")
        (choice, *_), usage = response.choices, response.usage
        message = choice.message
        text = cut_before(message.content or "", request.stop)  # some servers ignore stop texts
        ends = [text.index(stop) + len(stop) for stop in sampling.stop_sequences or () if stop in text]
        calls = [call.model_dump() for call in message.tool_calls or ()]
        said = {"role": "assistant", "content": text[: min(ends, default=None)], "tool_calls": calls}
        (answer,) = normalize_messages([said])
        text = message_text(answer)
        # The name of the field depends on the server.
        reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
        if reasoning and isinstance(reasoning, str) and "</think>" not in text:
            text = f"<think>{reasoning}</think>{text}"
        read, written = (usage.prompt_tokens or 0, usage.completion_tokens or 0) if usage else (0, 0)
        is_whole = choice.finish_reason not in ("length", "content_filter")
        return ChatCompletion(text, read, written, is_whole, message=answer)

    def close(self) -> None:
        self.runner.run(self.client.close())
        self.runner.close()


def api_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages as OpenAI's protocol has them: arguments as JSON text, and ids that pair calls and results.

    A result without an id answers the first open call of its tool, or the first open one.
    """
    sent: list[Message] = []
    unanswered: list[dict[str, Any]] = []
    numbers = itertools.count(1)
    for message in map(dict, messages):
        if message.get("tool_calls"):
            unanswered = [_api_call(call, next(numbers)) for call in message["tool_calls"]]
            message |= {"content": message["content"] or None, "tool_calls": [*unanswered]}
        elif message["role"] == "tool":
            same = [call for call in unanswered if call["function"]["name"] == message.get("name")]
            for call in (same or unanswered)[:1]:
                message.setdefault("tool_call_id", call["id"])
            unanswered = [call for call in unanswered if call["id"] != message.get("tool_call_id")]
        sent.append(message)
    return sent


def _api_call(call: dict[str, Any], number: int) -> dict[str, Any]:
    given = call["function"]["arguments"]
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    function = {**call["function"], "arguments": arguments}
    return {"id": call.get("id") or f"call_{number}", "type": "function", "function": function}

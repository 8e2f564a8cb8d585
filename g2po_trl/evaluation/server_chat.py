"""A chat model on a server with OpenAI's protocol."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..prompts.conversation import ChatRequest, Message, message_text, normalize_messages
from ..utils.extras import install_command
from .chat_models import ChatCompletion, ChatError, ChatModel, ChatSettings, Conversation

# Words in servers' errors about conversations that exceed the model's context.
_TOO_LONG = ("context_length", "context length", "context window", "maximum context", "too long")


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
        self, conversations: Sequence[Conversation | ChatRequest], settings: ChatSettings, seeds: Sequence[int]
    ) -> list[ChatCompletion]:
        with ThreadPoolExecutor(max_workers=max(1, self.parallel)) as threads:
            return list(
                threads.map(lambda pair: self._complete(pair[0], settings, pair[1]), zip(conversations, seeds))
            )

    def _complete(self, conversation: Conversation | ChatRequest, settings: ChatSettings, seed: int) -> ChatCompletion:
        from openai import APIConnectionError, AuthenticationError, BadRequestError, OpenAIError

        own = isinstance(conversation, ChatRequest)
        request = conversation if own else ChatRequest(conversation)
        if request.stop or request.max_tokens is not None:
            most = min(settings.max_tokens, request.max_tokens or settings.max_tokens)
            settings = replace(settings, stop=(*settings.stop, *request.stop), max_tokens=most)
        try:
            response = self._request(request, settings, seed)
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
        return self._parse(response, settings, own)

    def _parse(self, response: Any, settings: ChatSettings, with_message: bool = False) -> ChatCompletion:
        """Return the completion in a server's response; `with_message`: also the assistant's, with its tool calls."""
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
        answer = self._message(message, text) if with_message else None
        text = text if answer is None else message_text(answer)
        if reasoning and isinstance(reasoning, str) and "</think>" not in text:
            text = f"<think>{reasoning}</think>{text}"
        usage = response.usage
        return ChatCompletion(
            text,
            (usage.prompt_tokens or 0) if usage else 0,
            (usage.completion_tokens or 0) if usage else 0,
            choices[0].finish_reason not in ("length", "content_filter"),
            message=answer,
        )

    def _message(self, message: Any, text: str) -> Message:
        calls = [call if isinstance(call, dict) else call.model_dump() for call in message.tool_calls or ()]
        try:
            return normalize_messages([{"role": "assistant", "content": text, "tool_calls": calls}])[0]
        except ValueError as error:
            raise ChatError(f"the server at {self.base_url} answered with an odd tool call: {error}") from error

    def _request(self, request: ChatRequest, settings: ChatSettings, seed: int):
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
        options |= {"tools": request.tools} if request.tools else {}
        length_field = self.length_field
        try:
            return self.client.chat.completions.create(
                model=self.model,
                messages=api_messages(request.messages),
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
            return self._request(request, settings, seed)

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


def api_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages as OpenAI's protocol has them: arguments as JSON text, and ids that pair calls and results.

    A result without an id answers the first open call of its tool, or the first open one.
    """
    sent: list[Message] = []
    unanswered: list[dict[str, Any]] = []
    number = 0
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            unanswered = []
            for call in calls:
                number += 1
                arguments = call["function"]["arguments"]
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                function = {**call["function"], "arguments": text}
                unanswered.append({"id": call.get("id") or f"call_{number}", "type": "function", "function": function})
            message |= {"content": message["content"] or None, "tool_calls": list(unanswered)}
        elif message["role"] == "tool":
            same = [call for call in unanswered if call["function"]["name"] == message.get("name")]
            for call in (same or unanswered)[:1]:
                message.setdefault("tool_call_id", call["id"])
            unanswered = [call for call in unanswered if call["id"] != message.get("tool_call_id")]
        sent.append(message)
    return sent

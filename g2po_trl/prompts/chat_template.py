"""Chat messages -> the text a model reads, by its own chat template, whatever that refuses.

Some templates raise on a system message, or leave it out; some want roles to alternate, a system message to be there,
or contents as lists of blocks. What a template does is found out by trying it, and messages are arranged to suit it:
nothing of them is lost on the way.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

Message = dict[str, str]
_SYSTEM, _USER, _MORE = "Qsystemq", "Quserq", "Qmoreq"  # words to look for in a text; no template trims inside of them


def tokenizer_of(processing_class):
    """The tokenizer of a processor (multimodal checkpoints bring one); a tokenizer is its own."""
    return getattr(processing_class, "tokenizer", processing_class)


def template_of(processing_class) -> str | dict[str, str] | None:
    """The chat template of a tokenizer or processor, or of the processor's tokenizer."""
    own = getattr(processing_class, "chat_template", None)
    return own or getattr(tokenizer_of(processing_class), "chat_template", None)


class ChatTemplate:
    """`template(messages)` is the text of chat messages, with the beginning of the reply that is asked for.

    Args:
        processing_class: a tokenizer or a processor.
        kwargs: more variables of the template, e.g. `{"enable_thinking": False}`.

    Raises:
        ValueError: for a variable that the template does not have; when called, for a template that does not show what
            the user says.
    """

    def __init__(self, processing_class, kwargs: dict[str, Any] | None = None):
        self.tokenizer = tokenizer_of(processing_class)
        self.kwargs = dict(kwargs or {})
        template = template_of(processing_class)
        self._own = template if processing_class is not self.tokenizer and isinstance(template, str) else None
        source = "\n".join(template.values()) if isinstance(template, Mapping) else template or ""
        options = inspect.signature(self.tokenizer.apply_chat_template).parameters if kwargs else ()
        for name in self.kwargs:
            if name not in options and not re.search(rf"\b{re.escape(name)}\b", source):
                raise ValueError(
                    f"chat_template_kwargs has {name}={self.kwargs[name]!r}, and the chat template has no such "
                    "variable: remove it, or write it as the template does"
                )

    def __call__(self, messages: Sequence[Message]) -> str:
        messages = list(messages)
        if messages[0]["role"] == "system" and not self._takes_system:
            messages = without_system(messages)
        if any(a["role"] == b["role"] for a, b in zip(messages, messages[1:])) and not self._takes_neighbours:
            messages = joined_neighbours(messages)
        return self._render(messages, *self._form)

    @cached_property
    def _form(self) -> tuple[bool, bool]:
        """Whether contents are lists of blocks, and whether a system message must be there."""
        first_error = None
        for form in ((False, False), (True, False), (False, True), (True, True)):
            try:
                if _USER in self._render([_message("user", _USER)], *form):
                    return form
            except Exception as error:  # whatever a template raises
                first_error = first_error or error
        reason = f"it raises {type(first_error).__name__}: {first_error}" if first_error else "it leaves it out"
        raise ValueError(
            f"the chat template of {getattr(self.tokenizer, 'name_or_path', '') or 'the tokenizer'} does not show a "
            f"user's message ({reason}): set `tokenizer.chat_template` to one that does"
        ) from first_error

    @cached_property
    def _takes_system(self) -> bool:
        return self._shows([_message("system", _SYSTEM), _message("user", _USER)])

    @cached_property
    def _takes_neighbours(self) -> bool:
        return self._shows([_message("user", _USER), _message("user", _MORE)])

    def _shows(self, messages: list[Message]) -> bool:
        try:
            text = self._render(messages, *self._form)
        except Exception:  # whatever a template raises: it refuses
            return False
        return all(message["content"] in text for message in messages)

    def _render(self, messages: list[Message], as_blocks: bool, leads: bool) -> str:
        if leads and messages[0]["role"] != "system":
            messages = [_message("system", ""), *messages]
        if as_blocks:
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        template = {"chat_template": self._own} if self._own else {}
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **template, **self.kwargs
        )


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Messages in which the user says first what the system message said."""
    if messages[0]["role"] != "system":
        return list(messages)
    return joined_neighbours([_message("user", messages[0]["content"]), *messages[1:]], until=2)


def joined_neighbours(messages: Sequence[Message], until: int | None = None) -> list[Message]:
    """Messages of which no two in a row, of the first `until`, have the same role."""
    joined: list[Message] = []
    for place, message in enumerate(messages):
        if joined and joined[-1]["role"] == message["role"] and (until is None or place < until):
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}

"""Render chat messages with any model's chat template.

Some templates reject or drop a system message. Others require alternating roles, a leading system message, or contents
as lists of blocks. `ChatTemplate` probes the template and rearranges messages to fit it without losing content.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ..utils.errors import G2POError
from ..utils.options import require
from .conversation import Message, joined_content
from .images import content_blocks

_SYSTEM, _USER, _SECOND, _LATE = "Qsystemq", "Quserq", "Qmoreq", "Qlateq"  # probe words, which no template trims
MARK = "\ufdd0\ufdd1"  # inside a special token's name that is only text; Unicode assigns these to no character


def get_tokenizer(processing_class):
    """Return the tokenizer of a processor, or the tokenizer itself."""
    return getattr(processing_class, "tokenizer", processing_class)


def get_chat_template(processing_class) -> str | dict[str, str] | None:
    """Return the chat template of a tokenizer or processor; the processor's own takes precedence."""
    own = getattr(processing_class, "chat_template", None)
    return own or getattr(get_tokenizer(processing_class), "chat_template", None)


class ChatTemplate:
    """Renderer of chat messages, up to and including the generation prompt.

    Args:
        processing_class: a tokenizer or a processor.
        kwargs: more variables of the template, e.g. `{"enable_thinking": False}`.
        replacement: used instead of the tokenizer's own template.

    Attributes:
        template: the template that is rendered.
        reserved: special tokens that only the template may write. In messages and tools they are text, and get a
            `MARK` after their first character, where `ChatEncoder` cuts them: an environment's text cannot end a turn.

    Raises:
        G2POError: if the template lacks one of the variables; when called, if it omits the user's message.
    """

    def __init__(self, processing_class, kwargs: dict[str, Any] | None = None, replacement: str | None = None):
        self.tokenizer = get_tokenizer(processing_class)
        self.kwargs = dict(kwargs or {})
        template = self.template = replacement or get_chat_template(processing_class)
        passed = replacement or (processing_class is not self.tokenizer and isinstance(template, str))
        self._passed_template = template if passed else None
        self.reserved: list[str] = []
        source = "\n".join(template.values()) if isinstance(template, Mapping) else template or ""
        options = inspect.signature(self.tokenizer.apply_chat_template).parameters if kwargs else ()
        for name in self.kwargs:
            is_known = name in options or re.search(rf"\b{re.escape(name)}\b", source)
            require(bool(is_known), "chat_template_kwargs", kwargs, f"the chat template has no variable {name!r}")

    def __call__(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return a conversation's text, up to the beginning of the next answer if `add_generation_prompt`."""
        messages, tools = self.as_text(list(messages)), self.as_text(tools)
        late = int(any(message["role"] == "user" for message in messages))  # a system message may only be the first
        if any(message["role"] == "system" for message in messages[late:]) and not self._accepts_late_system[late]:
            messages[late:] = [{**m, "role": "user"} if m["role"] == "system" else m for m in messages[late:]]
        if messages[0]["role"] == "system" and not self._accepts_system:
            messages = merge_same_roles([_message("user", messages[0]["content"]), *messages[1:]], until=2)
        repeated = any(a["role"] == b["role"] != "tool" for a, b in zip(messages, messages[1:]))
        if repeated and not self._accepts_repeated_roles:
            messages = merge_same_roles(messages)
        return self._render(messages, *self._form, tools, add_generation_prompt)

    @cached_property
    def _form(self) -> tuple[bool, bool]:
        """Return whether contents must be lists of blocks, and whether a system message is required."""
        first_error = None
        for form in ((False, False), (True, False), (False, True), (True, True)):
            try:
                if _USER in self._render([_message("user", _USER)], *form):
                    return form
            except Exception as error:  # templates raise errors of any class
                first_error = first_error or error
        reason = f"it raises {type(first_error).__name__}: {first_error}" if first_error else "it omits the message"
        raise G2POError(
            f"the chat template of {getattr(self.tokenizer, 'name_or_path', '') or 'the tokenizer'} does not render a "
            f"user message ({reason}): set `tokenizer.chat_template` to one that does",
            "chat_template",
        ) from first_error

    @cached_property
    def _accepts_system(self) -> bool:
        return self._shows([_message("system", _SYSTEM), _message("user", _USER)])

    @cached_property
    def _accepts_repeated_roles(self) -> bool:
        return self._shows([_message("user", _USER), _message("user", _SECOND)])

    @cached_property
    def _accepts_late_system(self) -> tuple[bool, bool]:
        """Return whether a system message may be the only message, and whether it may follow others.

        Some templates write only the last system message, in the place of the first.
        """
        first = [_message("system", _SYSTEM)]
        others = [*first * self._accepts_system, _message("user", _USER), _message("assistant", _SECOND)]
        return self._shows(first), self._shows([*others, _message("system", _LATE)])

    @cached_property
    def sample(self) -> str:
        """A short conversation as the template writes it; "" if it cannot."""
        messages = [_message("user", _USER), _message("assistant", _SECOND), _message("user", _LATE)]
        for some in ([_message("system", _SYSTEM), *messages], messages, messages[:1]):
            try:
                return self(some)
            except Exception:  # templates raise errors of any class
                continue
        return ""

    def as_text(self, value: Any) -> Any:
        """Return a message, a part of it, or a completion, with marks in the reserved tokens of its texts."""
        if isinstance(value, str):
            for token in self.reserved:
                value = value.replace(token, f"{token[:1]}{MARK}{token[1:]}") if token in value else value
        elif isinstance(value, Mapping):
            return {name: self.as_text(part) for name, part in value.items()}
        elif isinstance(value, list):
            return [self.as_text(part) for part in value]
        return value

    def _shows(self, messages: list[Message]) -> bool:
        try:
            text = self._render(messages, *self._form)
        except Exception:  # templates raise errors of any class
            return False
        return all(message["content"] in text for message in messages)

    def _render(
        self,
        messages: list[Message],
        as_blocks: bool,
        needs_system: bool,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        if needs_system and messages[0]["role"] != "system":
            messages = [_message("system", ""), *messages]
        messages = [{**m, "content": content_blocks(m)} if as_blocks or "images" in m else m for m in messages]
        messages = [{name: part for name, part in m.items() if name != "images"} for m in messages]
        options = {"chat_template": self._passed_template} if self._passed_template else {}
        options |= {"tools": tools} if tools else {}
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options, **self.kwargs
        )


def merge_same_roles(messages: Sequence[Message], until: int | None = None) -> list[Message]:
    """Return the messages with consecutive messages of one role joined, among the first `until`."""
    joined: list[Message] = []
    for number, message in enumerate(messages):
        same = bool(joined) and joined[-1]["role"] == message["role"] != "tool"
        plain = same and joined[-1].keys() | message.keys() <= {"role", "content", "images"}
        if plain and (until is None or number < until):
            joined[-1] = joined[-1] | joined_content([joined[-1], message], "\n\n")
        else:
            joined.append(message)
    return joined


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}

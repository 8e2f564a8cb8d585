"""Chat messages as text and token ids, by any model's chat template, which is probed: messages are rearranged to fit.

Some templates reject or drop a system message, or require one, alternating roles, or contents as lists of blocks.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import date, datetime
from itertools import chain, islice
from typing import Any

from ..utils.errors import G2POError
from ..utils.images import Picture
from ..utils.options import require
from .conversation import Message, joined_content, pictures_of
from .images import ImageEncoder, content_blocks, reads_images

DATE = "strftime_now"  # what transformers calls the function with which templates write the date
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
        kwargs: more variables of the template, e.g. `{"enable_thinking": False}`. `strftime_now` is an ISO date, which
            a template that writes today's date gets; default: the day on which this object is made.
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
        template = self.template = replacement or get_chat_template(processing_class)
        passed = replacement or (processing_class is not self.tokenizer and isinstance(template, str))
        self._passed_template = template if passed else None
        self.reserved: list[str] = []
        self._shows = functools.cache(self._are_shown)
        source = "\n".join(template.values()) if isinstance(template, Mapping) else template or ""
        self.kwargs = ({DATE: date.today().isoformat()} if DATE in source else {}) | (kwargs or {})
        known = [*inspect.signature(self.tokenizer.apply_chat_template).parameters, *re.findall(r"\w+", source)]
        for name in kwargs or ():
            require(name in known, "chat_template_kwargs", kwargs, f"the chat template has no variable {name!r}")

    def __call__(
        self, messages: Sequence[Message], tools: list[dict] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation's text, up to the beginning of the next answer if `add_generation_prompt`."""
        messages, tools = self.as_text(list(messages)), self.as_text(tools)
        late = any(message["role"] == "user" for message in messages)  # a system message may only be the first
        before = [*["system"] * self._shows("system", "user"), "user", "assistant"] * late
        if any(message["role"] == "system" for message in messages[late:]) and not self._shows(*before, "system"):
            messages[late:] = [{**m, "role": "user"} if m["role"] == "system" else m for m in messages[late:]]
        if messages[0]["role"] == "system" and not self._shows("system", "user"):
            said = {"role": "user", "content": messages[0]["content"]}
            messages = [*merge_same_roles([said, *messages[1:2]]), *messages[2:]]
        repeated = any(a["role"] == b["role"] != "tool" for a, b in zip(messages, messages[1:]))
        if repeated and not self._shows("user", "user"):
            messages = merge_same_roles(messages)
        return self._render(messages, *self._form, tools, add_generation_prompt)

    @functools.cached_property
    def _form(self) -> tuple[bool, bool]:
        """Return whether contents must be lists of blocks, and whether a system message is required."""
        (asked,), errors = _probe("user"), []
        for form in ((False, False), (True, False), (False, True), (True, True)):
            try:
                if asked["content"] in self._render([asked], *form):
                    return form
            except Exception as error:  # templates raise errors of any class
                errors.append(f"it raises {type(error).__name__}: {error}")
        what = f"the chat template does not render a user message ({[*errors, 'it omits it'][0]})"
        raise G2POError(f"{what}: set `tokenizer.chat_template` to one that does", "chat_template")

    def _are_shown(self, *roles: str) -> bool:
        """Return whether the template writes all of a conversation with these roles."""
        with suppress(Exception):  # templates raise errors of any class
            text = self._render(_probe(*roles), *self._form)
            return all(message["content"] in text for message in _probe(*roles))
        return False

    def as_text(self, value: Any) -> Any:
        """Return a message, a part of it, or a completion, with marks in the reserved tokens of its texts."""
        if isinstance(value, Mapping):
            return {name: self.as_text(part) for name, part in value.items()}
        if isinstance(value, list):
            return [self.as_text(part) for part in value]
        for token in self.reserved if isinstance(value, str) else ():
            value = value.replace(token, f"{token[:1]}{MARK}{token[1:]}") if token in value else value
        return value

    def _render(self, messages: list[Message], as_blocks: bool, needs_system: bool, tools=None, asks=True) -> str:
        if needs_system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": ""}, *messages]
        messages = [{**m, "content": content_blocks(m)} if as_blocks or "images" in m else m for m in messages]
        messages = [{name: part for name, part in m.items() if name != "images"} for m in messages]
        options = {"tokenize": False, "add_generation_prompt": asks, **self.kwargs}
        options |= {"tools": tools} if tools else {}
        with _on_day(options.pop(DATE)) if DATE in options else nullcontext():
            return self.tokenizer.apply_chat_template(messages, chat_template=self._passed_template, **options)


def merge_same_roles(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with consecutive messages of one role joined."""
    joined: list[Message] = []
    for message in messages:
        same = bool(joined) and joined[-1]["role"] == message["role"] != "tool"
        if same and joined[-1].keys() | message.keys() <= {"role", "content", "images"}:
            joined[-1] = joined[-1] | joined_content([joined[-1], message], "\n\n")
        else:
            joined.append(message)
    return joined


def _on_day(day: str) -> AbstractContextManager[None]:
    """Let templates that are rendered inside write this day, where transformers calls `datetime.now`."""
    from transformers.utils import chat_template_utils

    from ..utils.trl_compat import replaced  # with torch, which is slow to import

    then = datetime.fromisoformat(day)
    return replaced(chat_template_utils, datetime=type("Clock", (datetime,), {"now": classmethod(lambda *_: then)}))


def _probe(*roles: str) -> list[Message]:
    """Return a conversation of words that no template trims or writes itself."""
    return [{"role": role, "content": f"Q{number}{role}q"} for number, role in enumerate(roles)]


class ChatEncoder:
    """Encoder of chat messages: `encoder(messages)` returns the prompt's token ids and text."""

    def __init__(self, processing_class, kwargs: dict[str, Any] | None = None, template: str | None = None):
        self.processing_class, self.tokenizer = processing_class, get_tokenizer(processing_class)
        self.text = ChatTemplate(processing_class, kwargs, template)
        self._rendered = self._special_tokens()
        ends = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id} & self._added.keys()
        reserved = self._rendered | ends if self._rendered else ()  # else messages write them themselves
        self.text.reserved = [self._added[number] for number in sorted(reserved)]
        self.images = ImageEncoder(processing_class) if reads_images(processing_class) else None
        self.text.reserved += [] if self.images is None else self.images.reserved

    def __call__(self, messages: list[dict[str, Any]]) -> tuple[list[int], str]:
        text = self.text(messages)
        return self.ids([text], [pictures_of(messages)])[0], text

    def ids(self, texts: Sequence[str], images: Sequence[Sequence[Picture]] = ()) -> list[list[int]]:
        """Return the token ids of each text, from one call of the tokenizer: much faster than one call per text.

        Texts are encoded in parts where `ChatTemplate` has marked that a special token's name is only text. With
        `images`, of each text, those that have any are encoded by the processor.
        """
        if not texts:
            return []
        parts = [text.split(MARK) for text in texts]
        if any(images):
            each = zip(texts, parts, images, strict=True)
            return [self.images.ids(part, shown) if shown else self.ids([text])[0] for text, part, shown in each]
        # Not verbose: the caller shortens prompts beyond the tokenizer's maximum.
        of_parts = iter(self.tokenizer(list(chain(*parts)), add_special_tokens=False, verbose=False)["input_ids"])
        return [list(chain(*islice(of_parts, len(of_text)))) for of_text in parts]

    def decode(self, ids: Sequence[int], stop_token_ids: Collection[int] = ()) -> str:
        """Return the text of a completion as it was written, without tokens that only give a turn its form.

        These tokens are end of sequence and padding, `stop_token_ids`, and special tokens that the chat template
        writes around messages. Others are text: the user's tags that were added as special tokens are kept.
        """
        ends = {*stop_token_ids, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id} & self._added.keys()
        dropped = self._rendered | {number for number in ends if self._added[number] not in self._tags}
        return self.tokenizer.decode([number for number in ids if number not in dropped])

    @functools.cached_property
    def _added(self) -> dict[int, str]:
        """Tokens added to the vocabulary, by id, special or not."""
        tokenizer = self.tokenizer
        added = {number: token.content for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        return dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens)) | added

    @functools.cached_property
    def _tags(self) -> set[str]:
        """Added tokens that are tags, `<name>` with `</name>`: parsers read them, also if the template writes them."""
        names = {self.tokenizer.eos_token, self.tokenizer.pad_token, self.tokenizer.bos_token}
        opened = {text for text in self._added.values() if text.startswith("<")} - names
        return {tag for text in opened if (end := f"</{text[1:]}") in opened for tag in (text, end)}

    def _special_tokens(self) -> set[int]:
        """Return the special tokens, without tags, that the chat template writes around messages."""
        tokenizer, added, text = self.tokenizer, getattr(self.tokenizer, "added_tokens_decoder", {}), ""
        with suppress(Exception):  # templates raise errors of any class
            text = self.text(_probe("system", "user", "assistant", "user"))
        special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        return {number for number in special.intersection(*self.ids([text])) if self._added[number] not in self._tags}

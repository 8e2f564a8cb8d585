"""Token ids of conversations, in which earlier completions keep the ids that the engine sampled.

The next prompt is the last prompt's ids, the completion's ids, and the template's text for the new messages, if the
chat template renders earlier messages independently of later ones. Otherwise the whole conversation is encoded again.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain

from ..utils.errors import G2POError
from .conversation import ChatRequest, Message, pictures_of, prefix_digests
from .template import Prompt, PromptError, cut_middle, longest, within, without_images
from .tokenization import ChatEncoder
from .tool_calls import Tools, make_tool_format

logger = logging.getLogger(__name__)

_USER, _TEXT = {"role": "user", "content": "dummy"}, {"role": "assistant", "content": "dummy"}
_SHORTENED_TO = 0.75  # of the limit: the next turns then continue the conversation


@dataclass
class Transcript:
    """Prompts and completions of one episode as token ids, by the digest of the conversation.

    `dropped`: exchanges left out of the beginning, where prompts were too long.
    """

    ids: dict[bytes, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)
    dropped: int = 0

    def add(self, prompt: Prompt, tools: Tools, answer: Message, ids: Sequence[int]) -> None:
        """Record a completion's ids, as far as `answer` shows them: prompts that continue it begin with them."""
        self.ids[prefix_digests([*prompt.messages, answer], tools)[-1]] = prompt.ids, ids


class ConversationEncoder:
    """Encoder of chat requests.

    Args:
        encode: encodes chat messages.
        stop_token_ids: tokens that end a completion.

    Attributes:
        tools: the format in which tools are shown and read.
        replaced: whether TRL's training template is used, as only that can be continued.
    """

    def __init__(self, encode: ChatEncoder, stop_token_ids: Iterable[int] = ()):
        from ..utils.trl_compat import get_training_chat_template  # with torch, which is slow to import

        self.stops = {*stop_token_ids, encode.tokenizer.eos_token_id}
        self.tools, self.encode, template = make_tool_format(encode.processing_class), encode, None
        if (own := self._continues()) < 1 + self.tools.native:
            with suppress(ValueError, AttributeError, TypeError):  # of templates that TRL does not know
                template = get_training_chat_template(encode.processing_class)
            self.encode = ChatEncoder(encode.processing_class, encode.text.kwargs, template)
            self.encode = self.encode if self._continues() > own else encode
        self.replaced = self.encode is not encode
        if self.replaced:
            what = "the model's chat template changes earlier turns: conversations are written, and the model is saved"
            logger.warning("%s, with TRL's training version of it", what)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a completion; see `ChatEncoder.decode`."""
        return self.encode.decode(ids, self.stops)

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Give the tokenizer, while it is saved, the template of conversations and the parser of its calls."""
        from ..utils.trl_compat import replaced  # with torch, which is slow to import

        written = {"chat_template": self.encode.text.template} if self.replaced else {}
        # TRL knows how calls are read by the model's own template alone.
        read_by = {"response_template": self.tools.own.response_template} if self.replaced else {}
        with replaced(self.encode.tokenizer, **written, **read_by), replaced(self.encode.processing_class, **written):
            yield

    def prompt(self, request: ChatRequest, transcript: Transcript, max_length: int | None = None) -> Prompt:
        """Return the prompt of a request, at most `max_length` tokens long.

        Over the limit, a request with `shorten` loses its oldest exchanges, down to three quarters of the limit, then
        the middle of its longest messages. System message, the messages of the task and the last one stay.

        Raises `PromptError`, also if the chat template cannot render the conversation, or `UnreadableImageError`.
        """
        head, *exchanges = _exchanges(request.messages, request.task) if request.shorten else [request.messages]
        limit = wanted = math.inf if max_length is None else max_length
        most = max(0, len(exchanges) - 1)
        transcript.dropped = min(transcript.dropped, most)
        while True:
            shown = [*head, *chain(*exchanges[transcript.dropped :])]
            prompt = self._build(shown, request.tools, transcript, transcript.dropped > 0)
            if len(prompt.ids) <= wanted or transcript.dropped == most:
                break
            transcript.dropped, wanted = transcript.dropped + 1, _SHORTENED_TO * limit
        if len(prompt.ids) > limit and request.shorten:
            most = max(len(message["content"]) for message in shown)

            def size(keep: int) -> int:  # without images: a processor is slow
                parts = without_images(_cut(shown, keep))
                return len(self._build(parts, request.tools, Transcript(), True).ids)

            whole = self._build(shown, request.tools, Transcript(), True) if prompt.continues else prompt
            without = limit - len(whole.ids) + size(most)
            prompt = self._build(_cut(shown, longest(size, most, without)), request.tools, Transcript(), True)
        what = f"the conversation of {len(request.messages)} messages has"
        return within(prompt, max_length, what, "let the agent send shorter messages")

    def _build(self, messages: list[Message], tools: Tools, transcript: Transcript, cut: bool) -> Prompt:
        images, digests = pictures_of(messages), prefix_digests(messages, tools) if transcript.ids else []
        for known in [at for at in range(len(digests) - 2, 1, -1) if digests[at] in transcript.ids]:
            asked, answer = transcript.ids[digests[known]]
            ended = bool(answer) and answer[-1] in self.stops
            if (added := self._continuation(messages[known - 1], messages[known:], ended)) is not None:
                ids, text = added
                # In some templates, the token that ends a message is the one that begins the next.
                ids = ids[1:] if ended and ids[:1] == [answer[-1]] else ids
                return Prompt([*asked, *answer, *ids], text, images, cut, messages, known - 1)
        try:
            text = self._text_of_all(messages, tools)
            return Prompt(self.encode.ids([text], [images])[0], text, images, cut, messages)
        except G2POError:  # of an image, or of the template itself
            raise
        except Exception as error:  # templates raise errors of any class
            why = f"conversation refused: the chat template raises {type(error).__name__}: {error}"
            raise PromptError(why) from error

    def _text_of_all(self, messages: list[Message], tools: Tools) -> str:
        several = any(len(message.get("tool_calls", ())) > 1 for message in messages)
        if several and self.tools.native and not self.renders_several_calls:
            raise PromptError("conversation refused: the chat template writes one call a message: send one at a time")
        text = self._text(messages, tools)
        if text.rstrip().endswith(self._ends):  # some templates take it that a call has left the model's turn open
            text += self._text([_USER], None).removeprefix(self._text([_USER], None, add_generation_prompt=False))
        return text

    @functools.cached_property
    def _ends(self) -> tuple[str, ...]:
        return tuple(filter(str.strip, map(self.encode.tokenizer.decode, sorted(self.stops - {None}))))

    def _continuation(self, answer: Message, new: list[Message], ended: bool) -> tuple[list[int], str] | None:
        """Return ids and text of what follows a completion, which is `ended` or not: new messages, generation prompt.

        As in TRL: a short conversation that ends with an assistant's message of the same kind is rendered with and
        without the new messages. `None`: the template cannot be continued so.
        """
        if any(message["role"] == "assistant" for message in new):
            return None  # written by the agent's program, or by a completion that is not among these
        stub = [_USER, _TEXT]
        if new[0]["role"] == "tool":  # some templates name the tool in its result's header
            calls = answer.get("tool_calls") or _calling("dummy")["tool_calls"]
            stub = [_USER, _calling(new[0].get("name") or calls[0]["function"]["name"])]
        try:
            asked = self._text(stub[:1], None, add_generation_prompt=False)
            before = self._text(stub, None, add_generation_prompt=False)
            after = self._text([*stub, *new], None)
        except Exception:  # templates raise errors of any class
            return None
        asked_ids, before_ids, after_ids = self.encode.ids([asked, before, after], [[], [], pictures_of(new)])
        ends = [place for place, token in enumerate(before_ids) if token in self.stops]
        # The user's message has ends as well; the assistant's has none where results belong to its turn.
        ends = ends[sum(token in self.stops for token in asked_ids) :]
        if ends:
            before_ids = before_ids[: ends[-1] + 1]
        elif "tool_calls" not in stub[1]:  # what the template writes after the text is not in the completion
            before_ids = self.encode.ids([before[: before.rindex("dummy") + len("dummy")]])[0]
        if after_ids[: len(before_ids)] != before_ids:
            return None
        added = after_ids[len(before_ids) :]
        missing_end = before_ids[-1:] if ends and not ended else []
        return missing_end + added, self.encode.tokenizer.decode(added)

    def _text(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = True) -> str:
        return self.encode.text(*self.tools.render(messages, tools), add_generation_prompt)

    def _continues(self) -> int:
        """Return after how many kinds of turns, of text and calls, the template can be continued."""
        result = {"role": "tool", "name": "dummy", "content": "dummy"}
        turns = [(_TEXT, _USER), (_calling("dummy"), result)][: 1 + self.tools.native]
        return sum(self._continuation(answer, [new], ended=True) is not None for answer, new in turns)

    @functools.cached_property
    def renders_several_calls(self) -> bool:
        """Whether the template renders several calls in a message: others reject or omit all but one."""
        with suppress(Exception):  # templates raise errors of any class
            text = self._text([_USER, _calling("Qoneq", "Qtwoq")], None, False)
            return "Qoneq" in text and "Qtwoq" in text
        return False


def _exchanges(messages: Sequence[Message], task: int) -> list[list[Message]]:
    """Return the first `task` messages with those up to an answer, and the others, cut before each answer."""
    parts: list[list[Message]] = [list(messages[:task])]
    for message in messages[task:]:
        if message["role"] == "assistant":
            parts.append([])
        parts[-1].append(message)
    return parts


def _cut(messages: Sequence[Message], keep: int) -> list[Message]:
    """Return messages without the middle of long contents; the system message and those with images stay."""
    stays = [message["role"] == "system" or "images" in message for message in messages]
    kept = [len(message["content"]) if stay else keep for message, stay in zip(messages, stays)]
    return [{**message, "content": cut_middle(message["content"], most)} for message, most in zip(messages, kept)]


def _calling(*names: str) -> Message:
    """Return an assistant's message with a call of each tool."""
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}

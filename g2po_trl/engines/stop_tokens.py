"""Tokens that end a completion, the same for every engine: the tokenizer's, the checkpoint's, the chat template's."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin

Processing = PreTrainedTokenizerBase | ProcessorMixin
logger = logging.getLogger(__name__)
_PROBE = "Qanswerq"  # a word that no template trims


def get_stop_token_ids(processing_class: Processing, model: Any) -> set[int]:
    """Return the tokens that end a completion: those of tokenizer and `model.generation_config`, and `end_of_turn`."""
    named = model.generation_config.eos_token_id
    ends = {_tokenizer(processing_class).eos_token_id, *(named if isinstance(named, list) else [named])} - {None}
    end = end_of_turn(processing_class, ends)
    return ends if end is None else {*ends, end}


def get_stop_token_ids_of_checkpoint(processing_class: Processing, name: str, revision: str | None = None) -> set[int]:
    """Return `get_stop_token_ids` of a checkpoint that is not loaded."""
    config = GenerationConfig()  # of a format that vLLM alone reads
    with suppress(OSError, ValueError):
        config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(name, revision=revision))
    with suppress(OSError):  # transformers derives one from the model's where the checkpoint has none
        config = GenerationConfig.from_pretrained(name, revision=revision)
    return get_stop_token_ids(processing_class, SimpleNamespace(generation_config=config))


def end_of_turn(
    processing_class: Processing, stop_token_ids: Collection[int], template_kwargs: Mapping[str, Any] | None = None
) -> int | None:
    """Return the token that ends an assistant's turn in the chat template, `None` if the end has a stop token.

    Checkpoints that were fine-tuned from a base model often keep the base model's `eos_token`. Also `None` if the end
    does not begin with a single token.
    """
    tail = turn_end(processing_class, template_kwargs).lstrip()
    added = getattr(_tokenizer(processing_class), "added_tokens_decoder", {})
    if any(added[number].content in tail for number in stop_token_ids if number in added):
        return None
    ends = [number for number, token in added.items() if token.content and tail.startswith(token.content)]
    return max(ends, key=lambda number: len(added[number].content), default=None)


def end_completions(
    processing_class: Processing,
    model: Any,
    stop_token_ids: Collection[int],
    template_kwargs: Mapping[str, Any] | None,
    stop_sequences: Sequence[str] | None,
) -> Collection[int]:
    """Return the stop tokens with the one that ends a turn in the chat template, and save it with the model.

    Logs that it is added, or that nothing ends a completion where the template ends a turn.
    """
    decode = _tokenizer(processing_class).decode
    known = [decode([number]) for number in stop_token_ids if number is not None]
    end = end_of_turn(processing_class, stop_token_ids, template_kwargs)
    text = turn_end(processing_class, template_kwargs).strip()
    named = f"the tokenizer and generation_config name {', '.join(known) or 'no token'}"
    if end is not None:
        model.generation_config.eos_token_id = stop_token_ids = [*stop_token_ids, end]
        logger.warning(f"the chat template ends a turn with {decode([end])!r}, so completions end there, too; {named}")
    elif text and not any(stop and stop in text for stop in (*known, *(stop_sequences or ()))):
        logger.warning(
            f"the chat template ends a turn with {text!r}, no token ({named}): set stop_sequences=[{text!r}]"
        )
    return stop_token_ids


def turn_end(processing_class: Any, template_kwargs: Mapping[str, Any] | None = None) -> str:
    """Return the text that the chat template writes after an assistant's last message, "" if it is unknown."""
    template = getattr(processing_class, "chat_template", None)
    options = {**(template_kwargs or {}), **({"chat_template": template} if isinstance(template, str) else {})}
    texts = [{"role": "system", "content": "Q"}, {"role": "user", "content": "Q"}]
    texts.append({"role": "assistant", "content": _PROBE})
    blocks = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in texts]
    for messages in (texts[1:], texts, blocks[1:], blocks):
        with suppress(Exception):  # templates raise errors of any class
            text = _tokenizer(processing_class).apply_chat_template(messages, tokenize=False, **options)
            if text.count(_PROBE) == 1 and "{'type'" not in text:
                return text.partition(_PROBE)[2]
    return ""


def _tokenizer(processing_class: Any) -> PreTrainedTokenizerBase:
    return getattr(processing_class, "tokenizer", processing_class)

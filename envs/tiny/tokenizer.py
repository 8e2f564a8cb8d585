"""A tiny model's tokenizer: byte-level BPE in which every word to be copied is one token.

A name that is one token can be copied by one attention head in one step; a name in pieces takes a chain of them.
It is a `Qwen2Tokenizer`, which `AutoTokenizer` constructs for every Qwen2 model, regardless of its files. This class
splits numbers into digits, so numbers are added tokens, which are found before the split.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from g2po_trl.utils.options import require

TAGS = ("<think>", "</think>", "<action>", "</action>")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, words: Sequence[str], pieces: Sequence[str]
) -> Qwen2Tokenizer:
    """Return a tokenizer trained on texts.

    Args:
        texts: training texts.
        vocab_size: maximum number of tokens.
        words: words that become one token each, with their leading space if they have one.
        pieces: further single tokens that the class would split, such as numbers and separators.

    Raises:
        G2POError: if `vocab_size` is too small for the words.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS) - len(pieces),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Merges go by count: said often enough, these are complete before anything else is.
    bpe.train_from_iterator(_weighted(words, texts), trainer)
    learned = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        padding_side="left",
        model_max_length=1024,
        chat_template=CHAT_TEMPLATE,
    )
    # The parser of completions reads the tags in decoded text: added, but not special, so that decoding keeps them.
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in (*TAGS, *pieces)])
    split = [text for text in (*words, *pieces) if len(tokenizer(text)["input_ids"]) != 1]
    require(not split, "vocab_size", vocab_size, f"too small, {', '.join(split[:5])} … take more than one token")
    return tokenizer


def _weighted(words: Sequence[str], texts: Iterable[str]) -> Iterable[str]:
    for _ in range(5_000):
        yield from words
    yield from texts

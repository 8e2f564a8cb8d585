"""Words of episodes that a small model's tokenizer spells in pieces."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..prompts.conversation import message_text
from ..trajectory import Step
from .contract import Finding

SMALL_VOCABULARY = 5000  # tokens; a bundled model's has fewer, a pretrained model's more
SHOWN = 8
_WORD = re.compile(r"[^\W\d_]+")


def spelled_words(steps: Sequence[Step], model: str | Path, with_actions: bool = False) -> list[Finding]:
    """Return a warning about words that a model has to write and its tokenizer spells in pieces.

    Nothing of a model that is not in a folder, and of one with a large vocabulary.

    Args:
        steps: of whole episodes. The words are those of listed actions and of the names of tools.
        model: a folder.
        with_actions: also those of the actions that were played, as an expert's.
    """
    file = Path(model, "tokenizer.json")
    if not file.is_file():
        return []
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    if tokenizer.get_vocab_size() > SMALL_VOCABULARY:
        return []
    counts: Counter[str] = Counter()
    for step in steps:
        answer = step.response or {"content": step.action}
        written = [*(step.admissible_actions or ())]
        written += [call["function"]["name"] for call in answer.get("tool_calls", ())]
        written += [message_text(answer)] if with_actions else []
        counts.update({word for text in written for word in _WORD.findall(text)})
    spelled = [word for word, _ in counts.most_common() if _pieces(tokenizer, word) > 1]
    if not spelled:
        return []
    shown = ", ".join(spelled[:SHOWN]) + (f", … ({len(spelled)} words)" if len(spelled) > SHOWN else "")
    text = f"the tokenizer of {model} spells {shown} in pieces, which a model of this size is slow to learn"
    return [Finding("warning", text, f"Use words of {file}, or a larger model.")]


def _pieces(tokenizer, word: str) -> int:
    """Return the number of tokens of a word, inside a text or at its beginning, whichever is smaller."""
    return min(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in (word, f" {word}"))

"""How completions are sampled, and where they end: the same for training and evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

# Names of engine options -> the setting that decides the same. An engine option would silently win over the setting,
# while the loss, a run's description and tables of results go by the setting.
_RESERVED = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")},
    "do_sample": "temperature",
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_length"), "max_tokens"),
    **dict.fromkeys(("stop", "stop_strings", "include_stop_str_in_output"), "stop_sequences"),
    **dict.fromkeys(("eos_token_id", "stop_token_ids", "ignore_eos", "pad_token_id", "bos_token_id"), "end tokens"),
    **dict.fromkeys(("n", "best_of", "num_return_sequences"), "number of completions"),
}


def reserved_option(options: Iterable[str]) -> tuple[str, str] | None:
    """Return the first engine option that a setting controls, with the setting's name, or `None`.

    The setting is a field of `Sampling`, "seed", "end tokens" or "number of completions".
    """
    return next(((name, _RESERVED[name]) for name in options if name in _RESERVED), None)


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled, and where they end.

    Args:
        temperature: 0 is greedy.
        top_p: nucleus sampling; 1 disables it.
        top_k: sample from the k most likely tokens; 0 disables it.
        min_p: minimum probability relative to the most likely token; `None` disables it.
        repetition_penalty: 1 disables it.
        max_tokens: maximum tokens of a completion.
        stop_sequences: a completion ends after the first of these texts.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    max_tokens: int = 512
    stop_sequences: tuple[str, ...] = ()


def derived_seed(*numbers: int) -> int:
    """Return a seed (63 bits) derived from numbers, such as a panel's seed and the number of an episode."""
    name = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") // 2

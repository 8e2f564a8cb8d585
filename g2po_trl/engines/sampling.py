"""How completions are sampled, and where they end: the same for training and evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from ..utils.options import Options, option

# Names of engine options -> the setting that decides the same. An engine option would silently win over the setting,
# while the loss, a run's description and tables of results go by the setting.
_SYNONYMS = {
    "do_sample": "temperature",
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_length"), "max_completion_length"),
    **dict.fromkeys(("stop", "stop_strings", "include_stop_str_in_output"), "stop_sequences"),
    "seed": "seed",
    **dict.fromkeys(("eos_token_id", "stop_token_ids", "ignore_eos", "pad_token_id", "bos_token_id"), "end tokens"),
    **dict.fromkeys(("n", "best_of", "num_return_sequences"), "number of completions"),
}
# Engine options that leave the distribution of tokens alone. All others, such as those of the next version, are taken
# to reshape it, unless they are None or False.
_LEAVE_THE_DISTRIBUTION = {
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "max_time", "renormalize_logits"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "skip_clone"),
    *("skip_reading_prefix_cache", "repetition_detection", "priority", "cache_salt"),
}
_completion = partial(option, group="Prompts and completions", plays=True)
_filter = partial(option, group="Rollout and generation", plays=True)


@dataclass
class Sampling(Options):
    """How completions are sampled, and where they end.

    The configuration and the options of `g2po evaluate` inherit these fields, and each engine translates them
    (`Engine.to_engine`). The metadata `neutral` of a filter is the value at which it does not change the model's
    distribution.
    """

    temperature: float = _filter("Sampling temperature; 0 is greedy.", 1.0, within="[0, inf)")
    top_p: float = _filter(
        "Sample from the most likely tokens that have this probability together; 1 disables it.",
        1.0,
        within="(0, 1]",
        neutral=1.0,
    )
    top_k: int = _filter("Sample from the k most likely tokens; 0 disables it.", 0, within="[0, inf)", neutral=0)
    min_p: float | None = _filter(
        "Minimum probability relative to the most likely token. `None` disables it.",
        None,
        within="[0, 1]",
        neutral=None,
    )
    repetition_penalty: float = _filter(
        "Penalty of tokens that occurred before; 1 disables it.", 1.0, within="(0, inf)", neutral=1.0
    )
    max_completion_length: int = _completion("Maximum number of tokens of a completion.", 512, within="[1, inf)")
    stop_sequences: list[str] | None = _completion(
        'Strings at which a completion ends, e.g. `["</action>"]`. The string stays part of it.', None
    )

    def filters(self) -> dict[str, Any]:
        """Return the filters that are not neutral: they reshape the distribution that completions are sampled from."""
        neutral = {one.name: one.metadata["neutral"] for one in fields(Sampling) if "neutral" in one.metadata}
        return {name: value for name in neutral if (value := getattr(self, name) or neutral[name]) != neutral[name]}


def reserved_option(options: Iterable[str]) -> tuple[str, str] | None:
    """Return the first engine option that a setting controls, with the setting's name, or `None`.

    The setting is a field of `Sampling`, "seed", "end tokens" or "number of completions".
    """
    reserved = {one.name: one.name for one in fields(Sampling)} | _SYNONYMS
    return next(((name, reserved[name]) for name in options if name in reserved), None)


def reshaping_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine options (`generation_kwargs`) that reshape the distribution of tokens, or may do so."""
    return {
        name: value
        for name, value in options.items()
        if name not in _LEAVE_THE_DISTRIBUTION and value is not None and value is not False
    }


def derived_seed(*numbers: int) -> int:
    """Return a seed (63 bits) derived from numbers, such as a panel's seed and the number of an episode."""
    name = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") // 2

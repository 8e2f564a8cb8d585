"""How completions are sampled, and where they end: the same for training and evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
# What importance weights need to know about an engine option, be it a setting, a field of `GenerationConfig` or of
# `SamplingParams`: the loss scores the whole distribution at the sampling's temperature. Options that are in neither
# table, such as those of the next version, are taken to reshape it.
_LEAVE_THE_DISTRIBUTION = {
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "max_time", "renormalize_logits"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "skip_clone"),
    *("skip_reading_prefix_cache", "repetition_detection", "priority", "cache_salt"),
}
_RESHAPE = {  # option -> the value at which it does not; so do None, False and what is empty
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("num_beams", "num_beam_groups", "length_penalty"), 1),
    **dict.fromkeys(("top_k", "min_p", "epsilon_cutoff", "eta_cutoff", "presence_penalty", "frequency_penalty"), 0),
    **dict.fromkeys(("min_tokens", "min_new_tokens", "min_length", "diversity_penalty", "top_n_sigma"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "penalty_alpha"), 0),
    **dict.fromkeys(("top_h", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id")),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words", "bad_words_ids", "sequence_bias")),
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "constraints", "force_words_ids", "watermarking_config")),
    **dict.fromkeys(("structured_outputs", "vllm_structured_outputs_regex", "response_format")),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar")),
    **dict.fromkeys(("logits_processors", "extra_args", "vllm_xargs", "thinking_token_budget")),
    **dict.fromkeys(("dola_layers", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "token_healing")),
    **dict.fromkeys(("early_stopping", "use_beam_search", "remove_invalid_values")),
}


def reserved_option(options: Iterable[str]) -> tuple[str, str] | None:
    """Return the first engine option that a setting controls, with the setting's name, or `None`.

    The setting is a field of `Sampling`, "seed", "end tokens" or "number of completions".
    """
    return next(((name, _RESERVED[name]) for name in options if name in _RESERVED), None)


def reshaping_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by which an engine samples from another distribution than the model's, or may do so."""

    def is_off(name: str, value: Any) -> bool:
        return value is None or value is False or value in ([], {}, (), "") or value == _RESHAPE[name]

    others = {name: value for name, value in options.items() if name not in _LEAVE_THE_DISTRIBUTION}
    return {name: value for name, value in others.items() if name not in _RESHAPE or not is_off(name, value)}


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

"""Checks of `G2POConfig`: messages name the field, its value and the remedy."""

from __future__ import annotations

import math
import os
import re
import warnings
from dataclasses import fields
from inspect import get_annotations
from typing import Any
from urllib.parse import urlsplit

from trl import GRPOConfig

from .credit.estimators.registry import ESTIMATORS
from .credit.state_keys import IGNORABLE, similarity_threshold
from .engines.sampling import reserved_option, reshaping_options
from .experimental.strategies import check_strategy
from .runs.sample_table import BACKENDS
from .update.packing import LAYOUTS
from .utils.dependent_options import (
    REFUSED,
    WITHOUT_EFFECT,
    check_best_model,
    check_training_loop,
    used,
    without_effect,
)
from .utils.options import KINDS, is_of_kind
from .utils.options import require as _require

# Setting that an entry of generation_kwargs would override -> remedy.
_REMEDIES = {
    "temperature": "set temperature, and eval_temperature for evaluations, instead",
    "top_p": "set top_p, and eval_top_p for evaluations, instead",
    "top_k": "set top_k, and eval_top_k for evaluations, instead",
    "min_p": "set min_p instead",
    "repetition_penalty": "set repetition_penalty instead",
    "max_completion_length": "set max_completion_length instead",
    "stop_sequences": "set stop_sequences instead",
    "seed": "all completions of a prompt would be equal; set seed, and eval_seed for evaluations, instead",
    "end tokens": "the model's generation_config and tokenizer define the tokens that end a completion; set "
    "stop_sequences for texts that end it",
    "number of completions": "a prompt gets one completion; remove it",
}
_ADDRESS = re.compile(r"https?://(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?/?")
# Fields that an `advantage_fn` replaces. State keys and `gamma` are not among them: they make its graph.
_READ_BY_ESTIMATORS = (
    "advantage_estimator",
    "estimator_kwargs",
    "step_advantage_weight",
    "invalid_action_penalty",
    "scale_rewards",
)


# Field -> (test of a number, remedy).
HISTORIES = (None, "window", "conversation")
_AT_LEAST_1 = (lambda value: value >= 1, "set it to 1 or more")
_AT_LEAST_0 = (lambda value: value >= 0, "set it to 0 or more")
_ABOVE_0 = (lambda value: value > 0, "set it above 0")
_ABOVE_0_OR_NONE = (lambda value: value > 0, "set it above 0, or to None")
_FRACTION = (lambda value: 0 <= value <= 1, "set it between 0 and 1")
_STEPS = ("logging_steps", "save_steps", "eval_steps")
_MAY_BE_NONE = {"mini_batch_size", "max_prompt_length", "eval_top_p", "eval_top_k", "packed_row_tokens", *_STEPS}
_MAY_BE_NONE |= {"log_trajectories_every", "min_p"}
_RANGES = {
    "gamma": (lambda value: 0 < value <= 1, "set it above 0 and at most 1 (the paper uses 0.95)"),
    "value_lambda": (lambda value: 0 <= value <= 1, "set it between 0 and 1 (1 is the paper)"),
    "temperature": (lambda value: value > 0, "set it above 0: greedy episodes of a group would all be equal"),
    "eval_temperature": (lambda value: value >= 0, "set it to 0 (greedy) or more"),
    "top_p": (lambda value: 0 < value <= 1, "set it above 0 and at most 1 (off)"),
    "eval_top_p": (lambda value: 0 < value <= 1, "set it above 0 and at most 1, or to None"),
    "min_p": (lambda value: 0 <= value <= 1, "set it between 0 and 1, or to None (off)"),
    "top_k": (lambda value: value >= 0, "set it to 1 or more, or to 0 (off)"),
    "repetition_penalty": (lambda value: value > 0, "set it above 0 (1 is off)"),
    **dict.fromkeys(("max_error_rate", "min_valid_action_ratio", "min_success_of_best"), _FRACTION),
    **dict.fromkeys(("step_advantage_weight", "invalid_action_penalty", "history_length", "eval_top_k"), _AT_LEAST_0),
    **dict.fromkeys(("log_trajectories_every", "num_trajectories_logged"), _AT_LEAST_0),
    "vllm_request_timeout": _ABOVE_0,
    **dict.fromkeys(_STEPS, _ABOVE_0_OR_NONE),
    **dict.fromkeys(("mini_batch_size", "max_prompt_length", "packed_row_tokens"), _AT_LEAST_1),
    "max_steps": (lambda value: value != 0, "set it to 1 or more, or to -1 for num_train_epochs"),
    "num_train_epochs": _ABOVE_0,
    **dict.fromkeys(("max_turns", "task_error_patience", "collapse_patience"), _AT_LEAST_1),
    **dict.fromkeys(("max_completion_length", "max_tokens_per_micro_batch", "generation_batch_tokens"), _AT_LEAST_1),
}


def check(args: GRPOConfig) -> None:
    """Check the fields before TRL derives others from them."""
    for sentence in used(vars(args), REFUSED):
        raise ValueError(sentence)
    _warn_of_no_effect(args)
    if args.num_generations is None or args.num_generations < 2:
        raise ValueError(
            f"num_generations is {args.num_generations}: a group needs at least 2 trajectories of one task to "
            "compare. Set it to 2 or more (the paper uses 8)."
        )
    _check_whole_groups(args)
    _check_kinds(args)
    for name, (is_right, remedy) in _RANGES.items():
        value = getattr(args, name)
        accepted = is_right(value) if isinstance(value, (int, float)) else value is None and name in _MAY_BE_NONE
        _require(accepted, name, value, remedy)
    _require(
        isinstance(args.state_key_ignores, (list, tuple, type(None))),
        "state_key_ignores",
        args.state_key_ignores,
        f"set it to a list of {', '.join(IGNORABLE)}, or to None",
    )
    for name in args.state_key_ignores or ():
        _require(name in IGNORABLE, "state_key_ignores", name, f"choose from {', '.join(IGNORABLE)}")
    similarity_threshold(args.state_key)
    others = args.other_eval_temperatures
    _require(
        isinstance(others, (list, tuple)) and all(isinstance(one, (int, float)) for one in others),
        "other_eval_temperatures",
        others,
        "set it to a list of numbers, such as [1.0], or to []",
    )
    _require(
        # Six digits, as in the names of their panels.
        all(0 <= one < math.inf for one in others)
        and len({f"{one:g}" for one in (*others, args.eval_temperature)}) == len(others) + 1,
        "other_eval_temperatures",
        others,
        "set each to 0 (greedy) or more, and none twice or to eval_temperature",
    )
    _require(
        not isinstance(args.stop_sequences, str)
        and all(one and isinstance(one, str) for one in args.stop_sequences or ()),
        "stop_sequences",
        args.stop_sequences,
        "pass a list of texts that are not empty, e.g. ['</action>']",
    )
    _require(args.history in HISTORIES, "history", args.history, "choose window or conversation, or leave it unset")
    _require(args.token_layout in LAYOUTS, "token_layout", args.token_layout, f"choose one of {', '.join(LAYOUTS)}")
    _require(
        args.packed_row_tokens is None or args.token_layout != "padded",
        "packed_row_tokens",
        args.packed_row_tokens,
        "token_layout='padded' has no packed rows; leave it at None",
    )
    _check_vllm(args)
    _check_servers(args)


def _check_kinds(args: GRPOConfig) -> None:
    """Refuse what is not of the field's type: 2.5 turns, or "false", which is true. TRL's fields are as in TRL."""
    kinds = {kind.__name__: kind for kind in (bool, int, float)}
    for name, annotation in _annotations(type(args)).items():
        kind, _, optional = annotation.partition(" | ")
        is_ours, value = name in _RANGES or name not in GRPOConfig.__dataclass_fields__, getattr(args, name)
        if is_ours and kind in kinds and not (optional and value is None):
            _require(is_of_kind(value, kinds[kind]), name, value, f"set it to a {KINDS[kinds[kind]]}")


def _annotations(owner: type) -> dict[str, str]:
    """Return the annotations of a dataclass's fields as text; the parser of transformers changes `fields` in place."""
    found = {name: kind for one in reversed(owner.__mro__) for name, kind in get_annotations(one).items()}
    text = {name: kind.__name__ if isinstance(kind, type) else str(kind) for name, kind in found.items()}
    return {name: text[name] for name in owner.__dataclass_fields__}


def _warn_of_no_effect(args: GRPOConfig) -> None:
    """Warn of fields that change nothing: scripts for TRL that set them should run."""
    for sentence in used(vars(args), WITHOUT_EFFECT):
        warnings.warn(sentence, stacklevel=5)
    for sentence in without_effect(vars(args), {field.name: field.default for field in fields(args)}):
        warnings.warn(f"{sentence}.", stacklevel=5)


def _check_whole_groups(args: GRPOConfig) -> None:
    """Refuse iterations that are not whole groups, naming the nearest sizes that are."""
    processes, size = int(os.environ.get("WORLD_SIZE", 1)), args.num_generations
    steps = args.steps_per_generation or args.gradient_accumulation_steps
    episodes = args.generation_batch_size or args.per_device_train_batch_size * steps * processes
    if episodes % size == 0:
        return
    if args.generation_batch_size:
        name, value, how = "generation_batch_size", episodes, ""
    else:
        name, value = "per_device_train_batch_size", args.per_device_train_batch_size
        how = f" x {steps} (steps_per_generation) x {processes} (processes)"
    near = [n for n in range(1, 4 * max(size, value)) if (n * episodes // value) % size == 0]
    below, above = [n for n in near if n < value][-1:], [n for n in near if n > value][:1]
    raise ValueError(
        f"{name} is {value}{how}: that is {episodes} episodes per iteration, not whole groups of num_generations="
        f"{size}. Set it to {' or '.join(map(str, below + above))}."
    )


def logs_tables(args: GRPOConfig) -> bool:
    """Return whether `report_to` names a tracker that shows tables of trajectories."""
    return not set(args.report_to).isdisjoint(BACKENDS)


def check_afterwards(args: GRPOConfig) -> None:
    """Check the fields that TRL has derived, and those that depend on them."""
    _check_generation_kwargs(args)
    if args.corrects_sampling and args.vllm_importance_sampling_correction:
        _check_distribution(args)
    check_strategy(args)
    _require(
        args.log_trajectories_every == 0 or logs_tables(args),
        "log_trajectories_every",
        args.log_trajectories_every,
        f"report_to is {args.report_to}: tables go to {', '.join(BACKENDS)}",
    )
    for name in ("steps_per_generation", "gradient_accumulation_steps") if args.mini_batch_size is not None else ():
        _require(
            getattr(args, name) == 1,
            name,
            getattr(args, name),
            f"mini_batch_size={args.mini_batch_size} sets the mini-batches of a rollout, of "
            f"{args.generation_batch_size} episodes (generation_batch_size); set {name} to 1, and "
            "per_device_train_batch_size to the episodes of a process",
        )
    if args.scale_rewards not in ("group", "none"):
        raise ValueError(
            f"scale_rewards is {args.scale_rewards!r}: G2PO scales the advantages of each group separately. Set it to "
            "'group' (divide advantages by their standard deviation) or 'none'."
        )
    check_training_loop(args)
    check_best_model(args)


def check_estimator(args: GRPOConfig) -> None:
    """Refuse an unknown estimator, its options if it does not have them, and fields that it does not use."""
    name = args.advantage_estimator
    _require(name in ESTIMATORS, "advantage_estimator", name, f"choose one of {', '.join(ESTIMATORS)}")
    row = ESTIMATORS[name]
    unused = {
        "value_lambda": (1.0, not row.uses_value_lambda),
        "step_advantage_weight": (1.0, "step_weight" not in row.parameters),
        **dict.fromkeys(("state_key", "state_key_ignores"), (None, row.compares == "episodes")),
    }
    for field_name, (default, is_unused) in unused.items():
        value = getattr(args, field_name)
        _require(
            value == default or not is_unused,
            field_name,
            value,
            f"advantage_estimator={name!r} does not use it; leave it at {default!r}",
        )
    _require(
        "gamma" not in row.options or args.gamma == type(args).gamma,
        "gamma",
        args.gamma,
        f'advantage_estimator={name!r} has its own discount: set estimator_kwargs to {{"gamma": {args.gamma}}}',
    )
    args.make_estimator()


def check_advantage_fn(args: GRPOConfig) -> None:
    """Refuse fields of the built-in estimators, which an `advantage_fn` would ignore."""
    defaults = {field.name: field.default for field in fields(args)}
    for name in _READ_BY_ESTIMATORS:
        value, default = getattr(args, name), defaults[name]
        _require(
            value == default,
            name,
            value,
            f"advantage_fn replaces the estimator, and nothing else reads {name}. Apply it inside advantage_fn, "
            f"e.g. functools.partial(g2po_trl.g2po, …), and leave it at {default!r}; or remove advantage_fn",
        )


def _check_vllm(args: GRPOConfig) -> None:
    if not args.use_vllm:
        return
    if args.max_prompt_length is not None and args.vllm_max_model_length is not None:
        needed = args.max_prompt_length + args.max_completion_length
        _require(
            args.vllm_max_model_length >= needed,
            "vllm_max_model_length",
            args.vllm_max_model_length,
            f"set it to max_prompt_length + max_completion_length = {needed} or more",
        )


def _check_servers(args: GRPOConfig) -> None:
    servers = args.vllm_servers
    _require(
        args.vllm_weights_folder is None or servers is not None,
        "vllm_weights_folder",
        args.vllm_weights_folder,
        "only vllm_servers read weights from a folder; set them, or leave it at None",
    )
    if servers is None:
        return
    _require(
        isinstance(servers, (list, tuple)) and len(servers) > 0,
        "vllm_servers",
        servers,
        "pass a list of addresses, e.g. ['http://10.0.0.2:8000'], or None",
    )
    for server in servers:
        _require(
            _is_address(server),
            "vllm_servers",
            server,
            "write an address as http://HOST:PORT or https://HOST:PORT",
        )
    different = {server.rstrip("/").lower() for server in servers}
    _require(len(different) == len(servers), "vllm_servers", servers, "name each server once")
    _require(not args.use_vllm, "use_vllm", True, "vllm_servers is set as well; choose one engine")
    for name in ("vllm_request_timeout", "vllm_server_timeout"):
        _require(getattr(args, name) > 0, name, getattr(args, name), "set it above 0")


def _check_generation_kwargs(args: GRPOConfig) -> None:
    options = args.generation_kwargs
    _require(options is None or isinstance(options, dict), "generation_kwargs", options, "pass an object, or None")
    if (reserved := reserved_option(options or ())) is not None:
        name, setting = reserved
        raise ValueError(
            f"generation_kwargs has {name}={options[name]!r}, which would override the setting that the loss and the "
            f"records of the run use: {_REMEDIES[setting]}."
        )
    _require(
        args.vllm_structured_outputs_regex is None or "structured_outputs" not in (options or {}),
        "vllm_structured_outputs_regex",
        args.vllm_structured_outputs_regex,
        "generation_kwargs has structured_outputs as well; choose one of them",
    )


def _check_distribution(args: GRPOConfig) -> None:
    """Refuse what samples from another distribution than the loss scores: importance weights would be biased."""
    changed = [f"{name}={value!r}" for name, value in args.filters().items()]
    if args.vllm_structured_outputs_regex is not None and (args.use_vllm or args.vllm_servers is not None):
        changed.append(f"vllm_structured_outputs_regex={args.vllm_structured_outputs_regex!r}")
    given = reshaping_options(args.generation_kwargs or {})
    changed += [f"{name}={value!r} (in generation_kwargs)" for name, value in given.items()]
    if changed:
        raise ValueError(
            f"{', '.join(changed)} with vllm_importance_sampling_correction=True: completions would not be sampled "
            "from the distribution that the loss scores, so every ratio between their probabilities would be biased. "
            "Remove what reshapes it (evaluation has eval_top_p and eval_top_k), or set "
            "vllm_importance_sampling_correction=False."
        )


def as_bound(args: GRPOConfig) -> float | None:
    """Return the largest importance weight: a number above 0, or `None`."""
    value = args.vllm_importance_sampling_clip_max
    if value == "auto":
        return 1.0 if args.is_off_policy and args.vllm_importance_sampling_mode == "token_truncate" else 3.0
    if value is None or str(value).lower() in ("none", "null"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    _require(number > 0, "vllm_importance_sampling_clip_max", value, "set it above 0, to None, or to 'auto'")
    return number


def _is_address(server: Any) -> bool:
    if not isinstance(server, str) or not _ADDRESS.fullmatch(server):
        return False
    try:
        parts = urlsplit(server)
        parts.hostname.encode("idna")
        return parts.port != 0
    except ValueError:
        return False

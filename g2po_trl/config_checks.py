"""What `G2POConfig` refuses, each with the field, its value and the remedy."""

from __future__ import annotations

import math
import os
import re
import warnings
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .credit.state_keys import IGNORABLE
from .installing import how_to_install
from .rollout.sampling import reserved_option
from .runs.sample_table import BACKENDS
from .switches import without_effect
from .update.packing import LAYOUTS

if TYPE_CHECKING:
    from .config import G2POConfig

# GRPO options that do not apply: field -> (the only value that means "not used", why). Set otherwise, they are
# refused: an option that is accepted and ignored costs its user a run.
REFUSED = {
    "reward_weights": (None, "the reward comes from the environment's `step`; scale it there"),
    "multi_objective_aggregation": ("sum_then_normalize", "an episode has one reward"),
    "max_tool_calling_iterations": (None, "an episode's length is `max_turns`"),
    "top_entropy_quantile": (1.0, "its threshold would depend on the split into micro-batches"),
    "entropy_coef": (0.0, "the bonus would depend on the split into micro-batches"),
    "use_adaptive_entropy": (False, "the bonus would depend on the split into micro-batches"),
    "use_transformers_paged": (False, "transformers calls it use_transformers_continuous_batching now"),
    "use_liger_kernel": (
        False,
        "TRL's fused LM head is used; load kernels with model_init_kwargs={'use_kernels': True}",
    ),
}
# Options of every TRL script that change nothing here but what is shown: set, they are told to have no effect.
_SHOWN = "`save_trajectories` writes every prompt and reply, and `g2po view` shows them"
WITHOUT_EFFECT = {
    "log_completions": (False, _SHOWN),
    "num_completions_to_print": (None, _SHOWN),
    "log_unique_prompts": (False, _SHOWN),
    "log_completions_hub_repo": (None, "`push_to_hub` uploads the model and its card"),
}
ESTIMATORS = ("g2po", "gigpo", "grpo", "rloo", "graphgpo", "hgpo", "crbc")
# What to do in place of an entry of generation_kwargs, by the setting that decides the same.
_REMEDIES = {
    "temperature": "set temperature, and eval_temperature for evaluations, instead",
    "top_p": "set top_p, and eval_top_p for evaluations, instead",
    "top_k": "set top_k, and eval_top_k for evaluations, instead",
    "min_p": "set min_p instead",
    "repetition_penalty": "set repetition_penalty instead",
    "max_tokens": "set max_completion_length instead",
    "stop_sequences": "set stop_sequences instead",
    "seed": "all completions of a prompt would be the same; set seed, and eval_seed for evaluations, instead",
    "end tokens": "the model's generation_config and tokenizer name the tokens that end a completion; set "
    "stop_sequences for texts that end it",
    "number of completions": "a prompt gets one completion; remove it",
}
_ADDRESS = re.compile(r"https?://(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?/?")
_EPISODE_STATISTICS = ("trajectory", "step")
# What an `advantage_fn` takes the place of. Keys of states and `gamma` are not among them: they make its graph.
_READ_BY_ESTIMATORS = (
    "advantage_estimator",
    "use_node_advantage",
    "use_edge_advantage",
    "use_group_aggregation",
    "step_advantage_weight",
    "graphgpo_omega",
    "hgpo_depth_exponent",
    "crbc_step_weight",
    "crbc_gamma",
    "crbc_least_std",
    "invalid_action_penalty",
    "episode_statistics",
    "scale_rewards",
)


def check(args: G2POConfig) -> None:
    """What can be said before TRL has looked at the fields it knows.

    Raises:
        ValueError: for the first field that cannot be what it is.
    """
    for name, (unused, reason) in REFUSED.items():
        if getattr(args, name) != unused:
            raise ValueError(f"{name}={getattr(args, name)!r} has no effect in G2PO: {reason}.")
    _warn_of_no_effect(args)
    if args.num_generations is None or args.num_generations < 2:
        raise ValueError(
            f"num_generations is {args.num_generations}: a group needs at least 2 trajectories of one task to "
            "compare. Set it to 2 or more (the paper uses 8)."
        )
    _check_whole_groups(args)
    _require(0 < args.gamma <= 1, "gamma", args.gamma, "set it above 0 and at most 1 (the paper uses 0.95)")
    _require(args.step_advantage_weight >= 0, "step_advantage_weight", args.step_advantage_weight, "set it >= 0")
    _require(0 < args.graphgpo_omega < 1, "graphgpo_omega", args.graphgpo_omega, "set it above 0 and below 1")
    _require(args.hgpo_depth_exponent >= 0, "hgpo_depth_exponent", args.hgpo_depth_exponent, "set it >= 0")
    _require(args.crbc_step_weight >= 0, "crbc_step_weight", args.crbc_step_weight, "set it >= 0")
    _require(args.crbc_least_std >= 0, "crbc_least_std", args.crbc_least_std, "set it >= 0")
    _require(0 < args.crbc_gamma <= 1, "crbc_gamma", args.crbc_gamma, "set it above 0 and at most 1")
    _require(args.invalid_action_penalty >= 0, "invalid_action_penalty", args.invalid_action_penalty, "set it >= 0")
    _require(
        args.episode_statistics in _EPISODE_STATISTICS,
        "episode_statistics",
        args.episode_statistics,
        f"choose one of {', '.join(_EPISODE_STATISTICS)}",
    )
    for name in args.state_key_ignores or ():
        _require(name in IGNORABLE, "state_key_ignores", name, f"choose from {', '.join(IGNORABLE)}")
    similarity = args.state_similarity
    _require(0 < similarity <= 1, "state_similarity", similarity, "set it above 0 and at most 1 (1: equal keys)")
    _require(
        similarity == 1 or find_spec("datasketch") is not None,
        "state_similarity",
        similarity,
        f"below 1 it needs datasketch: {how_to_install('similarity')}",
    )
    size = args.mini_batch_size
    _require(size is None or size >= 1, "mini_batch_size", size, "set it to 1 or more, or to None")
    _require(args.max_turns >= 1, "max_turns", args.max_turns, "an episode needs at least 1 turn")
    _require(args.refill_groups >= 1, "refill_groups", args.refill_groups, "set it to 1 (off) or more")
    _check_ahead(args)
    _check_branches(args)
    _require(args.history_length >= 0, "history_length", args.history_length, "set it to 0 or more")
    _require(
        args.max_prompt_length is None or args.max_prompt_length >= 1,
        "max_prompt_length",
        args.max_prompt_length,
        "set it to 1 or more, or to None for no limit",
    )
    _require(args.eval_temperature >= 0, "eval_temperature", args.eval_temperature, "set it to 0 (greedy) or more")
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
    for name in ("max_error_rate", "min_valid_action_ratio", "min_success_of_best"):
        _require(0 <= getattr(args, name) <= 1, name, getattr(args, name), "set it between 0 and 1")
    _require(args.task_error_patience >= 1, "task_error_patience", args.task_error_patience, "set it to 1 or more")
    limits = ("load_timeout", "episode_timeout", "worker_resets", "worker_memory_mb")
    for name in (f"environment_{limit}" for limit in limits):
        value = getattr(args, name)
        _require(value is None or value > 0, name, value, "set it above 0, or to None")
    for name in ("log_trajectories_every", "num_trajectories_logged"):
        _require(getattr(args, name) >= 0, name, getattr(args, name), "set it to 0 (none) or more")
    _require(args.collapse_patience >= 1, "collapse_patience", args.collapse_patience, "set it to 1 or more")
    _require(args.eval_top_p is None or 0 < args.eval_top_p <= 1, "eval_top_p", args.eval_top_p, "set it in (0, 1]")
    _require(args.eval_top_k is None or args.eval_top_k >= 0, "eval_top_k", args.eval_top_k, "set it >= 0")
    _require(
        not isinstance(args.stop_sequences, str) and all(args.stop_sequences or ()),
        "stop_sequences",
        args.stop_sequences,
        "pass a list of texts that are not empty, e.g. ['</action>']",
    )
    _require(args.token_layout in LAYOUTS, "token_layout", args.token_layout, f"choose one of {', '.join(LAYOUTS)}")
    row_tokens = args.packed_row_tokens
    _require(row_tokens is None or row_tokens >= 1, "packed_row_tokens", row_tokens, "set it to 1 or more, or None")
    _require(
        row_tokens is None or args.token_layout != "padded",
        "packed_row_tokens",
        row_tokens,
        "token_layout='padded' has no packed rows; leave it at None",
    )
    _check_vllm(args)
    _check_servers(args)
    for name in ("max_completion_length", "max_tokens_per_micro_batch", "generation_batch_tokens"):
        _require((getattr(args, name) or 0) >= 1, name, getattr(args, name), "set it to 1 or more")


def _warn_of_no_effect(args: G2POConfig) -> None:
    """What is harmless is only told: a TRL script that sets it should run."""
    for name, (unused, reason) in WITHOUT_EFFECT.items():
        if getattr(args, name) != unused:
            warnings.warn(f"{name}={getattr(args, name)!r} has no effect in G2PO: {reason}.", stacklevel=5)
    for sentence in without_effect(vars(args), {field.name: field.default for field in fields(args)}):
        warnings.warn(f"{sentence}.", stacklevel=5)


def _check_whole_groups(args: G2POConfig) -> None:
    """Episodes of an iteration, over all processes, are whole groups. TRL says so in its own terms."""
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
        f"{name} is {value}{how}: that is {episodes} episodes an iteration, not whole groups of num_generations="
        f"{size}. Set it to {' or '.join(map(str, below + above))}."
    )


def check_afterwards(args: G2POConfig) -> None:
    """What follows from fields that TRL has worked out.

    Raises:
        ValueError: for the first field that cannot be what it is.
    """
    _check_generation_kwargs(args)
    _require(
        args.log_trajectories_every == 0 or bool(set(args.report_to) & set(BACKENDS)),
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
            f"scale_rewards is {args.scale_rewards!r}: groups never mix in G2PO. Set it to 'group' (divide "
            "advantages by their standard deviation) or 'none'."
        )
    if args.load_best_model_at_end:
        _check_best_model(args)


def check_estimator(args: G2POConfig) -> None:
    """The estimator is there, and reads what was set."""
    name = args.advantage_estimator
    _require(name in ESTIMATORS, "advantage_estimator", name, f"choose one of {', '.join(ESTIMATORS)}")
    without_meaning = {
        field: default
        for field, default, estimators in (
            ("value_lambda", 1.0, ("g2po",)),
            ("use_node_advantage", True, ("g2po",)),
            ("use_edge_advantage", True, ("g2po",)),
            ("use_group_aggregation", True, ("g2po",)),
            ("step_advantage_weight", 1.0, ("g2po", "gigpo", "graphgpo")),
            ("graphgpo_omega", 0.1, ("graphgpo",)),
            ("hgpo_depth_exponent", 1.0, ("hgpo",)),
            ("crbc_step_weight", 5.0, ("crbc",)),
            ("crbc_gamma", 0.98, ("crbc",)),
            ("crbc_least_std", 0.01, ("crbc",)),
            ("state_key_ignores", None, ("g2po", "gigpo", "graphgpo", "hgpo", "crbc")),
            ("state_similarity", 1.0, ("g2po", "gigpo", "graphgpo", "hgpo", "crbc")),
            ("episode_statistics", "trajectory", ("g2po", "gigpo", "grpo", "graphgpo", "crbc")),
        )
        if name not in estimators
    }
    for field_name, default in without_meaning.items():
        _require(
            getattr(args, field_name) == default,
            field_name,
            getattr(args, field_name),
            f"advantage_estimator={name!r} does not use it; leave it at {default!r}",
        )


def check_advantage_fn(args: G2POConfig) -> None:
    """See `G2POConfig.check_advantage_fn`."""
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


def _check_vllm(args: G2POConfig) -> None:
    if not args.use_vllm:
        return
    if args.use_transformers_continuous_batching:
        raise ValueError("use_vllm and use_transformers_continuous_batching are both True: choose one engine")
    _check_filters(args)
    if args.max_prompt_length is not None and args.vllm_max_model_length is not None:
        needed = args.max_prompt_length + args.max_completion_length
        _require(
            args.vllm_max_model_length >= needed,
            "vllm_max_model_length",
            args.vllm_max_model_length,
            f"set it to max_prompt_length + max_completion_length = {needed} or more",
        )


def _check_ahead(args: G2POConfig) -> None:
    ahead, mode = args.rollouts_ahead, args.vllm_importance_sampling_mode
    _require(ahead in (0, 1, 2), "rollouts_ahead", ahead, "set it to 0, 1 or 2")
    if not ahead:
        return
    for name, off in (("refill_groups", 1), ("overlap_environments", False)):
        value = getattr(args, name)
        _require(value == off, name, value, f"rollouts_ahead is {ahead} as well; choose one of them")
    _require(
        args.loss_type != "vespo" or mode is None or mode.startswith("token"),
        "vllm_importance_sampling_mode",
        mode,
        "loss_type='vespo' takes token_truncate or token_mask",
    )
    _check_filters(args)


def _check_branches(args: G2POConfig) -> None:
    share, size = args.branch_share, args.num_generations
    _require(0 <= share < 1, "branch_share", share, "set it to 0 (off) or more, and below 1")
    if not share:
        return
    _require(
        1 <= args.num_branches <= size - 2,
        "branch_share",
        share,
        f"of num_generations={size} episodes it may make {args.num_branches} branches; that must be at least 1, "
        "and leave at least 2",
    )
    _require(
        args.advantage_estimator not in ("grpo", "rloo", "gae"),
        "branch_share",
        share,
        f"advantage_estimator={args.advantage_estimator!r} compares whole episodes, and a branch is none; use 0",
    )
    weight = "crbc_step_weight" if args.advantage_estimator == "crbc" else "step_advantage_weight"
    _require(
        getattr(args, weight) != 0 or args.advantage_estimator == "hgpo",
        "branch_share",
        share,
        f"{weight} is 0, so that only whole episodes are compared, and a branch is none; use 0",
    )
    _require(
        args.use_node_advantage or args.use_edge_advantage,
        "branch_share",
        share,
        "use_node_advantage and use_edge_advantage are False, so that only whole episodes are compared, and a branch "
        "is none; use 0",
    )


def _check_servers(args: G2POConfig) -> None:
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
            "an address is http://HOST:PORT or https://HOST:PORT, and nothing else",
        )
    different = {server.rstrip("/").lower() for server in servers}
    _require(len(different) == len(servers), "vllm_servers", servers, "name each server once")
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        _require(not getattr(args, name), name, True, "vllm_servers is set as well; choose one engine")
    for name in ("vllm_request_timeout", "vllm_server_timeout"):
        _require(getattr(args, name) > 0, name, getattr(args, name), "set it above 0")
    _check_filters(args)


def _check_generation_kwargs(args: G2POConfig) -> None:
    options = args.generation_kwargs
    _require(options is None or isinstance(options, dict), "generation_kwargs", options, "pass an object, or None")
    if (reserved := reserved_option(options or ())) is not None:
        name, setting = reserved
        raise ValueError(
            f"generation_kwargs has {name}={options[name]!r}, which would win over the setting that the loss and the "
            f"run's records go by: {_REMEDIES[setting]}."
        )
    _require(
        args.vllm_structured_outputs_regex is None or "structured_outputs" not in (options or {}),
        "vllm_structured_outputs_regex",
        args.vllm_structured_outputs_regex,
        "generation_kwargs has structured_outputs as well; choose one of them",
    )


def _check_filters(args: G2POConfig) -> None:
    filters = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    changed = [f"{name}={getattr(args, name)}" for name, off in filters.items() if getattr(args, name) != off]
    if changed and args.vllm_importance_sampling_correction:
        raise ValueError(
            f"{', '.join(changed)} with vllm_importance_sampling_correction=True: vLLM's log-probabilities are "
            "those of the filtered distribution, the trainer's those of the whole one, so every ratio between "
            f"them would be biased. Set {', '.join(f'{name}={off}' for name, off in filters.items())} (evaluation "
            "has eval_top_p and eval_top_k), or vllm_importance_sampling_correction=False."
        )


def _check_best_model(args: G2POConfig) -> None:
    strategies = {args.eval_strategy, args.save_strategy}
    _require(
        strategies == {"steps"} or strategies == {"epoch"} or args.save_strategy == "best",
        "load_best_model_at_end",
        True,
        f"the best model is a checkpoint made when it was evaluated, but eval_strategy is "
        f"{str(args.eval_strategy)!r} and save_strategy {str(args.save_strategy)!r}; set both to 'steps'",
    )
    if strategies == {"steps"}:
        _require(
            args.eval_steps % args.save_steps == 0,
            "save_steps",
            args.save_steps,
            f"with load_best_model_at_end every evaluation (eval_steps={args.eval_steps}) needs a checkpoint; set "
            "eval_steps to a multiple of save_steps",
        )


def as_lambda(value: float | str) -> float | str:
    """A number in [0, 1], or `"auto"`."""
    if value == "auto":
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    _require(0 <= number <= 1, "value_lambda", value, "set it between 0 and 1 (1 is the paper), or to 'auto'")
    return number


def as_bound(args: G2POConfig) -> float | None:
    """The largest importance weight: a number above 0, or `None`."""
    value = args.vllm_importance_sampling_clip_max
    if value == "auto":
        return 1.0 if args.rollouts_ahead and args.vllm_importance_sampling_mode == "token_truncate" else 3.0
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


def _require(condition: bool, name: str, value, remedy: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value!r}: {remedy}.")

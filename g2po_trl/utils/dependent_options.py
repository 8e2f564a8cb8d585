"""Options without effect unless another option is set: `--lora_r 8` without `--use_peft`. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Values = Callable[[str], Any]


@dataclass(frozen=True)
class Switch:
    """Fields that take effect only for certain values of other fields, the switches.

    Args:
        switches: names of the fields that decide.
        is_on: reads the switches by name and returns whether `fields` take effect.
        remedy: how to turn it on, as a user types it.
        fields: names of the fields without effect while it is off.
        in_objects: also check `G2POConfig` objects; `False` where `G2POConfig` computes the defaults itself.
    """

    switches: tuple[str, ...]
    is_on: Callable[[Values], bool]
    remedy: str
    fields: tuple[str, ...]
    in_objects: bool = True


def _by(name: str, *fields: str) -> Switch:
    return Switch((name,), lambda value: bool(value(name)), f"--{name}", fields)


SWITCHES = (
    _by(
        "use_peft",
        *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"),
        *("lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora"),
    ),
    _by("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant"),
    _by("use_vllm", "vllm_mode", "vllm_model_impl", "vllm_structured_outputs_regex"),
    _by("use_vllm", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size"),
    _by("use_vllm", "vllm_max_model_length"),
    Switch(
        ("vllm_mode",),
        lambda value: bool(value("use_vllm")) and value("vllm_mode") == "server",
        "--use_vllm --vllm_mode server",
        ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_group_port"),
    ),
    Switch(
        ("use_vllm", "vllm_mode"),
        lambda value: bool(value("use_vllm")) and value("vllm_mode") == "colocate",
        "--use_vllm --vllm_mode colocate",
        ("vllm_merge_adapter",),
    ),
    _by("vllm_servers", "vllm_request_timeout", "vllm_weights_folder"),
    Switch(
        ("use_vllm", "vllm_servers", "rollout_strategy"),
        lambda value: bool(
            value("use_vllm") or value("vllm_servers") or value("rollout_strategy") == "partial_rollouts"
        ),
        "--use_vllm, --vllm_servers or --rollout_strategy partial_rollouts",
        ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
        in_objects=False,
    ),
    _by("push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy", "hub_always_push", "hub_revision"),
    _by("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    Switch(
        ("log_trajectories_every", "report_to"),
        lambda value: bool(value("log_trajectories_every") or value("report_to") not in (None, "none", [], ["none"])),
        "--report_to trackio, wandb or tensorboard",
        ("num_trajectories_logged",),
    ),
    Switch(
        ("min_valid_action_ratio", "min_success_of_best"),
        lambda value: bool(value("min_valid_action_ratio") or value("min_success_of_best")),
        "--min_valid_action_ratio or --min_success_of_best",
        ("collapse_patience",),
    ),
    Switch(
        ("eval_strategy",),
        lambda value: str(getattr(value("eval_strategy"), "value", value("eval_strategy"))) != "no",
        "--eval_strategy steps",
        ("eval_steps",),
    ),
    *(
        Switch(
            ("loss_type",),
            lambda value, name=name: value("loss_type") == name,
            f"--loss_type {name}",
            tuple(f"{name}_{part}" for part in parts),
        )
        for name, parts in (
            ("sapo", ("temperature_neg", "temperature_pos")),
            ("vespo", ("k_pos", "lambda_pos", "k_neg", "lambda_neg")),
        )
    ),
)


def check_given(given: Collection[str]) -> None:
    """Refuse options whose switch is not given, on the command line or in the configuration file.

    A switch that is given as off is a decision: `--use_vllm false` with the configuration of a GPU is accepted.
    """
    for switch in SWITCHES:
        found = [name for name in switch.fields if name in given]
        if found and not any(name in given for name in switch.switches):
            raise ValueError(f"{_has_no_effect(found)} without {switch.remedy}: add it, or leave {_them(found)} out")


def without_effect(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each switch that is off while some of its fields differ from their defaults."""
    for switch in SWITCHES:
        known = switch.in_objects and all(name in values for name in switch.switches)
        if not known or switch.is_on(values.get):
            continue
        found = [name for name in switch.fields if name in values and values[name] != defaults[name]]
        if found:
            yield f"{_has_no_effect(found)} without {switch.remedy}"


def _has_no_effect(names: list[str]) -> str:
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect"


def _them(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"

"""Episodes and step samples of a configuration, derived from its fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..utils.options import require
from .memory import BYTES, ModelShape, Training, read_shape

_ASSUMED_PROMPT, _ASSUMED_COMPLETION, _ASSUMED_FRACTION_OF_TURNS, _ASSUMED_FORWARDED = 700.0, 150.0, 0.66, 0.45
_LORA = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_target_modules": "target_modules", "use_dora": "use_dora"}


@dataclass(frozen=True)
class Episodes:
    """Statistics of episodes: means of an episode and of a step, and their source.

    Args:
        turns: mean number of turns of an episode.
        prompt_tokens, completion_tokens: mean numbers of tokens of a step.
        forwarded: fraction of a step sample's positions that the update processes.
        source: "assumed", or the run that they were measured in.
    """

    turns: float
    prompt_tokens: float
    completion_tokens: float
    forwarded: float = _ASSUMED_FORWARDED
    source: str = "assumed"

    @classmethod
    def of_log(cls, log: Sequence[Mapping[str, Any]], source: str) -> Episodes:
        """Return the statistics of the episodes in a run's log. Raises `G2POError` if no episode has a step."""
        steps, number, prompts, completions = (
            sum(entry[f"rollout/{name}"] for entry in log)
            for name in ("steps", "episodes", "prompt_tokens", "completion_tokens")
        )
        require(steps > 0, "like", source, "pass another run, its log.jsonl has no iteration with a step")
        forwarded = sum(entry.get("update/forwarded_tokens", 0.0) for entry in log)
        return cls(steps / number, prompts / steps, completions / steps, forwarded / (prompts + completions), source)


@dataclass(frozen=True)
class Plan:
    """A run by its settings.

    Args:
        settings: every field of the recipe, with its default if it is not given.
        processes: number of processes, one per GPU.
        sharded: whether processes share one copy of the model (FSDP2, ZeRO-3).
    """

    settings: Mapping[str, Any]
    processes: int
    sharded: bool

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], processes: int = 1, sharded: bool = False) -> Plan:
        """Return the plan. Raises `G2POError` if the number of steps is not set, or groups are not whole."""
        plan = cls(settings, processes, sharded)
        steps, group = plan["max_steps"] or 0, plan["num_generations"]
        require(steps > 0, "max_steps", steps, "set it, so that the length of the run is known")
        remedy = f"change the batch size or the number of processes, {plan.episodes} episodes are not whole groups"
        require(plan.episodes % group == 0, "num_generations", group, remedy)
        return plan

    def __getitem__(self, name: str) -> Any:
        return self.settings.get(name)

    @property
    def slices(self) -> int:
        """Number of mini-batches of a rollout that `max_steps` counts."""
        of_batch = (self["generation_batch_size"] or 0) // (
            self.processes * (self["per_device_train_batch_size"] or 8)
        )
        return self["steps_per_generation"] or of_batch or self["gradient_accumulation_steps"] or 1

    @property
    def steps_per_iteration(self) -> int:
        """Number of steps of an iteration that `max_steps` counts, see `G2POConfig.optimizer_steps_per_iteration`."""
        return max(1, self.slices * self["num_iterations"] // (self["gradient_accumulation_steps"] or 1))

    @property
    def iterations(self) -> int:
        return math.ceil(self["max_steps"] / self.steps_per_iteration)

    @property
    def episodes(self) -> int:
        """Episodes of an iteration, over all processes."""
        return self.processes * (self["per_device_train_batch_size"] or 8) * self.slices

    @property
    def uses_bfloat16(self) -> bool:
        """Whether arithmetic is in bfloat16, which is TRL's default on a GPU."""
        chosen = not self["fp16"] if self["bf16"] is None else self["bf16"]
        return bool(chosen) and not self["use_cpu"]

    def shape(self) -> ModelShape:
        """Return the model's shape; see `read_shape`."""
        lora = None
        if self["use_peft"]:
            lora = {ours: self[name] for name, ours in _LORA.items() if self[name] is not None}
        return read_shape(self.model, self["model_revision"], lora)

    @property
    def model(self) -> str:
        """Folder or Hub id of the model."""
        name = self["model_name_or_path"]
        require(name is not None, "model_name_or_path", name, "pass --model, a folder or a Hub id")
        return str(name)

    def training(self, checkpoint_dtype: str = "float32") -> Training:
        """Return the settings that determine the memory. `checkpoint_dtype`: dtype of weights for "auto"."""
        uses_vllm, mode = self["use_vllm"] or self["engine"] == "vllm", self["vllm_mode"] or "colocate"
        dtype = checkpoint_dtype if self["dtype"] == "auto" else self["dtype"]
        return Training(
            dtype=dtype if dtype in BYTES else "float32",
            quantized="4bit" if self["load_in_4bit"] else "8bit" if self["load_in_8bit"] else None,
            reference=bool(self["beta"]),
            critic="critic_learning_rate" in self.settings,
            autocast=bool(self.uses_bfloat16 or self["fp16"]),
            checkpointing=bool(self["gradient_checkpointing"]),
            micro_batch_tokens=self["max_tokens_per_micro_batch"],
            sharded=self.sharded,
            processes=self.processes,
            vllm_share=self["vllm_gpu_memory_utilization"] if uses_vllm and mode == "colocate" else 0.0,
            vllm_gpus=self["vllm_tensor_parallel_size"] or 1,
        )

    def assumed_episodes(self, **given: float) -> Episodes:
        """Return assumed statistics of episodes; given means replace the assumed ones."""
        longest = self["max_prompt_length"]
        assumed = Episodes(
            _ASSUMED_FRACTION_OF_TURNS * self["max_turns"],
            min(_ASSUMED_PROMPT, longest or _ASSUMED_PROMPT),
            min(_ASSUMED_COMPLETION, self["max_completion_length"]),
        )
        return replace(assumed, **given)

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest prompt with its completion."""
        return (self["max_prompt_length"] or 0) + self["max_completion_length"]

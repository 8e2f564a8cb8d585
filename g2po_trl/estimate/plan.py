"""Episodes and step samples of a configuration, derived from its fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..utils.options import require
from .memory import BYTES, ModelShape, Training, read_shape

_ASSUMED_PROMPT, _ASSUMED_COMPLETION, _ASSUMED_FRACTION_OF_TURNS, _ASSUMED_FORWARDED = 700.0, 150.0, 0.66, 0.45
_LORA = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_target_modules": "target_modules", "use_dora": "use_dora"}


@dataclass(frozen=True)
class Episodes:
    """Statistics of episodes: means of an episode and of a step, and their source."""

    turns: float  # of an episode
    prompt_tokens: float  # of a step
    completion_tokens: float
    forwarded: float = _ASSUMED_FORWARDED  # fraction of a step sample's positions that the update processes
    source: str = "assumed"  # or the run that they were measured in

    @classmethod
    def of_log(cls, log: Sequence[Mapping[str, Any]], source: str) -> Episodes:
        """Return the statistics of the episodes in a run's log. Raises `G2POError` if no episode has a step."""
        names = ("rollout/steps", "rollout/episodes", "rollout/prompt_tokens", "rollout/completion_tokens")
        steps, number, prompts, completions = (sum(entry[name] for entry in log) for name in names)
        require(steps > 0, "like", source, "pass another run, its log.jsonl has no iteration with a step")
        forwarded = sum(entry.get("update/forwarded_tokens", 0.0) for entry in log)
        return cls(steps / number, prompts / steps, completions / steps, forwarded / (prompts + completions), source)


@dataclass(frozen=True)
class Plan:
    """A run by its settings.

    Raises:
        G2POError: if the number of steps is not set, or groups are not whole.
    """

    settings: Mapping[str, Any]  # every field of the recipe, with its default if it is not given
    processes: int = 1  # one per GPU
    sharded: bool = False  # whether processes share one copy of the model (FSDP2, ZeRO-3)

    def __post_init__(self):
        steps, group = self["max_steps"] or 0, self["num_generations"]
        require(steps > 0, "max_steps", steps, "set it, so that the length of the run is known")
        remedy = f"{self.episodes} episodes are not whole groups, change the batch size or the number of processes"
        require(self.episodes % group == 0, "num_generations", group, remedy)

    def __getitem__(self, name: str) -> Any:
        return self.settings.get(name)

    @property
    def batch(self) -> int:
        """Episodes of a mini-batch, over all processes."""
        return self.processes * (self["per_device_train_batch_size"] or 8)

    @property
    def slices(self) -> int:
        """Number of mini-batches of a rollout that `max_steps` counts."""
        of_batch = (self["generation_batch_size"] or 0) // self.batch
        return self["steps_per_generation"] or of_batch or self["gradient_accumulation_steps"] or 1

    @property
    def episodes(self) -> int:
        """Episodes of an iteration, over all processes."""
        return self.batch * self.slices

    @property
    def iterations(self) -> int:
        """Number of iterations, see `G2POConfig.optimizer_steps_per_iteration`."""
        steps = max(1, self.slices * self["num_iterations"] // (self["gradient_accumulation_steps"] or 1))
        return math.ceil(self["max_steps"] / steps)

    @property
    def model(self) -> str:
        """Folder or Hub id of the model."""
        name = self["model_name_or_path"]
        require(name is not None, "model_name_or_path", name, "pass --model, a folder or a Hub id")
        return str(name)

    def shape(self) -> ModelShape:
        """Return the model's shape; see `read_shape`."""
        lora = {ours: self[name] for name, ours in _LORA.items() if self[name] is not None}
        return read_shape(self.model, self["model_revision"], lora if self["use_peft"] else None)

    def training(self, checkpoint_dtype: str = "float32") -> Training:
        """Return the settings that determine the memory. `checkpoint_dtype`: dtype of weights for "auto"."""
        uses_vllm, mode = self["use_vllm"] or self["engine"] == "vllm", self["vllm_mode"] or "colocate"
        dtype = checkpoint_dtype if self["dtype"] == "auto" else self["dtype"]
        has_bfloat16 = not self["fp16"] if self["bf16"] is None else self["bf16"]  # TRL's default on a GPU
        return Training(
            dtype=dtype if dtype in BYTES else "float32",
            quantized="4bit" if self["load_in_4bit"] else "8bit" if self["load_in_8bit"] else None,
            reference=bool(self["beta"]),
            critic="critic_learning_rate" in self.settings,
            autocast=bool(has_bfloat16 and not self["use_cpu"] or self["fp16"]),
            checkpointing=bool(self["gradient_checkpointing"]),
            micro_batch_tokens=self["max_tokens_per_micro_batch"],
            sharded=self.sharded,
            processes=self.processes,
            vllm_share=self["vllm_gpu_memory_utilization"] if uses_vllm and mode == "colocate" else 0.0,
            vllm_gpus=self["vllm_tensor_parallel_size"] or 1,
        )

    def assumed_episodes(self) -> Episodes:
        """Return assumed statistics of episodes."""
        prompt = min(_ASSUMED_PROMPT, self["max_prompt_length"] or _ASSUMED_PROMPT)
        completion = min(_ASSUMED_COMPLETION, self["max_completion_length"])
        return Episodes(_ASSUMED_FRACTION_OF_TURNS * self["max_turns"], prompt, completion)

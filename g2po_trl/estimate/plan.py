"""What a configuration plays and trains, from its fields alone, and what a run's iterations took."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..utils.errors import G2POError
from .memory import ModelShape, Training, read_shape

_ASSUMED_PROMPT, _ASSUMED_COMPLETION, _ASSUMED_FRACTION_OF_TURNS, _ASSUMED_FORWARDED = 700.0, 150.0, 0.66, 0.65
_OFFICIAL = {"official:valid_seen": 140, "official:valid_unseen": 134}  # ALFWorld's games
_LORA = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_target_modules": "target_modules", "use_dora": "use_dora"}


@dataclass(frozen=True)
class Episodes:
    """What episodes are like: means of an episode and of a step, and where they are from.

    Args:
        turns: mean of an episode.
        prompt_tokens, completion_tokens: mean of a step.
        forwarded: fraction of a step sample's positions that the update processes.
        source: "assumed", or the run that they were measured in.
    """

    turns: float
    prompt_tokens: float
    completion_tokens: float
    forwarded: float = _ASSUMED_FORWARDED
    source: str = "assumed"


@dataclass(frozen=True)
class Plan:
    """A run by its settings.

    Args:
        settings: every field of the recipe, its default if it is not given.
        processes: number of processes, one a GPU.
        sharded: whether they share one copy of the model (FSDP2, ZeRO-3).
    """

    settings: Mapping[str, Any]
    processes: int
    sharded: bool

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], processes: int = 1, sharded: bool = False) -> Plan:
        """Return the plan. Raises `G2POError` if the number of steps is not set, or groups are not whole."""
        plan = cls(settings, processes, sharded)
        if not (plan["max_steps"] or 0) > 0:
            raise G2POError(f"max_steps is {plan['max_steps']}: set it, so that the length of the run is known")
        if plan.episodes % plan["num_generations"]:
            raise G2POError(
                f"num_generations is {plan['num_generations']}, which does not divide the {plan.episodes} episodes of "
                "an iteration: change per_device_train_batch_size, steps_per_generation or the number of processes"
            )
        return plan

    def __getitem__(self, name: str) -> Any:
        return self.settings.get(name)

    @property
    def slices(self) -> int:
        """Mini-batches of a rollout that `max_steps` counts."""
        return self["steps_per_generation"] or self["gradient_accumulation_steps"] or 1

    @property
    def steps_per_iteration(self) -> int:
        """What `max_steps` counts in an iteration, as `G2POConfig.optimizer_steps_per_iteration`."""
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
        """Whether arithmetic is in bfloat16, as TRL has it on a GPU where nothing is set."""
        chosen = not self["fp16"] if self["bf16"] is None else self["bf16"]
        return bool(chosen) and not self["use_cpu"]

    @property
    def evaluations(self) -> int:
        """Times that an evaluation set is played; the reported one counts as large as the one that chooses a model."""
        every = {"steps": self["eval_steps"] or 1, "no": None}.get(self["eval_strategy"] or "no")
        during = self["max_steps"] // every if every and every >= 1 else 0
        before = bool(self.settings.get("eval_before", True))  # recipes without this field always play it
        others = any(self[f"num_report_{kind}"] for kind in ("games", "levels", "goals"))
        reported = 2 if self["load_best_model_at_end"] or others else 0  # before and after
        after = self["max_steps"] % every > 0 if every else not reported  # transformers', or the recipe's
        return before + during + after + reported

    @property
    def evaluation_episodes(self) -> int | None:
        """Episodes of an evaluation at all temperatures. `None`: not known from the settings."""
        rows = _OFFICIAL.get(self["eval_games"])
        if rows is None and self["eval_games"] is None:
            names = ("num_eval_games", "num_eval_levels", "num_eval_goals", "num_eval_tasks")
            rows = next((self[name] for name in names if self[name]), None)
        if rows is None:
            return None
        return rows * (self["num_generations_eval"] or 1) * (1 + len(self["other_eval_temperatures"] or []))

    def shape(self) -> tuple[ModelShape, str]:
        """Return the model's shape and its source; see `read_shape`."""
        lora = None
        if self["use_peft"]:
            lora = {ours: self[name] for name, ours in _LORA.items() if self[name] is not None}
        return read_shape(self.model, self["model_revision"], lora)

    @property
    def model(self) -> str:
        """Folder or Hub id of the model."""
        if self["model_name_or_path"] is None:
            raise G2POError("model_name_or_path is None: pass --model, a folder or a Hub id")
        return str(self["model_name_or_path"])

    def training(self) -> Training:
        """Return what is kept in memory."""
        return Training(
            dtype=self["dtype"] if self["dtype"] in ("bfloat16", "float16") else "float32",
            quantized="4bit" if self["load_in_4bit"] else "8bit" if self["load_in_8bit"] else None,
            reference=bool(self["beta"]),
            critic="critic_learning_rate" in self.settings,
            autocast=bool(self.uses_bfloat16 or self["fp16"]),
            checkpointing=bool(self["gradient_checkpointing"]),
            micro_batch_tokens=self["max_tokens_per_micro_batch"],
            sharded=self.sharded,
            processes=self.processes,
            vllm_share=self["vllm_gpu_memory_utilization"] if self._colocates_vllm else 0.0,
        )

    @property
    def _colocates_vllm(self) -> bool:
        return self["engine"] == "vllm" and (self["vllm_mode"] or "colocate") == "colocate"

    def assumed_episodes(self, **given: float) -> Episodes:
        """Return episodes as they are assumed, with the given means instead where there are some."""
        longest = self["max_prompt_length"]
        assumed = {
            "turns": _ASSUMED_FRACTION_OF_TURNS * self["max_turns"],
            "prompt_tokens": min(_ASSUMED_PROMPT, longest or _ASSUMED_PROMPT),
            "completion_tokens": min(_ASSUMED_COMPLETION, self["max_completion_length"]),
        }
        return Episodes(**{**assumed, **given})

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest prompt with its completion."""
        return (self["max_prompt_length"] or 0) + self["max_completion_length"]


_PHASES = ("time/rollout", "time/advantage", "time/critic", "time/batch", "time/logps", "time/update", "time/weights")


@dataclass(frozen=True)
class MeasuredRun:
    """What iterations took.

    Args:
        iterations: that were counted.
        seconds: median of each phase, those of `docs/metrics.md`.
        iteration: median seconds of an iteration.
        evaluation: seconds of the last evaluation at all temperatures; 0 without one.
        rest: seconds of the command besides iterations and evaluations: imports, tasks, saving. 0 if not measured.
        peak_memory: bytes of the largest process; 0 if not measured.
        episodes: what episodes were like.
    """

    iterations: int
    seconds: Mapping[str, float]
    iteration: float
    evaluation: float
    rest: float
    peak_memory: float
    episodes: Episodes


def read_measured(folder: Path, wall: float = 0.0, peak_memory: float = 0.0) -> MeasuredRun:
    """Return what a run's iterations took; the first one, which warms up, is left out if there are others.

    `wall`: seconds of the whole command. Raises `G2POError` if the folder has no log of an iteration.
    """
    history = _log(folder)
    entries = [entry for entry in history if "time/rollout" in entry]
    if not entries:
        raise G2POError(f"{folder} has no iteration in its trainer_state.json: pass the folder of a training run")
    counted = entries[1:] or entries
    totals = [_seconds(entry) for entry in counted]
    names = [name for name in _PHASES if any(name in entry for entry in counted)]
    last = max((entry["step"] for entry in history if _runtimes(entry)), default=None)
    played = [sum(_runtimes(entry)) for entry in history if _runtimes(entry) and entry["step"] == last]
    evaluations = sum(sum(_runtimes(entry)) for entry in history if _runtimes(entry))
    rest = wall - sum(map(_seconds, entries)) - evaluations if wall else 0.0
    return MeasuredRun(
        len(counted),
        {name: median(entry.get(name, 0.0) for entry in counted) for name in names},
        median(totals),
        sum(played),
        max(0.0, rest),
        peak_memory,
        _episodes(counted, str(folder)),
    )


def _log(folder: Path) -> list[dict[str, Any]]:
    states = [*sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)]
    states += [folder / "trainer_state.json"]
    found = [path for path in states if path.is_file()]
    if not found:
        raise G2POError(f"{folder} has no trainer_state.json: pass the folder of a training run")
    try:
        return json.loads(found[-1].read_text(encoding="utf-8"))["log_history"]
    except (ValueError, KeyError, TypeError) as error:
        raise G2POError(f"{found[-1]} cannot be read ({error!r}): pass the folder of another run") from error


def _seconds(entry: Mapping[str, float]) -> float:
    return sum(entry.get(name, 0.0) for name in _PHASES)


def _runtimes(entry: Mapping[str, float]) -> list[float]:
    return [value for name, value in entry.items() if name.endswith("_runtime") and name != "train_runtime"]


def _episodes(entries: list[dict[str, float]], source: str) -> Episodes:
    steps = sum(entry["rollout/steps"] for entry in entries)
    number = sum(entry["rollout/episodes"] for entry in entries)
    prompts, completions = (
        sum(entry[f"rollout/{kind}_tokens"] for entry in entries) for kind in ("prompt", "completion")
    )
    forwarded = sum(entry.get("update/forwarded_tokens", 0.0) for entry in entries)
    return Episodes(steps / number, prompts / steps, completions / steps, forwarded / (prompts + completions), source)

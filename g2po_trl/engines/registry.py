"""The engines by name. An engine is a file with a subclass of `Engine`, and a row of `ENGINES`."""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar

from ..utils.options import Choice, check_choice, require


@dataclass(frozen=True)
class EngineKind(Choice):
    """An engine that a trainer uses.

    Args:
        path, help: see `Choice`.
        offline: `module:function` that returns the actor of a checkpoint, for `g2po evaluate`. `None`: none.
        extra: the extra of this package that the engine needs.
    """

    offline: str | None = None
    extra: str | None = None
    method: ClassVar[str] = "of_trainer"

    def load_offline(self, model: str, **options: Any) -> Any:
        """Return the actor of a checkpoint that is not being trained."""
        return resolve_name(f"g2po_trl.{self.offline}")(model, **options)


ENGINES = {
    "transformers": EngineKind(
        "engines.transformers:TransformersEngine",
        "`generate`, with the trainer's own weights",
        offline="evaluation.chat_models:load_local",
    ),
    "vllm": EngineKind(
        "engines.trl_vllm:VLLMEngine",
        "vLLM in the training processes, or TRL's vLLM server (`vllm_mode`); `use_vllm=True` means the same",
        offline="evaluation.chat_models:load_vllm",
        extra="vllm",
    ),
}


def check_engine(args: Any) -> None:
    """Refuse options that the configured engine does not have, and settings that it excludes."""
    check_choice(ENGINES, "engine", args)
    corrects = args.corrects_sampling and args.vllm_importance_sampling_correction
    remedy = f"engine={args.engine!r} returns no log-probabilities; set it to False"
    can_correct = not corrects or ENGINES[args.engine].load().returns_logprobs
    require(can_correct, "vllm_importance_sampling_correction", True, remedy)

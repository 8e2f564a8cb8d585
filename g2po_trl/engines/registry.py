"""The engines by name. An engine is a file with a subclass of `Engine`, and a row of `ENGINES`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..utils.options import check_options, keyword_options, load_name


@dataclass(frozen=True)
class EngineKind:
    """An engine.

    Args:
        help: description in one line, for the help and the documentation.
        path: `module:class` of the engine that a trainer uses, inside the package.
        offline: `module:function` that returns the chat model of a checkpoint, for `g2po evaluate`. `None`: none.
        extra: the extra of this package that the engine needs.
    """

    help: str
    path: str
    offline: str | None = None
    extra: str | None = None

    @property
    def engine(self) -> type:
        """The class, imported on first use."""
        return load_name(self.path)

    def load(self, model: str, **options: Any) -> Any:
        """Return the chat model of a checkpoint that is not being trained."""
        return load_name(self.offline)(model, **options)


ENGINES = {
    "transformers": EngineKind(
        "`generate`, with the trainer's own weights",
        "engines.transformers:TransformersEngine",
        offline="evaluation.chat_models:load_local",
    ),
    "vllm": EngineKind(
        "vLLM in the training processes, or TRL's vLLM server (`vllm_mode`); `use_vllm=True` means the same",
        "engines.trl_vllm:VLLMEngine",
        offline="evaluation.chat_models:load_vllm",
        extra="vllm",
    ),
}


def check_engine(args: Any) -> None:
    """Refuse options that the configured engine does not have, and settings that it excludes."""
    engine, options = ENGINES[args.engine].engine, args.engine_kwargs or {}
    check_options("engine_kwargs", options, keyword_options(engine.of_trainer), f"engine={args.engine!r}")
    engine.check(args, **options)

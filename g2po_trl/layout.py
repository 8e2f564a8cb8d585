"""A trainer whose micro-batches pass through the model in a token layout of ours; the loss stays TRL's.

The one seam is `_get_per_token_logps_and_entropies`, TRL's only way from token ids to log-probabilities.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Trainer

from .packing import ATTENTION, default_row_tokens, packed_log_probs
from .playing import PlayingTrainer

logger = logging.getLogger(__name__)

# How far log-probabilities may differ between two layouts, on average, in nats: rounding does less, a wrong mask more.
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_OF_HALF = 5e-2


class LayoutTrainer(PlayingTrainer):
    """`_get_per_token_logps_and_entropies` in the layout of the micro-batch at hand."""

    _layout: dict[str, torch.Tensor] | None = None

    def choose_layout(self) -> None:
        """The configured layout, or the padded one where the model's attention does not take a mask of ours."""
        args, attention = self.args, self.model.config._attn_implementation
        if attention == "flex_attention" and self.accelerator.device.type in ("cpu", "mps"):
            raise ValueError(
                "attn_implementation is 'flex_attention', which PyTorch does not train on a CPU: set it to 'sdpa' in "
                "model_init_kwargs"
            )
        self.token_layout, self.layout_checked = args.token_layout, args.token_layout == "padded"
        self.packed_row_tokens = args.packed_row_tokens or default_row_tokens(self.model.config.get_text_config())
        if self.token_layout != "padded" and attention not in ATTENTION:
            self._fall_back(f"attn_implementation is {attention!r}, and only {', '.join(ATTENTION)} take any mask")

    def _fall_back(self, reason: str) -> None:
        logger.warning(f"token_layout is {self.token_layout!r} and 'padded' is used: {reason}.")
        self.token_layout, self.layout_checked = "padded", True

    def layout_is_exact(self, micro_batch: dict[str, Any]) -> bool:
        """Compare the layout with padded rows on a micro-batch, once a run; all ranks together. Falls back if not."""
        packed = {name: value for name, value in micro_batch.items() if name in _LAYOUT}
        padded = {name: value for name, value in micro_batch.items() if name not in _LAYOUT}
        with torch.no_grad():
            found, wanted = (self.log_probs(self.model, batch) for batch in (padded | packed, padded))
        mask = micro_batch["completion_mask"].to(found.device)
        counts = torch.stack([((found - wanted).abs() * mask).sum(), mask.sum()]).double()
        total, tokens = self.accelerator.reduce(counts, reduction="sum").tolist()
        difference = total / max(tokens, 1)
        limit = _TOLERANCE.get(self._arithmetic(), _TOLERANCE_OF_HALF)
        self.layout_checked = True
        if not difference <= limit:
            self._fall_back(
                f"with it log-probabilities are off by {difference:.2g} on average (limit {limit:.2g}); the model is "
                "not one whose tokens see all that went before, and nothing else"
            )
        return difference <= limit

    def _arithmetic(self) -> torch.dtype:
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return mixed.get(self.accelerator.mixed_precision, self.model.dtype)

    @contextmanager
    def in_layout(self, micro_batch: dict[str, Any]) -> Iterator[None]:
        """Log-probabilities asked for in here are those of this micro-batch, in its layout."""
        self._layout = micro_batch if "packed_ids" in micro_batch else None
        try:
            yield
        finally:
            self._layout = None

    def log_probs(self, model, micro_batch: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities of the reply tokens, (rows, C)."""
        batch = Trainer._prepare_inputs(self, micro_batch)  # to the device
        with self.in_layout(batch):
            return self._get_per_token_logps_and_entropies(
                model,
                torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                batch["completion_ids"].size(1),
            )[0]

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, compute_entropy=False, **kwargs
    ):
        if self._layout is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, compute_entropy=compute_entropy, **kwargs
            )
        inner = self.accelerator.unwrap_model(model)
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        with self.accelerator.autocast():
            log_probs, entropies = packed_log_probs(
                model, inner.base_model, self._layout, attention_mask[:, -logits_to_keep:]
            )
        return log_probs, entropies if compute_entropy else None, None


_LAYOUT = ("packed_ids", "packed_positions", "packed_ends", "scored_from", "scored_ids")

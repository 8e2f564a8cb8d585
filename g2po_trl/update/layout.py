"""A trainer whose micro-batches pass through the model in a token layout of ours; the loss stays TRL's.

The one seam is `_get_per_token_logps_and_entropies`, TRL's only way from token ids to log-probabilities.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import Trainer

from ..playing import PlayingTrainer
from .attention import limits, most_places, takes_packed, why_padded
from .packing import Pack, default_row_tokens, lay_out, packed_log_probs

logger = logging.getLogger(__name__)

# Log-probabilities in a packed layout may differ from those of rows of their own by so many times what they change by
# when the last bits of the embeddings do (measured: up to 1.0), and so many nats besides: a wrong mask does more.
_TIMES_ROUNDING = 3
_NATS = {"mean": 1e-5, "largest": 1e-4}


class LayoutTrainer(PlayingTrainer):
    """`_get_per_token_logps_and_entropies` in the layout of the micro-batch at hand."""

    _layout: dict[str, torch.Tensor] | None = None

    def choose_layout(self) -> None:
        """The configured layout, or what the model takes instead, by its configuration."""
        args, (model, _) = self.args, self._parts(self.model)
        for each in filter(None, (model, self.ref_model)):
            _show_body(self.accelerator.unwrap_model(each))
        attention = model.config._attn_implementation
        if attention == "flex_attention" and self.accelerator.device.type in ("cpu", "mps"):
            raise ValueError(
                "attn_implementation is 'flex_attention', which PyTorch does not train on a CPU: set it to 'sdpa' in "
                "model_init_kwargs"
            )
        self.token_layout = args.token_layout
        self.checked_length = 0  # the longest sequence at which the layout was found to be exact
        self.packed_row_tokens = args.packed_row_tokens or default_row_tokens(
            model.config.get_text_config(), args.max_tokens_per_micro_batch if attention == "eager" else None
        )
        most = most_places(model.config.get_text_config())
        self.packed_row_tokens = min(self.packed_row_tokens, most or self.packed_row_tokens)
        # On CUDA, attention copies a mask in every layer unless its rows are aligned.
        aligned = 64 if self.accelerator.device.type == "cuda" else None
        self.row_multiple = args.pad_to_multiple_of or aligned
        if self.token_layout == "padded":
            return
        reason = why_padded(model)
        if reason is not None:
            self._fall_back(reason)
        elif self.token_layout == "shared" and takes_packed(attention):
            logger.warning(
                f"token_layout is 'shared' and 'packed' is used: attn_implementation is {attention!r}, which tells "
                "sequences of a row apart but does not let them share tokens."
            )
            self.token_layout = "packed"

    def _fall_back(self, reason: str) -> None:
        logger.warning(f"token_layout is {self.token_layout!r} and 'padded' is used: {reason}.")
        self.token_layout = "padded"

    def layout_holds(self, slices: Sequence[Sequence[dict[str, Any]]]) -> bool:
        """Whether the layout is exact on sequences as long as these; falls back if not. All ranks together.

        Compared by number: at first, and again when the longest sequence is twice as long as any compared so far, or
        passes a length at which the model computes otherwise. Only what is true of short sequences is seen on them.
        """
        if self.token_layout == "padded":
            return True
        micro_batches = [micro_batch for part in slices for micro_batch in part]
        lengths = [int(_lengths(micro_batch).max()) for micro_batch in micro_batches]
        own = torch.tensor([max(lengths)], device=self.accelerator.device)
        longest = int(self.accelerator.gather(own).max())
        known = self.checked_length
        if longest < 2 * max(known, 1) and not any(
            known <= limit < longest for limit in limits(self._parts(self.model)[0].config.get_text_config())
        ):
            return True
        self.checked_length = longest
        reason = self._difference(micro_batches[int(np.argmax(lengths))])
        if reason is not None:
            self._fall_back(reason)
        return reason is None

    def _difference(self, micro_batch: dict[str, Any]) -> str | None:
        """How far the layout's log-probabilities are from those of rows of their own, if further than by rounding."""
        rows = _some_rows(_lengths(micro_batch), self.args.max_tokens_per_micro_batch)
        alone = _one_a_row(micro_batch, rows, self.encode.tokenizer.pad_token_id)
        model, body = self._parts(self.model)
        was_training = self.model.training
        self.model.eval()  # dropout would differ
        try:
            with torch.no_grad():
                found = self.log_probs(self.model, micro_batch)[rows]
                wanted = self.log_probs(self.model, alone)
                with _last_bits_flipped(model.get_input_embeddings(), self._arithmetic()):
                    rounded = self.log_probs(self.model, alone)
        finally:
            self.model.train(was_training)
        mask = alone["completion_mask"].to(wanted.device).bool()
        off, rounding = ((other - wanted).abs().masked_fill(~mask, 0).float() for other in (found, rounded))
        sums = torch.stack([off.nan_to_num(torch.inf).sum(), rounding.sum(), mask.sum().float()])
        largest = torch.stack([off.nan_to_num(torch.inf).max(), rounding.max()])
        off_sum, rounding_sum, tokens = self.accelerator.reduce(sums, reduction="sum").tolist()
        off_max, rounding_max = self.accelerator.gather(largest[None]).amax(0).tolist()
        tokens = max(tokens, 1)
        for name, by, noise in (
            ("mean", off_sum / tokens, rounding_sum / tokens),
            ("largest", off_max, rounding_max),
        ):
            limit = _TIMES_ROUNDING * noise + _NATS[name]
            if not by <= limit:
                return (
                    f"on sequences of up to {self.checked_length} tokens the {name} difference of log-probabilities "
                    f"from those of rows of their own is {by:.2g}, and rounding explains {limit:.2g}: tokens see "
                    "other tokens than the configuration says"
                )
        return None

    def _parts(self, model) -> tuple[torch.nn.Module, torch.nn.Module]:
        """The causal language model inside all wrappers, and the same without its LM head."""
        model = self.accelerator.unwrap_model(model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        return model, model.base_model

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
        _, body = self._parts(model)
        with self.accelerator.autocast():
            log_probs, entropies = packed_log_probs(model, body, self._layout, attention_mask[:, -logits_to_keep:])
        return log_probs, entropies if compute_entropy else None, None


def _show_body(model: torch.nn.Module) -> None:
    """Make `base_model` the model without its LM head, which TRL's fused LM head calls, where it is the model itself.

    Raises:
        ValueError: where there is none.
    """
    if model.base_model is not model:
        return
    if not hasattr(model, "model"):
        raise ValueError(
            f"the model is a {type(model).__name__}, whose part without the LM head TRL does not find: load its text "
            "model, and pass that"
        )
    model.base_model_prefix = "model"  # Llama4ForCausalLM names a part that it does not have


def _lengths(micro_batch: dict[str, Any]) -> torch.Tensor:
    """(rows,) tokens of the rows that are scored, 0 of others."""
    prompts, replies = (micro_batch[name].sum(1) for name in ("prompt_mask", "completion_mask"))
    return (prompts + replies) * (replies > 0)


def _some_rows(lengths: torch.Tensor, max_tokens: int) -> list[int]:
    """The longest row and others from all over the micro-batch, as many as padded rows have room for."""
    longest = int(lengths.argmax())
    scored = lengths.nonzero().flatten().tolist() or [longest]
    room = max(1, max_tokens // max(int(lengths[longest]), 1))
    places = np.linspace(0, len(scored) - 1, min(room, len(scored))).round().astype(int)
    return list(dict.fromkeys([longest, *(scored[place] for place in places)]))[:room]


def _one_a_row(micro_batch: dict[str, Any], rows: list[int], pad_token_id: int) -> dict[str, Any]:
    """These rows of a micro-batch as a padded one."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    part = {name: micro_batch[name][rows] for name in names}
    prompts, replies = (
        [ids[mask.bool()].numpy() for ids, mask in zip(part[f"{name}_ids"], part[f"{name}_mask"])]
        for name in ("prompt", "completion")
    )
    sequences = [np.concatenate(pair) for pair in zip(prompts, replies)]
    packs = [Pack([row], [0], len(sequence)) for row, sequence in enumerate(sequences)]
    return part | lay_out(packs, sequences, list(map(len, replies)), pad_token_id)


@contextmanager
def _last_bits_flipped(embeddings: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Each embedding larger or smaller by rounding in the dtype, always the same ones."""

    def flip(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        signs = torch.arange(output.numel(), device=output.device).mul(0x9E3779B1).bitwise_right_shift(16)
        signs = signs.bitwise_and(1).mul(2).sub(1).view(output.shape)
        return output * (1 + torch.finfo(dtype).eps * signs).to(output.dtype)

    handle = embeddings.register_forward_hook(flip)
    try:
        yield
    finally:
        handle.remove()

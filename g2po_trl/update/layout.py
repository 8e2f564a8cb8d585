"""Layout of tokens in which a model processes micro-batches; the loss stays TRL's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType

from ..utils.errors import G2POError
from ..utils.forward_pass import evaluation_mode
from ..utils.trl_compat import attention_of, expose_body
from .attention import arithmetic, attends_by_masks, limits, most_places, takes_packed, why_padded
from .forks import fork_cost
from .packing import SHARING, Pack, RowLength, lay_out, packed_log_probs
from .policy.probe import why_not_bounded, why_not_forked

logger = logging.getLogger(__name__)

# Tolerance of log-probabilities in a packed layout: 3x the change caused by flipping the embeddings' last bits, plus
# 1e-5 nats on average and 1e-4 for a token; a wrong mask does more. One flip may change little where few tokens are
# uncertain (7x less, measured with a pretrained model), so the largest change of up to 8 is taken.
_TIMES_ROUNDING = 3
_TRIES = 8
_NATS = {"mean": 1e-5, "largest": 1e-4}

# (model, micro-batch) -> log-probabilities of its completion tokens, (rows, C).
Score = Callable[[torch.nn.Module, dict[str, Any]], torch.Tensor]


class Layout:
    """Layout of a micro-batch's sequences in the model: shared (or forked, or chained), packed or padded.

    Args:
        kind: the configured layout. The attribute `kind` falls back to a layout that the model supports, see `verify`.
        temperature: temperature of log-probabilities.
        max_tokens: tokens of a micro-batch. row_tokens: tokens of a packed row; `None`: the cheapest number.
        pad_to_multiple_of: multiple of row lengths; `None`: depends on the device, see `row_multiple`.
        others: models that must support the same layout, such as the reference.
        image_inputs: for a model that reads images, see `g2po_trl.prompts.images.ImageInputs`.
        checkpointing: whether gradient checkpointing recomputes layers, and so keeps no cache.

    Attributes:
        fused: log-probabilities come from TRL's fused LM head; `False`: from the model's own, see `StartCheck`.

    Raises:
        G2POError: for a model that no layout supports.
    """

    def __init__(
        self,
        kind: str,
        model: torch.nn.Module,
        accelerator: Accelerator,
        max_tokens: int,
        row_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        others: Sequence[torch.nn.Module] = (),
        temperature: float = 1.0,
        image_inputs: Callable[..., dict[str, torch.Tensor]] | None = None,
        checkpointing: bool = False,
    ):
        self.image_inputs = image_inputs
        self.fused, self.temperature = True, temperature
        self.kind, self.accelerator, self.max_tokens = kind, accelerator, max_tokens
        self.checked_length = 0  # the longest sequence at which the layout was found to be exact
        self._micro_batch: dict[str, torch.Tensor] | None = None
        for other in others:
            expose_body(accelerator.unwrap_model(other))
        model = self.language_model(model)
        expose_body(model)
        config, attention = model.config.get_text_config(), attention_of(model.config)
        if attention == "flex_attention" and accelerator.device.type in ("cpu", "mps"):
            raise G2POError(
                "attn_implementation is 'flex_attention', which PyTorch does not train on a CPU: set it to 'sdpa' in "
                "model_init_kwargs"
            )
        length = RowLength(row_tokens) if row_tokens else RowLength.from_config(config, attention, max_tokens)
        places = most_places(config)
        self.row_length = replace(length, most=min(length.most, places), longest=0) if places else length
        self._takes_masks = True  # or positions, in place of masks
        self.pad_to_multiple_of = pad_to_multiple_of
        self._found_for = [kind, attention, accelerator.device.type, str(self.arithmetic(model))]
        self._found_for += [torch.__version__, transformers.__version__]
        if self.kind == "padded":
            return
        reason = why_padded(model)
        if reason is not None and self.kind == "shared":
            self.kind, self._takes_masks = "forked", False
            self._fork_cost = fork_cost(weights_of_a_layer(model), accelerator.device.type)
            against = self._why_not_forked(model, checkpointing)
            if against is not None:
                self._fall_back(f"{reason}, and {against}")
        elif reason is not None:
            against = "" if attends_by_masks(model) else self._why_not_bounded(model)
            if against is not None:
                self._fall_back(", and ".join(filter(None, (reason, against))))
        elif self.kind == "shared" and takes_packed(attention):
            self._fall_back(
                f"attn_implementation is {attention!r}, which separates the sequences of a row but does not let them "
                "share tokens",
                "chained",
            )
        if self.kind != kind:  # with checkpointing or shards, another run of the same arithmetic may take another
            self._found_for.append(self.kind)

    @property
    def row_multiple(self) -> int | None:
        """Multiple of row lengths, except for those that `row_width` skips; `None`: rows are as long as their tokens.

        On CUDA, attention copies a mask in every layer unless its rows are aligned. Rows with a mask are long, and few
        different lengths avoid fragmentation; rows of one sequence need no mask, and may be as short as a prompt.
        """
        if self.pad_to_multiple_of or self.accelerator.device.type != "cuda":
            return self.pad_to_multiple_of
        return 16 if self.kind == "padded" else 128

    @property
    def pack_length(self) -> RowLength:
        """Length of packed rows in the current layout."""
        if self.kind == "forked":
            return RowLength(self.max_tokens, fork_cost=self._fork_cost)
        return self.row_length if self._takes_masks else RowLength(1)

    def state_dict(self) -> dict[str, Any]:
        """Return the verified layout and the arithmetic it was verified for, as plain data for a checkpoint."""
        return {"kind": self.kind, "checked_length": self.checked_length, "found_for": self._found_for}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the verified layout if model, dtype and library versions are unchanged."""
        if state["found_for"] == self._found_for:
            self.kind, self.checked_length = state["kind"], state["checked_length"]

    def pad_images(self, has_images: bool) -> None:
        """Use `padded` from now on if any rank's rows have images. All ranks of a model that reads images call it."""
        if self.kind == "padded":
            return
        flag = torch.tensor(int(has_images), device=self.accelerator.device)
        if self.accelerator.reduce(flag, reduction="sum"):
            self._fall_back("rows have images, whose tokens see each other and have positions of their own", "padded")

    def _fall_back(self, reason: str, kind: str | None = None) -> None:
        before, self.checked_length = "shared" if self.kind in SHARING else self.kind, 0
        kind = kind or ("chained" if self.kind == "forked" else "padded")
        logger.warning(f"token_layout is {before!r} and {kind!r} is used: {reason}.")
        self.kind = kind

    def _why_not_forked(self, model: torch.nn.Module, checkpointing: bool) -> str | None:
        if self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            return "with sharded weights, all processes make the same number of forward passes"
        if checkpointing or getattr(model, "is_gradient_checkpointing", False):
            return "gradient checkpointing keeps no cache"
        with self.accelerator.autocast():
            return why_not_forked(model, self.arithmetic(model))

    def _why_not_bounded(self, model: torch.nn.Module) -> str | None:
        with self.accelerator.autocast():
            return why_not_bounded(model, self.arithmetic(model))

    @contextmanager
    def of(self, micro_batch: dict[str, Any]) -> Iterator[None]:
        """Compute log-probabilities inside in the layout of this micro-batch."""
        self._micro_batch = micro_batch if "packed_ids" in micro_batch else None
        try:
            yield
        finally:
            self._micro_batch = None

    def log_probs(
        self, model: torch.nn.Module, completion_mask: torch.Tensor, compute_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return log-probabilities and entropies of the current micro-batch, (rows, C); `None` if it is padded."""
        if self._micro_batch is None:
            return None
        body = self.language_model(model).base_model
        own_head_at, images = None if self.fused else self.temperature, self._micro_batch.get("images")
        # Made here and not with the micro-batch: pixels take many times the memory of the files.
        more = self.image_inputs(self._micro_batch["packed_ids"], images) if images is not None else None
        with self.accelerator.autocast():
            log_probs, entropies = packed_log_probs(model, body, self._micro_batch, completion_mask, own_head_at, more)
        return log_probs, entropies if compute_entropy else None

    def verify(
        self, model: torch.nn.Module, mini_batches: Sequence[Sequence[dict[str, Any]]], score: Score, pad_token_id: int
    ) -> bool:
        """Return whether the layout is exact on sequences of this length; fall back if not. All ranks call it.

        It compares log-probabilities at the beginning, and again when the longest sequence is twice as long as any
        compared so far or passes a length beyond which the model computes differently.
        """
        if self.kind == "padded":
            return True
        micro_batches = [micro_batch for part in mini_batches for micro_batch in part]
        lengths = [int(_lengths(micro_batch).max()) for micro_batch in micro_batches]
        own = torch.tensor([max(lengths)], device=self.accelerator.device)
        longest = int(self.accelerator.gather(own).max())
        known, config = self.checked_length, self.language_model(model).config.get_text_config()
        if longest < 2 * max(known, 1) and not any(known <= limit < longest for limit in limits(config)):
            return True
        self.checked_length = longest
        reason = self._difference(model, micro_batches[int(np.argmax(lengths))], score, pad_token_id)
        if reason is not None:
            self._fall_back(reason)
        return reason is None

    def _difference(
        self, model: torch.nn.Module, micro_batch: dict[str, Any], score: Score, pad_token_id: int
    ) -> str | None:
        """Return how much the layout changes log-probabilities, `None` if rounding explains it."""
        rows = _some_rows(_lengths(micro_batch), self.max_tokens)
        alone = _one_a_row(micro_batch, rows, pad_token_id)
        embeddings = self.language_model(model).get_input_embeddings()
        with evaluation_mode(model), torch.no_grad():
            found, wanted = score(model, micro_batch)[rows], score(model, alone)
            mask = alone["completion_mask"].to(wanted.device).bool()

            def distance(scored: torch.Tensor) -> torch.Tensor:
                return (scored - wanted).abs().masked_fill(~mask, 0).float()

            off = distance(found).nan_to_num(torch.inf)
            rounding, reason = torch.zeros_like(off), None
            for attempt in range(_TRIES):
                with _last_bits_flipped(embeddings, self.arithmetic(model), attempt):
                    rounding = torch.maximum(rounding, distance(score(model, alone)))
                reason = self._beyond(off, rounding, mask)
                if reason is None:
                    break
        return reason

    def _beyond(self, off: torch.Tensor, rounding: torch.Tensor, mask: torch.Tensor) -> str | None:
        """Return how differences (rows, C) over all ranks exceed rounding, `None` if they do not."""
        sums = torch.stack([off.sum(), rounding.sum(), mask.sum().float()])
        largest = torch.stack([off.max(), rounding.max()])
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

    def language_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the causal language model inside all wrappers."""
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def arithmetic(self, model: torch.nn.Module) -> torch.dtype:
        """Return the dtype that the model computes in."""
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return mixed.get(self.accelerator.mixed_precision, arithmetic(self.language_model(model).base_model))


def weights_of_a_layer(model: torch.nn.Module) -> float:
    """Return the mean number of weights of a layer."""
    weights = sum(p.numel() for p in model.base_model.parameters()) - model.get_input_embeddings().weight.numel()
    return max(weights, 1) / max(model.config.get_text_config().num_hidden_layers, 1)


def _lengths(micro_batch: dict[str, Any]) -> torch.Tensor:
    """Return (rows,) tokens of scored rows, 0 of others."""
    prompts, completions = (micro_batch[name].sum(1) for name in ("prompt_mask", "completion_mask"))
    return (prompts + completions) * (completions > 0)


def _some_rows(lengths: torch.Tensor, max_tokens: int) -> list[int]:
    """Return the longest row and others spread over the micro-batch, as many as fit when padded."""
    longest = int(lengths.argmax())
    scored = lengths.nonzero().flatten().tolist() or [longest]
    room = max(1, max_tokens // max(int(lengths[longest]), 1))
    places = np.linspace(0, len(scored) - 1, min(room, len(scored))).round().astype(int)
    return list(dict.fromkeys([longest, *(scored[place] for place in places)]))[:room]


def _one_a_row(micro_batch: dict[str, Any], rows: list[int], pad_token_id: int) -> dict[str, Any]:
    """Return these rows of a micro-batch as a padded micro-batch."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    part = {name: micro_batch[name][rows] for name in names}
    prompts, completions = (
        [ids[mask.bool()].numpy() for ids, mask in zip(part[f"{name}_ids"], part[f"{name}_mask"])]
        for name in ("prompt", "completion")
    )
    sequences = [np.concatenate(pair) for pair in zip(prompts, completions)]
    packs = [Pack([row], [0], len(sequence)) for row, sequence in enumerate(sequences)]
    return part | lay_out(packs, sequences, list(map(len, completions)), pad_token_id)


@contextmanager
def _last_bits_flipped(embeddings: torch.nn.Module, dtype: torch.dtype, attempt: int) -> Iterator[None]:
    """Change each embedding inside by the dtype's rounding, up or down; `attempt` seeds the signs."""

    def flip(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        # A generator of its own leaves the run's random state as it is.
        signs = torch.randint(2, output.shape, generator=torch.Generator().manual_seed(attempt), dtype=torch.int8)
        signs = signs.mul(2).sub(1).to(output.device)
        return output * (1 + torch.finfo(dtype).eps * signs).to(output.dtype)

    handle = embeddings.register_forward_hook(flip)
    try:
        yield
    finally:
        handle.remove()

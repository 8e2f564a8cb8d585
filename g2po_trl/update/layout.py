"""Layout of tokens in which a model processes micro-batches; the loss stays TRL's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType

from ..utils.errors import G2POError
from ..utils.trl_compat import attention_of, expose_body, forget_rotary_lengths, fused_log_probs, own_log_probs
from .attention import Branches, arithmetic, attention_by_branches, limits, rotary_scales, why_not_by_branches
from .forks import fork_cost, forked_passes
from .images import image_inputs_of
from .policy.probe import why_not_forked

logger = logging.getLogger(__name__)

# (model, micro-batch) -> log-probabilities of its completion tokens, (rows, C).
Score = Callable[[torch.nn.Module, dict[str, Any]], torch.Tensor]


class Layout:
    """Layout of a micro-batch's rows in the model: shared (or forked), or padded.

    Args:
        kind: the configured layout. The attribute `kind` falls back to a layout that the model supports, see `verify`.
        pad_to_multiple_of: multiple of padded lengths; `None`: depends on the device, see `row_multiple`.
        others: models that must support the same layout, such as the reference.
        temperature: temperature of log-probabilities.
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
        pad_to_multiple_of: int | None = None,
        others: Sequence[torch.nn.Module] = (),
        temperature: float = 1.0,
        image_inputs: Callable[..., dict[str, torch.Tensor]] | None = None,
        checkpointing: bool = False,
    ):
        self.image_inputs = image_inputs
        self.fused, self.temperature = True, temperature
        self.kind, self.accelerator, self.pad_to_multiple_of = kind, accelerator, pad_to_multiple_of
        self.checked_length = 0  # the longest sequence at which the layout was found to be exact
        self.has_images = False  # rows had any; without, the check says nothing of them
        self.fork_cost: int | None = None
        self._micro_batch: dict[str, Any] | None = None
        self._branches: Branches | None = None
        for other in others:
            expose_body(accelerator.unwrap_model(other))
        model = self.language_model(model)
        expose_body(model)
        self.config, attention = model.config.get_text_config(), attention_of(model.config)
        if attention == "flex_attention" and (kind == "shared" or accelerator.device.type in ("cpu", "mps")):
            raise G2POError(
                "attn_implementation is 'flex_attention', which compiles for each branch of token_layout 'shared', "
                "and which PyTorch does not train on a CPU: set it to 'sdpa' in model_init_kwargs"
            )
        self._found_for = [kind, attention, accelerator.device.type, str(self.arithmetic(model))]
        self._found_for += [torch.__version__, transformers.__version__]
        if kind == "shared" and (reason := why_not_by_branches(model)) is not None:
            self.kind, self.fork_cost = "forked", fork_cost(weights_of_a_layer(model), accelerator.device.type)
            against = self._why_not_forked(model, checkpointing)
            if against is not None:
                self.fall_back(f"{reason}, and {against}")
            self._found_for.append(self.kind)  # with checkpointing or shards another run may take another

    @property
    def row_multiple(self) -> int | None:
        """Multiple of padded lengths; `None`: rows are as long as the longest.

        On a GPU 16. A model whose rotary scale depends on the longest row has none, which could make it longer.
        """
        if rotary_scales(self.config, [0])[0]:
            return None
        return self.pad_to_multiple_of or (16 if self.accelerator.device.type == "cuda" else None)

    def scale_of(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """Return what rows of one forward pass must have in common, for rows of these lengths."""
        return rotary_scales(self.config, lengths)

    def state_dict(self) -> dict[str, Any]:
        """Return the verified layout and the arithmetic it was verified for, as plain data for a checkpoint."""
        names = ("kind", "checked_length", "has_images")
        return {"found_for": self._found_for, **{name: getattr(self, name) for name in names}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the verified layout if model, dtype and library versions are unchanged."""
        if state["found_for"] == self._found_for:
            self.kind, self.checked_length = state["kind"], state["checked_length"]
            self.has_images = state["has_images"]

    def notice_images(self) -> None:
        """Compare the layout again: rows have images."""
        if not self.has_images and self.kind != "padded":
            self.has_images, self.checked_length = True, 0
            if self.kind == "forked":
                self.fall_back("rows have images, which a cache does not fork")

    def fall_back(self, reason: str) -> None:
        """Continue with padded rows, with a message."""
        logger.warning(f"token_layout is 'shared' and 'padded' is used: {reason}.")
        self.kind, self.checked_length = "padded", 0

    def _why_not_forked(self, model: torch.nn.Module, checkpointing: bool) -> str | None:
        if self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            return "with sharded weights, all processes make the same number of forward passes"
        if checkpointing or getattr(model, "is_gradient_checkpointing", False):
            return "gradient checkpointing keeps no cache"
        with self.accelerator.autocast():
            return why_not_forked(model, self.arithmetic(model))

    @contextmanager
    def of(self, model: torch.nn.Module, micro_batch: dict[str, Any]) -> Iterator[None]:
        """Process this micro-batch's rows in forward and backward passes inside; checkpointing makes both."""
        model, before = self.language_model(model), (self._micro_batch, self._branches)
        forget_rotary_lengths(model)
        try:
            with attention_by_branches(model, micro_batch.get("branches"), micro_batch.get("paths")) as branches:
                self._micro_batch, self._branches = micro_batch, branches
                yield
        finally:
            self._micro_batch, self._branches = before

    def log_probs(
        self, model: torch.nn.Module, completion_mask: torch.Tensor, compute_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return log-probabilities and entropies of the current micro-batch, (rows, C).

        They stand at the ones of `completion_mask`. `None` outside of `of`.
        """
        if self._micro_batch is None:
            return None
        body, device = self.language_model(model).base_model, completion_mask.device
        ids, places, scored, positions = (
            None if tensor is None else tensor.to(device)
            for tensor in map(self._micro_batch.get, ("row_ids", "scored_from", "scored_ids", "row_positions"))
        )
        # Without positions, rows begin at their first place, and padding comes last, where no token sees it: a causal
        # model needs no mask. This also holds for recurrent states, which padding before the row would shift.
        inputs = {"input_ids": ids, "attention_mask": None}
        inputs |= {} if positions is None else {"position_ids": positions}
        if "images" in self._micro_batch:
            inputs |= image_inputs_of(self._micro_batch, body, ids, self.image_inputs)
        with self.accelerator.autocast(), forked_passes(body, self._micro_batch.get("forks")):
            if self.fused:
                found = fused_log_probs(model, body, inputs, places, scored)
            else:
                found = own_log_probs(model, body, inputs, places, scored, self.temperature)
        if self._branches is not None and not self._branches.attended:
            raise ValueError("the model's layers do not call the attention function that its configuration names")
        log_probs, entropies = (None if of is None else _in_rows(of, completion_mask) for of in found)
        return log_probs, entropies if compute_entropy else None

    def needs_check(self, longest: int) -> bool:
        """Return whether trees with a sequence of that many tokens are to be compared with samples alone.

        They are at the beginning, and again when the longest sequence is twice as long as any compared so far or
        passes a length beyond which the model computes differently.
        """
        known = self.checked_length
        beyond = any(known <= limit < longest for limit in limits(self.config))
        return self.kind != "padded" and (longest >= 2 * max(known, 1) or beyond)

    def language_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the causal language model inside all wrappers."""
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def arithmetic(self, model: torch.nn.Module) -> torch.dtype:
        """Return the dtype that the model computes in."""
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return mixed.get(self.accelerator.mixed_precision, arithmetic(self.language_model(model).base_model))

    def precision(self, model: torch.nn.Module) -> torch.dtype:
        """Return the dtype with the rounding of the coarsest operation."""
        dtypes = [self.arithmetic(model)]
        if getattr(self.language_model(model), "is_quantized", False):
            dtypes.append(torch.bfloat16)
        matmul = torch.backends.cuda.matmul
        if self.accelerator.device.type == "cuda" and getattr(matmul, "fp32_precision", "") == "tf32":
            dtypes.append(torch.float16)  # TF32 has as many bits
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def weights_of_a_layer(model: torch.nn.Module) -> float:
    """Return the mean number of weights of a layer."""
    weights = sum(p.numel() for p in model.base_model.parameters()) - model.get_input_embeddings().weight.numel()
    return max(weights, 1) / max(model.config.get_text_config().num_hidden_layers, 1)


def _in_rows(scored: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (M,) values at the ones of the mask, (rows, C), and 0 elsewhere."""
    mask = mask.to(scored.device, torch.bool)
    return scored.new_zeros(mask.shape).masked_scatter(mask, scored)

"""Layout of tokens in which a model processes micro-batches; the loss stays TRL's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType

from ..utils.forward_pass import rotary_scales
from ..utils.options import require
from ..utils.trl_compat import attention_of, expose_body, forget_rotary_lengths, fused_log_probs, own_log_probs
from .attention import attention_by_branches, limits, why_not_by_branches
from .forks import fork_cost, forked_passes
from .images import image_inputs_of
from .policy.probe import why_not_forked

logger = logging.getLogger(__name__)

_KEPT = ("kind", "checked_length", "has_images")  # by a checkpoint
# Two computations differ by the dtype's rounding of the largest logit, taken to be 12.8 before it is known, and a
# little more: TRL's fused LM head sums the exponentials of 262,144 logits in tiles of float32, and is off by 7e-5.
_LARGEST_LOGIT, _NATS = 12.8, 5e-4


class Layout:
    """Layout of a micro-batch's rows in the model: shared (or forked), or padded.

    Args:
        kind: the configured layout. The attribute `kind` falls back to a layout that the model supports.
        pad_to_multiple_of: multiple of padded lengths; `None`: on a GPU 16.
        temperature: temperature of log-probabilities.
        image_inputs: for a model that reads images, see `g2po_trl.prompts.images.ImageInputs`.
        checkpointing: whether gradient checkpointing recomputes layers, and so keeps no cache.

    Attributes:
        scale_of: returns for each of some row lengths what rows of one forward pass must have in common.
        row_multiple: multiple of padded lengths; `None`: rows are as long as the longest.
        fused: log-probabilities come from TRL's fused LM head; `False`: from the model's own, see `StartCheck`.
        checked_length: the longest sequence at which the layout was found to be exact.
        has_images: rows had any; without, the check says nothing of them.

    Raises:
        G2POError: for a model that no layout supports.
    """

    def __init__(
        self,
        kind: str,
        model: torch.nn.Module,
        accelerator: Accelerator,
        pad_to_multiple_of: int | None = None,
        temperature: float = 1.0,
        image_inputs: Callable[..., dict[str, torch.Tensor]] | None = None,
        checkpointing: bool = False,
    ):
        self.kind, self.accelerator, self.temperature, self.image_inputs = kind, accelerator, temperature, image_inputs
        self.fused, self.checked_length, self.has_images = True, 0, False
        self.largest_logit = _LARGEST_LOGIT  # mean over tokens of a conversation
        self.fork_cost: int | None = None
        self._micro_batch: dict[str, Any] | None = None
        model, device = self.language_model(model), accelerator.device.type
        expose_body(model)
        self.model_name, self.config = type(model).__name__, model.config.get_text_config()
        self.scale_of = partial(rotary_scales, self.config)
        self.row_multiple = pad_to_multiple_of or (16 if device == "cuda" else None)
        if self.scale_of([0])[0]:  # which the longest row decides
            self.row_multiple = None
        attention = attention_of(model.config)
        trains = attention != "flex_attention" or kind == "padded" and device not in ("cpu", "mps")
        remedy = "it compiles for each branch, and PyTorch does not train it on a CPU; set it to 'sdpa'"
        require(trains, "attn_implementation", attention, remedy)
        self._found_for = [kind, attention, device, str(self.precision(model))]
        self._found_for += [torch.__version__, transformers.__version__]
        if kind == "shared" and (reason := why_not_by_branches(model)) is not None:
            self.kind, self.fork_cost = "forked", fork_cost(model, device)
            against = self._why_not_forked(model, checkpointing)
            if against is not None:
                self.fall_back(f"{reason}, and {against}")
            self._found_for.append(self.kind)  # with checkpointing or shards another run may take another

    def _why_not_forked(self, model: torch.nn.Module, checkpointing: bool) -> str | None:
        if self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            return "with sharded weights, all processes make the same number of forward passes"
        if checkpointing or getattr(model, "is_gradient_checkpointing", False):
            return "gradient checkpointing keeps no cache"
        if self.scale_of([0])[0]:
            return "a prefix of its own has another rotary scale"
        return why_not_forked(model, self.precision(model, mixed=False))

    def fall_back(self, reason: str) -> None:
        """Continue with padded rows, with a message."""
        logger.warning(f"token_layout is 'shared' and 'padded' is used: {reason}.")
        self.kind, self.checked_length = "padded", 0

    def notice_images(self) -> None:
        """Compare the layout again: rows have images."""
        if not self.has_images and self.kind != "padded":
            self.has_images, self.checked_length = True, 0
            if self.kind == "forked":
                self.fall_back("rows have images, which a cache does not fork")

    def state_dict(self) -> dict[str, Any]:
        """Return the verified layout and the arithmetic it was verified for, as plain data for a checkpoint."""
        return {"found_for": self._found_for, **{name: getattr(self, name) for name in _KEPT}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the verified layout if model, dtype and library versions are unchanged."""
        if state["found_for"] == self._found_for:
            vars(self).update({name: state[name] for name in _KEPT})

    @contextmanager
    def of(self, model: torch.nn.Module, micro_batch: dict[str, Any]) -> Iterator[None]:
        """Process this micro-batch's rows in forward and backward passes inside; checkpointing makes both."""
        model, before = self.language_model(model), self._micro_batch
        forget_rotary_lengths(model)
        try:
            with attention_by_branches(model, micro_batch) as branches:
                self._micro_batch = {**micro_batch, "attention": branches}
                yield
        finally:
            self._micro_batch = before

    def log_probs(
        self, model: torch.nn.Module, completion_mask: torch.Tensor, compute_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return log-probabilities and entropies of the micro-batch, (rows, C), at the ones of `completion_mask`.

        `None` outside of `of`.
        """
        if self._micro_batch is None:
            return None
        body, device = self.language_model(model).base_model, completion_mask.device
        ids, places, scored = (self._micro_batch[name].to(device) for name in ("row_ids", "scored_from", "scored_ids"))
        # Without positions, rows begin at their first place, and padding comes last, where no token sees it: a causal
        # model needs no mask. This also holds for recurrent states, which padding before the row would shift.
        inputs = {"input_ids": ids, "attention_mask": None}
        if "row_positions" in self._micro_batch:
            inputs["position_ids"] = self._micro_batch["row_positions"].to(device)
        if "images" in self._micro_batch:
            inputs |= image_inputs_of(self._micro_batch, body, ids, self.image_inputs)
        with self.accelerator.autocast(), forked_passes(body, self._micro_batch.get("forks")):
            if self.fused:
                found = fused_log_probs(model, body, inputs, places, scored)
            else:
                found = own_log_probs(model, body, inputs, places, scored, self.temperature)
        if self._micro_batch["attention"] is not None and not self._micro_batch["attention"].attended:
            raise ValueError("the model's layers do not call the attention function that its configuration names")
        mask = completion_mask.to(found[0].device, torch.bool)
        log_probs, entropies = (
            None if of is None else of.new_zeros(mask.shape).masked_scatter(mask, of) for of in found
        )
        return log_probs, entropies if compute_entropy else None

    def needs_check(self, longest: int) -> bool:
        """Return whether trees with a sequence of that many tokens are to be compared with samples alone.

        At the beginning; at twice the length compared so far; and beyond one at which the model computes differently.
        """
        known = self.checked_length
        beyond = any(known <= limit < longest for limit in limits(self.config))
        return self.kind != "padded" and (longest >= 2 * max(known, 1) or beyond)

    def language_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the causal language model inside all wrappers."""
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def tolerance(self, model: torch.nn.Module, least: torch.dtype = torch.float32) -> float:
        """Return the mean difference of log-probabilities, in nats, that rounding explains, at least in that dtype."""
        return _NATS + self.largest_logit * max(torch.finfo(dtype).eps for dtype in (self.precision(model), least))

    def precision(self, model: torch.nn.Module, mixed: bool = True) -> torch.dtype:
        """Return the dtype with the rounding of the coarsest operation; `mixed`: under autocast."""
        model, of_autocast = self.language_model(model), {"bf16": torch.bfloat16, "fp16": torch.float16}
        weights = {one.dtype for one in model.base_model.parameters() if one.is_floating_point()}
        dtypes = [dtype for dtype in weights if dtype.itemsize > 1]
        if mixed and self.accelerator.mixed_precision in of_autocast:
            dtypes.append(of_autocast[self.accelerator.mixed_precision])
        if getattr(model, "is_quantized", False):
            dtypes.append(torch.bfloat16)
        matmul = torch.backends.cuda.matmul
        if self.accelerator.device.type == "cuda" and getattr(matmul, "fp32_precision", "") == "tf32":
            dtypes.append(torch.float16)  # TF32 has as many bits
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

"""Masks of packed rows, from the reach of attention that a model's configuration declares.

In most models, a token sees all tokens before it. In others, some or all layers see only a window (Mistral, Gemma,
GPT-OSS), or back to the beginning of a chunk (Llama 4). Both count *positions*, not places in a row, so a packed row
needs separate masks for each kind of layer; transformers takes them as `attention_mask`, a dict by layer type if the
configuration has `layer_types`. Layers that are not attention (convolutions, recurrent states), or that derive
positions from the place in the row (ALiBi), support only one sequence per row.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..utils.trl_compat import attention_of, is_stateful

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MASKED = ("sdpa", "eager", "flex_attention")  # attention implementations that take any mask


@dataclass(frozen=True)
class Reach:
    """How far back a token sees: `window` positions with its own, or back to the start of its `chunk`; else all."""

    window: int | None = None
    chunk: int | None = None


def reaches(config) -> dict[str, Reach] | Reach:
    """Return the reach of a text model's layers: one for all, or by layer type if it takes a dict of masks.

    Raises `ValueError` for layers that are not attention.
    """
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    kinds = {
        "full_attention": Reach(),
        "sliding_attention": Reach(window=window),
        "chunked_attention": Reach(chunk=chunk),
    }
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return Reach(window, None if window else chunk)
    others = sorted(set(layer_types) - set(kinds))
    if others:
        raise ValueError(f"layers of type {', '.join(map(repr, others))} do not attend through a mask")
    return {kind: kinds[kind] for kind in dict.fromkeys(layer_types)}


def limits(config) -> list[int]:
    """Return the sequence lengths beyond which the model computes differently, by its configuration."""
    names = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    found = [getattr(config, name, None) for name in names]
    found += [part.get(names[-1]) for part in (rope, *rope.values()) if isinstance(part, dict)]
    found.append(_indexed(config))
    return sorted({int(limit) for limit in found if limit})


def _indexed(config) -> int:
    """Return the number of tokens up to which an indexer lets a query see all; 0 without an indexer."""
    entries = [getattr(config, name, None) for name in ("index_topk", "indexer_budget", "index_topk_blocks")]
    rates = getattr(config, "compress_rates", None) or {}  # tokens of an entry
    each = getattr(config, "index_block_size", None) or min(rates.values(), default=1)
    return max(filter(None, entries), default=0) * each


def most_places(config) -> int | None:
    """Return the row length up to which the place in the row does not matter (Llama 4 scales attention by it)."""
    return config.floor_scale if getattr(config, "attn_temperature_tuning", False) else None


def why_padded(model: torch.nn.Module) -> str | None:
    """Return why the causal language model supports only one sequence per row; `None` if it supports packed rows."""
    config = model.config.get_text_config()
    attention = attention_of(model.config)
    reason = _not_masked(model)
    if reason is not None:
        return reason
    if getattr(config, "alibi", False) or "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        return "the model takes no position ids: positions follow from the place in the row"
    if takes_packed(attention) and most_places(config):
        return "the model scales attention by the place in the row, and flash attention takes a long one"
    if attention not in MASKED and not takes_packed(attention):
        return f"attn_implementation is {attention!r}, and only {', '.join(MASKED)} take any mask"
    return None


def attends_by_masks(model: torch.nn.Module) -> bool:
    """Return whether masks keep sequences apart in all layers, which are then attention."""
    return _not_masked(model) is None


def _not_masked(model: torch.nn.Module) -> str | None:
    if is_stateful(model):
        return "the model carries a recurrent state from token to token"
    try:
        reaches(model.config.get_text_config())
    except ValueError as error:
        return str(error)
    return None


def takes_packed(attention: str) -> bool:
    """Return whether the implementation separates sequences of a row by positions, as flash attention does."""
    return "flash" in attention


def boundaries(positions: torch.Tensor) -> dict[str, Any]:
    """Return where the sequences of one row (1, N) begin, by their positions, under the names that layers take."""
    begins = positions[0] == 0
    starts = torch.cat([begins.nonzero().flatten(), begins.new_tensor([len(begins)], dtype=torch.long)]).int()
    longest = int(starts.diff().max())
    return {
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), starts),
        **dict.fromkeys(("max_length_q", "max_length_k"), longest),
        "seq_idx": (begins.cumsum(0) - 1).int()[None],
    }


def visible(ends: torch.Tensor, positions: torch.Tensor | None = None, reach: Reach | None = None) -> torch.Tensor:
    """Return (R, 1, L, L) bool, which token (row) sees which (column), from ends and positions (R, L)."""
    place = torch.arange(ends.shape[1], device=ends.device)
    sees = (place <= place[:, None]) & (place[:, None] < ends[:, None, :])
    reach = reach or Reach()
    if reach.window:
        sees &= positions[:, :, None] - positions[:, None, :] < reach.window
    if reach.chunk:
        chunks = positions // reach.chunk
        sees &= chunks[:, :, None] == chunks[:, None, :]
    return sees.unsqueeze(1)


def arithmetic(body: torch.nn.Module) -> torch.dtype:
    """Return the dtype of the layers' inputs: that of the first weight of neither embeddings nor an adapter.

    The model's own `dtype` is that of the embeddings. If the LM head shares them, `cast_lm_head_to_fp32` makes them
    float32, while bfloat16 layers are unchanged. A quantized layer does not help: its outputs have the dtype of its
    inputs, and its bias that of its own arithmetic.
    """
    skipped = set()
    for module in body.modules():
        adapters = [getattr(module, name, None) for name in getattr(module, "adapter_layer_names", ())]
        parts = [part for part in adapters if isinstance(part, torch.nn.Module)]
        skipped |= {id(parameter) for part in parts for parameter in part.parameters()}
        own = list(module.parameters(recurse=False))
        if isinstance(module, torch.nn.Embedding) or any(map(_is_quantized, own)):
            skipped |= set(map(id, own))
    for parameter in body.parameters():
        if id(parameter) not in skipped and parameter.is_floating_point():
            return parameter.dtype
    return body.dtype


def _is_quantized(parameter: torch.nn.Parameter) -> bool:
    return parameter.dtype.itemsize == 1 or hasattr(parameter, "quant_state")


def added_mask(sees: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask that SDPA and eager attention add to scores: 0 where a token sees another, else the minimum.

    It has the dtype of the arithmetic, so that all layers keep this one tensor for their backward pass instead of
    converted copies; on CUDA, another dtype is not supported (cuDNN reads a float32 mask as if it were bfloat16,
    pytorch#191612).
    """
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, torch.finfo(dtype).min)


def block_mask(ends: torch.Tensor, positions: torch.Tensor, reach: Reach) -> BlockMask:
    """Return the mask of `visible` for flex attention, which skips blocks of 128 x 128 tokens without any True."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(row, head, token, other):
        seen = (other <= token) & (token < ends[row, other])
        if reach.window:
            seen = seen & (positions[row, token] - positions[row, other] < reach.window)
        if reach.chunk:
            seen = seen & (positions[row, token] // reach.chunk == positions[row, other] // reach.chunk)
        return seen

    rows, length = ends.shape
    return create_block_mask(sees, rows, None, length, length, device=ends.device)


def masks(body: torch.nn.Module, ends: torch.Tensor, positions: torch.Tensor) -> Any:
    """Return `attention_mask` of packed rows for the model: a mask, or one by layer type."""

    def mask(reach: Reach) -> torch.Tensor | BlockMask:
        if attention_of(body.config) == "flex_attention":
            return block_mask(ends, positions, reach)
        kind = ends.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else arithmetic(body)
        return added_mask(visible(ends, positions, reach), dtype)

    kinds = reaches(body.config.get_text_config())
    return {kind: mask(reach) for kind, reach in kinds.items()} if isinstance(kinds, dict) else mask(kinds)

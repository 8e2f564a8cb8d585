"""Attention of a tree's branches, by the model's own attention function.

The queries of a branch attend to the keys of its path, causal from the end (see `tree`). For the model's function this
is a text that continues a cache, so windows, soft caps, sinks and grouped heads remain its own affair. No mask of the
row exists.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface

from ..utils.trl_compat import attention_of, is_stateful

_HAS_VARLEN = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters  # PyTorch 2.13
_NAME = "g2po_branches"


@dataclass
class Branches:
    """Branches of one row: numbers of queries and keys of each, and (K,) places of all keys in the row."""

    own: str  # attention implementation that the model is configured with
    queries: list[int]
    keys: list[int]
    paths: torch.Tensor
    attended: bool = False  # whether a layer has

    def starts(self, device: torch.device) -> dict[str, Any]:
        """Return where branches begin, under the names that transformers' flash attention takes."""
        sizes = [torch.tensor([0, *of]).cumsum(0).int().to(device) for of in (self.queries, self.keys)]
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        return dict(zip(names, (*sizes, max(self.queries), max(self.keys))))


# Not an argument: some models pass none on, and checkpointing recomputes layers in the backward pass.
_branches: Branches | None = None


@contextmanager
def attention_by_branches(model: torch.nn.Module, layout: dict[str, Any]) -> Iterator[Branches | None]:
    """Let passes of a causal language model, forward and backward, attend by a layout's branches; yield these."""
    global _branches
    sizes = layout.get("branches")  # of one branch, nothing changes
    text, before = model.config.get_text_config(), _branches
    configs = {id(text): text}
    for module in model.modules():  # a part of the model may have a copy
        if getattr(getattr(module, "config", None), "model_type", None) == text.model_type:
            configs[id(module.config)] = module.config
    was = attention_of(text)
    own = before.own if was == _NAME else was
    _branches = None if sizes is None else Branches(own, *map(list, zip(*sizes)), layout["paths"].to(model.device))
    try:
        for config in configs.values():
            config._attn_implementation = own if sizes is None else _NAME
        yield _branches
    finally:
        _branches = before
        for config in configs.values():
            config._attn_implementation = was


@torch.compiler.disable  # branches differ from row to row, and each would be compiled
def branch_attention(module, query, key, value, attention_mask, **options) -> tuple[torch.Tensor, None]:
    """Return the attention of a row (1, N, heads, D), given queries (1, heads, N, D), keys and values.

    Takes the place of transformers' functions of these arguments, and as a mask what `no_mask` returned.
    """
    if attention_mask is not None:
        if attention_mask.numel() != 1:
            raise ValueError(f"{type(module).__name__} makes a mask of its own")
        options["sliding_window"] = int(attention_mask)
    of, files = _branches, [sys.modules[kind.__module__] for kind in type(module).__mro__]
    of.attended, file = True, next(file for file in files if hasattr(file, "ALL_ATTENTION_FUNCTIONS"))
    own = file.ALL_ATTENTION_FUNCTIONS.get_interface(of.own, getattr(file, "eager_attention_forward", None))
    if torch.is_autocast_enabled(query.device.type):  # the functions would: a layer's rotary positions are float32
        query, key, value = (part.to(torch.get_autocast_dtype(query.device.type)) for part in (query, key, value))
    # One gather and splits: the backward pass of a slice would allocate a gradient of the whole row, once a branch.
    paths, window = of.paths.to(key.device), options.get("sliding_window")
    key, value = key.index_select(2, paths), value.index_select(2, paths)
    if "flash" in of.own:  # transformers' function reads there which kernels it calls
        module.config._attn_implementation = of.own
        try:
            return own(module, query, key, value, None, **{**options, **of.starts(query.device)})
        finally:
            module.config._attn_implementation = _NAME
    takes_varlen = (
        of.own == "sdpa"
        and _HAS_VARLEN
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= 256
        and key.shape == value.shape
        and options.get("softcap") is None
        and options.get("s_aux") is None
        and not options.get("dropout")
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )
    if takes_varlen:
        return _in_one_call(of, query, key, value, options.get("scaling"), window), None
    parts = query.split(of.queries, 2), key.split(of.keys, 2), value.split(of.keys, 2)
    found = [_of_branch(own, of.own == "sdpa", module, *part, **options) for part in zip(*parts)]
    return torch.cat(found, 1), None


def no_mask(mask_function: Any, kv_length: int, local_size: int | None = None, **given: Any) -> torch.Tensor | None:
    """Return in place of a layer's mask its window, `None` without one; refuse a rule that is not causal."""
    places = torch.arange(kv_length - 1, device=given.get("device"))
    if mask_function(0, 0, places, places + 1).any():
        raise ValueError("tokens see later ones, as those of an image may")
    return None if local_size is None else torch.full((1, 1, 1, 1), local_size)  # some models cut it at the last keys


AttentionInterface.register(_NAME, branch_attention)
AttentionMaskInterface.register(_NAME, no_mask)


def _in_one_call(of: Branches, query, key, value, scale: float | None, window: int | None) -> torch.Tensor:
    rows = [part[0].transpose(0, 1) for part in (query, key, value)]
    sizes = (window - 1 if window else -1, 0)  # causal, from the end
    found = varlen.varlen_attn(
        *rows, *of.starts(query.device).values(), scale=scale, window_size=sizes, enable_gqa=True
    )
    return found[None]


def _of_branch(own, is_sdpa: bool, module, query, key, value, **options: Any) -> torch.Tensor:
    """Return the attention of one branch (1, n, heads, D)."""
    (n, m), window = (query.shape[2], key.shape[2]), options.get("sliding_window")
    if (is_sdpa and n == m or n == 1) and (window is None or m <= window):
        return own(module, query, key, value, None, **options)[0]
    # With the last query first, what a query sees depends on the sum of its place and the key's: a mask of n x m is a
    # view of n + m numbers, and it has the dtype of the arithmetic, so that no function makes a copy of it.
    line = query.new_zeros(n + m - 1)
    line[m:] = line[: max(m - (window or m), 0)] = torch.finfo(query.dtype).min
    mask = line.as_strided((1, 1, n, m), (0, 0, 1, 1))
    if query.device.type != "cpu":  # kernels there need aligned rows
        mask = mask.contiguous()
    return own(module, query.flip(2), key, value, mask, **options)[0].flip(1)


# -- what the configuration tells -------------------------------------------------------------------------------------


def why_not_by_branches(model: torch.nn.Module) -> str | None:
    """Return why a causal language model cannot attend by branches, by its configuration; `None` if it may."""
    config = model.config.get_text_config()
    if is_stateful(model):
        return "the model carries a recurrent state from token to token"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}):
        return f"layers of type {', '.join(map(repr, others))} do not attend by branches"
    if any(getattr(config, name, None) for name in ("attention_chunk_size", "attn_temperature_tuning")):
        return "the model attends by chunks or scales attention by the place in the row"
    if getattr(config, "alibi", False) or "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        return "the model takes no position ids: positions follow from the place in the row"
    return None


def limits(config) -> list[int]:
    """Return the sequence lengths beyond which the model computes differently, by its configuration."""
    # An indexer lets a query see all until there are more entries than it chooses, each of some tokens.
    entries = max(getattr(config, name, None) or 0 for name in ("index_topk", "indexer_budget", "index_topk_blocks"))
    each = getattr(config, "index_block_size", None)
    each = each or min((getattr(config, "compress_rates", None) or {}).values(), default=1)
    return sorted({int(limit) for limit in (getattr(config, "sliding_window", None), entries * each) if limit})

"""Whole conversations as TRL's AsyncGRPO trains them, in a prefix trie: part of `phases.py`.

The trie, its budget and its attention are TRL's own (`trl.experimental.async_grpo.packing`), and so is the order:
conversations are added as they come, until one does not fit. What differs is the kernel: TRL asks the Hub for flash
attention 3; where that cannot be reached, PyTorch's own variable-length flash attention (2) takes its place, and on a
CPU a loop. Log-probabilities come from the same fused LM head as those of the other layouts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl.experimental.async_grpo import packing

from benchmarks.gpu.work import conversation_tokens
from g2po_trl import Trajectory
from g2po_trl.utils.trl_compat import fused_log_probs


def flash_attn_varlen_func(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest: int,
    longest_keys: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Return attention of each segment's queries over its path, causal from the end: as flash attention's function."""
    if query.is_cuda:
        # A tuple: output, logsumexp, random state and so on.
        return torch.ops.aten._flash_attention_forward(
            query, key, value, starts, key_starts, longest, longest_keys, 0.0, causal, False, scale=softmax_scale
        )[0]
    found, repeated = [], query.shape[1] // key.shape[1]
    for start, stop, first, last in zip(starts[:-1], starts[1:], key_starts[:-1], key_starts[1:]):
        here, there = slice(start, stop), slice(first, last)
        mask = torch.ones(stop - start, last - first, dtype=torch.bool).tril(int(last - first - stop + start))
        parts = (part[there].repeat_interleave(repeated, 1).transpose(0, 1) for part in (key, value))
        q = query[here].transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(q, *parts, attn_mask=mask, scale=softmax_scale)
        found.append(out.transpose(0, 1))
    return torch.cat(found)


def register() -> str:
    """Return the name under which a model takes TRL's attention of tries, with the kernel that is here."""
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    packing.register_tree_attention()
    return packing.TREE_ATTENTION


def micro_batches(conversations: list[Trajectory], budget: int) -> list[dict[str, Any]]:
    """Return rows of at most so many unique tokens, with `conversation_tokens`: those of their conversations."""
    rows = [packing.TreeRow()]
    for conversation in conversations:
        ids, completed = conversation_tokens(conversation)
        sample = {
            "input_ids": np.array(ids),
            "completion_mask": np.array(completed),
            "old_log_probs": np.zeros(len(ids)),
            "advantage": 1.0 if conversation.reward else -1.0,
            "group_id": conversation.group,
        }
        if rows[-1].samples and not rows[-1].fits(sample, budget):
            rows.append(packing.TreeRow())
        rows[-1].add(sample)
    found = []
    for row in rows:
        packed = row.pack()
        packed["conversation_tokens"] = sum(len(sample["input_ids"]) for sample in row.samples)
        found.append(packed)
    return found


def log_probs(model: torch.nn.Module, row: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Return log-probabilities of the row's completion tokens, under autocast as it stands."""
    there = {name: value.to(device) for name, value in row.items() if isinstance(value, torch.Tensor)}
    longest, longest_keys = row["tree_max_seqlens"].tolist()
    inputs = {
        "input_ids": there["input_ids"][None],
        "position_ids": there["position_ids"][None],
        "attention_mask": None,
        "tree_kv_index": there["tree_kv_index"],
        "tree_cu_seqlens_q": there["tree_cu_seqlens_q"],
        "tree_cu_seqlens_k": there["tree_cu_seqlens_k"],
        "tree_max_seqlen_q": longest,
        "tree_max_seqlen_k": longest_keys,
    }
    places = there["token_index"]
    labels = there["shift_labels"][places]
    found, _ = fused_log_probs(model, model.base_model, inputs, places, labels)
    return found


def loss(found: torch.Tensor, row: dict[str, Any]) -> torch.Tensor:
    """Return GRPO's, clipped, of tokens whose old log-probabilities are about those found."""
    ratio = torch.exp(found - found.detach())
    advantages = row["advantages"].to(found.device)
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

"""Test numerically how a model without masks separates sequences: by its cache, or by boundaries in a row.

Two short sequences with a common prefix are processed as separate rows and in the other way. The hidden states and the
gradient of the prefix's embeddings are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...utils.forward_pass import evaluation_mode
from ..attention import boundaries
from ..forks import cache_argument, forked_passes

_PREFIX, _TAILS = 12, (5, 9)  # tokens

# (prefix, tails) -> the model's inputs, the context of its forward pass, and where prefixes and tails begin in them.
_Way = Callable[
    [torch.Tensor, Sequence[torch.Tensor]], tuple[dict[str, Any], AbstractContextManager, Sequence[int], Sequence[int]]
]


def why_not_forked(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> str | None:
    """Return why a model's cache does not start continuations; `None` if it does. `dtype`: of the arithmetic."""
    if cache_argument(model.base_model.forward) is None:
        return "the model takes no cache"

    def forked(prefix: torch.Tensor, tails: Sequence[torch.Tensor]):
        passes = [(1, _PREFIX, None), *((1, len(tail), 0) for tail in tails)]
        inputs = {"input_ids": torch.cat([prefix, *tails])[None]}
        return inputs, forked_passes(model.base_model, passes), [0], [_PREFIX, _PREFIX + len(tails[0])]

    return _difference(model, dtype, forked, "continued from its cache")


def why_not_bounded(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> str | None:
    """Return why boundaries do not keep sequences of a row apart; `None` if they do. `dtype`: of the arithmetic."""

    def bounded(prefix: torch.Tensor, tails: Sequence[torch.Tensor]):
        rows = [torch.cat([prefix, tail]) for tail in tails]
        places = torch.cat([torch.arange(len(row), device=row.device) for row in rows])[None]
        inputs = {"input_ids": torch.cat(rows)[None], "position_ids": places, **boundaries(places)}
        starts = [0, len(rows[0])]
        return inputs, nullcontext(), starts, [start + _PREFIX for start in starts]

    return _difference(model, dtype, bounded, "in one row, told where they begin,")


def _difference(model: torch.nn.Module, dtype: torch.dtype, way: _Way, words: str) -> str | None:
    """Return the difference of two sequences from separate rows, `None` if rounding explains it."""
    body, read, handle = model.base_model, [], None

    def watch(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        read.append(output.detach().requires_grad_())
        return read[-1]

    def hidden(inputs: dict[str, Any]) -> torch.Tensor:
        return body(**{"attention_mask": None, "use_cache": False, **inputs}).last_hidden_state[0]

    def flat(tails: Sequence[torch.Tensor], prefixes: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return hidden states of both tails, and the gradient of prefixes: (pass, first token) of each."""
        loss = sum(part.float().square().sum() for part in tails)
        found = torch.autograd.grad(loss, read, allow_unused=True)
        gradients = [torch.zeros_like(of) if grad is None else grad for grad, of in zip(found, read)]
        of_prefix = sum(gradients[number][0, start : start + _PREFIX].float() for number, start in prefixes)
        return torch.cat([*(part.float().flatten() for part in tails), of_prefix.flatten()])

    try:
        vocabulary, draw = min(1000, model.config.get_text_config().vocab_size), torch.Generator().manual_seed(0)
        ids = torch.randint(3, vocabulary, (_PREFIX + sum(_TAILS),), generator=draw)
        prefix, *tails = ids.to(next(body.parameters()).device).split([_PREFIX, *_TAILS])
        handle = model.get_input_embeddings().register_forward_hook(watch)
        with evaluation_mode(model), torch.enable_grad():
            alone = [hidden({"input_ids": torch.cat([prefix, tail])[None]})[_PREFIX:] for tail in tails]
            wanted = flat(alone, [(number, 0) for number in range(len(tails))])
            read.clear()
            inputs, context, prefixes, starts = way(prefix, tails)
            with context:
                states = hidden(inputs)
            ends = [states[start : start + len(tail)] for start, tail in zip(starts, tails)]
            found = flat(ends, [(0, start) for start in prefixes])
    except Exception as error:  # models that do not take it raise errors of any class
        return f"{words} it raises {type(error).__name__} ({error})"
    finally:
        if handle is not None:
            handle.remove()
    off = ((found - wanted).norm() / wanted.norm()).item()
    if not off <= torch.finfo(dtype).eps ** 0.5:
        return f"{words} its hidden states and gradients are off by {off:.1g} of their length"
    return None

"""Test numerically whether a model's cache starts continuations: two of one prefix, against each text alone.

Compared are hidden states and the gradient of the prefix's embeddings.
"""

from __future__ import annotations

from typing import Any

import torch

from ...utils.forward_pass import evaluation_mode
from ..forks import cache_argument, forked_passes

_PREFIX, _TAILS = 12, (5, 9)  # tokens


def why_not_forked(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> str | None:
    """Return why a model's cache does not start continuations; `None` if it does. `dtype`: of the arithmetic."""
    body, read, handle = model.base_model, [], None
    if cache_argument(body.forward) is None:
        return "the model takes no cache"

    def watch(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        read.append(output.detach().requires_grad_())
        return read[-1]

    def hidden(*parts: torch.Tensor) -> torch.Tensor:
        return body(input_ids=torch.cat(parts)[None], attention_mask=None, use_cache=False).last_hidden_state[0]

    def flat(tails: list[torch.Tensor]) -> torch.Tensor:
        """Return hidden states of both tails, and the gradient of the prefix."""
        found = torch.autograd.grad(sum(part.float().square().sum() for part in tails), read, allow_unused=True)
        gradients = [torch.zeros_like(of) if grad is None else grad for grad, of in zip(found, read)]
        prefixes = [one[0, :_PREFIX].float() for one in gradients if one.shape[1] >= _PREFIX]
        return torch.cat([*(part.float().flatten() for part in tails), sum(prefixes).flatten()])

    passes = [(1, _PREFIX, None), *((1, length, 0) for length in _TAILS)]
    try:
        vocabulary, draw = min(1000, model.config.get_text_config().vocab_size), torch.Generator().manual_seed(0)
        ids = torch.randint(3, vocabulary, (_PREFIX + sum(_TAILS),), generator=draw)
        prefix, *tails = ids.to(next(body.parameters()).device).split([_PREFIX, *_TAILS])
        handle = model.get_input_embeddings().register_forward_hook(watch)
        with evaluation_mode(model), torch.enable_grad():
            wanted = flat([hidden(prefix, tail)[_PREFIX:] for tail in tails])
            read.clear()
            with forked_passes(body, passes):
                found = flat(list(hidden(prefix, *tails)[_PREFIX:].split(_TAILS)))
    except Exception as error:  # models that do not take it raise errors of any class
        return f"continued from its cache it raises {type(error).__name__} ({error})"
    finally:
        if handle is not None:
            handle.remove()
    off = ((found - wanted).norm() / wanted.norm()).item()
    if not off <= torch.finfo(dtype).eps ** 0.5:
        return f"continued from its cache its hidden states and gradients are off by {off:.1g} of their length"
    return None

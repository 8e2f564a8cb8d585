"""Contexts of a forward pass: evaluation mode, and the kernels of attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside: with dropout, log-probabilities would be others."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN attention in forward and backward passes; a context manager and a decorator.

    PyTorch prefers it on an H100, H200 or B200. With a mask its gradient is NaN at some row lengths (pytorch#196678),
    it builds a plan of up to a second for each new shape, of which an iteration has dozens, and on a B200 it generates
    wrong tokens for models with few key-value heads (pytorch#193893). Models with a sliding window create masks
    internally, so the arguments do not show whether a mask is used.
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)

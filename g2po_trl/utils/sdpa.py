"""Which kernels PyTorch's attention may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Passes through a model in here, backward ones too, take no attention of cuDNN's; also a decorator.

    PyTorch takes it first on an H100, H200 or B200. Under a mask its gradient is NaN at some lengths of a row
    (pytorch#196678), it builds a plan of up to a second for each new shape, of which an iteration has dozens, and on a
    B200 it generates wrong tokens for models with few key-value heads (pytorch#193893). Models with a sliding window
    make masks of their own, so what is passed does not tell where there is one.
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)

"""Values of all ranks, and work of one rank for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from .errors import G2POError


def any_rank(accelerator: Accelerator, flag: bool) -> bool:
    """Return whether the flag is set on any rank. All ranks call it together."""
    return bool(accelerator.reduce(torch.tensor(int(flag), device=accelerator.device)).item())


def on_main(accelerator: Accelerator, work: Callable[[], Any]) -> Any:
    """Run `work` on the main process, and return its result, or raise its error, or a text of it, on all ranks."""
    failure = None
    try:
        result = work() if accelerator.is_main_process else None
    except Exception as error:
        result, failure = None, error
    result, told = broadcast_object_list([result, failure and str(failure)])  # not every error can be sent
    if told is not None:
        raise failure or G2POError(told)
    return result

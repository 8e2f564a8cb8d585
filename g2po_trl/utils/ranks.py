"""Values of all ranks, and work of one rank for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list


def any_rank(accelerator: Accelerator, flag: bool) -> bool:
    """Return whether the flag is set on any rank. All ranks call it together."""
    return bool(accelerator.reduce(torch.tensor(int(flag), device=accelerator.device)).item())


def on_main(accelerator: Accelerator, work: Callable[[], Any]) -> Any:
    """Run `work` on the main process, and return its result, or raise its error, on all ranks."""
    result = failure = None
    if accelerator.is_main_process:
        try:
            result = work()
        except Exception as error:
            failure = error if isinstance(error, (ValueError, OSError)) else RuntimeError(repr(error))  # can be sent
    result, failure = broadcast_object_list([result, failure])
    if failure is not None:
        raise failure
    return result

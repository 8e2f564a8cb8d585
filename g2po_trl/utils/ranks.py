"""Work of one rank for all, and data exchanged between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from .errors import G2POError

Result = TypeVar("Result")


def on_main(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Run `work` on the main process, and return its result, or raise its error, on all ranks."""
    if accelerator.num_processes == 1:
        return work()
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = work()
        except Exception as error:
            kind = G2POError if isinstance(error, ValueError) else RuntimeError  # that can be sent
            outcome[1] = kind(str(error) if isinstance(error, (ValueError, RuntimeError)) else repr(error))
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def all_to_all(
    parts: Sequence[np.ndarray], rank: int, gather: Callable[[Any], list[Any]], device: torch.device
) -> list[np.ndarray]:
    """Return the parts that all ranks send to this one. All ranks call it together.

    Args:
        parts: data for each rank, int32.
        rank: this process.
        gather: returns the objects of all ranks, by rank.
        device: device of the tensors that ranks exchange.
    """
    sizes = [of_rank[rank] for of_rank in gather([len(part) for part in parts])]
    received = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    sent = torch.from_numpy(np.concatenate(parts)).to(device)
    torch.distributed.all_to_all_single(received, sent, sizes, [len(part) for part in parts])
    return np.split(received.cpu().numpy(), np.cumsum(sizes)[:-1])

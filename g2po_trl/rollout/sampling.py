"""How replies are drawn, and where they end: the same for training and for evaluation."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import G2POConfig


@dataclass(frozen=True)
class Sampling:
    """How replies are drawn, and where they end.

    Args:
        temperature: 0 is greedy.
        top_p, top_k, min_p, repetition_penalty: 1, 0, `None` and 1 switch them off.
        max_tokens: of a reply.
        stop_sequences: a reply ends with the first of these.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    max_tokens: int = 512
    stop_sequences: tuple[str, ...] = ()

    @classmethod
    def for_training(cls, args: G2POConfig) -> Sampling:
        return cls(
            args.temperature,
            args.top_p,
            args.top_k,
            args.min_p,
            args.repetition_penalty,
            args.max_completion_length,
            tuple(args.stop_sequences or ()),
        )

    @classmethod
    def for_evaluation(cls, args: G2POConfig) -> Sampling:
        """`eval_temperature`, `eval_top_p` and `eval_top_k`; without filters of its own, those of training."""
        return replace(
            cls.for_training(args),
            temperature=args.eval_temperature,
            top_p=args.top_p if args.eval_top_p is None else args.eval_top_p,
            top_k=args.top_k if args.eval_top_k is None else args.eval_top_k,
        )


def derived_seed(*numbers: int) -> int:
    """A seed (63 bits) that follows from numbers, such as a panel's seed and the number of an episode."""
    name = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") // 2

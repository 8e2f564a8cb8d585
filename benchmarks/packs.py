"""Packed rows of sequences whose order is not known, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from g2po_trl.update.packing import Pack, common_prefix, cut_into_packs, lexicographic


def make_packs(sequences: Sequence[np.ndarray], max_tokens: int, share: bool = True) -> list[Pack]:
    """Return packed rows of sequences, in lexicographic order.

    Args:
        sequences: token ids of each.
        max_tokens: of a packed row; a longer sequence has a row of its own.
        share: lay out common tokens once; `False` puts sequences end to end, longest first.
    """
    order = lexicographic(sequences) if share else sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    neighbours = zip(order, order[1:])
    overlaps = [0, *(common_prefix(sequences[a], sequences[b]) if share else 0 for a, b in neighbours)]
    return cut_into_packs(order, [len(sequences[row]) for row in order], overlaps, max_tokens)

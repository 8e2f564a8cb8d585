"""Packed rows of sequences whose order is not known, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from g2po_trl.update.packing import Pack, RowLength, common_prefix, cut_into_packs, lexicographic, pack_rows


def make_packs(
    sequences: Sequence[np.ndarray],
    max_tokens: int,
    share: bool = True,
    layout: str = "shared",
    fork_cost: int | None = None,
) -> list[Pack]:
    """Return packed rows of sequences, in lexicographic order.

    Args:
        sequences: token ids of each.
        max_tokens: of a packed row; a longer sequence has a row of its own.
        share: lay out common tokens once; `False` puts sequences end to end, longest first.
        layout: the way in which they are laid out once.
        fork_cost: of forked rows, in tokens.
    """
    order = lexicographic(sequences) if share else sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    neighbours = zip(order, order[1:])
    overlaps = [0, *(common_prefix(sequences[a], sequences[b]) if share else 0 for a, b in neighbours)]
    lengths = [len(sequences[row]) for row in order]
    if layout == "shared":
        return cut_into_packs(order, lengths, overlaps, max_tokens)
    return pack_rows(order, lengths, overlaps, layout, RowLength(max_tokens, fork_cost=fork_cost))

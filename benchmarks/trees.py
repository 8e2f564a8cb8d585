"""Trees of sequences whose order is not known, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from g2po_trl.update.tree import Tree, grow, in_order


def make_trees(sequences: Sequence[np.ndarray], max_tokens: int, fork_cost: int | None = None) -> list[Tree]:
    """Return trees of sequences, in lexicographic order; arguments as of `grow`."""
    return grow(*in_order(sequences, range(len(sequences))), max_tokens, fork_cost)

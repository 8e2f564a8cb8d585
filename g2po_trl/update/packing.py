"""Token layouts: the model processes tokens that rows have in common once.

Step samples of a group repeat one another: the task, earlier pages, and at the first turn the whole prompt. In
lexicographic order, a sequence (prompt and completion) begins like its predecessor, and the repeated tokens are not
laid out again. A packed row holds a run of such sequences, one after the other:

    sequences   A B c d     A B c e f     A g         packed row   A B c d e f g
                                                      position     0 1 2 3 3 4 1
                                                      end          7 6 6 4 6 6 7

Token i sees token j when j <= i < end[j], where end[j] is the place after the last sequence that runs through j: the
tokens of its own sequence, and no others of the row. So every token's hidden state equals that in a separate row, and
so do the loss and its gradient, up to the order of floating-point sums.

Layers that no mask separates share tokens in two other ways: `forked` (see `forks`), and `chained`, in rows whose
sequences each begin with the whole previous one, like the turns of a conversation. Such a row is plain text and needs
no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..utils.trl_compat import attention_of, fused_log_probs, own_log_probs
from .attention import attends_by_masks, boundaries, masks, takes_packed
from .forks import Call, calls, forked_passes, lay_out_calls

LAYOUTS = ("shared", "packed", "padded")
SHARING = ("shared", "forked", "chained")  # layouts that process common tokens once


@dataclass(frozen=True)
class Pack:
    """Sequences of one packed row.

    Args:
        rows: numbers of the sequences, in the order of the layout.
        shared: for each sequence, how many of its first tokens its predecessor has laid out.
        num_tokens: number of tokens laid out; for a forked row, including its padding.
        calls: forward passes of a forked row.
        is_chain: each sequence begins with the whole previous one, and the row needs no mask.
    """

    rows: list[int]
    shared: list[int]
    num_tokens: int
    calls: list[Call] | None = None
    is_chain: bool = False

    @classmethod
    def from_lengths(
        cls, rows: list[int], shared: list[int], lengths: Sequence[int] | dict[int, int], fork_cost: int | None
    ) -> Pack:
        """Return the packed row of sequences that have `lengths[row]` tokens, forked if there is a `fork_cost`."""
        sizes = [int(lengths[row]) for row in rows]
        if fork_cost is None:
            return cls(rows, shared, sum(sizes) - sum(shared))
        made = calls(sizes, shared, fork_cost)
        return cls(rows, shared, sum(call.positions for call in made), made)


def pack_rows(
    rows: Sequence[int], lengths: Sequence[int], overlaps: Sequence[int], layout: str, length: RowLength
) -> list[Pack]:
    """Return the packed rows of a layout, derived from lengths; see `cut_into_packs`."""
    if layout == "padded":
        return [Pack([row], [0], size) for row, size in zip(rows, lengths)]
    if layout == "chained":
        return _chained_packs(rows, lengths, overlaps, length.most)
    if layout == "packed":
        overlaps = [0] * len(rows)
    packs = best_packs(rows, lengths, overlaps, length)
    if layout == "shared":  # a conversation is a plain row, however long: no mask, and nothing of it is repeated
        chains = _chained_packs(rows, lengths, overlaps, 1)
        packs = min(packs, chains, key=lambda some: sum(pack.num_tokens for pack in some))
    return packs if layout != "forked" else _forked_packs(packs, dict(zip(rows, lengths)), length)


def _chained_packs(
    rows: Sequence[int], lengths: Sequence[int], overlaps: Sequence[int], max_tokens: int
) -> list[Pack]:
    """Return packed rows of whole chains: sequences that each begin with the whole one before."""
    first = [i for i in range(len(rows)) if not i or overlaps[i] != lengths[i - 1]]
    chains = list(zip(first, [*first[1:], len(rows)]))
    sizes = [lengths[stop - 1] for _, stop in chains]
    packs = []
    for pack in cut_into_packs(range(len(chains)), sizes, [0] * len(chains), max_tokens):
        places = [(i, i > start) for start, stop in (chains[chain] for chain in pack.rows) for i in range(start, stop)]
        shared = [overlaps[i] * continues for i, continues in places]
        packs.append(Pack([rows[i] for i, _ in places], shared, pack.num_tokens, is_chain=True))
    return packs


def _forked_packs(packs: Sequence[Pack], lengths: dict[int, int], length: RowLength) -> list[Pack]:
    """Return forked rows of at most `length.most` tokens with their padding, if they have several sequences."""
    found, left = [], list(reversed(packs))
    while left:
        pack = left.pop()
        if len(pack.rows) > _MOST_ROWS:
            left += reversed(_halves(pack, lengths, None))
            continue
        forked = Pack.from_lengths(pack.rows, pack.shared, lengths, length.fork_cost)
        if forked.num_tokens > length.most and len(pack.rows) > 1:
            left += reversed(_halves(pack, lengths, None))
        else:
            found.append(forked)
    return found


def _halves(pack: Pack, lengths: Sequence[int] | dict[int, int], fork_cost: int | None) -> list[Pack]:
    """Return a packed row's sequences in two rows."""
    half, rows, shared = len(pack.rows) // 2, pack.rows, pack.shared
    parts = ((rows[:half], shared[:half]), (rows[half:], [0, *shared[half + 1 :]]))
    return [replace(Pack.from_lengths(*part, lengths, fork_cost), is_chain=pack.is_chain) for part in parts]


def cut_into_packs(
    rows: Sequence[int], lengths: Sequence[int], overlaps: Sequence[int], max_tokens: int, longest: int = 0
) -> list[Pack]:
    """Return packed rows of at most `max_tokens` tokens, of sequences in the order given, derived from lengths.

    `overlaps` are the tokens that each sequence has in common with its predecessor. A longer sequence has its own row,
    which also holds, up to `longest` tokens, the following sequences that share most of their tokens with it.
    """
    packs: list[Pack] = []
    own: list[int] = []
    shared: list[int] = []
    num_tokens = first = 0
    for row, length, overlap in zip(rows, lengths, overlaps):
        common = overlap if own else 0
        extends = first > max_tokens and common >= _MOST * length
        if own and num_tokens + length - common > (longest if extends else max_tokens):
            packs.append(Pack(own, shared, num_tokens))
            own, shared, num_tokens, common = [], [], 0, 0
        first = first if own else length
        own.append(row)
        shared.append(common)
        num_tokens += length - common
    return [*packs, Pack(own, shared, num_tokens)] if own else packs


def lexicographic(sequences: Sequence[np.ndarray]) -> list[int]:
    """Return indices in lexicographic order: no earlier sequence shares a longer prefix than the predecessor."""
    return sorted(range(len(sequences)), key=lambda i: sort_key(sequences[i]))


def sort_key(sequence: np.ndarray) -> bytes:
    """Return bytes that compare as the token ids do."""
    return sequence.astype(">u4").tobytes()


def split_packs(
    packs: Sequence[Pack], lengths: Sequence[int], num_ranks: int, fork_cost: int | None = None
) -> list[Pack]:
    """Halve the packs of most rows until the number of ranks divides that of packs, if there are enough rows."""
    packs = list(packs)
    while len(packs) % num_ranks:
        largest = max(range(len(packs)), key=lambda i: len(packs[i].rows))
        if len(packs[largest].rows) < 2:
            break
        packs[largest : largest + 1] = _halves(packs[largest], lengths, fork_cost)
    return packs


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def row_width(tokens: int, multiple: int | None) -> int:
    """Return the length of a row of `tokens` tokens: a multiple that is not 64 modulo 128, or `tokens` without one.

    cuDNN's attention makes NaN of a gradient under a mask at 64 modulo 128 (docs/speed.md), so such a row gets one
    multiple more.
    """
    if not multiple:
        return tokens
    width = -(-tokens // multiple) * multiple
    return width + multiple * (width % 128 == 64)


def most_tokens(places: int, multiple: int | None) -> int:
    """Return the tokens of the longest row of at most `places` places; `places` if not even one multiple fits."""
    if not multiple:
        return places
    fits = [width for width in range(places // multiple * multiple, 0, -multiple)[:2] if width % 128 != 64]
    return fits[0] if fits else places


def lay_out(
    packs: Sequence[Pack],
    sequences: Sequence[np.ndarray],
    completion_lengths: Sequence[int],
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
) -> dict[str, Any]:
    """Return the tensors of a micro-batch of packed rows.

    Args:
        packs: the packed rows.
        sequences: token ids of each sequence, by its number.
        completion_lengths: number of tokens at the end of each sequence that are scored; 0 for none.
        pad_token_id: token that fills rows.
        pad_to_multiple_of: see `row_width`.

    Returns:
        `packed_ids`, `packed_positions`, `packed_ends` (R, L), of each token, the latter two only if some row with
        several sequences is not a chain; `scored_from` (M,), the place in the flattened rows of the hidden state that
        predicts each scored token, and `scored_ids` (M,), the token: over packs, their rows, completion tokens. If no
        token is scored, both have one entry (0 and -100). Forked: `packed_ids` (1, N) of all forward passes, and
        `forks`, their shapes and parents, see `forks.hidden_states`.
    """
    if packs and packs[0].calls is not None:
        return _lay_out_forked(packs, sequences, completion_lengths, pad_token_id)
    length = max((pack.num_tokens for pack in packs), default=1)
    length = row_width(length, pad_to_multiple_of)
    shape = (max(len(packs), 1), length)
    ids = np.full(shape, pad_token_id, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    ends = np.tile(np.arange(1, length + 1), (shape[0], 1))  # padding sees itself: attention over nothing is undefined
    scored, plain = [], all(pack.is_chain or len(pack.rows) == 1 for pack in packs)
    for r, pack in enumerate(packs):
        path = np.zeros(0, dtype=np.int64)  # where the tokens of the sequence are in the row
        stop = 0
        for row, common in zip(pack.rows, pack.shared):
            sequence = sequences[row]
            start, stop = stop, stop + len(sequence) - common
            path = np.concatenate([path[:common], np.arange(start, stop)])
            ids[r, start:stop] = sequence[common:]
            positions[r, start:stop] = np.arange(common, len(sequence))
            ends[r, path] = stop
            scored.append((r * length + path, sequence, completion_lengths[row]))
    arrays = {"packed_ids": ids, **_scored(scored)}
    if not plain:
        arrays |= {"packed_positions": positions, "packed_ends": ends}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _lay_out_forked(
    packs: Sequence[Pack], sequences: Sequence[np.ndarray], completion_lengths: Sequence[int], pad_token_id: int
) -> dict[str, Any]:
    ids, forks, scored, first = [], [], [], 0
    for pack in packs:
        own = [sequences[row] for row in pack.rows]
        tokens, paths = lay_out_calls(pack.calls, own, pad_token_id)
        scored += [
            (first + path, *rest) for path, *rest in zip(paths, own, (completion_lengths[r] for r in pack.rows))
        ]
        before = len(forks)
        forks += [(*call.shape, None if call.parent is None else before + call.parent) for call in pack.calls]
        ids.append(tokens)
        first += len(tokens)
    arrays = {"packed_ids": np.concatenate(ids)[None], **_scored(scored)}
    return {"forks": forks, **{name: torch.from_numpy(array) for name, array in arrays.items()}}


def _scored(sequences: Sequence[tuple[np.ndarray, np.ndarray, int]]) -> dict[str, np.ndarray]:
    """Return `scored_from` and `scored_ids`, given each sequence's places, its tokens, and how many are scored."""
    places = [path[len(tokens) - number - 1 : len(tokens) - 1] for path, tokens, number in sequences]
    ids = [tokens[len(tokens) - number :] for _, tokens, number in sequences]
    if not sum(map(len, ids)):
        places, ids = [np.zeros(1)], [np.full(1, -100)]
    return {name: np.concatenate(of).astype(np.int64) for name, of in (("scored_from", places), ("scored_ids", ids))}


def packed_log_probs(
    model,
    body: torch.nn.Module,
    layout: dict[str, torch.Tensor],
    mask: torch.Tensor,
    own_head_at: float | None = None,
    more: dict[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities and entropies of the scored tokens at their places in padded rows.

    Only hidden states that predict a scored token reach the LM head.

    Args:
        model: a causal language model with TRL's fused LM head, or a wrapper of it.
        body: the model without its LM head, inside all wrappers.
        layout: tensors of `lay_out`.
        mask: (rows, C) of completion tokens; the number of ones is that of scored tokens.
        own_head_at: temperature, if the model's own LM head is used in place of TRL's.
        more: the model's further inputs, e.g. of images.
    """
    scored = {**_rows(body, layout), **(more or {})}, layout["scored_from"], layout["scored_ids"]
    with forked_passes(body, layout.get("forks")):
        if own_head_at is None:
            log_probs, entropies = fused_log_probs(model, body, *scored)
        else:
            log_probs, entropies = own_log_probs(model, body, *scored, own_head_at)
    return _in_rows(log_probs, mask), None if entropies is None else _in_rows(entropies, mask)


def _rows(body: torch.nn.Module, layout: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the model's inputs.

    Rows of one text begin at their first place, and padding comes last, where no token sees it: a causal model needs
    neither mask nor positions, and uses its fastest kernels. This is also correct for absolute positions and recurrent
    states, which padding before the sequence would shift.
    """
    ids, positions = layout["packed_ids"], layout.get("packed_positions")
    if positions is None:
        return {"input_ids": ids, "attention_mask": None}
    by_mask = attends_by_masks(body)
    if not by_mask or takes_packed(attention_of(body.config)):  # one row; a sequence begins where positions do
        row = {"input_ids": ids.view(1, -1), "attention_mask": None, "position_ids": positions.view(1, -1)}
        return row if by_mask else row | boundaries(row["position_ids"])
    return {
        "input_ids": ids,
        "attention_mask": masks(body, layout["packed_ends"], positions),
        "position_ids": positions,
    }


def _in_rows(scored: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (M,) values at the ones of the mask, (rows, C), and 0 elsewhere."""
    mask = mask.to(scored.device, torch.bool)
    return scored.new_zeros(mask.shape).masked_scatter(mask, scored)


_SHORTEST, _LONGEST = 256, 4096
_MOST_ROWS = 128  # sequences of a forked row, in which forks may be as many, one inside the other
_MOST = 0.75  # of a long sequence's tokens, which it shares with the row that it joins
_EAGER_SCORES = 2**28  # attention scores of a layer that eager attention may hold: 1 GiB of float32
# Seconds an operation of attention under a mask, over those of a matrix product: measured on a CPU,
# see benchmarks/results/phases/log.md.
_ATTENTION_COST = 2


@dataclass(frozen=True)
class RowLength:
    """Length of packed rows.

    Args:
        most: maximum number of tokens; a longer sequence has its own row.
        longest: maximum number of tokens of a row that begins with a longer sequence, followed by sequences that share
            most of their tokens with it. 0: no others follow.
        even: tokens of a row at which attention takes as long as the rest of the model. `None`: rows are as long as
            `most`; otherwise of the length that costs least, see `best_packs`.
        fork_cost: cost of a fork in forked rows, see `forks.fork_cost`.
    """

    most: int
    even: float | None = None
    longest: int = 0
    fork_cost: int | None = None

    def work(self, tokens: int) -> float:
        """Return the work of a row of `tokens` tokens, in tokens without attention."""
        return tokens * (1 + tokens / self.even) if self.even else tokens

    @classmethod
    def from_config(cls, config, attention: str, max_tokens: int) -> RowLength:
        """Return the row length that suits a model.

        A layer works 2 T H on the attention of a token over the T others of its row (H: hidden size), and as
        much as it has weights on the rest.
        """

        def size(name: str, default: int) -> int:  # recurrent models have no heads, and some others a size by layer
            value = getattr(config, name, None) or default
            return max(value) if isinstance(value, (list, tuple)) else value

        hidden = size("hidden_size", 1024)
        weights = 4 * hidden**2 + 3 * hidden * size("intermediate_size", 4 * hidden)
        if attention not in ("sdpa", "eager"):  # others skip what a token does not see
            most = int(np.clip(2 ** round(np.log2(weights / (4 * hidden))), _SHORTEST, _LONGEST))
            return cls(most, longest=max_tokens)
        most, longest = max_tokens, max_tokens
        if attention == "eager":  # it holds a score for each head, token and place
            most, longest = min(most, _EAGER_SCORES // (size("num_attention_heads", 1) * max_tokens)), 0
        even = weights / (2 * hidden * _ATTENTION_COST)
        return cls(int(np.clip(most, _SHORTEST, _LONGEST)), even, longest)


def best_packs(rows: Sequence[int], lengths: Sequence[int], overlaps: Sequence[int], length: RowLength) -> list[Pack]:
    """Return `cut_into_packs` at the row length with the least work, among `most`, `longest` and their halves.

    Shorter rows repeat more common tokens, and need less attention, which covers the whole row.
    """

    def halves(tokens: int, least: int) -> list[int]:
        return [tokens >> n for n in range(tokens.bit_length()) if tokens >> n >= least]

    def work(packs: list[Pack]) -> float:
        return sum(length.work(pack.num_tokens) for pack in packs)

    tried = [length.most] if length.even is None else halves(length.most, min(length.most, _SHORTEST))
    found = [cut_into_packs(rows, lengths, overlaps, tokens) for tokens in tried]
    for longest in halves(length.longest, length.most + 1):
        found.append(cut_into_packs(rows, lengths, overlaps, length.most, longest))
    return min(found, key=work)

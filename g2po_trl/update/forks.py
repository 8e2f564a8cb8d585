"""Prefixes that pass through the model once, where its cache starts each continuation.

A recurrent state or a convolution reads all tokens before it in the row, so a tree's branches cannot stand in one row.
There the prefix is a row of its own, and each continuation begins with the model's cache after it (keys and values,
recurrent and convolution states), as in generation. Gradients flow back through the cache:

    sequences   A B c d     A B c e f     A g         call 0   A         the root
                                                      call 1   B c       continues call 0: two sequences fork after it
                                                      call 2   g         continues call 0
                                                      call 3   d -       continues call 1: ends of sequences are rows
                                                               e f       of one call, padded behind

A fork costs calls, so it is omitted if it saves few tokens: then each branch repeats them. Sequences that begin
one another (turns of a conversation) need no fork: they are scored in the row of the longest.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from ..utils.trl_compat import replaced

# Weights times tokens of a layer that take as long as the calls of a fork take besides: about a millisecond a layer on
# a CPU core, half of one in kernel launches on CUDA. Estimates.
_CALL_WORK = {"cpu": 4e6, "cuda": 1e11}
_LEAST = 2  # tokens of a call: for a single one some layers take kernels of generation, without a gradient


@dataclass
class Segment:
    """Tokens `start` to `stop` of the sequences that run through it."""

    start: int
    stop: int
    of: int  # place of one of these sequences among those of the tree
    ending: list[int]  # places of sequences whose last token is in it
    branches: list[Segment] = field(default_factory=list)  # the segments after it; none, or at least two

    @property
    def length(self) -> int:
        """Tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class Call:
    """One forward pass: segments that are its rows, all of which continue the one row of call `parent`."""

    segments: list[Segment]
    parent: int | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens of each."""
        longest = max(segment.length for segment in self.segments)
        return len(self.segments), longest if self.parent is None else max(longest, _LEAST)

    @property
    def padding(self) -> int:
        """Tokens of padding."""
        return math.prod(self.shape) - sum(segment.length for segment in self.segments)


def fork_cost(model: torch.nn.Module, device: str) -> int:
    """Return how many tokens take as long as a fork in a model, by the mean number of weights of its layers."""
    weights = sum(p.numel() for p in model.base_model.parameters()) - model.get_input_embeddings().weight.numel()
    weights = max(weights, 1) / max(model.config.get_text_config().num_hidden_layers, 1)
    return int(_CALL_WORK.get(device, _CALL_WORK["cuda"]) / weights)


def segments(lengths: Sequence[int], overlaps: Sequence[int], cost: int) -> list[Segment]:
    """Return the trees of sequences in order, see `tree.in_order`, in which each fork saves at least `cost` tokens."""

    def grow(first: int, last: int, start: int) -> list[Segment]:
        """Return the segments of sequences `first` up to `last`, whose tokens before `start` are known."""
        ending: list[int] = []
        while True:
            stop = min(overlaps[first + 1 : last], default=lengths[first])
            bounds = [first, *(i for i in range(first + 1, last) if overlaps[i] == stop), last]
            groups = list(zip(bounds, bounds[1:]))
            # In this order, a sequence that ends where others go on comes before them.
            while groups and lengths[groups[0][0]] == stop and groups[0][1] - groups[0][0] == 1:
                ending.append(groups.pop(0)[0])
            if len(groups) != 1:
                break
            ((first, last),) = groups
        if not groups:
            return [Segment(start, stop, ending[-1], ending)]
        forks = stop - start >= _LEAST and (len(groups) - 1) * (stop - start) >= max(cost, 1)
        branches = [branch for group in groups for branch in grow(*group, stop if forks else start)]
        if forks:
            return [Segment(start, stop, groups[0][0], ending, branches)]
        branches[0].ending += ending
        return branches

    return grow(0, len(lengths), 0) if lengths else []


def calls(lengths: Sequence[int], overlaps: Sequence[int], cost: int) -> list[Call]:
    """Return the forward passes of sequences, each after its parent; arguments as in `segments`."""
    made: list[Call] = []

    def visit(branches: Sequence[Segment], parent: int | None) -> None:
        ends = sorted((one for one in branches if not one.branches), key=lambda one: -one.length)
        while ends:  # longest first; a call for shorter ones costs half a fork
            padding = np.cumsum([ends[0].length - one.length for one in ends])
            number = max(1, int((padding <= cost // 2).sum()))
            made.append(Call(ends[:number], parent))
            ends = ends[number:]
        for segment in branches:
            if segment.branches:
                made.append(Call([segment], parent))
                visit(segment.branches, len(made) - 1)

    visit(segments(lengths, overlaps, cost), None)
    return made


def lay_out_calls(
    made: Sequence[Call], sequences: Sequence[np.ndarray], pad_token_id: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the token ids (N,) of forward passes, flat, and the places of each sequence's tokens in them."""
    ids, paths, before, first = [], {}, {}, 0  # before: the path to each segment
    for call in made:
        tokens = np.full(call.shape, pad_token_id, dtype=np.int64)
        for row, segment in zip(tokens, call.segments):
            row[: segment.length] = sequences[segment.of][segment.start : segment.stop]
            path = np.append(before.get(id(segment), []), np.arange(first, first + segment.length)).astype(np.int64)
            paths |= {one: path[: len(sequences[one])] for one in segment.ending}
            before |= {id(branch): path for branch in segment.branches}
            first += len(row)
        ids.append(tokens.ravel())
    return np.concatenate(ids), [paths[place] for place in range(len(sequences))]


# -- the model's forward passes ---------------------------------------------------------------------------------------


class ForkedCache(DynamicCache):
    """A cache that keeps the autograd graph of its content; each continuation takes a copy."""

    def update_recurrent_state(self, recurrent_states, layer_idx: int, state_idx: int = 0, **kwargs) -> torch.Tensor:
        # transformers copies into the old state, which the backward pass of this call still needs.
        layer = self.layers[layer_idx]
        layer.recurrent_states[state_idx] = recurrent_states
        layer.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states

    def fork(self, rows: int) -> ForkedCache:
        """Return a cache for `rows` continuations of the only row of this cache."""

        def copied(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: copied(of_key) for key, of_key in value.items()}
            if isinstance(value, torch.Tensor) and value.ndim > 1:
                return value.expand(rows, *value.shape[1:]).clone()
            return value

        forked = copy.copy(self)
        forked.layers = [copy.copy(layer) for layer in self.layers]
        for layer in forked.layers:
            vars(layer).update(copied(vars(layer)))
        return forked


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Return the name under which a forward pass takes a cache, `None` if it takes none."""
    taken = inspect.signature(forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in taken), None)


@contextmanager
def forked_passes(body: torch.nn.Module, forks: Sequence[tuple[int, int, int | None]] | None) -> Iterator[None]:
    """Let a model without its LM head process the flat tokens (1, N) of forked rows inside, see `tree.lay_out`."""
    if forks is None:
        yield
        return
    forward, parents = body.forward, {parent for *_, parent in forks}
    name, takes_places = cache_argument(forward), "position_ids" in inspect.signature(forward).parameters

    def passes(*, input_ids: torch.Tensor, **unused: Any) -> Any:
        caches: dict[int, tuple[ForkedCache, int]] = {}  # with the number of tokens in them
        hidden, parts = [], input_ids[0].split([rows * length for rows, length, _ in forks])
        for number, ((rows, length, parent), tokens) in enumerate(zip(forks, parts)):
            past, cache = 0, None
            if parent is not None:
                before, past = caches[parent]
                cache = before.fork(rows)
            elif number in parents:
                cache = ForkedCache(config=body.config)
            taken = {name: cache, "use_cache": True} if cache is not None else {"use_cache": False}
            if takes_places:
                places = torch.arange(past, past + length, device=tokens.device)
                taken["position_ids"] = places.expand(rows, length)
            output = forward(input_ids=tokens.view(rows, length), attention_mask=None, **taken)
            if number in parents:
                caches[number] = cache, past + length
            hidden.append(output.last_hidden_state.flatten(0, 1))
        output.last_hidden_state = torch.cat(hidden)[None]
        return output

    with replaced(body, forward=passes):
        yield

"""Images of a micro-batch: token ids that tell images apart, which images the model's row shows, and positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..utils.images import Picture
from .tree import Tree

# (token ids (L,), their images) -> (L,) for each token the number of the image it is a feature of, -1 for text.
OwnersOf = Callable[[np.ndarray, Sequence[Picture]], np.ndarray]


def keyed(ids: np.ndarray, images: Sequence[Picture], owners_of: OwnersOf) -> np.ndarray:
    """Return token ids with parts of an image's hash in place of its features: equal ids are equal inputs."""
    if not images:
        return ids
    owners, found = owners_of(ids, images), ids.copy()
    for number, image in enumerate(images):
        places = np.flatnonzero(owners == number)
        found[places] = np.resize(np.frombuffer(bytes.fromhex(image), dtype=np.int32), len(places))
    return found


def images_of(
    trees: Sequence[Tree], sequences: Sequence[np.ndarray], images: Sequence[Sequence[Picture]], owners_of: OwnersOf
) -> dict[str, Any]:
    """Return the images of a micro-batch.

    Args:
        trees: those of the micro-batch.
        sequences: token ids of each sequence, by its number.
        images: of each sequence.
        owners_of: see `OwnersOf`.

    Returns:
        `images`, of each sequence; `images_before`, how many of them the model's row shows already; and `image_of`
        (L,), the number among the row's images of that which a token is a feature of, -1 for text, for one tree.
    """
    before, numbers, shown = [], [], 0
    for tree in trees:
        for row, common in zip(tree.rows, tree.shared):
            owners = owners_of(sequences[row], images[row])
            before.append(int(owners[:common].max(initial=-1)) + 1)
            numbers.append(np.where(owners < 0, -1, owners - before[-1] + shown)[common:])
            shown += len(images[row]) - before[-1]
    found = {"images": [list(images[row]) for tree in trees for row in tree.rows], "images_before": before}
    return found | ({"image_of": torch.from_numpy(np.concatenate(numbers))} if len(trees) == 1 else {})


def image_inputs_of(
    micro_batch: dict[str, Any], body: torch.nn.Module, ids: torch.Tensor, make: Callable[..., dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return the inputs that a model takes beside token ids (R, L), from images.

    Made here and not with the micro-batch: pixels take many times the memory of the files.
    """
    shown = [images[first:] for images, first in zip(micro_batch["images"], micro_batch["images_before"])]
    inputs = make(ids, shown if len(shown) == len(ids) else [[image for images in shown for image in images]])
    if "branches" in micro_batch:
        at = [micro_batch[name].to(ids.device) for name in ("paths", "image_of")]
        inputs |= image_positions(body, {"input_ids": ids, **inputs}, micro_batch["branches"], *at)
    return inputs


def image_positions(
    body: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    sizes: Sequence[Sequence[int]],
    paths: torch.Tensor,
    image_of: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return `position_ids` (3, 1, N) of a tree's tokens, if the model derives them from images.

    Args:
        body: the model without its LM head.
        inputs: its inputs, those of images included.
        sizes: numbers of queries and keys of each branch.
        paths: (K,) places of all branches' keys.
        image_of: (N,) see `images_of`.
    """
    if not hasattr(body, "get_rope_index") or "image_grid_thw" not in inputs:
        return {}
    found = []
    for (queries, _), path in zip(sizes, paths.split([keys for _, keys in sizes])):
        numbers = image_of[path]
        grids = inputs["image_grid_thw"][numbers[numbers >= 0].unique()]
        alone = {name: inputs[name][:, path] for name in ("input_ids", "mm_token_type_ids")}
        positions, _ = body.get_rope_index(**alone, image_grid_thw=grids if len(grids) else None)
        found.append(positions[..., -queries:])
    return {"position_ids": torch.cat(found, -1)}

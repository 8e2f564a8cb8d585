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
    """Return the images of a micro-batch's trees; `sequences` and `images` are those of all rows, by number.

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
    """Return the inputs that a model takes beside token ids (R, L), from images: pixels, and positions of a tree.

    Made here and not with the micro-batch: pixels take many times the memory of the files.
    """
    shown = [images[first:] for images, first in zip(micro_batch["images"], micro_batch["images_before"])]
    inputs = make(ids, shown if len(shown) == len(ids) else [[image for images in shown for image in images]])
    if "branches" not in micro_batch or not hasattr(body, "get_rope_index") or "image_grid_thw" not in inputs:
        return inputs
    positions = []  # of each branch alone, (3, 1, queries): the model derives them from images
    paths = micro_batch["paths"].to(ids.device).split([keys for _, keys in micro_batch["branches"]])
    for (queries, _), path in zip(micro_batch["branches"], paths):
        numbers = micro_batch["image_of"].to(ids.device)[path]
        grids = inputs["image_grid_thw"][numbers[numbers >= 0].unique()]
        alone = {"input_ids": ids[:, path], "mm_token_type_ids": inputs["mm_token_type_ids"][:, path]}
        of_path, _ = body.get_rope_index(**alone, image_grid_thw=grids if len(grids) else None)
        positions.append(of_path[..., -queries:])
    return inputs | {"position_ids": torch.cat(positions, -1)}

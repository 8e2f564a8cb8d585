"""Images in fine-tuning: pixels beside the token ids of TRL's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from g2po_trl.prompts.images import ImageInputs
from g2po_trl.trajectory import Trajectory
from g2po_trl.utils.images import Picture

COLUMN = "shown_images"  # of hashes; TRL makes prompts anew from a column "images"


def pictures_in(trajectories: Iterable[Trajectory]) -> dict[str, Picture]:
    """Return the images that the prompts of trajectories show, by their hashes."""
    return {image: image for one in trajectories for step in one.steps for image in step.shown_images}


@dataclass
class ImageCollator:
    """Makes batches of samples as another collator does, with what the model reads beside their token ids.

    Args:
        collate: the other collator.
        inputs: of the model.
        pictures: images by their hashes, which samples have in `COLUMN`.
    """

    collate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    inputs: ImageInputs
    pictures: Mapping[str, Picture]

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        images = [[self.pictures[name] for name in sample.pop(COLUMN, ())] for sample in samples]
        batch = self.collate(samples)
        return {**batch, **self.inputs(batch["input_ids"], images)}

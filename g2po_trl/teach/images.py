"""Images in fine-tuning: TRL's batches get the model's inputs for images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from g2po_trl.prompts.images import ImageInputs
from g2po_trl.trajectory import Trajectory
from g2po_trl.utils.images import Picture

COLUMN = "shown_images"  # hashes; from a column named "images", TRL would render the prompts again


def pictures_in(trajectories: Iterable[Trajectory]) -> dict[str, Picture]:
    """Return the images that the prompts of trajectories show, by their hashes."""
    return {image: image for one in trajectories for step in one.steps for image in step.shown_images}


@dataclass
class ImageCollator:
    """Make batches of samples with another collator, and add the model's inputs for their images.

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

"""Images in prompts: the token ids that stand for them, one a feature, and what a model reads beside token ids.

No family is named here: a processor is asked with an image what it returns, a model by its signature what it takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..utils.errors import G2POError
from ..utils.images import PLACE, Picture

if TYPE_CHECKING:
    import torch


def reads_images(processing_class) -> bool:
    """Return whether it is a processor of images and text."""
    return all(getattr(processing_class, name, None) is not None for name in ("image_processor", "image_token"))


def load_processor(place: str, **options: Any):
    """Return the processor of images and text of a folder or a Hub id; `None` if it has none, or what that needs."""
    from transformers import AutoProcessor

    with suppress(ImportError, OSError, ValueError):  # the model still reads text
        processor = AutoProcessor.from_pretrained(place, **{"padding_side": "left", **options})
        return processor if reads_images(processor) else None


def load_processing_class(place: str, **options: Any):
    """Return the processor of images and text of a folder or a Hub id, else its tokenizer, loaded with `options`."""
    from transformers import AutoTokenizer

    return load_processor(place, **options) or AutoTokenizer.from_pretrained(place, **options)


def content_blocks(message: dict[str, Any]) -> list[dict[str, str]]:
    """Return a message's content as chat templates take it with images: a block for each text and each image."""
    if not message.get("images"):
        return [{"type": "text", "text": message["content"]}]
    blocks = [[{"type": "image"}, {"type": "text", "text": text}] for text in message["content"].split(PLACE)]
    return [block for block in chain(*blocks) if block.get("text") != ""][1:]


class UnreadableImageError(G2POError):
    """The processor refuses an image, such as one that is too narrow."""


class ImageEncoder:
    """Token ids of prompts with images, of a processor of images and text.

    Attributes:
        token: the text that the chat template writes for an image.
        token_ids: tokens of features, and `token`'s, which must not be sampled.
        reserved: texts of these tokens and of `token`.
    """

    def __init__(self, processor):
        self.processor, tokenizer = processor, processor.tokenizer
        self.token: str = processor.image_token
        self._alone = self._ids(self.token)
        known = [*processor.image_token_ids, *processor.video_token_ids, *self._alone * (len(self._alone) == 1)]
        self.token_ids: list[int] = list(dict.fromkeys(number for number in known if number is not None))
        self.reserved = list(dict.fromkeys([self.token, *tokenizer.convert_ids_to_tokens(self.token_ids)]))
        self._of_sizes: dict[tuple[int, int], tuple[list[int], list[int], list[int]]] = {}

    def ids(self, parts: Sequence[str], images: Sequence[Picture]) -> list[int]:
        """Return the token ids of a text with images, given in parts that are encoded apart.

        Raises `UnreadableImageError`, or `G2POError` if the text does not have the token of an image for each.
        """
        if (written := sum(part.count(self.token) for part in parts)) != len(images):
            what = f"the chat template writes {self.token!r} {written} times for {len(images)} images"
            remedy = "set that of a vision-language model, and {observation} in each text of the prompt template"
            raise G2POError(f"{what}: {remedy}", "chat_template")
        ids, left = [], iter(images)
        for part in parts:
            shown = list(islice(left, part.count(self.token)))
            ids += self._with_images(part, shown) if shown else self._ids(part)
        return ids

    def unexpanded(self, ids: Sequence[int], images: Sequence[Picture]) -> list[int]:
        """Return the token ids of a prompt with the token of each image alone in place of its features.

        Raises `G2POError` if the prompt does not have the images' features, in their order.
        """
        left, shorter = list(ids), []
        for image in images:
            before, written, after = self.written(image)
            at = next((at for at in range(len(left)) if left[at : at + len(written)] == written), len(left))
            text = self._without(left[:at], before, of_end=True)
            others = self._without(left[at + len(written) :], after, of_end=False)
            if at == len(left) or text is None or others is None:
                raise G2POError(f"the prompt has no image of {image.size} pixels as the processor writes it", "images")
            shorter, left = [*shorter, *text, *self._alone], others
        return shorter + left

    def written(self, image: Picture) -> tuple[list[int], list[int], list[int]]:
        """Return the white space before an image's tokens, the tokens, and the white space after, by its size."""
        if image.size not in self._of_sizes:
            ids = self._with_images(self.token, [image])
            blank = [text.isspace() for text in self.processor.tokenizer.batch_decode([[number] for number in ids])]
            begin, end = blank.index(False), len(ids) - blank[::-1].index(False)
            self._of_sizes[image.size] = ids[:begin], ids[begin:end], ids[end:]
        return self._of_sizes[image.size]

    def _without(self, ids: list[int], blank: list[int], of_end: bool) -> list[int] | None:
        """Return ids without white space at an end, which may be joined with that of the text; `None`: without."""
        cut = len(ids) - len(blank) if of_end else len(blank)
        if blank == (ids[cut:] if of_end else ids[:cut]):
            return ids[:cut] if of_end else ids[cut:]
        decode = self.processor.tokenizer.decode
        space, joined = decode(blank), decode(ids[-1:] if of_end else ids[:1])
        rest = joined.removesuffix(space) if of_end else joined.removeprefix(space)
        if rest == joined:
            return None
        return ids[:-1] + self._ids(rest) if of_end else self._ids(rest) + ids[1:]

    def _ids(self, text: str) -> list[int]:
        return self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _with_images(self, part: str, images: Sequence[Picture]) -> list[int]:
        opened = [[image.open() for image in images]]
        try:
            return list(self.processor(text=[part], images=opened, add_special_tokens=False)["input_ids"][0])
        except Exception as error:  # processors raise errors of any class
            sizes = [image.size for image in images]
            why = f"the processor refuses an image among those of {sizes} pixels ({error}): give it another shape"
            raise UnreadableImageError(why, "images") from error


class ImageInputs:
    """A model's inputs beside token ids, of those `accepted`: pixels, their grids, and which tokens are of images."""

    def __init__(self, processor, accepted: Collection[str]):
        self.encoder, self.processor, self.accepted = ImageEncoder(processor), processor, accepted
        self.token_ids = self.encoder.token_ids

    @classmethod
    def of(cls, processing_class, model) -> ImageInputs | None:
        """Return the inputs of a model; `None` for one that reads text alone, or whose tokenizer is given alone."""
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        accepted = frozenset(inspect.signature(model.forward).parameters)
        fits = reads_images(processing_class) and "pixel_values" in accepted
        return cls(processing_class, accepted) if fits else None

    def owners(self, ids: np.ndarray, images: Sequence[Picture]) -> np.ndarray:
        """Return (L,) for each token the number of the image it is a feature of, -1 for text."""
        found = np.full(len(ids), -1)
        features = [int(np.isin(self.encoder.written(image)[1], self.token_ids).sum()) for image in images]
        if images:
            found[np.isin(ids, self.token_ids)] = np.repeat(np.arange(len(images)), features)
        return found

    @cached_property
    def _names(self) -> tuple[list[str], list[str]]:
        """Names of the inputs, and of those that have a number for each token."""
        from PIL import Image

        found = self._processed([[Image.new("RGB", (64, 64))]])
        names = [name for name in found if name in self.accepted and name not in ("input_ids", "attention_mask")]
        types = [name for name in names if name.endswith("token_type_ids")]
        returned = getattr(self.processor, "return_mm_token_type_ids", True)
        return [name for name in names if name not in types], types * returned

    def __call__(self, ids: torch.Tensor, images: Sequence[Sequence[Picture]]) -> dict[str, torch.Tensor]:
        """Return the inputs of rows of token ids (R, L), given the images of each in the order of their tokens."""
        import torch

        inputs, (names, types) = {}, self._names
        for name in types:  # a processor may make some in a way of its own, as for experts of images
            made = getattr(self.processor, f"create_{name}", self.processor.create_mm_token_type_ids)
            inputs[name] = torch.tensor(made(ids.tolist()), device=ids.device)
        if opened := [[image.open() for image in row] for row in images if row]:
            found = self._processed(opened)
            inputs |= {name: found[name].to(ids.device) for name in names}
        return inputs

    def _processed(self, opened: list[list[Any]]) -> dict[str, Any]:
        texts = [self.encoder.token * len(row) for row in opened]
        return self.processor(text=texts, images=opened, padding=True, return_tensors="pt", add_special_tokens=False)

"""What a tool returns as TRL takes it: a text, or blocks of texts and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...prompts.conversation import Message, read_parts
from ...utils.errors import G2POError
from ...utils.images import PLACE, Picture
from ..contract import Observation
from ..validation import EnvironmentContractError


class Shown(str):
    """A text with a `PLACE` for each of its `images`."""

    images: Sequence[Picture] = ()

    @classmethod
    def of(cls, parts: Sequence[str]) -> Shown:
        """Return texts as one, a line each, with their images."""
        shown = cls("\n".join(parts))
        shown.images = [image for part in parts for image in getattr(part, "images", ())]
        return shown

    def observation(self, **fields: Any) -> Observation:
        """Return an observation with this text, before which its images stand."""
        if not self.images:
            return Observation(str(self), **fields)
        return Observation(self.replace(PLACE, "").strip("\n"), images=self.images, **fields)

    def message(self, role: str, **fields: Any) -> Message:
        """Return a message with this text."""
        return {"role": role, **fields, "content": str(self), **({"images": self.images} if self.images else {})}


def content_of(content: Any, name: str) -> Shown:
    """Return a text: of content blocks their texts and images, as TRL takes them, of other values `str(content)`.

    Raises:
        EnvironmentContractError: for a block of another type, or an image that cannot be read; with `name`, the
            method's.
    """
    if not (isinstance(content, list) and content and all(map(_is_block, content))):
        return Shown(content)
    other = next((block["type"] for block in content if block["type"] not in ("text", "image")), None)
    if other is not None:
        raise EnvironmentContractError(
            f"{name} returned a block of type {other!r}: only text and images are supported; return a text that "
            "describes it"
        )
    try:
        text, images = read_parts(content, name, opens_files=True)
    except G2POError as error:
        raise EnvironmentContractError(str(error)) from error
    shown = Shown(text)
    shown.images = images
    return shown


def _is_block(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return "text" in part if kind == "text" else kind in ("image", "image_url", "audio", "video")

"""Results of tools in the forms that TRL accepts: text, or blocks of text and images."""

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
        """Return one text with its parts on separate lines, and their images."""
        shown = cls("\n".join(parts))
        shown.images = [image for part in parts for image in getattr(part, "images", ())]
        return shown

    def observation(self, **fields: Any) -> Observation:
        """Return an observation with this text; its images come first."""
        if not self.images:
            return Observation(str(self), **fields)
        return Observation(self.replace(PLACE, "").strip("\n"), images=self.images, **fields)

    def message(self, role: str, **fields: Any) -> Message:
        """Return a message with this text."""
        return {"role": role, **fields, "content": str(self), **({"images": self.images} if self.images else {})}


def content_of(content: Any, name: str) -> Shown:
    """Return a tool's result: the texts and images of content blocks, as in TRL, or `str(content)`.

    Raises:
        EnvironmentContractError: for a block of another type, or an image that cannot be read. `name`, of the method,
            is in the message.
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

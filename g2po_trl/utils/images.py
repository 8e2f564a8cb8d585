"""Images of observations: PNG bytes that are identified by their hash.

An image is encoded where it is made, in the environment's process, and from then on it is a `Picture`: a text (the
hash) that carries the bytes. Messages, steps and JSON files contain the text; only code that shows the image reads the
bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from .errors import G2POError
from .show import show

if TYPE_CHECKING:
    import PIL.Image

PLACE = "\ufffc"  # in the text of a message, the place of an image; Unicode's object replacement character
_SEEN: WeakValueDictionary[str, Picture] = WeakValueDictionary()  # equal images are in memory once
_SENT: WeakValueDictionary[bytes, Picture] = WeakValueDictionary()  # by digests of data URLs, which recur
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_TAKEN = "a PIL image, the path of a file, an array of uint8 (height, width[, 3]), or a data URL"


class Picture(str):
    """The hash of an image, with its bytes as `png`."""

    png: bytes

    def __new__(cls, png: bytes) -> Picture:
        picture = super().__new__(cls, hashlib.blake2b(png, digest_size=16).hexdigest())
        picture.png = png
        return picture

    def __reduce__(self):
        return Picture, (self.png,)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, from the file's header."""
        return struct.unpack(">II", self.png[16:24])

    def open(self) -> PIL.Image.Image:
        """Return the image in memory, as RGB."""
        from PIL import Image

        return Image.open(io.BytesIO(self.png), formats=["PNG"]).convert("RGB")

    @property
    def data_url(self) -> str:
        """The image as a `data:` URL."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


def read_png(png: bytes) -> Picture:
    """Return the PNG of another process as a picture, after checking its checksums; `ValueError` for other bytes."""
    picture = Picture(png)
    if (known := _SEEN.get(picture)) is not None:
        return known
    try:
        from PIL import Image

        Image.open(io.BytesIO(png), formats=["PNG"]).verify()
    except Exception as error:  # PIL raises errors of several classes for broken files
        raise ValueError(f"an image is no PNG, or broken: {error!r:.200}") from error
    _SEEN[str(picture)] = picture  # a key that is the picture would keep it
    return picture


def as_picture(image: Any, what: str = "an image") -> Picture:
    """Return a PIL image, the path of a file, an array, or a `data:` URL as a picture, in RGB.

    Any other value, a network address, or a file that cannot be read is a `G2POError`, in which `what` names it.
    """
    if isinstance(image, Picture):
        return image
    is_sent = isinstance(image, str) and image.startswith("data:")
    digest = hashlib.blake2b(image.encode()).digest() if is_sent else None
    if (known := _SENT.get(digest)) is not None:
        return known
    try:
        picture = Picture(_png_of(image))
    except Exception as error:  # PIL raises errors of several classes for broken files
        why = _ADDRESS.sub("", str(error))  # agents may show it to the model: a replay must give the same text
        shown = show(image) if isinstance(image, (str, Path)) else f"of type {type(image).__name__}"
        raise G2POError(f"{what} is {shown}, which cannot be read ({why}): give {_TAKEN}", what, image) from error
    if is_sent:
        _SENT[digest] = picture
    return picture


def _png_of(image: Any) -> bytes:
    from PIL import Image, ImageOps

    if isinstance(image, str) and image.startswith("data:"):
        image = Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2], validate=True)))
    elif isinstance(image, (str, Path)):
        image = Image.open(image)
    elif hasattr(image, "dtype"):
        if str(image.dtype) != "uint8":
            raise TypeError(f"an array of {image.dtype}")
        image = Image.fromarray(image)
    if image.mode[0] in "IF":
        raise ValueError(f"of mode {image.mode}: scale its values to 0 to 255")
    pixels = ImageOps.exif_transpose(image).convert("RGB")  # as its camera noted, and as transformers loads one
    pixels.info = {}  # a colour profile and the like would be saved, too: the same pixels have one hash
    file = io.BytesIO()
    pixels.save(file, "PNG", compress_level=1)
    return file.getvalue()

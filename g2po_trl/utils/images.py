"""Images of observations: PNG bytes that are identified by their hash.

An image is encoded where it is made, in the environment's process, and from then on it is a `Picture`: a text (the
hash) that carries the bytes. Messages, steps and JSON files contain the text; only code that shows the image reads the
bytes.
"""

from __future__ import annotations

import base64
import binascii
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
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
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

    def __deepcopy__(self, memo: Any) -> Picture:
        return self

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, from the file's header."""
        return struct.unpack(">II", self.png[16:24])

    def open(self) -> PIL.Image.Image:
        """Return the image in memory, as RGB."""
        return _pil().open(io.BytesIO(self.png), formats=["PNG"]).convert("RGB")

    @property
    def data_url(self) -> str:
        """The image as a `data:` URL."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


def read_png(png: bytes) -> Picture:
    """Return the PNG of another process as a picture, after checking its checksums.

    Raises:
        ValueError: for other bytes.
    """
    if png[:8] != _SIGNATURE or len(png) < 24:
        raise ValueError("an image is not a PNG")
    if (known := _SEEN.get(picture := Picture(png))) is not None:
        return known
    try:
        _pil().open(io.BytesIO(png), formats=["PNG"]).verify()
    except Exception as error:  # PIL raises errors of several classes for broken files
        raise ValueError(f"an image is broken: {error!r:.200}") from error
    _SEEN[picture] = picture
    return picture


def as_picture(image: Any, what: str = "an image") -> Picture:
    """Return an image as a picture, in RGB.

    Args:
        image: a PIL image, the path of a file, an array, or a `data:` URL.
        what: how messages name it.

    Raises:
        G2POError: for any other value, a network address, or a file that cannot be read.
    """
    if isinstance(image, Picture):
        return image
    pil = _pil()
    from PIL import ImageOps

    try:
        sent = isinstance(image, str) and image.startswith("data:") and hashlib.blake2b(image.encode()).digest()
        if sent and (known := _SENT.get(sent)) is not None:
            return known
        opened = image
        if isinstance(image, (str, Path)):
            opened = pil.open(_file(image, what))
        elif hasattr(image, "dtype") and str(image.dtype) == "uint8" and len(image.shape) in (2, 3):
            opened = pil.fromarray(image)
        if isinstance(opened, pil.Image):
            if opened.mode[0] in "IF":
                raise G2POError(
                    f"{what} has the mode {opened.mode}: scale its values to 0 to 255, as an array of uint8"
                )
            file = io.BytesIO()
            upright = ImageOps.exif_transpose(opened)  # as its camera noted, and as transformers loads one
            pixels = upright.convert("RGB")
            pixels.info = {}  # a colour profile and the like would be saved, too: the same pixels have one hash
            pixels.save(file, "PNG", compress_level=1)
            picture = Picture(file.getvalue())
            if sent:
                _SENT[sent] = picture
            return picture
    except Exception as error:  # PIL raises errors of several classes for broken files
        if isinstance(error, G2POError):
            raise
        why = _ADDRESS.sub("", str(error))  # agents may show it to the model: a replay must give the same text
        raise G2POError(f"{what} is {_named(image)}, which cannot be read ({why}): give {_TAKEN}") from error
    raise G2POError(f"{what} is {_named(image)}: give {_TAKEN}")


def _named(image: Any) -> str:
    is_array = hasattr(image, "shape") and hasattr(image, "dtype")
    return f"an array of {image.dtype} with the shape {tuple(image.shape)}" if is_array else show(image)


def _file(place: str | Path, what: str) -> str | Path | io.BytesIO:
    """Return a file that PIL opens: the path, or the bytes of a `data:` URL."""
    if isinstance(place, Path) or "://" not in place[:12] and not place.startswith("data:"):
        return place
    header, comma, data = place.partition(",")
    if not place.startswith("data:"):
        raise G2POError(
            f"{what} is {show(place)}: workers read no addresses. Load it where the agent or the environment runs, "
            "and give data:image/png;base64,…"
        )
    if not header.startswith("data:image/") or not header.endswith(";base64") or not comma:
        raise G2POError(f"{what} is {show(place)}, which is not an image in base64: give data:image/png;base64,…")
    try:
        return io.BytesIO(base64.b64decode(data, validate=True))
    except binascii.Error as error:
        raise G2POError(f"{what} is {show(place)}, which is not base64 ({error}): encode the file again") from error


def _pil() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise G2POError("images need Pillow: pip install pillow") from error
    return PIL.Image

"""Bodies of HTTP requests: with a length or in chunks, plain or compressed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import BinaryIO

from .chat_protocol import RefusedRequestError

MAX_BODY_BYTES = 2**26
_LONGEST_LINE = 2**13
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def read_body(headers: Mapping[str, str], stream: BinaryIO) -> bytes:
    """Return the body of a request.

    Raises:
        RefusedRequestError: if its length is unknown, it is too large, before or after decompression, or not readable.
    """
    coding = headers.get("Transfer-Encoding", "").strip().lower()
    if coding == "chunked":
        body = _read_chunks(stream)
    elif coding not in ("", "identity"):
        raise RefusedRequestError(
            f"Transfer-Encoding is {coding!r}: send the body in chunks, or its length", status=501
        )
    else:
        length = headers.get("Content-Length", "").strip()
        if not (length.isascii() and length.isdecimal()):
            raise RefusedRequestError("the request has no Content-Length: send the length of its body", status=411)
        if len(length) > 18 or int(length) > MAX_BODY_BYTES:
            raise _too_large(f"{int(length):,} bytes" if len(length) <= 18 else "a length of many digits")
        body = stream.read(int(length))
    for encoding in reversed([one.strip().lower() for one in headers.get("Content-Encoding", "").split(",")]):
        body = body if encoding in ("", "identity") else _decompressed(body, encoding)
    return body


def _read_chunks(stream: BinaryIO) -> bytes:
    body = bytearray()
    while True:
        size = _read_line(stream).partition(b";")[0].strip()
        try:
            if not size.isalnum():
                raise ValueError
            length = int(size, 16)
        except ValueError as error:
            raise _unreadable(f"the size of a chunk is {size[:20]!r}") from error
        if length > MAX_BODY_BYTES - len(body):
            raise _too_large(f"more than {MAX_BODY_BYTES:,} bytes in chunks")
        if length == 0:
            break
        chunk = stream.read(length)
        if len(chunk) < length or _read_line(stream):
            raise _unreadable("a chunk does not end where its size says")
        body += chunk
    while _read_line(stream):  # trailers
        pass
    return bytes(body)


def _read_line(stream: BinaryIO) -> bytes:
    line = stream.readline(_LONGEST_LINE + 1)
    if not line.endswith(b"\n"):
        raise _unreadable("a line of it is too long, or cut off")
    return line.rstrip(b"\r\n")


def _decompressed(body: bytes, encoding: str) -> bytes:
    if encoding not in _WINDOWS:
        remedy = f"send it plain, or compressed by {', '.join(_WINDOWS)}"
        raise RefusedRequestError(f"Content-Encoding is {encoding!r}: {remedy}", status=415)
    raw = encoding == "deflate" and not _has_zlib_header(body)  # some clients leave the header out
    decompress = zlib.decompressobj(-15 if raw else _WINDOWS[encoding])
    try:
        plain = decompress.decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise _unreadable(f"it is not compressed by {encoding}: {error}") from error
    if len(plain) > MAX_BODY_BYTES:
        raise _too_large(f"more than {MAX_BODY_BYTES:,} bytes without compression")
    if not decompress.eof:
        raise _unreadable(f"what {encoding} compressed is cut off")
    return plain


def _has_zlib_header(body: bytes) -> bool:
    return len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0


def _too_large(how: str) -> RefusedRequestError:
    return RefusedRequestError(f"the body has {how}, more than {MAX_BODY_BYTES:,}: shorten the messages", status=413)


def _unreadable(why: str) -> RefusedRequestError:
    return RefusedRequestError(f"the body cannot be read ({why}): send its length, or whole chunks")

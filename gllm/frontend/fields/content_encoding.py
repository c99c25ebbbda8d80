"""Decompress request bodies according to their Content-Encoding, up to a size limit."""

import zlib

from gllm.frontend.errors import ApiError

GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
"""Window bits that make zlib detect a gzip or zlib header."""
WINDOW_BITS = {"gzip": GZIP_OR_ZLIB, "x-gzip": GZIP_OR_ZLIB, "deflate": GZIP_OR_ZLIB}
"""Window bits of each supported Content-Encoding."""


class BodyTooLargeError(Exception):
    """The decompressed body exceeds the size limit."""


def check_content_encoding(encoding: str) -> None:
    """Raise ApiError (415) if a Content-Encoding is not supported."""
    if encoding not in WINDOW_BITS:
        supported = ", ".join(WINDOW_BITS)
        message = (
            f"Content-Encoding {encoding!r:.100} is not supported: use {supported} or no encoding"
        )
        raise ApiError(415, message, code="unsupported_encoding")


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the decompressed body. Holds at most `max_bytes` + 1 of it, and releases the GIL.

    Raises:
        BodyTooLargeError: The decompressed body has more than `max_bytes`.
        ApiError: The data is invalid or incomplete.
    """
    window_bits = WINDOW_BITS[encoding]
    if encoding == "deflate" and body[:1] and body[0] & 0xF != zlib.DEFLATED:
        # Some clients omit the zlib header.
        window_bits = -zlib.MAX_WBITS
    decompressor = zlib.decompressobj(window_bits)
    try:
        data = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as error:
        message = f"The request body is not valid {encoding} data: {error}"
        raise ApiError(400, message, code="invalid_body") from error
    if len(data) > max_bytes:
        raise BodyTooLargeError
    if not decompressor.eof:
        message = f"The request body is incomplete: its {encoding} data has no end."
        raise ApiError(400, message, code="invalid_body")
    return data

"""Bodies that clients have compressed.

Owns the encodings that are read and the bound on what comes out of one. Knows nothing of JSON.
"""

import zlib

from gllm.frontend.errors import ApiError

AUTOMATIC = zlib.MAX_WBITS | 32
"""Window bits for gzip and zlib, by what the header says."""
WINDOW_BITS = {"gzip": AUTOMATIC, "x-gzip": AUTOMATIC, "deflate": AUTOMATIC}


class BodyTooLargeError(Exception):
    """More comes out of a body than is allowed."""


def check_content_encoding(encoding: str) -> None:
    """Raise ApiError for a Content-Encoding that is not read here."""
    if encoding not in WINDOW_BITS:
        known = ", ".join(WINDOW_BITS)
        message = f"Content-Encoding {encoding!r:.100} is not supported: send {known} or plain JSON"
        raise ApiError(415, message, code="unsupported_encoding")


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return what was compressed. Holds no more than `max_bytes` of it, and no lock of Python's
    while it works.

    Raises BodyTooLargeError if there is more, ApiError if the body is broken.
    """
    bits = WINDOW_BITS[encoding]
    if encoding == "deflate" and body[:1] and body[0] & 0xF != zlib.DEFLATED:
        # Some clients leave out zlib's header.
        bits = -zlib.MAX_WBITS
    inflater = zlib.decompressobj(bits)
    try:
        plain = inflater.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise ApiError(400, f"the body is not {encoding}: {error}", code="invalid_body") from error
    if len(plain) > max_bytes:
        raise BodyTooLargeError
    if not inflater.eof:
        raise ApiError(400, f"the body ends before its {encoding} data does", code="invalid_body")
    return plain

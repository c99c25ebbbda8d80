"""How much a JSON text holds, counted before it is decoded.

Owns the bounds on values: decoding costs little per byte of a long string, and much per value.
Knows nothing of fields.
"""

from collections.abc import Iterator

from gllm.config.limits import MAX_JSON_NUMBERS, MAX_JSON_VALUES
from gllm.frontend.errors import ApiError

SMALL_BODY_BYTES = 2**16
"""Texts up to this size hold too few values to be counted."""
PIECE_BYTES = 2**18
"""Counted at once: a thread that counts lets others run between two pieces."""


def check_json_size(body: bytes) -> None:
    """Raise ApiError if a JSON text holds more values than any request needs.

    For a thread of its own: it takes about 10 ns per byte where strings are full of JSON.
    """
    if len(body) <= SMALL_BODY_BYTES or _is_surely_small(body):
        return
    values = commas = 0
    for num_strings, outside in _structure(body):
        values += num_strings + outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        if values > MAX_JSON_VALUES:
            raise _too_many(f"{MAX_JSON_VALUES} strings, lists and objects")
        if commas > MAX_JSON_NUMBERS:
            raise _too_many(f"{MAX_JSON_NUMBERS} commas between values")


def _is_surely_small(body: bytes) -> bool:
    """Whether there are few enough quotes, brackets and commas, those within strings included."""
    values = body.count(b'"') // 2 + body.count(b"[") + body.count(b"{")
    return values <= MAX_JSON_VALUES and body.count(b",") <= MAX_JSON_NUMBERS


def _structure(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield for each piece of a JSON text how many strings begin in it, and what is outside of
    strings."""
    is_inside = False
    begin = 0
    while begin < len(body):
        piece = body[begin : begin + PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and begin + len(piece) < len(body):
            piece = piece[:-1]  # not between a backslash and what it escapes
        begin += len(piece)
        # Without escaped backslashes and quotes every quote begins or ends a string.
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield (len(parts) - is_inside) // 2, b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


def _too_many(what: str) -> ApiError:
    return ApiError(400, f"The body has more than {what}.", code="body_too_complex")

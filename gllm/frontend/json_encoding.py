"""Encode responses as JSON; large ones in pieces, so that other threads can run in between."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

MIN_SPLIT_ENTRIES = 64
"""Minimum length of a list that is encoded entry by entry."""
NUMBERS_PER_PIECE = 4096
"""Numbers of a list that are encoded at once."""


def json_response(answer: msgspec.Struct, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return an HTTP response with a struct as its JSON body."""
    return web.Response(
        body=msgspec.json.encode(answer),
        content_type="application/json",
        charset="utf-8",
        headers=headers,
    )


def encode_json_in_pieces(value: Any) -> bytes:
    """Encode a large value as JSON in pieces, so that no single call holds the GIL for long.

    Call it in a thread: other threads run between the pieces.
    """
    return msgspec.json.encode(_in_pieces(value))


def _in_pieces(value: Any) -> Any:
    """Return a value in which long lists are replaced by encoded JSON."""
    if isinstance(value, msgspec.Struct):
        value = {
            name: item
            for name, item in msgspec.structs.asdict(value).items()
            if item is not msgspec.UNSET
        }
    if isinstance(value, dict):
        return {name: _in_pieces(item) for name, item in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) < MIN_SPLIT_ENTRIES:
        return [_in_pieces(item) for item in value]
    if isinstance(value[0], int | float):
        return _numbers(value)
    return [msgspec.Raw(msgspec.json.encode(item)) for item in value]


def _numbers(values: Sequence[int | float]) -> msgspec.Raw:
    """Return a long list of numbers as encoded JSON."""
    begins = range(0, len(values), NUMBERS_PER_PIECE)
    parts = [
        msgspec.json.encode(values[begin : begin + NUMBERS_PER_PIECE])[1:-1] for begin in begins
    ]
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")

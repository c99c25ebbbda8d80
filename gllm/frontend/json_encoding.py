"""JSON of large answers, encoded so that other threads run in between.

Owns the cutting into pieces. Knows nothing of what answers say.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

MIN_SPLIT_ENTRIES = 64
"""Entries from which on a list is encoded entry by entry."""
NUMBERS_PER_PIECE = 4096
"""Encoded at once."""


def encode_json_in_pieces(value: Any) -> bytes:
    """Return a value as JSON. For a thread: nothing is encoded for long with the interpreter locked
    but the copying of finished pieces."""
    return msgspec.json.encode(_in_pieces(value))


def _in_pieces(value: Any) -> Any:
    """A value whose long lists hold finished JSON."""
    if isinstance(value, dict):
        return {name: _in_pieces(one) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) < MIN_SPLIT_ENTRIES:
        return [_in_pieces(one) for one in value]
    if isinstance(value[0], int | float):
        return _numbers(value)
    return [msgspec.Raw(msgspec.json.encode(one)) for one in value]


def _numbers(values: Sequence[int | float]) -> msgspec.Raw:
    """A long list of numbers."""
    begins = range(0, len(values), NUMBERS_PER_PIECE)
    parts = [
        msgspec.json.encode(values[begin : begin + NUMBERS_PER_PIECE])[1:-1] for begin in begins
    ]
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")

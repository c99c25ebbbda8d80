"""Encodings: how gllm-link writes activations on a connection.

An encoding is one class of this package and one line of `gllm.config.link_encodings`. It sees rows:
the activations of one token each. Encoded rows have equal lengths, so a receiver decodes each row
as soon as its bytes have arrived.
"""

import importlib
from typing import NamedTuple, Protocol

from gllm.config.link_encodings import LINK_ENCODINGS


class RowFormat(NamedTuple):
    """Number and dtype of the elements of one row, for example the activations of one token."""

    hidden_size: int
    itemsize: int
    """Bytes per element: 4 for float32, 2 for bfloat16 and float16."""
    is_bfloat16: bool = False
    """True if elements of 2 bytes are bfloat16."""

    @property
    def num_bytes(self) -> int:
        """Length of a row."""
        return self.hidden_size * self.itemsize


class LinkEncoding(Protocol):
    """Interface of an encoding of activations or KV on the network, for example int8.

    Methods keep no state between calls.
    """

    def row_bytes(self, row: RowFormat) -> int:
        """Return the bytes of an encoded row, at most those of the row itself."""

    def encode(self, rows: memoryview, row: RowFormat) -> memoryview:
        """Return whole rows encoded, possibly in the same memory."""

    def decode(self, encoded: memoryview, row: RowFormat, rows: memoryview) -> None:
        """Decode whole rows into memory of the same number of rows; any bytes are valid input."""


class PlainEncoding:
    """Encoding that sends activations unchanged."""

    def row_bytes(self, row: RowFormat) -> int:
        """Return the length of the row."""
        return row.num_bytes

    def encode(self, rows: memoryview, row: RowFormat) -> memoryview:
        """Return the rows themselves."""
        return rows

    def decode(self, encoded: memoryview, row: RowFormat, rows: memoryview) -> None:
        """Copy the rows."""
        rows[:] = encoded


def make_encoding(name: str) -> LinkEncoding:
    """Create the network encoding of activations with the given name.

    Args:
        name: a name of LINK_ENCODINGS.

    Raises:
        ValueError: There is no such encoding.
    """
    if name not in LINK_ENCODINGS:
        raise ValueError(f"the encoding {name!r} is none of {', '.join(LINK_ENCODINGS)}")
    module, class_name = LINK_ENCODINGS[name]
    encoding: LinkEncoding = getattr(importlib.import_module(module), class_name)()
    return encoding

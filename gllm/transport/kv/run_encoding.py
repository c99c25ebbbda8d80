"""Encoding of runs on the wire: the bytes as they are, or 8-bit integers with a scale per head."""

import numpy as np

from gllm.config.link_encodings import PLAIN
from gllm.messages.kv_layout import KvLayout
from gllm.transport.kv.pages import Bytes, KvPagesError
from gllm.transport.link.encodings import LinkEncoding, RowFormat, make_encoding

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class RunEncoding:
    """Encoding of the runs of one layer. A row is a key or a value of one token and head."""

    def __init__(self, name: str, layout: KvLayout, layer: int) -> None:
        """Prepare an encoding.

        Args:
            name: Of LINK_ENCODINGS. A cache of 8-bit elements is sent as it is.
            layout: Of the worker.
            layer: Index in the model; one of the layout's.

        Raises:
            KvPagesError: There is no such encoding.
        """
        self._encoding: LinkEncoding | None = None
        each = next(each for each in layout.layers if each.layer == layer)
        widths = [width for width in (each.key_bytes, each.value_bytes) if width]
        item_bytes = _ITEM_BYTES.get(layout.dtype)
        if name != PLAIN and item_bytes is not None:
            try:
                self._encoding = make_encoding(name)
            except ValueError as error:
                raise KvPagesError(str(error)) from error
            is_bfloat16 = layout.dtype == "bfloat16"
            self._rows = [
                RowFormat(width // item_bytes, item_bytes, is_bfloat16) for width in widths
            ]

    def encode(self, run: Bytes) -> Bytes:
        """Return a run, keys then values, as it travels."""
        if self._encoding is None:
            return run
        num_rows = len(run) // sum(row.num_bytes for row in self._rows)
        parts, begin = [], 0
        for row in self._rows:
            end = begin + num_rows * row.num_bytes
            parts.append(np.frombuffer(self._encoding.encode(run[begin:end].data, row), np.uint8))
            begin = end
        return np.concatenate(parts)

    def decode(self, encoded: Bytes) -> Bytes:
        """Return a run as it was, or nearly. Raises KvPagesError for a wrong length."""
        if self._encoding is None:
            return encoded
        sizes = [self._encoding.row_bytes(row) for row in self._rows]
        num_rows, rest = divmod(len(encoded), sum(sizes))
        if rest:
            raise KvPagesError(f"an encoded run of {len(encoded)} bytes")
        parts, begin = [], 0
        for row, size in zip(self._rows, sizes, strict=True):
            part = np.empty(num_rows * row.num_bytes, np.uint8)
            end = begin + num_rows * size
            self._encoding.decode(encoded[begin:end].data, row, part.data)
            parts.append(part)
            begin = end
        return np.concatenate(parts)

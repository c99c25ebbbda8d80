"""Activations of a step on a connection with an encoding: encoded and decoded row by row.

Both ends convert only the rows that a chunk covers, so decodes of another lane do not wait until a
long prefill is converted.
"""

from gllm.transport.link.encodings import LinkEncoding, RowFormat


class EncodedRows:
    """Encoded activations of a step, as a sequence of bytes; rows are encoded when they are read.

    Args:
        rows: Activations in the slot's memory.
        row: Their format.
        encoding: Of the connection.
    """

    def __init__(self, rows: memoryview, row: RowFormat, encoding: LinkEncoding) -> None:
        self._rows, self._row, self._encoding = rows, row, encoding
        self._row_bytes = encoding.row_bytes(row)
        self._num_rows = len(rows) // row.num_bytes
        self._encoded = bytearray(self._num_rows * self._row_bytes)
        self._num_encoded = 0
        """Rows that are encoded."""

    def __len__(self) -> int:
        """Return the number of encoded bytes."""
        return len(self._encoded)

    def __getitem__(self, part: slice) -> memoryview:
        """Return a part of the encoded bytes."""
        begin, end, _ = part.indices(len(self._encoded))
        self._encode(min(self._num_rows, -(-end // self._row_bytes)))
        return memoryview(self._encoded)[begin:end]

    def _encode(self, end: int) -> None:
        """Encode the rows up to `end`."""
        begin, size = self._num_encoded, self._row.num_bytes
        if begin < end:
            rows = self._rows[begin * size : end * size]
            place = slice(begin * self._row_bytes, end * self._row_bytes)
            self._encoded[place] = self._encoding.encode(rows, self._row)
            self._num_encoded = end


class RowDecoder:
    """Memory for the encoded activations of a step, which decodes each row that is complete.

    Args:
        rows: Memory for the activations.
        row: Their format.
        encoding: Of the connection.
    """

    def __init__(self, rows: memoryview, row: RowFormat, encoding: LinkEncoding) -> None:
        self._rows, self._row, self._encoding = rows, row, encoding
        self._row_bytes = encoding.row_bytes(row)
        self.encoded = memoryview(bytearray(len(rows) // row.num_bytes * self._row_bytes))
        """Memory for the encoded bytes, which arrive in order."""
        self._num_decoded = 0

    def decode(self, num_bytes: int) -> None:
        """Decode the rows that are complete once `num_bytes` bytes have arrived."""
        begin, end = self._num_decoded, num_bytes // self._row_bytes
        if begin < end:
            size, row_bytes = self._row.num_bytes, self._row_bytes
            rows = self._rows[begin * size : end * size]
            self._encoding.decode(
                self.encoded[begin * row_bytes : end * row_bytes], self._row, rows
            )
            self._num_decoded = end

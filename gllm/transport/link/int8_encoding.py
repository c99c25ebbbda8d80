"""Encoding of activations as 8-bit integers with one scale per token."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gllm.transport.link.encodings import RowFormat

Floats = NDArray[np.float32]

SCALE_BYTES = 2
"""Bytes of a scale: a bfloat16, which has the range of float32."""
MAX_LEVEL = 127
"""Largest absolute value of an encoded element."""
BLOCK_ELEMENTS = 2**17
"""Elements that are converted at a time: their float32 values stay in a core's cache."""
MAX_BFLOAT16 = 3.3895314e38
"""Largest finite bfloat16."""
MAX_FLOAT16 = 65504.0
"""Largest finite float16."""


class Int8Encoding:
    """Encoding that quantizes the activations of each token to int8 with one scale per token.

    The scale of a token is its largest absolute value / 127, rounded up to a bfloat16. An encoded
    row is the scale and then one byte per element: hidden_size + 2 bytes. The error of an element
    is at most half a scale, before it is rounded to the format of the row. A token with a value
    that is not finite arrives as NaN in all elements.

    Source: the quantization of activations per token in Yao et al., "ZeroQuant" (NeurIPS 2022).
    """

    def row_bytes(self, row: RowFormat) -> int:
        """Return the bytes of an encoded row: a scale, and one byte per element."""
        return SCALE_BYTES + row.hidden_size

    def encode(self, rows: memoryview, row: RowFormat) -> memoryview:
        """Quantize whole rows; return [rows] of `row_bytes` bytes each."""
        num_rows = len(rows) // row.num_bytes
        memory = np.frombuffer(rows, np.uint8).reshape(num_rows, row.num_bytes)
        encoded = np.empty((num_rows, self.row_bytes(row)), np.uint8)
        with np.errstate(all="ignore"):
            for block in _blocks(num_rows, row):
                values = _read_floats(memory[block], row)
                largest = np.abs(values).max(axis=1)
                is_finite = np.isfinite(largest)
                scales = _round_up_to_bfloat16(np.where(is_finite, largest / MAX_LEVEL, np.nan))
                divisors = _from_bfloat16(scales)
                divisors[~(is_finite & (divisors > 0))] = np.inf
                levels = np.rint(values / divisors[:, None])
                levels[~is_finite] = 0
                encoded[block, :SCALE_BYTES] = scales[:, None].view(np.uint8)
                encoded[block, SCALE_BYTES:] = levels.astype(np.int8).view(np.uint8)
        return encoded.reshape(-1).data

    def decode(self, encoded: memoryview, row: RowFormat, rows: memoryview) -> None:
        """Dequantize the rows in `encoded` and write them to `rows` in the format `row`."""
        num_rows = len(encoded) // self.row_bytes(row)
        source = np.frombuffer(encoded, np.uint8).reshape(num_rows, self.row_bytes(row))
        target = np.frombuffer(rows, np.uint8).reshape(num_rows, row.num_bytes)
        with np.errstate(all="ignore"):
            for block in _blocks(num_rows, row):
                scales = np.ascontiguousarray(source[block, :SCALE_BYTES]).view("<u2")
                levels = source[block, SCALE_BYTES:].view(np.int8)
                values = levels.astype(np.float32) * _from_bfloat16(scales)
                target[block] = _write_floats(values, row)


def _blocks(num_rows: int, row: RowFormat) -> Iterator[slice]:
    """Yield the rows in parts of at most BLOCK_ELEMENTS elements."""
    step = max(1, BLOCK_ELEMENTS // max(1, row.hidden_size))
    for begin in range(0, num_rows, step):
        yield slice(begin, min(begin + step, num_rows))


def _read_floats(memory: NDArray[np.uint8], row: RowFormat) -> Floats:
    """Return rows of bytes as float32 [rows, hidden_size]."""
    if row.itemsize == 4:
        return memory.view("<f4")
    if row.is_bfloat16:
        return _from_bfloat16(memory.view("<u2"))
    return memory.view("<f2").astype(np.float32)


def _write_floats(values: Floats, row: RowFormat) -> NDArray[np.uint8]:
    """Return float32 [rows, hidden_size] as bytes of a row format, rounded to nearest even.

    Values beyond the format's range become its largest: a scale that was rounded up must not make
    an element infinite.
    """
    if row.itemsize == 4:
        return np.clip(values, -np.finfo(np.float32).max, np.finfo(np.float32).max).view(np.uint8)
    if not row.is_bfloat16:
        return np.clip(values, -MAX_FLOAT16, MAX_FLOAT16).astype("<f2").view(np.uint8)
    bits = np.clip(values, -MAX_BFLOAT16, MAX_BFLOAT16).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").view(np.uint8)


def _from_bfloat16(bits: NDArray[np.uint16]) -> Floats:
    """Return bfloat16 as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _round_up_to_bfloat16(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Return the bits of the smallest bfloat16 that is at least a value, which is not negative."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0xFFFF)) >> np.uint32(16)
    return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2")

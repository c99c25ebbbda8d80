"""Types of GGUF's tensors: blocks of neighbouring weights, unpacked to codes, scales and minimums.

Nothing is rounded: `dequantize_rows` of what `unpack` returns has the bits of llama.cpp's
dequantization. Codes of 2, 3 and 5 bits have 4 and 6 bits in memory, scales keep the form that they
have in the file: numbers in float16, or 8-bit integers times a float16 unit per 256 weights.

Source: ggml's `ggml-common.h` (`block_q4_0` and so on) and `dequantize_row_*` of `ggml-quants.c`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from gllm.kernels.grouped_weight import GroupedRows, GroupLayout, GroupScales
from gllm.models.errors import ModelError
from gllm.models.formats.gguf_file import BlockType

FLOATS: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
"""Types that are plain numbers."""
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values that the codes of IQ4_NL and IQ4_XS choose from."""
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values, doubled, that the codes of MXFP4 choose from."""


@dataclass(frozen=True, slots=True)
class GroupedType:
    """Type of few bits: how its weights lie in memory, and how a block is unpacked."""

    layout: GroupLayout
    unpack: Callable[[Tensor], GroupedRows]
    """Unpacks blocks [rows, blocks, bytes per block] uint8."""
    memory_bytes: float
    """Bytes in memory per weight."""


def grouped_type(name: str) -> GroupedType | None:
    """Return the type of few bits with a name; None for floats. Raises ModelError for others."""
    if name in FLOATS:
        return None
    if name not in GROUPED_TYPES:
        raise ModelError(
            f"type {name} is not implemented: choose a file of the model of another type, such as "
            f"Q4_K_M; types that are: {', '.join((*FLOATS, *GROUPED_TYPES))}"
        )
    return GROUPED_TYPES[name]


def view_blocks(data: bytearray, rows: int, kind: BlockType) -> Tensor:
    """Return the blocks of some rows, [rows, blocks, bytes per block] uint8, without a copy."""
    return torch.frombuffer(data, dtype=torch.uint8).view(rows, -1, kind.nbytes)


def _halves(blocks: Tensor, begin: int) -> Tensor:
    """Return the float16 numbers at a byte of each block, [rows, blocks]."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16)[..., 0]


def _fields(data: Tensor, width: int) -> Tensor:
    """Return fields of `width` bits, [..., 8 / width, n] of bytes [..., n], the lowest first."""
    mask = (1 << width) - 1
    return torch.stack([data >> shift & mask for shift in range(0, 8, width)], -2)


def _nibbles(blocks: Tensor, begin: int) -> Tensor:
    """Return the codes [rows, blocks, 32] of 16 bytes of each block: low halves, then high ones."""
    return _fields(blocks[..., begin : begin + 16], 4).flatten(2)


def _with_fifth_bit(blocks: Tensor, begin: int) -> Tensor:
    """Return the codes [rows, blocks, 32] of 4 bytes with their highest bits and 16 with others."""
    # Bit i of the four bytes is that of code i.
    high = _fields(blocks[..., begin : begin + 4], 1).transpose(2, 3).flatten(2)
    return _nibbles(blocks, begin + 4) | high << 4


def _rows(codes: Tensor, scales: GroupScales, minimums: GroupScales | None = None) -> GroupedRows:
    """Return rows of codes that have further dimensions."""
    return GroupedRows(codes.flatten(1), scales, minimums)


def _q4_0(blocks: Tensor) -> GroupedRows:
    return _rows(_nibbles(blocks, 2), GroupScales(_halves(blocks, 0)))


def _q4_1(blocks: Tensor) -> GroupedRows:
    # The file has what is added, the layout what is subtracted.
    minimums = GroupScales(-_halves(blocks, 2))
    return _rows(_nibbles(blocks, 4), GroupScales(_halves(blocks, 0)), minimums)


def _q5_0(blocks: Tensor) -> GroupedRows:
    return _rows(_with_fifth_bit(blocks, 2), GroupScales(_halves(blocks, 0)))


def _q5_1(blocks: Tensor) -> GroupedRows:
    minimums = GroupScales(-_halves(blocks, 2))
    return _rows(_with_fifth_bit(blocks, 4), GroupScales(_halves(blocks, 0)), minimums)


def _q8_0(blocks: Tensor) -> GroupedRows:
    # Codes from -128 become those from 0: the highest bit changes.
    return _rows(blocks[..., 2:] ^ 0x80, GroupScales(_halves(blocks, 0)))


def _integer_scales(numbers: Tensor, units: Tensor) -> GroupScales:
    """Return scales of numbers [rows, blocks, groups] times units [rows, blocks]."""
    return GroupScales(numbers.flatten(1).to(torch.int8), units)


def _q2_k(blocks: Tensor) -> GroupedRows:
    codes = _fields(blocks[..., 16:80].unflatten(2, (2, 32)), 2)
    scales = _integer_scales(blocks[..., :16] & 15, _halves(blocks, 80))
    minimums = _integer_scales(blocks[..., :16] >> 4, _halves(blocks, 82))
    return _rows(codes, scales, minimums)


def _q3_k(blocks: Tensor) -> GroupedRows:
    low = _fields(blocks[..., 32:96].unflatten(2, (2, 32)), 2).flatten(2)
    high = _fields(blocks[..., :32], 1).flatten(2)
    packed = blocks[..., 96:108]
    numbers = _fields(packed[..., :8], 4).flatten(2) | _fields(packed[..., 8:], 2).flatten(2) << 4
    scales = _integer_scales(numbers.to(torch.int8) - 32, _halves(blocks, 108))
    return _rows(low | high << 2, scales)


def _k_scales(blocks: Tensor) -> tuple[GroupScales, GroupScales]:
    """Return scales and minimums of Q4_K and Q5_K: 6 bits each in 12 bytes, after their units."""
    scales, minimums, low = blocks[..., 4:16].unflatten(2, (3, 4)).unbind(2)
    return (
        _integer_scales(
            torch.cat((scales & 63, low & 15 | (scales >> 2 & 0x30)), 2), _halves(blocks, 0)
        ),
        _integer_scales(
            torch.cat((minimums & 63, low >> 4 | (minimums >> 2 & 0x30)), 2), _halves(blocks, 2)
        ),
    )


def _q4_k(blocks: Tensor) -> GroupedRows:
    return _rows(_fields(blocks[..., 16:].unflatten(2, (4, 32)), 4), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> GroupedRows:
    low = _fields(blocks[..., 48:].unflatten(2, (4, 32)), 4).flatten(2)
    high = _fields(blocks[..., 16:48], 1).flatten(2)
    return _rows(low | high << 4, *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> GroupedRows:
    low = _fields(blocks[..., :128].unflatten(2, (2, 64)), 4).flatten(2)
    high = _fields(blocks[..., 128:192].unflatten(2, (2, 32)), 2).flatten(2)
    scales = _integer_scales(blocks[..., 192:208].view(torch.int8), _halves(blocks, 208))
    return _rows(low | high << 4, scales)


def _iq4_xs(blocks: Tensor) -> GroupedRows:
    codes = _fields(blocks[..., 8:].unflatten(2, (8, 16)), 4)
    # Four bits of two groups per byte, then two bits of four groups.
    low = _fields(blocks[..., 4:8], 4).transpose(2, 3).flatten(2)
    high = _fields(blocks[..., 2:4], 2).transpose(2, 3).flatten(2)
    numbers = (low | high << 4).to(torch.int8) - 32
    return _rows(codes, _integer_scales(numbers, _halves(blocks, 0)))


def _mxfp4(blocks: Tensor) -> GroupedRows:
    exponents = blocks[..., 0].int()
    # Half of 2^(exponent - 127), whose bits are built: below 2^-126 numbers are denormal.
    bits = torch.where(exponents < 2, 1 << 21 + exponents.clamp(max=1), (exponents - 1) << 23)
    scales = bits.view(torch.float32).to(torch.bfloat16)
    return _rows(_nibbles(blocks, 1), GroupScales(scales))


def _table(values: tuple[int, ...]) -> GroupLayout:
    """Return the layout of groups of 32 whose codes choose from values, and their zero."""
    zero = -min(values)
    return GroupLayout(4, 32, zero, tuple(value + zero for value in values))


GROUPED_TYPES: Mapping[str, GroupedType] = MappingProxyType(
    {
        "Q4_0": GroupedType(GroupLayout(4, 32, zero=8), _q4_0, 0.5625),
        "Q4_1": GroupedType(GroupLayout(4, 32), _q4_1, 0.625),
        "Q5_0": GroupedType(GroupLayout(6, 32, zero=16), _q5_0, 0.8125),
        "Q5_1": GroupedType(GroupLayout(6, 32), _q5_1, 0.875),
        "Q8_0": GroupedType(GroupLayout(8, 32, zero=128), _q8_0, 1.0625),
        "Q2_K": GroupedType(GroupLayout(4, 16), _q2_k, 0.640625),
        "Q3_K": GroupedType(GroupLayout(4, 16, zero=4), _q3_k, 0.5703125),
        "Q4_K": GroupedType(GroupLayout(4, 32), _q4_k, 0.578125),
        "Q5_K": GroupedType(GroupLayout(6, 32), _q5_k, 0.828125),
        "Q6_K": GroupedType(GroupLayout(6, 16, zero=32), _q6_k, 0.8203125),
        "IQ4_NL": GroupedType(_table(IQ4_VALUES), _q4_0, 0.5625),
        "IQ4_XS": GroupedType(_table(IQ4_VALUES), _iq4_xs, 0.5390625),
        "MXFP4": GroupedType(_table(MXFP4_VALUES), _mxfp4, 0.5625),
    }
)
"""Types of few bits that are implemented, by their names in ggml."""

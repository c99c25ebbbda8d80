"""Weights of few bits as checkpoints of safetensors store them: bits, groups and ranks' parts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gllm.kernels.grouped_weight import (
    BLOCK_INPUTS,
    GroupedRows,
    GroupedWeight,
    GroupLayout,
    GroupScales,
)
from gllm.models.formats.stored_format import StoredLinear
from gllm.models.shard import is_aligned, shard_groups, widen
from gllm.models.spec.parts import DimensionShard

WORD_BITS = 32
"""Bits of the integers that hold codes. Codes of any width begin anew after 32 of them."""


def unpack_bits(data: Tensor, width: int, count: int) -> Tensor:
    """Return integers of `width` bits, [..., count] uint8, the lowest bits first.

    Args:
        data: [..., n] of int32 or uint8: a stream of bits in the last dimension.
        width: bits of an integer, 1 to 8.
        count: number of integers.
    """
    data = data.contiguous().view(torch.uint8)
    if 8 % width == 0:
        mask = (1 << width) - 1
        parts = [data >> shift & mask for shift in range(0, 8, width)]
        return torch.stack(parts, -1).flatten(-2)[..., :count]
    bits = torch.stack([data >> shift & 1 for shift in range(8)], -1).flatten(-2)
    bits = bits[..., : count * width].unflatten(-1, (count, width))
    numbers = bits[..., 0].clone()
    for index in range(1, width):
        numbers |= bits[..., index] << index
    return numbers


def bit_words(size: int, width: int) -> int:
    """Return the number of 32-bit words that hold `size` codes of `width` bits."""
    return -(-size * width // WORD_BITS)


def shard_words(shard: DimensionShard | None, width: int) -> DimensionShard | None:
    """Return the words with the codes of a shard that begins and ends at multiples of 32 codes."""
    if shard is None:
        return None
    runs = tuple((begin * width // WORD_BITS, bit_words(end, width)) for begin, end in shard.runs)
    return DimensionShard(bit_words(shard.size, width), runs)


@dataclass(frozen=True, slots=True)
class WidenedShard:
    """The part of a dimension that is loaded, and the whole words of codes around it."""

    wide: DimensionShard | None
    """The elements that are read; None for the whole dimension."""
    positions: Tensor
    """Index of each element to load among those that are read, ascending."""

    @property
    def count(self) -> int:
        """Number of elements to load."""
        return len(self.positions)


def widen_to_units(shard: DimensionShard | None, size: int, unit: int = WORD_BITS) -> WidenedShard:
    """Return a shard of a dimension of `size` elements, read in whole units."""
    if shard is None:
        return WidenedShard(None, torch.arange(size))
    wide = widen(shard, unit)
    held, chosen = (torch.cat([torch.arange(*run) for run in each.runs]) for each in (wide, shard))
    return WidenedShard(wide, torch.searchsorted(held, chosen))


@dataclass(frozen=True, slots=True)
class GroupedInputs:
    """The inputs of a layer's part, in groups that share a scale."""

    group: int
    """Inputs per group; all of them if the checkpoint has a scale per output."""
    shard: WidenedShard
    groups: DimensionShard | None
    """Groups to load; None for all."""
    num_stored: int
    """Groups of the whole layer."""

    @property
    def layout_group(self) -> int:
        """Inputs per group for the kernels: a multiple of what they sum at once."""
        group, inputs = self.group, self.shard.count
        return group if group < inputs or not group % BLOCK_INPUTS else _round_up(inputs)


def _round_up(size: int) -> int:
    return -(-size // BLOCK_INPUTS) * BLOCK_INPUTS


def group_inputs(layer: StoredLinear) -> GroupedInputs:
    """Return the groups of a layer's inputs.

    Raises:
        ValueError: the shard divides a group.
    """
    inputs = layer.shape[1]
    if layer.spec.block is None:
        return GroupedInputs(inputs, widen_to_units(layer.columns, inputs), None, 1)
    group = layer.spec.block[1]
    if layer.columns is not None and not is_aligned(layer.columns, group):
        raise ValueError(f"is divided among ranks within groups of {group} inputs with one scale")
    shard = widen_to_units(layer.columns, inputs, group)
    return GroupedInputs(group, shard, shard_groups(layer.columns, group), -(-inputs // group))


def check_scales(scales: Tensor) -> Tensor:
    """Return scales. Raises ValueError for those that are no finite floats."""
    if not scales.is_floating_point() or not bool(scales.isfinite().all()):
        raise ValueError("has scales that are no floats or not finite")
    return scales


def grouped_weight(
    layer: StoredLinear,
    layout: GroupLayout,
    unpack: Callable[[int, int], Tensor],
    scales: Tensor,
    minimums: GroupScales | None = None,
    order: Tensor | None = None,
) -> GroupedWeight:
    """Return the weight with these codes and scales.

    Args:
        layer: the layer.
        layout: layout of the codes in memory.
        unpack: returns the codes [outputs, inputs] uint8 of some outputs, in the order of `order`.
        scales: [outputs, groups], of the part to load.
        minimums: [outputs, groups] likewise.
        order: [inputs] int64: the input that each column of codes multiplies; None: in order.
    """
    rows, columns = layer.rows, layer.columns
    shape = (
        layer.shape[0] if rows is None else rows.num_elements,
        layer.shape[1] if columns is None else columns.num_elements,
    )
    all_scales = GroupScales(scales.contiguous())
    read = partial(_read_rows, unpack, all_scales, minimums)
    nbytes = shape[0] * shape[1] * layout.width // 8 + all_scales.nbytes
    nbytes += 0 if minimums is None else minimums.nbytes
    return GroupedWeight(layout, shape, nbytes, read, layer.dtype, order=order)


def _read_rows(
    unpack: Callable[[int, int], Tensor],
    scales: GroupScales,
    minimums: GroupScales | None,
    begin: int,
    end: int,
) -> GroupedRows:
    """Return the outputs from `begin` to `end`; see `grouped_weight`."""
    parts = [
        None if each is None else each.map(lambda part: part[begin:end])
        for each in (scales, minimums)
    ]
    assert parts[0] is not None, "weights have scales"
    return GroupedRows(unpack(begin, end), parts[0], parts[1])


def integer_layout(
    width: int, group: int, scales: Tensor, zeros: Tensor | None
) -> tuple[GroupLayout, GroupScales | None]:
    """Return the layout of integers and their minimums: w = scale * (code - zero).

    Args:
        width: bits of a code in the checkpoint.
        group: inputs per group.
        scales: [outputs, groups].
        zeros: [outputs, groups] uint8: code of 0 in each group; None for the middle of all codes.
    """
    layout = GroupLayout(4 if width <= 4 else 8, group, zero=1 << (width - 1))
    if zeros is None:
        return layout, None
    if bool((zeros == zeros[0, 0]).all()):
        return replace(layout, zero=int(zeros[0, 0])), None
    differences = zeros.int() - layout.zero
    if scales.dtype == torch.float16:
        return layout, GroupScales(differences.to(torch.int8), scales.contiguous())
    return layout, GroupScales(scales.float() * differences)

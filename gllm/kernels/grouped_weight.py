"""Weights of few bits as they are loaded: integers in groups with a scale, and maybe a minimum.

A weight is scale * (code - zero) - minimum; `group` neighbouring inputs of an output share scale
and minimum. Codes have 4, 6 or 8 bits, or choose from a table of 16 values. This covers the block
types of GGUF files, AWQ, GPTQ and compressed-tensors, MXFP4 and NVFP4; what a file stores in 2, 3
or 5 bits has 4 or 6 here, so that no type loses anything. Floats are rounded to it too.

How they are packed is in `grouped_panels` for CPUs and in `grouped_words` for GPUs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.linear_int8 import MAX_CODE

CPU = torch.device("cpu")
BLOCK_INPUTS = 32
"""Inputs whose activations share a scale, and whose codes lie together."""
PANEL_OUTPUTS = 32
"""Outputs of a panel, the fewest that are unpacked and packed at once."""
SLAB_WEIGHTS = 1 << 16
"""Weights that are read and packed at once: only their codes are unpacked in memory. 16 times as
many take 20 MB more."""
WIDTHS = (4, 6, 8)
"""Bits of a code in memory."""


@dataclass(frozen=True, slots=True)
class GroupScales:
    """Scales or minimums of groups: numbers, or 8-bit integers times units that groups share."""

    numbers: Tensor
    """[outputs, groups], in panels [panels, groups, PANEL_OUTPUTS]; a dtype of SCALE_KINDS."""
    units: Tensor | None = None
    """[outputs, groups / groups per unit] float16, in panels likewise; only with int8 numbers."""

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        return self.numbers.nbytes + (0 if self.units is None else self.units.nbytes)

    @property
    def groups_per_unit(self) -> int:
        """Groups that share a unit; 0 without units."""
        return 0 if self.units is None else self.numbers.shape[1] // self.units.shape[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> "GroupScales":
        """Return the same with both tensors changed."""
        return GroupScales(change(self.numbers), None if self.units is None else change(self.units))

    def floats(self) -> Tensor:
        """Return the numbers in float32; outputs are the first dimension, groups the second."""
        if self.units is None:
            return self.numbers.float()
        units = self.units.float().repeat_interleave(self.groups_per_unit, 1)
        return self.numbers.float() * units


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Memory layout of a weight of few bits, the same for all of its outputs."""

    width: int
    """Bits of a code in memory, of WIDTHS."""
    group: int
    """Inputs that share a scale: 16, or a multiple of BLOCK_INPUTS."""
    zero: int = 0
    """Code of 0: the number that is subtracted from codes."""
    table: tuple[int, ...] | None = None
    """[16]: codes, 0..255, that the stored ones of 4 bits choose from; None: they are codes."""

    def __post_init__(self) -> None:
        """Check the fields. Raises ValueError."""
        if self.width not in WIDTHS or (self.table is not None and self.width != 4):
            raise ValueError(f"codes of {self.width} bits are not implemented")
        if self.group != BLOCK_INPUTS // 2 and (self.group % BLOCK_INPUTS or self.group <= 0):
            raise ValueError(
                f"groups of {self.group} inputs are not implemented: 16, or multiples of 32"
            )

    @property
    def part(self) -> int:
        """Inputs whose products are summed in integers: a group, at most a block."""
        return min(self.group, BLOCK_INPUTS)


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Some outputs of a weight of few bits, unpacked."""

    codes: Tensor
    """[outputs, inputs] uint8, as stored: with a table, indices of it."""
    scales: GroupScales
    minimums: GroupScales | None = None


def slice_rows(rows: GroupedRows, begin: int, end: int) -> GroupedRows:
    """Return some outputs of rows."""

    def cut(part: Tensor) -> Tensor:
        return part[begin:end]

    minimums = None if rows.minimums is None else rows.minimums.map(cut)
    return GroupedRows(cut(rows.codes), rows.scales.map(cut), minimums)


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Weight [outputs, inputs] of few bits as a file stores it; its outputs are unpacked on demand.

    A `Weight` as loaded, of which `GroupedFormat.prepare` makes a GroupedMatrix.
    """

    format: ClassVar[str] = "grouped"
    layout: GroupLayout
    shape: tuple[int, int]
    nbytes: int
    """Size that counts as its memory, in bytes: of the packed weight, or in the file."""
    read: Callable[[int, int], GroupedRows]
    """Unpacks the outputs from one index up to another."""
    dtype: torch.dtype = torch.float32
    """Dtype of the floats that it represents."""
    device: torch.device = CPU
    """Device that multiplies by it."""
    order: Tensor | None = None
    """[inputs] int64: the input that each column of codes multiplies (act-order of GPTQ); None if
    the columns are in order."""


def reorder_outputs(weight: GroupedWeight, order: Tensor) -> GroupedWeight:
    """Return a weight with its outputs in another order.

    Args:
        weight: [outputs, inputs].
        order: [outputs] int64: index in `weight` of each output.
    """

    def read(begin: int, end: int) -> GroupedRows:
        rows = order[begin:end]
        borders = [0, *(torch.nonzero(rows.diff() != 1).flatten() + 1).tolist(), len(rows)]
        parts = [
            weight.read(int(rows[first]), int(rows[last - 1]) + 1)
            for first, last in pairwise(borders)
        ]
        scales = concatenate_scales([part.scales for part in parts])
        minimums = [part.minimums for part in parts if part.minimums is not None]
        codes = torch.cat([part.codes for part in parts])
        return GroupedRows(codes, scales, concatenate_scales(minimums) if minimums else None)

    return replace(weight, read=read)


def concatenate_scales(parts: Sequence[GroupScales]) -> GroupScales:
    """Return scales of further outputs, or of further panels, as one."""
    units = [part.units for part in parts if part.units is not None]
    numbers = torch.cat([part.numbers for part in parts])
    return GroupScales(numbers, torch.cat(units) if units else None)


CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's largest magnitude that 4 bits may represent, of which the best is taken."""


def quantize_to_4_bits(weight: Tensor) -> GroupedWeight:
    """Return a weight rounded to 4 bits: scale * (code - 8), in groups of BLOCK_INPUTS.

    The scale of a group, in float16, is the one of CLIPS with the least sum of squared errors.

    Args:
        weight: [outputs, inputs].
    """
    outputs, inputs = weight.shape

    def read(begin: int, end: int) -> GroupedRows:
        groups = _to_groups(weight[begin:end])
        # The largest number, with its sign, becomes code 0: 4 bits have one negative number more.
        most = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        best = torch.full_like(most, torch.inf)
        codes, scales = torch.zeros_like(groups, dtype=torch.uint8), most.half()
        for clip in CLIPS:
            scale = (most * (clip / -8)).half()
            inverse = torch.where(scale == 0, 0.0, 1 / scale.float())
            trial = (groups * inverse).round().clamp(-8, 7)
            error = (trial * scale.float() - groups).square().sum(2, keepdim=True)
            is_better = error < best
            best = torch.where(is_better, error, best)
            codes = torch.where(is_better, (trial + 8).to(torch.uint8), codes)
            scales = torch.where(is_better, scale, scales)
        return GroupedRows(codes.flatten(1)[:, :inputs], GroupScales(scales[:, :, 0]))

    layout = GroupLayout(4, BLOCK_INPUTS, zero=8)
    shape = (outputs, inputs)
    return GroupedWeight(layout, shape, weight.nbytes, read, weight.dtype, weight.device)


def quantize_to_8_bits(weight: Tensor) -> GroupedWeight:
    """Return a weight rounded to 8 bits: scale * (code - 128), in groups of BLOCK_INPUTS.

    The scale of a group, in float16, is its largest magnitude / MAX_CODE.

    Args:
        weight: [outputs, inputs].
    """
    outputs, inputs = weight.shape

    def read(begin: int, end: int) -> GroupedRows:
        groups = _to_groups(weight[begin:end])
        scales = (groups.abs().amax(2, keepdim=True) / MAX_CODE).half()
        inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
        codes = (groups * inverse).round().clamp(-MAX_CODE, MAX_CODE) + 128
        return GroupedRows(
            codes.to(torch.uint8).flatten(1)[:, :inputs], GroupScales(scales[:, :, 0])
        )

    layout, shape = GroupLayout(8, BLOCK_INPUTS, zero=128), (outputs, inputs)
    return GroupedWeight(layout, shape, weight.nbytes, read, weight.dtype, weight.device)


def _to_groups(rows: Tensor) -> Tensor:
    """Return rows [outputs, inputs] as float32 [outputs, groups, BLOCK_INPUTS], padded with 0."""
    padding = -rows.shape[1] % BLOCK_INPUTS
    return functional.pad(rows.float(), (0, padding)).unflatten(1, (-1, BLOCK_INPUTS))


def dequantize_rows(rows: GroupedRows, layout: GroupLayout) -> Tensor:
    """Return the floats [outputs, inputs] float32 of codes as stored."""
    codes = rows.codes
    if layout.table is not None:
        codes = torch.tensor(layout.table, dtype=torch.uint8, device=codes.device)[codes.long()]
    return to_floats(replace(rows, codes=codes), layout)


def to_floats(rows: GroupedRows, layout: GroupLayout) -> Tensor:
    """Return scale * (code - zero) - minimum in float32 [outputs, inputs]; codes are looked up."""
    inputs = rows.codes.shape[1]

    def spread(scales: GroupScales) -> Tensor:
        return scales.floats().repeat_interleave(layout.group, 1)[:, :inputs]

    numbers = (rows.codes.int() - layout.zero).float() * spread(rows.scales)
    return numbers if rows.minimums is None else numbers - spread(rows.minimums)


def restore_order(rows: Tensor, order: Tensor | None) -> Tensor:
    """Return rows [n, inputs] whose columns multiply the inputs `order`, in the order of inputs."""
    return rows if order is None else rows[:, order.argsort()]


def slabs(weight: GroupedWeight) -> Iterator[tuple[int, int]]:
    """Yield ranges of outputs, whole panels with about SLAB_WEIGHTS."""
    outputs, inputs = weight.shape
    step = max(1, SLAB_WEIGHTS // (inputs * PANEL_OUTPUTS)) * PANEL_OUTPUTS
    for begin in range(0, outputs, step):
        yield begin, min(begin + step, outputs)

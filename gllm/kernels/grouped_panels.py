"""Weights of few bits packed for CPUs, and the products by them.

Activations are quantized to 8 bits in blocks of 32 inputs, each with a scale. Products of a group
are summed exactly in integers, groups one after the other in float32, so a row's result depends on
no other row of its batch, and every implementation returns the same bits.

Source of the products: llama.cpp's `ggml_vec_dot_*_q8_*`, which quantize activations in blocks of
32 inputs, or of 256 for its K types.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.grouped_weight import (
    BLOCK_INPUTS,
    PANEL_OUTPUTS,
    GroupedRows,
    GroupedWeight,
    GroupLayout,
    GroupScales,
    concatenate_scales,
    restore_order,
    slabs,
    to_floats,
)
from gllm.kernels.linear_int8 import MAX_CODE, MIN_MAGNITUDE
from gllm.kernels.native.library import (
    NO_ACTIVATION,
    GroupedArguments,
    GroupedRowsArguments,
    GroupScalesArguments,
    library_for,
)

SCALE_KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
"""Dtypes of scales and minimums; the index is the number in `enum ScaleKind` of grouped.cpp."""


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Neighbouring outputs of a GroupedMatrix with one layout."""

    layout: GroupLayout
    codes: Tensor
    """[panels, blocks, words, PANEL_OUTPUTS] int32: four neighbouring inputs per output and word;
    grouped_codes.h has the order of their bits."""
    scales: GroupScales
    minimums: GroupScales | None
    outputs: int
    """Number of outputs; the last panel may hold more."""
    inputs: int
    table: Tensor | None
    """[16] uint8: the layout's."""
    order: Tensor | None = None
    """[inputs] int64: the input that each column multiplies; None if they are in order."""

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        minimums = 0 if self.minimums is None else self.minimums.nbytes
        return self.codes.nbytes + self.scales.nbytes + minimums

    def fits(self, other: "PackedPart") -> bool:
        """Return True if the outputs of another weight can follow those of this one."""

        def kind(part: "PackedPart") -> list[object]:
            tensors = [part.codes]
            for scales in (part.scales, part.minimums):
                if scales is not None:
                    tensors += [t for t in (scales.numbers, scales.units) if t is not None]
            shapes = [(tensor.dtype, tensor.shape[1:]) for tensor in tensors]
            order = None if part.order is None else part.order.tolist()
            return [part.layout, part.inputs, order, part.minimums is None, shapes]

        return self.outputs % PANEL_OUTPUTS == 0 and kind(self) == kind(other)

    def unpack(self) -> GroupedRows:
        """Return the codes, looked up in the table, the scales and minimums, in rows."""
        blocks = self.codes.shape[1]
        quads = self.codes.view(torch.uint8).unflatten(3, (PANEL_OUTPUTS, 4))
        if self.layout.width == 8:
            codes = quads
        else:
            codes = torch.cat((quads[:, :, :4] & 15, quads[:, :, :4] >> 4), 2)
        if self.layout.width == 6:
            # Pair i of bits of word j belongs to quad 2 j + i % 2 of half i / 2.
            pairs = torch.stack([quads[:, :, 4:] >> 2 * i & 3 for i in range(4)], 3)
            high = pairs.unflatten(3, (2, 2)).permute(0, 1, 3, 2, 4, 5, 6).flatten(2, 4)
            codes = codes | high << 4
        # [panels, blocks, quads, outputs, 4] to [outputs, inputs]
        rows = codes.permute(0, 3, 1, 2, 4).reshape(-1, blocks * BLOCK_INPUTS)
        if self.table is not None:
            rows = self.table[rows.long()]
        rows = rows[: self.outputs, : self.inputs]
        minimums = None if self.minimums is None else self.minimums.map(self._to_rows)
        return GroupedRows(rows, self.scales.map(self._to_rows), minimums)

    def _to_rows(self, panels: Tensor) -> Tensor:
        return panels.transpose(1, 2).flatten(0, 1)[: self.outputs]


def pack(weight: GroupedWeight) -> PackedPart:
    """Pack a weight for the compiled kernels, about SLAB_WEIGHTS at a time, in whole panels."""
    outputs, inputs = weight.shape
    layout = weight.layout
    panels, blocks = -(-outputs // PANEL_OUTPUTS), -(-inputs // BLOCK_INPUTS)
    codes = torch.empty(panels, blocks, layout.width, PANEL_OUTPUTS, dtype=torch.int32)
    groups = -(-blocks * BLOCK_INPUTS // layout.group)
    scales: GroupScales | None = None
    minimums: GroupScales | None = None
    for begin, end in slabs(weight):
        rows = weight.read(begin, end)
        first = begin // PANEL_OUTPUTS
        slab = _pack_codes(rows.codes, layout.width)
        codes[first : first + len(slab)] = slab
        scales = _store(scales, rows.scales, (panels, groups), first)
        if rows.minimums is not None:
            minimums = _store(minimums, rows.minimums, (panels, groups), first)
    assert scales is not None, "a weight has outputs"
    table = None if layout.table is None else torch.tensor(layout.table, dtype=torch.uint8)
    return PackedPart(layout, codes, scales, minimums, outputs, inputs, table, weight.order)


def join_panels(parts: Sequence[PackedPart]) -> list[PackedPart]:
    """Concatenate neighbouring weights along the outputs, as far as their kinds are the same.

    One call for the weights of several projections quantizes the activations once.
    """
    joined: list[list[PackedPart]] = []
    for part in parts:
        if joined and joined[-1][-1].fits(part):
            joined[-1].append(part)
        else:
            joined.append([part])
    return [_join(run) for run in joined]


def _join(run: Sequence[PackedPart]) -> PackedPart:
    if len(run) == 1:
        return run[0]
    minimums = [part.minimums for part in run if part.minimums is not None]
    return replace(
        run[0],
        codes=torch.cat([part.codes for part in run]),
        scales=concatenate_scales([part.scales for part in run]),
        minimums=concatenate_scales(minimums) if minimums else None,
        outputs=sum(part.outputs for part in run),
    )


def _store(
    all_of: GroupScales | None, rows: GroupScales, shape: tuple[int, int], first: int
) -> GroupScales:
    """Write scales of some outputs into those of all.

    Args:
        all_of: [panels, groups, PANEL_OUTPUTS]; None: they are allocated.
        rows: [outputs, groups].
        shape: panels and groups of all; the last group may have no inputs.
        first: panel of the first output.
    """
    panels, groups = shape
    numbers = rows.numbers
    missing = groups - numbers.shape[1]
    if missing:
        # Units of several groups are whole in all types that have them.
        per_unit = max(rows.groups_per_unit, 1)
        rows = rows.map(
            lambda part: functional.pad(
                part, (0, missing if part is numbers else missing // per_unit)
            )
        )
    slab = rows.map(
        lambda part: _pad_outputs(part).unflatten(0, (-1, PANEL_OUTPUTS)).transpose(1, 2)
    )
    if all_of is None:
        all_of = slab.map(lambda part: part.new_zeros(panels, *part.shape[1:]))
    all_of.numbers[first : first + len(slab.numbers)] = slab.numbers
    if all_of.units is not None and slab.units is not None:
        all_of.units[first : first + len(slab.units)] = slab.units
    return all_of


def _pad_outputs(rows: Tensor) -> Tensor:
    """Return rows with zeros up to a multiple of PANEL_OUTPUTS."""
    missing = -len(rows) % PANEL_OUTPUTS
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


def _pack_codes(codes: Tensor, width: int) -> Tensor:
    """Pack codes [outputs, inputs] uint8 to [panels, blocks, words, PANEL_OUTPUTS] int32."""
    padded = _pad_outputs(functional.pad(codes, (0, -codes.shape[1] % BLOCK_INPUTS)))
    quads = padded.view(-1, PANEL_OUTPUTS, padded.shape[1] // BLOCK_INPUTS, 8, 4)
    quads = quads.permute(0, 2, 3, 1, 4)
    if width < 8:
        low = quads & 15
        words = low[:, :, :4] | low[:, :, 4:] << 4
        if width == 6:
            high = (quads >> 4).unflatten(2, (2, 2, 2))
            fields = [high[:, :, i // 2, :, i % 2] << 2 * i for i in range(4)]
            words = torch.cat((words, fields[0] | fields[1] | fields[2] | fields[3]), 2)
        quads = words
    return quads.contiguous().view(torch.int32)[..., 0]


def multiply_panels(
    x: Tensor, part: PackedPart, bias: Tensor | None, out: Tensor, gate: int = NO_ACTIVATION
) -> None:
    """Write x W^T + b to out.

    Args:
        x: [tokens, inputs], contiguous.
        part: W [outputs, inputs].
        bias: b [outputs], of x's dtype.
        out: [tokens, outputs], of x's dtype or float32; outputs are neighbours.
        gate: number of an activation of the compiled kernels, which multiply the second half of
            the outputs by the activated first one, whole panels each; out is then
            [tokens, outputs / 2], of x's dtype.
    """
    library = library_for(x, "linear_grouped")
    if library is None:
        assert gate == NO_ACTIVATION, "only compiled kernels gate outputs"
        ordered = x if part.order is None else x.index_select(1, part.order)
        _multiply_reference(ordered, part, bias, out)
        return
    library(
        GroupedArguments(
            *(part.codes, part.table, _scales(part.scales), _scales(part.minimums)),
            *(x, bias, out),
            *(*x.shape, part.outputs, out.stride(0), part.layout.group),
            *(part.layout.width, part.layout.zero, gate),
            *(x.dtype, out.dtype == torch.float32),
            order=part.order,
        )
    )


def lookup_panels(part: PackedPart, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return outputs of a packed weight by index: ids [n] int64 to [n, inputs] of a dtype.

    Raises:
        IndexError: an index is out of range.
    """
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < part.outputs:
        raise IndexError(f"a row index is outside the weight's {part.outputs} rows")
    rows = torch.empty(len(ids), part.inputs, dtype=dtype)
    library = library_for(rows, "linear_grouped")
    if library is None:
        rows = to_floats(part.unpack(), part.layout)[ids].to(dtype)
        return restore_order(rows, part.order)
    library(
        GroupedRowsArguments(
            *(part.codes, part.table, _scales(part.scales), _scales(part.minimums)),
            *(ids, rows, *rows.shape, part.layout.group),
            *(part.layout.width, part.layout.zero, rows.dtype),
        )
    )
    return restore_order(rows, part.order)


def _scales(scales: GroupScales | None) -> GroupScalesArguments:
    """Return the C structure of scales."""
    if scales is None:
        return GroupScalesArguments()
    units = None if scales.units is None else scales.units.data_ptr()
    kind = SCALE_KINDS.index(scales.numbers.dtype)
    return GroupScalesArguments(scales.numbers.data_ptr(), units, scales.groups_per_unit, kind)


@dataclass(frozen=True, slots=True)
class QuantizedBlocks:
    """Activations quantized to 8 bits in blocks of BLOCK_INPUTS, padded with zeros."""

    codes: Tensor
    """[rows, blocks, BLOCK_INPUTS] float32: whole numbers from -MAX_CODE to MAX_CODE."""
    scales: Tensor
    """[rows, blocks] float32: NaN if a number of the block is not finite."""


def quantize_blocks(x: Tensor) -> QuantizedBlocks:
    """Quantize x [rows, inputs] as the kernels do."""
    numbers = functional.pad(x.float(), (0, -x.shape[1] % BLOCK_INPUTS))
    numbers = numbers.unflatten(1, (-1, BLOCK_INPUTS))
    most = numbers.abs().amax(2)
    is_finite = numbers.isfinite().all(2)
    # A tensor as the dividend: torch computes number / tensor as the reciprocal times the number.
    limit = torch.full_like(most, MAX_CODE)
    scales = torch.where(is_finite, most / limit, torch.nan)
    counts = is_finite & (most >= MIN_MAGNITUDE)
    inverse = torch.where(counts, limit / most, 0.0)[:, :, None]
    return QuantizedBlocks(torch.where(inverse > 0, numbers * inverse, 0.0).round(), scales)


def _multiply_reference(x: Tensor, part: PackedPart, bias: Tensor | None, out: Tensor) -> None:
    """Write the same bits as the compiled kernels to out [rows, outputs]."""
    rows, layout = part.unpack(), part.layout
    blocks = quantize_blocks(x)
    size, num_parts = layout.part, BLOCK_INPUTS // layout.part
    codes = functional.pad((rows.codes.double() - layout.zero), (0, -part.inputs % BLOCK_INPUTS))
    # [parts, rows, size] x [parts, size, outputs]: float64 holds all integer sums exactly.
    x_parts = blocks.codes.flatten(1).double().unflatten(1, (-1, size)).transpose(0, 1)
    sums = (x_parts @ codes.unflatten(1, (-1, size)).permute(1, 2, 0)).float()
    scales = rows.scales.floats().repeat_interleave(layout.group // size, 1)
    result = torch.zeros(len(x), part.outputs)
    for index in range(len(sums)):
        row_scale = blocks.scales[:, index // num_parts, None]
        result = result + sums[index] * (scales[:, index] * row_scale)
    if rows.minimums is not None:
        minimums = rows.minimums.floats().repeat_interleave(layout.group // size, 1)
        totals = x_parts.sum(2).float() * blocks.scales.t().repeat_interleave(num_parts, 0)
        for index in range(len(sums)):
            result = result - minimums[:, index] * totals[index][:, None]
    out.copy_(result if bias is None else result + bias)

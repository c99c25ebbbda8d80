"""AWQ, GPTQ and compressed-tensors: integers of 2, 3, 4 or 8 bits in words of 32 bits.

A weight is scale * (code - zero); inputs in groups share scale and zero. Sources: Lin et al., "AWQ"
(2023), and its library's GEMM kernels (order of the codes in a word); Frantar et al., "GPTQ"
(2022), and AutoGPTQ's QuantLinear (zeros minus one, g_idx); compressed-tensors' `pack_to_int32`.
"""

import torch
from torch import Tensor

from gllm.kernels.linear_grouped import DEVICES
from gllm.kernels.weight_format import Weight
from gllm.models.formats.packed_weight import (
    bit_words,
    check_scales,
    group_inputs,
    grouped_weight,
    integer_layout,
    shard_words,
    unpack_bits,
    widen_to_units,
)
from gllm.models.formats.stored_format import StoredFormat, StoredLinear

WORDS = frozenset({"I32"})
"""Type of words with codes."""
AWQ_BITS = 4
"""Bits of AWQ's codes."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in its word of AWQ's code of each of eight neighbouring outputs."""


class StoredAwq(StoredFormat):
    """AWQ's GEMM layout: words of eight outputs of one input."""

    codes = "qweight"
    dtypes = WORDS
    devices = DEVICES

    def load(self, layer: StoredLinear) -> Weight:
        """Return the part of a layer's AWQ weight, as `StoredFormat.load` specifies."""
        outputs, inputs = layer.shape
        rows, parts = widen_to_units(layer.rows, outputs), group_inputs(layer)
        words, groups = bit_words(outputs, AWQ_BITS), parts.num_stored
        word_shard = shard_words(rows.wide, AWQ_BITS)
        codes = layer.read("qweight", (inputs, words), (parts.shard.wide, word_shard))
        zeros = layer.read("qzeros", (groups, words), (parts.groups, word_shard))
        scales = layer.read("scales", (groups, outputs), (parts.groups, layer.rows))
        scales = check_scales(scales).t()
        zero_codes = _awq_outputs(zeros)[rows.positions]
        layout, minimums = integer_layout(AWQ_BITS, parts.layout_group, scales, zero_codes)

        def unpack(begin: int, end: int) -> Tensor:
            chosen = rows.positions[begin:end]
            first, last = int(chosen[0]) // 8, int(chosen[-1]) // 8 + 1
            part = _awq_outputs(codes[:, first:last])[chosen - first * 8]
            return part[:, parts.shard.positions]

        return grouped_weight(layer, layout, unpack, scales, minimums)


def _awq_outputs(words: Tensor) -> Tensor:
    """Return the codes [8 n, m] uint8 of AWQ's words [m, n]."""
    codes = unpack_bits(words.t()[..., None], AWQ_BITS, 8)
    return codes[..., AWQ_ORDER].transpose(1, 2).flatten(0, 1)


class StoredGptq(StoredFormat):
    """GPTQ's layout: words of neighbouring inputs of one output, zeros minus one."""

    codes = "qweight"
    dtypes = WORDS
    devices = DEVICES
    zero_offset = 1
    """Added to stored zeros, modulo the number of codes."""

    def load(self, layer: StoredLinear) -> Weight:
        """Return the part of a layer's GPTQ weight, as `StoredFormat.load` specifies."""
        (outputs, inputs), width = layer.shape, layer.spec.width
        rows, parts = widen_to_units(layer.rows, outputs), group_inputs(layer)
        groups, columns = parts.num_stored, parts.shard
        word_shard = shard_words(columns.wide, width)
        codes = layer.read("qweight", (bit_words(inputs, width), outputs), (word_shard, layer.rows))
        zeros = layer.read(
            "qzeros",
            (groups, bit_words(outputs, width)),
            (parts.groups, shard_words(rows.wide, width)),
        )
        scales = layer.read("scales", (groups, outputs), (parts.groups, layer.rows))
        scales = check_scales(scales).t()
        num_zeros = outputs if rows.wide is None else rows.wide.num_elements
        zero_codes = unpack_bits(zeros, width, num_zeros).t()[rows.positions]
        zero_codes = zero_codes + self.zero_offset & (1 << width) - 1
        layout, minimums = integer_layout(width, parts.layout_group, scales, zero_codes)
        order = _input_order(layer, "g_idx", parts.group)
        num_codes = inputs if columns.wide is None else columns.wide.num_elements
        positions = columns.positions if order is None else order

        def unpack(begin: int, end: int) -> Tensor:
            return unpack_bits(codes[:, begin:end].t(), width, num_codes)[:, positions]

        return grouped_weight(layer, layout, unpack, scales, minimums, order)


class StoredGptqV2(StoredGptq):
    """GPTQ's layout with zeros as they are."""

    zero_offset = 0


class StoredPackQuantized(StoredFormat):
    """compressed-tensors' integers: words of neighbouring inputs of one output, row by row."""

    codes = "weight_packed"
    dtypes = WORDS
    devices = DEVICES

    def load(self, layer: StoredLinear) -> Weight:
        """Return the part of a compressed-tensors weight, as `StoredFormat.load` specifies."""
        (outputs, inputs), width = layer.shape, layer.spec.width
        parts = group_inputs(layer)
        groups, columns = parts.num_stored, parts.shard
        word_shard = shard_words(columns.wide, width)
        codes = layer.read(
            "weight_packed", (outputs, bit_words(inputs, width)), (layer.rows, word_shard)
        )
        scales = layer.read("weight_scale", (outputs, groups), (layer.rows, parts.groups))
        if layer.has("weight_shape"):
            shape = layer.read("weight_shape", (2,)).tolist()
            if shape != [outputs, inputs]:
                raise ValueError(f"has weight_shape {shape}, but by config.json {layer.shape}")
        zeros = self._read_zeros(layer, width) if layer.has("weight_zero_point") else None
        group, scales = parts.layout_group, check_scales(scales)
        layout, minimums = integer_layout(width, group, scales, zeros)
        order = _input_order(layer, "weight_g_idx", parts.group)
        num_codes = inputs if columns.wide is None else columns.wide.num_elements
        positions = columns.positions if order is None else order

        def unpack(begin: int, end: int) -> Tensor:
            return unpack_bits(codes[begin:end], width, num_codes)[:, positions]

        return grouped_weight(layer, layout, unpack, scales, minimums, order)

    def _read_zeros(self, layer: StoredLinear, width: int) -> Tensor:
        """Return the code of 0 of each output and group; older files do not pack it."""
        outputs, name = layer.shape[0], "weight_zero_point"
        rows, parts = widen_to_units(layer.rows, outputs), group_inputs(layer)
        shape = bit_words(outputs, width), parts.num_stored
        if layer.shape_of(name) == (outputs, parts.num_stored) != shape:
            plain = layer.read(name, (outputs, parts.num_stored), (layer.rows, parts.groups))
            return (plain.int() + (1 << (width - 1))).to(torch.uint8)
        words = layer.read(name, shape, (shard_words(rows.wide, width), parts.groups))
        if words.dtype != torch.int32:
            raise ValueError(f"has {name!r} of type {words.dtype}, which holds no packed integers")
        count = outputs if rows.wide is None else rows.wide.num_elements
        return unpack_bits(words.t(), width, count).t()[rows.positions]


def _input_order(layer: StoredLinear, name: str, group: int) -> Tensor | None:
    """Return the inputs sorted by their groups (act-order); None if they are in order.

    Raises:
        ValueError: the groups have other sizes, or ranks divide inputs that are not in order.
    """
    if not layer.has(name):
        return None
    indices = layer.read(name, (layer.shape[1],)).long()
    regular = torch.arange(len(indices)) // group
    if torch.equal(indices, regular):
        return None
    order = indices.argsort(stable=True)
    if not torch.equal(indices[order], regular):
        raise ValueError(f"has {name!r} that does not put {group} inputs into each group")
    if layer.columns is not None:
        raise ValueError(
            "is quantized in the order of activations (desc_act): the inputs of a rank belong to "
            "groups of other ranks, so use tensor_parallel_size 1"
        )
    return order

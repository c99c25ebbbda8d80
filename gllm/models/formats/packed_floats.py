"""MXFP4 and NVFP4: floats of 4 bits (e2m1) in pairs, with scales of 8 bits.

Sources: OCP, "Microscaling Formats (MX) Specification" (2023), sections 5.3.3 (e2m1) and 5.4.1
(e8m0); compressed-tensors' `nvfp4-pack-quantized` and `mxfp4-pack-quantized`.
"""

import torch
from torch import Tensor

from gllm.kernels.grouped_weight import GroupLayout
from gllm.kernels.linear_grouped import DEVICES
from gllm.kernels.weight_format import Weight
from gllm.models.formats.packed_weight import (
    check_scales,
    group_inputs,
    grouped_weight,
    unpack_bits,
)
from gllm.models.formats.stored_format import StoredFormat, StoredLinear
from gllm.models.shard import shard_groups

LARGEST = 12
"""Largest float of e2m1, doubled: the zero of the codes."""
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Floats of e2m1 by their codes, doubled."""
TABLE = tuple(LARGEST + value for value in DOUBLED)
"""Codes of the kernels, above 0."""
EXPONENT_BIAS = 127
"""Code of the scale 1 in e8m0."""


class StoredNvfp4(StoredFormat):
    """NVFP4: a scale in e4m3 per 16 inputs, divided by one float32 number per layer."""

    codes = "weight_packed"
    dtypes = frozenset({"U8"})
    devices = DEVICES

    def load(self, layer: StoredLinear) -> Weight:
        """Return the part of an NVFP4 layer's weight, as `StoredFormat.load` specifies."""
        parts = group_inputs(layer)
        outputs, groups = layer.shape[0], parts.num_stored
        scales = layer.read("weight_scale", (outputs, groups), (layer.rows, parts.groups))
        scales = self.scale_floats(layer, scales)
        inputs = layer.shape[1]
        shard = shard_groups(layer.columns, 2)
        codes = layer.read("weight_packed", (outputs, -(-inputs // 2)), (layer.rows, shard))
        layout = GroupLayout(4, parts.group, zero=LARGEST, table=TABLE)

        def unpack(begin: int, end: int) -> Tensor:
            return unpack_bits(codes[begin:end], 4, parts.shard.count)

        # The table has doubled numbers.
        return grouped_weight(layer, layout, unpack, check_scales(scales / 2))

    def scale_floats(self, layer: StoredLinear, scales: Tensor) -> Tensor:
        """Return the scales as float32, which represents them exactly."""
        if layer.has("input_global_scale"):  # of activations, which get dynamic scales
            layer.read("input_global_scale", (1,))
        divisor = layer.read("weight_global_scale", (1,)).float()
        if not bool((divisor > 0).all()):
            raise ValueError("has a weight_global_scale that is not positive")
        if scales.dtype != torch.float8_e4m3fn:
            raise ValueError(f"has scales of type {scales.dtype}, not float8_e4m3fn")
        return scales.float() / divisor


class StoredMxfp4(StoredNvfp4):
    """MXFP4: a power of two per 32 inputs, as an exponent of 8 bits."""

    def scale_floats(self, layer: StoredLinear, scales: Tensor) -> Tensor:
        """Return the scales as float32, which represents them exactly."""
        if scales.dtype != torch.uint8:
            raise ValueError(f"has scales of type {scales.dtype}, not uint8")
        exponents = scales.int() - EXPONENT_BIAS
        powers = torch.ldexp(torch.ones(exponents.shape), exponents).bfloat16()
        return powers.masked_fill(exponents == 255 - EXPONENT_BIAS, torch.nan)

"""8-bit floats (e4m3) with one scale per tensor, output or block.

DeepSeek, Qwen and transformers write them as `fp8`, llm-compressor as compressed-tensors.
"""

from gllm.kernels.linear_fp8 import dequantize, prepare_fp8
from gllm.kernels.weight_format import Weight
from gllm.models.formats.stored_format import StoredFormat, StoredLinear
from gllm.models.shard import shard_scales, widen_shards
from gllm.models.stored_tensor import select

SCALES = ("weight_scale_inv", "weight_scale")
"""Names of a layer's scales in checkpoints; codes are multiplied by either."""
ACTIVATION_SCALES = ("input_scale", "activation_scale")
"""Names of static scales of 8-bit activations, which are not used: activations keep their dtype, or
get dynamic scales."""


class StoredFp8(StoredFormat):
    """FP8 codes and scales; a part that ends within a block of scales becomes floats."""

    dtypes = frozenset({"F8_E4M3"})
    devices = ("cuda",)
    is_read_on_cpu = False

    def load(self, layer: StoredLinear) -> Weight:
        """Return the part of a layer's weight, as `StoredFormat.load` specifies."""
        block, shards = layer.spec.block, (layer.rows, layer.columns)
        wide = widen_shards(shards, block)
        codes = layer.read("weight", layer.shape, wide)
        name = next(filter(layer.has, SCALES), SCALES[0])
        shape = layer.shape_of(name)
        if shape is None:
            raise ValueError(
                f"is of type {codes.dtype} and shape {layer.shape}, but there is no "
                f"{SCALES[0]!r} beside it to scale it by"
            )
        scales = layer.read_shards(name, shard_scales(wide, shape, block))
        for ignored in filter(layer.has, ACTIVATION_SCALES):
            layer.read_shards(ignored, ())
        try:
            weight = prepare_fp8(codes, scales, block, layer.dtype)
        except ValueError as error:
            raise ValueError(f"{error} ({name})") from error
        return weight if wide == shards else select(dequantize(weight), wide, shards)

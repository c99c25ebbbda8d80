"""W8A8 of compressed-tensors: 8-bit integers with a scale per output, or one for all of them."""

from gllm.kernels.linear_int8 import Int8Weight
from gllm.kernels.weight_format import Weight
from gllm.models.formats.packed_weight import check_scales
from gllm.models.formats.stored_format import StoredFormat, StoredLinear


class StoredInt8(StoredFormat):
    """Codes times scales; activations get dynamic scales, also where the checkpoint has others."""

    dtypes = frozenset({"I8"})
    devices = ("cpu",)

    def load(self, layer: StoredLinear) -> Weight:
        """Return the part of an int8 layer's weight, as `StoredFormat.load` specifies."""
        outputs = layer.shape[0]
        codes = layer.read("weight", layer.shape, (layer.rows, layer.columns))
        stored = layer.shape_of("weight_scale")
        if stored in ((), (1,), (1, 1)):
            scales = layer.read("weight_scale", stored).reshape(1).expand(len(codes))
        else:
            scales = layer.read("weight_scale", (outputs, 1), (layer.rows, None)).flatten()
        if layer.has("input_scale"):
            layer.read_shards("input_scale", ())
        return Int8Weight(codes, check_scales(scales).float(), layer.dtype)

"""The memory of a stage's KV cache.

Owns its layout and size. Knows nothing of who holds which block: that is the scheduler's.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gllm.models.spec import LayerSpec


def block_bytes(layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over a stage's layers, keys and values, for what is cached in dtype."""
    elements = sum(layer.attention.kv_entry.num_elements for layer in layers)
    return block_size * elements * dtype.itemsize


class KVCache:
    """Keys and values of a stage's layers, one block more than can be used: the last stays zero.

    On the CPU pages are taken from the system when they are first written.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
    ) -> None:
        """dtype: of what is cached. `zeros`: makes tensors of a shape; default: on the CPU."""
        make = zeros or _zeros
        # 8-bit floats as bytes: 0 is 0, and not all of torch knows how to write them.
        made = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = []
        """Keys and values of each layer, [num_blocks + 1, block_size, kv_heads, elements]."""
        for layer in layers:
            cached = layer.attention.kv_entry
            shape = (num_blocks + 1, block_size, cached.num_heads)
            keys = make((*shape, cached.key_dim), made).view(dtype)
            shared = keys[..., : cached.value_dim]
            values = (
                shared if cached.is_shared else make((*shape, cached.value_dim), made).view(dtype)
            )
            self.layers.append((keys, values))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that cost no memory until written: numpy asks the system for them, torch.zeros would
    write them."""
    count = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)

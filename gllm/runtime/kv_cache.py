"""Memory of a stage's KV cache: layout and size. The scheduler assigns its blocks."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gllm.models.spec import LayerSpec


def block_bytes(layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one KV block over a stage's layers, keys and values."""
    num_elements = sum(layer.attention.kv_entry.num_elements for layer in layers)
    return block_size * num_elements * dtype.itemsize


class KVCache:
    """Keys and values of a stage's layers.

    There is one block more than can be used: the last one stays zero. On the CPU the system
    provides a page when it is first written.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
    ) -> None:
        """Allocate the memory.

        Args:
            layers: of the stage.
            num_blocks: usable blocks.
            block_size: tokens per block.
            dtype: of keys and values.
            zeros: creates a tensor of a shape and dtype; None for one on the CPU.
        """
        create = zeros or _lazy_zeros
        # 8-bit floats are created as bytes: 0 is 0, and not all of torch can write them.
        created_dtype = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = []
        """Keys and values of each layer, [num_blocks + 1, block_size, kv_heads, elements]."""
        for layer in layers:
            cached = layer.attention.kv_entry
            shape = (num_blocks + 1, block_size, cached.num_heads)
            keys = create((*shape, cached.key_dim), created_dtype).view(dtype)
            if cached.is_shared:
                values = keys[..., : cached.value_dim]
            else:
                values = create((*shape, cached.value_dim), created_dtype).view(dtype)
            self.layers.append((keys, values))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that take no memory until written.

    numpy gets zeroed pages from the system; torch.zeros would write them.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)

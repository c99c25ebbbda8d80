"""The memory of a stage's KV cache.

Owns its layout and size. Knows nothing of who holds which block: that is the scheduler's.
"""

import math

import numpy as np
import torch
from torch import Tensor

from gllm.models.config import ModelConfig


def block_bytes(config: ModelConfig, layers: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over a stage's layers, keys and values."""
    return 2 * layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVCache:
    """Keys and values of a stage's layers, one block more than can be used: the last stays zero.

    On the CPU pages are taken from the system when they are first written.
    """

    def __init__(
        self, config: ModelConfig, layers: int, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        shape = (num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = [(_zeros(shape, dtype), _zeros(shape, dtype)) for _ in range(layers)]
        """Keys and values of each layer, [num_blocks + 1, block_size, kv_heads, head_dim]."""


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that cost no memory until written: numpy asks the system for them, torch.zeros would
    write them."""
    count = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)

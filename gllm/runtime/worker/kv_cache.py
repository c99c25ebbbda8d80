"""Memory of a stage's KV cache and states: layout, size. The scheduler assigns blocks and slots."""

import math
import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.int8_cache import SCALE_BYTES
from gllm.messages.kv_layout import KvLayout, LayerLayout
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.layer import LayerSpec
from gllm.options.field_types import FieldError


def block_bytes(layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one KV block: keys and values of all layers of a stage."""
    entries = [layer.attention.kv_entry for layer in layers]
    num_bytes = sum(
        entry.num_elements * dtype.itemsize + entry.num_vectors * _scale_bytes(dtype)
        for entry in entries
    )
    return block_size * num_bytes


def _scale_bytes(dtype: torch.dtype) -> int:
    """Return the bytes behind each key and value of a token and head."""
    return SCALE_BYTES if dtype == torch.int8 else 0


def state_bytes(layers: Sequence[LayerSpec]) -> int:
    """Return the bytes of one state slot: the states of a sequence in all layers of a stage."""
    entries = (layer.attention.state_entry for layer in layers)
    return sum(entry.num_bytes for entry in entries if entry is not None)


class KVCache:
    """KV cache of a stage in blocks: keys and values of each layer, states of recurrent layers.

    One block more than usable exists: the last one stays zero. On the CPU, memory is taken only
    when it is first written.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
        num_state_slots: int = 0,
    ) -> None:
        """Allocate the memory.

        Args:
            layers: layers of the stage.
            num_blocks: usable blocks.
            block_size: tokens per block.
            dtype: dtype of keys and values.
            zeros: creates a tensor of a shape and dtype; None for one on the CPU.
            num_state_slots: state slots of recurrent layers.
        """
        create = zeros or _lazy_zeros
        # 8-bit floats are created as bytes: 0 is 0, and not all of torch can write them.
        created_dtype = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: list[tuple[Tensor, ...]] = []
        """Tensors of each layer. Keys and values: [num_blocks + 1, block_size, kv_heads, elements],
        of int8 with a scale after the elements (`int8_cache.py`). Index keys follow if the layer
        has an indexer. A recurrent layer has the parts of its state, [num_state_slots, *shape]
        float32, after keys and values if it has both."""
        extra = _scale_bytes(dtype)
        for layer in layers:
            entry = layer.attention.state_entry
            states: tuple[Tensor, ...] = ()
            if entry is not None:
                shapes = [(num_state_slots, *part.shape) for part in entry.parts]
                states = tuple(create(shape, torch.float32) for shape in shapes)
            cached = layer.attention.kv_entry
            if isinstance(layer.attention, AttentionSpec) and layer.attention.kv_layers_back:
                self.layers.append(self.layers[-layer.attention.kv_layers_back])
                continue
            if not cached.num_elements:
                self.layers.append(states)
                continue
            shape = (num_blocks + 1, block_size, cached.num_heads)
            width = cached.key_dim + cached.index_dim + extra
            keys = create((*shape, width), created_dtype).view(dtype)
            if cached.is_shared:
                values = keys[..., : cached.value_dim]
                if cached.index_dim:
                    keys, index_keys = keys.split((cached.key_dim, cached.index_dim), dim=-1)
                    self.layers.append((keys, values, index_keys))
                    continue
            else:
                values = create((*shape, cached.value_dim + extra), created_dtype).view(dtype)
            self.layers.append((keys, values, *states))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that take no memory until written.

    numpy gets zeroed pages from the system; torch.zeros would write them.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def map_zeros(descriptor: int) -> Callable[[tuple[int, ...], torch.dtype], Tensor]:
    """Return a function that creates zero tensors in a memory-mapped file, one after another.

    Other processes that map the file read and write the same memory. The layout of the file is that
    of KvLayout. A page takes no memory until it is written. The tensors keep their memory when the
    descriptor is closed.

    The function raises FieldError if the process may not have a file or mappings of that size.

    Args:
        descriptor: An empty file, for example a memfd.
    """

    def create(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        begin = os.fstat(descriptor).st_size
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            os.ftruncate(descriptor, begin + size)
            memory = mmap.mmap(descriptor, size, offset=begin)
        except OSError as error:
            raise FieldError(
                "kv_cache_memory",
                f"kv_transfer cannot have a KV cache of {begin + size} bytes or more in a file "
                f"({error.strerror}): lower kv_cache_memory, or raise the limits of file size and "
                "address space (ulimit -f, ulimit -v)",
            ) from error
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)

    return create


def describe_layout(
    model: str,
    layers: range,
    all_layers: Sequence[LayerSpec],
    rank: int,
    num_ranks: int,
    cache: KVCache,
) -> KvLayout:
    """Return the memory layout of a worker's KV cache, by which other engines read its blocks.

    Args:
        model: Digest of all that decides the numbers in the cache.
        layers: Indices of the stage's layers.
        all_layers: Layers of the whole model, not divided among ranks.
        rank: Index of the worker among the stage's ranks.
        num_ranks: Ranks of the stage.
        cache: KV cache of the worker.
    """
    layouts = []
    for index, (keys, values, *_) in zip(layers, cache.layers, strict=True):
        entry = all_layers[index].attention.kv_entry
        if not entry.num_elements:
            continue
        item_bytes = keys.dtype.itemsize
        layouts.append(
            LayerLayout(
                index,
                rank * entry.num_heads // num_ranks,
                keys.shape[2],
                (keys.shape[3] + entry.index_dim) * item_bytes,
                0 if entry.is_shared else values.shape[3] * item_bytes,
            )
        )
    dtype = str(cache.layers[0][0].dtype).removeprefix("torch.")
    return KvLayout(model, dtype, cache.block_size, cache.num_blocks, layouts)

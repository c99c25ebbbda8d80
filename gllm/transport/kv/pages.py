"""Memory of a worker's KV cache as numpy views: runs of tokens of one layer and head range."""

import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gllm.messages.kv_layout import KvLayout, LayerLayout

Bytes = NDArray[np.uint8]
Slots = NDArray[np.int64]


class KvPagesError(ValueError):
    """The requested tokens, heads or blocks are outside of a worker's KV cache."""


def find_slots(block_ids: Sequence[int], block_size: int, offset: int, num_tokens: int) -> Slots:
    """Return the slot of each of consecutive tokens in a layer's KV cache, [num_tokens] int64.

    Args:
        block_ids: blocks of a sequence, in order.
        block_size: tokens per block.
        offset: position of the first token, counted from the start of the first block.
        num_tokens: number of tokens.

    Raises:
        KvPagesError: There are too few blocks.
    """
    if offset < 0 or num_tokens < 0 or offset + num_tokens > len(block_ids) * block_size:
        raise KvPagesError(
            f"tokens {offset} to {offset + num_tokens - 1} are not in {len(block_ids)} blocks of "
            f"{block_size} tokens"
        )
    tokens = np.arange(offset, offset + num_tokens, dtype=np.int64)
    blocks = np.asarray(block_ids, np.int64)
    return blocks[tokens // block_size] * block_size + tokens % block_size


class KvPages:
    """KV cache of one worker, mapped from a file such as a memfd, with reads and writes by token.

    Pages that were never written use no memory. Elements are copied as bytes, whatever their dtype.
    """

    def __init__(self, layout: KvLayout, descriptor: int, is_writable: bool = True) -> None:
        """Map the file.

        Args:
            layout: Of the worker.
            descriptor: The file, which may be closed afterwards.
            is_writable: False for a cache of another engine.

        Raises:
            KvPagesError: The file is smaller than the layout.
            OSError: The file cannot be mapped.
        """
        self.layout = layout
        size = os.fstat(descriptor).st_size
        if size < layout.num_bytes:
            raise KvPagesError(f"a KV cache of {layout.num_bytes} bytes in a file of {size}")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        self._memory = mmap.mmap(descriptor, layout.num_bytes, mmap.MAP_SHARED, access)
        memory = np.frombuffer(self._memory, np.uint8)
        self.address: int = memory.ctypes.data
        """Address of the memory in this process."""
        num_slots = (layout.num_blocks + 1) * layout.block_size
        self._layers: dict[int, tuple[LayerLayout, tuple[Bytes, ...]]] = {}
        """Layers by index: layout, keys and values [slots, heads, bytes]; no values with MLA."""
        for layer, offsets in zip(layout.layers, layout.offsets, strict=True):
            arrays = tuple(
                memory[begin : begin + num_slots * layer.num_heads * width].reshape(
                    num_slots, layer.num_heads, width
                )
                for begin, width in (
                    (offsets.keys, layer.key_bytes),
                    (offsets.values, layer.value_bytes),
                )
                if width
            )
            self._layers[layer.layer] = layer, arrays

    def find_slots(self, block_ids: Sequence[int], offset: int, num_tokens: int) -> Slots:
        """Return positions as `find_slots` does. Raises KvPagesError for unknown blocks too."""
        for block in block_ids:
            if not 0 <= block < self.layout.num_blocks:
                raise KvPagesError(f"block {block} of {self.layout.num_blocks}")
        return find_slots(block_ids, self.layout.block_size, offset, num_tokens)

    def bytes_per_token(self, layer: int, heads: range) -> int:
        """Return the bytes of one token of a head range. Raises KvPagesError."""
        part, _ = self._find(layer, heads)
        return len(heads) * part.bytes_per_head

    def read(self, layer: int, heads: range, slots: Slots) -> Bytes:
        """Return keys [tokens, heads, bytes], then values, of some tokens as one array of bytes.

        Args:
            layer: Index of the layer in the model.
            heads: KV heads by their indices in the model.
            slots: Slots of the tokens, from `find_slots`.

        Raises:
            KvPagesError: The worker does not have the layer or the heads.
        """
        _, arrays = self._find(layer, heads)
        return np.concatenate([array[slots].reshape(-1) for array in arrays])

    def write(self, layer: int, heads: range, slots: Slots, run: Bytes) -> None:
        """Write keys and values in the form that `read` returns. Raises KvPagesError."""
        part, arrays = self._find(layer, heads)
        if len(run) != len(slots) * len(heads) * part.bytes_per_head:
            raise KvPagesError(f"{len(run)} bytes for {len(slots)} tokens of {len(heads)} heads")
        begin = 0
        for array in arrays:
            shape = len(slots), len(heads), array.shape[-1]
            end = begin + len(slots) * len(heads) * array.shape[-1]
            array[slots] = run[begin:end].reshape(shape)
            begin = end

    def copy(
        self, layer: int, heads: range, slots: Slots, source: "KvPages", source_slots: Slots
    ) -> None:
        """Copy keys and values directly from another worker's KV cache. Raises KvPagesError."""
        _, arrays = self._find(layer, heads)
        _, other_arrays = source._find(layer, heads)
        for array, other_array in zip(arrays, other_arrays, strict=True):
            array[slots] = other_array[source_slots]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of all layers and heads of the worker."""
        return self.layout.block_size * self.layout.bytes_per_token

    def read_block(self, block: int) -> bytes:
        """Return the keys and values of a block, layer by layer. Raises KvPagesError."""
        return b"".join(array.data for array in self._find_block(block))

    def write_block(self, block: int, data: bytes) -> None:
        """Write a block in the form that `read_block` returns. Raises KvPagesError."""
        if len(data) != self.block_bytes:
            raise KvPagesError(f"{len(data)} bytes for a block of {self.block_bytes}")
        run, begin = np.frombuffer(data, np.uint8), 0
        for array in self._find_block(block):
            end = begin + array.size
            array[:] = run[begin:end].reshape(array.shape)
            begin = end

    def _find_block(self, block: int) -> list[Bytes]:
        """Return the keys and values of a block in each layer, as views."""
        if not 0 <= block < self.layout.num_blocks:
            raise KvPagesError(f"block {block} of {self.layout.num_blocks}")
        size = self.layout.block_size
        return [
            array[block * size : (block + 1) * size]
            for _, arrays in self._layers.values()
            for array in arrays
        ]

    def close(self) -> None:
        """Unmap the memory once no view of it is left."""
        self._layers = {}
        try:
            self._memory.close()
        except BufferError:
            # A reader still copies; the memory ends with its view.
            return

    def _find(self, layer: int, heads: range) -> tuple[LayerLayout, list[Bytes]]:
        """Return the layout of a layer, and its keys and values of a head range, as views."""
        if layer not in self._layers:
            raise KvPagesError(f"the worker does not have layer {layer}")
        part, arrays = self._layers[layer]
        if not (heads and part.heads.start <= heads.start and heads.stop <= part.heads.stop):
            raise KvPagesError(
                f"heads {heads.start} to {heads.stop - 1} of layer {layer}: the worker has "
                f"{part.heads.start} to {part.heads.stop - 1}"
            )
        own = slice(heads.start - part.first_head, heads.stop - part.first_head)
        return part, [array[:, own] for array in arrays]

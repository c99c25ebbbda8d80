"""Layout of a worker's part of a KV cache, and the parts of a hand-off between two engines.

A part is a head range of one layer that one worker reads from another one. Both engines may be cut
differently into pipeline stages, tensor-parallel ranks and machines, may replicate heads and may
have different block sizes: a run of tokens of a part has the same bytes on every worker that has
its heads.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

_PAGE_BYTES = 4096
"""Keys and values of each layer begin at a page, so that untouched ones take no memory."""

BlockId = Annotated[int, Meta(ge=0, lt=2**31)]
"""Index of a block in the KV caches of all workers."""
_Count = Annotated[int, Meta(ge=0, lt=2**31)]
_Size = Annotated[int, Meta(ge=1, lt=2**31)]


class KvLayoutError(ValueError):
    """Error: the KV caches of two engines do not fit, so blocks cannot be transferred."""


class LayerLayout(msgspec.Struct, frozen=True, array_like=True):
    """KV heads of one layer that a worker has, and their sizes in bytes."""

    layer: _Count
    """Index in the model."""
    first_head: _Count
    """Index of the worker's first KV head in the model."""
    num_heads: _Size
    key_bytes: _Size
    """Bytes of a key of one token and head."""
    value_bytes: _Count
    """Bytes of a value of one token and head; 0 if values are not stored separately (MLA)."""

    @property
    def heads(self) -> range:
        """KV heads by their indices in the model."""
        return range(self.first_head, self.first_head + self.num_heads)

    @property
    def bytes_per_head(self) -> int:
        """Bytes of the key and the value of one token and head."""
        return self.key_bytes + self.value_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token, keys and values of all heads of the worker."""
        return self.num_heads * self.bytes_per_head


class LayerOffsets(NamedTuple):
    """Byte offsets of a layer's keys, values and end in the memory of its worker's KV cache."""

    keys: int
    values: int
    end: int


class KvLayout(msgspec.Struct, frozen=True, array_like=True):
    """Layers, KV heads, dtype and block counts in the KV cache memory of one worker.

    The memory has, layer by layer, keys [num_blocks + 1, block_size, heads, elements], then values
    of the same form. The last block stays zero.
    """

    model: str
    """Digest of all that decides the numbers; equal on engines that exchange their caches."""
    dtype: str
    """Name of the dtype of keys and values."""
    block_size: _Size
    num_blocks: _Size
    """Usable blocks."""
    layers: Annotated[list[LayerLayout], Meta(min_length=1, max_length=4096)]
    is_staged: bool = False
    """True if the blocks are staging blocks of a device, to and from which its worker copies."""

    @property
    def offsets(self) -> list[LayerOffsets]:
        """Position of each layer."""
        num_slots, end, offsets = (self.num_blocks + 1) * self.block_size, 0, []
        for layer in self.layers:
            keys, values = end, end + _pages(num_slots * layer.num_heads * layer.key_bytes)
            end = values + _pages(num_slots * layer.num_heads * layer.value_bytes)
            offsets.append(LayerOffsets(keys, values, end))
        return offsets

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return self.offsets[-1].end

    def find_strides(self, layer: int, heads: range) -> list[tuple[int, int, int]]:
        """Return where the keys and values of some heads are in the memory.

        Returns:
            For keys, then for separate values: offset of the first token's bytes, distance between
            two tokens, and bytes per token.

        Raises:
            KvLayoutError: The worker does not have the layer or the heads.
        """
        for held, offsets in zip(self.layers, self.offsets, strict=True):
            if (
                held.layer == layer
                and held.heads.start <= heads.start <= heads.stop <= held.heads.stop
            ):
                first = heads.start - held.first_head
                kinds = ((offsets.keys, held.key_bytes), (offsets.values, held.value_bytes))
                return [
                    (begin + first * width, held.num_heads * width, len(heads) * width)
                    for begin, width in kinds
                    if width
                ]
        raise KvLayoutError(
            f"heads {heads.start} to {heads.stop - 1} of layer {layer} are elsewhere"
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over the layers and heads of the worker."""
        return sum(layer.bytes_per_token for layer in self.layers)


class KvPart(NamedTuple):
    """Range of KV heads of one layer that a worker reads from a worker of another engine."""

    machine: int
    """Machine of the worker that reads, by its index in its engine."""
    worker: int
    """Index of that worker among those of its machine."""
    owner_machine: int
    """Machine of the worker that is read from, by its index in its engine."""
    owner: int
    """Index of that worker among those of its machine."""
    layer: int
    heads: range
    """Indices in the model."""


def plan_parts(
    mine: Sequence[Sequence[KvLayout]], theirs: Sequence[Sequence[KvLayout]]
) -> list[KvPart]:
    """Plan a hand-off: divide the KV of a token into parts that one machine reads from another one.

    Each layer and head of each worker that receives is read exactly once, however both engines are
    cut into stages, ranks and machines. Every machine can compute the plan of its whole engine.

    Args:
        mine: layouts of the engine that receives, by machine and worker.
        theirs: layouts of the other engine, by machine and worker.

    Raises:
        KvLayoutError: the layouts do not fit, or a head is nowhere on the other side.
    """
    places = [(machine, worker) for machine, own in enumerate(mine) for worker in range(len(own))]
    owners = [(machine, worker) for machine, own in enumerate(theirs) for worker in range(len(own))]
    layouts = [theirs[machine][worker] for machine, worker in owners]
    parts = []
    for position, (machine, worker) in enumerate(places):
        layout = mine[machine][worker]
        # Workers read replicated heads from different ones.
        order = [(position + index) % len(layouts) for index in range(len(layouts))]
        by_layer: dict[int, list[tuple[int, LayerLayout]]] = {}
        for number in order:
            _check_format(layout, layouts[number])
            for layer in layouts[number].layers:
                by_layer.setdefault(layer.layer, []).append((number, layer))
        parts += [
            KvPart(machine, worker, *owners[number], own.layer, heads)
            for own in layout.layers
            for number, heads in _divide_heads(own, by_layer.get(own.layer, []))
        ]
    return parts


def count_token_bytes(layouts: Sequence[KvLayout]) -> int:
    """Return the KV bytes of a token over all workers of an engine.

    Replicated heads count once.
    """
    sizes = {
        (layer.layer, head): layer.bytes_per_head
        for layout in layouts
        for layer in layout.layers
        for head in layer.heads
    }
    return sum(sizes.values())


def _divide_heads(
    own: LayerLayout, others: Sequence[tuple[int, LayerLayout]]
) -> list[tuple[int, range]]:
    """Return which heads of a layer are read from each of the other engine's workers.

    Args:
        own: heads to read.
        others: number of each worker of the other engine that has the layer, and its heads; those
            before others are preferred.

    Raises:
        KvLayoutError: the sizes differ, or no worker has one of the heads.
    """
    missing, divided = [own.heads], []
    for number, other in others:
        if (other.key_bytes, other.value_bytes) != (own.key_bytes, own.value_bytes):
            raise KvLayoutError(
                f"layer {own.layer} has keys and values of {other.key_bytes} and "
                f"{other.value_bytes} bytes per head there, {own.key_bytes} and {own.value_bytes} "
                "here"
            )
        rest = []
        for heads in missing:
            begin = max(heads.start, other.heads.start)
            end = min(heads.stop, other.heads.stop)
            if begin >= end:
                rest.append(heads)
                continue
            divided.append((number, range(begin, end)))
            rest += [range(heads.start, begin), range(end, heads.stop)]
        missing = [heads for heads in rest if heads]
    if missing:
        heads = missing[0]
        raise KvLayoutError(
            f"no worker of the other engine has heads {heads.start} to {heads.stop - 1} of layer "
            f"{own.layer}"
        )
    return divided


def _check_format(mine: KvLayout, other: KvLayout) -> None:
    """Raise KvLayoutError if the contents of two caches mean different things."""
    for name in ("model", "dtype"):
        own_value, other_value = getattr(mine, name), getattr(other, name)
        if own_value != other_value:
            raise KvLayoutError(
                f"the KV caches differ in {name}: {other_value!r} there, {own_value!r} here"
            )


def _pages(num_bytes: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES

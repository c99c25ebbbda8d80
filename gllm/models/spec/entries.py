"""Entries that a layer keeps of a sequence: keys and values, or a state of fixed size."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class KVEntrySpec:
    """Shape of the keys and values of one token in the KV cache of one layer."""

    num_heads: int
    key_dim: int
    """Elements per key."""
    value_dim: int
    """Elements per value."""
    is_shared: bool = False
    """True if values are the first elements of the keys and are not stored separately."""
    index_dim: int = 0
    """Elements of an index key, which is stored behind the key if values are shared; 0 without an
    indexer."""

    @property
    def num_elements(self) -> int:
        """Elements stored per token and layer."""
        own = self.key_dim + (0 if self.is_shared else self.value_dim)
        return self.num_heads * own + self.index_dim

    @property
    def num_vectors(self) -> int:
        """Keys and values stored per token and layer, over all heads."""
        return self.num_heads * (1 if self.is_shared else 2)


NO_KV_ENTRY = KVEntrySpec(0, 0, 0)
"""KV cache entry of a layer that has none: a recurrent one, or one that reads another's."""


@dataclass(frozen=True)
class StatePartSpec:
    """Name and shape of one part of the state of a recurrent layer, in float32."""

    name: str
    shape: tuple[int, ...]
    """Shape for one sequence in one layer, on this rank."""
    flops_per_element: float
    """FLOP per element with which one token updates the part and reads it."""

    @property
    def num_elements(self) -> int:
        """Number of elements of the part."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class StateEntrySpec:
    """Parts of the state of one sequence in one recurrent layer, all in float32.

    A state has a fixed size. It is updated by each token, so that it is that of a prefix of the
    sequence: the tokens computed so far.
    """

    parts: tuple[StatePartSpec, ...]

    @property
    def num_elements(self) -> int:
        """Elements per sequence and layer."""
        return sum(part.num_elements for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes per sequence and layer."""
        return self.num_elements * STATE_ELEMENT_BYTES

    @property
    def flops(self) -> int:
        """FLOP per token and layer."""
        return round(sum(part.num_elements * part.flops_per_element for part in self.parts))


STATE_ELEMENT_BYTES = 4
"""Bytes of one element of a state: float32, as rounding errors of a state accumulate."""

"""Parts of blocks: norms, linear layers, rotary embeddings, and a rank's share of a tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class DimensionShard:
    """The part of one dimension of a stored tensor that a tensor parallel rank loads."""

    size: int
    """Elements of the whole dimension."""
    runs: tuple[tuple[int, int], ...]
    """Ranges [begin, end) of elements, ascending, which are concatenated."""

    @property
    def num_elements(self) -> int:
        """Number of elements in the ranges."""
        return sum(end - begin for begin, end in self.runs)


@dataclass(frozen=True)
class NormSpec:
    """Specification of an RMSNorm or LayerNorm: tensor name, epsilon and variant."""

    name: str
    kind: Literal["rms", "layer"]
    """RMSNorm or LayerNorm."""
    eps: float
    has_bias: bool = False
    offset: float = 0.0
    """Added to the stored scale."""
    has_weight: bool = True
    """False if all scales are 1 and none are stored."""
    heads: DimensionShard | None = None
    """Heads of this rank, if the scale has the shape [heads, head_dim]; their elements, if it has
    the shape [heads * head_dim]; None for all."""


@dataclass(frozen=True)
class LinearSpec:
    """Specification of a linear layer; outputs of the named tensors are concatenated."""

    names: tuple[str, ...]
    has_bias: bool = False
    is_transposed: bool = False
    """True if the weight is stored as [inputs, outputs]."""
    rows: tuple[DimensionShard, ...] = ()
    """Outputs of this rank, for each tensor name; empty for all outputs."""
    columns: DimensionShard | None = None
    """Inputs of this rank; None for all."""
    is_summed: bool = False
    """True if the layer's inputs are divided among ranks, so that its outputs are summed over the
    ranks before the bias is added."""


@dataclass(frozen=True)
class RopeSpec:
    """Specification of the rotary embedding, applied to the first `dim` elements of a head."""

    dim: int
    kind: str = "default"
    """Scaling of the frequencies: a key of gllm.models.rope.ROPE_KEYS."""
    theta: float = 10_000.0
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Parameters of the scaling, by their names in config.json."""
    is_interleaved: bool = False
    """True if neighbouring elements form pairs; otherwise elements i and i + dim / 2 do."""


@dataclass(frozen=True)
class QueryScaleSpec:
    """Specification of a factor of the queries that grows with their position.

    It is 1 + beta * log(1 + floor((position + offset) / period)). Source: Meta, "The Llama 4 herd"
    (2025).
    """

    beta: float
    period: int
    """Positions with the same factor; queries before the first period are not scaled."""
    offset: int = 0
    """Positions that periods begin earlier."""

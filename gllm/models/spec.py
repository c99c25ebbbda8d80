"""A model as data: what is computed, and where its weights are in a checkpoint.

Owns the parts that families are described with. Knows neither configuration files (a family reads
those) nor tensors: the frontend, the cut into stages and the size of the KV cache need no torch.

Names of tensors are those of checkpoints, without `.weight` and `.bias`. Those within a layer are
relative to the layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Norm:
    """Normalisation of a vector, with a learned scale."""

    name: str
    kind: Literal["rms", "layer"]
    """Root mean square; or mean and variance."""
    eps: float
    bias: bool = False
    offset: float = 0.0
    """Added to the stored scale."""


@dataclass(frozen=True)
class Linear:
    """A linear map whose outputs are stacked from the tensors of these names."""

    names: tuple[str, ...]
    bias: bool = False
    transposed: bool = False
    """Stored as [inputs, outputs]."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first `dim` elements of a head."""

    dim: int
    kind: str = "default"
    theta: float = 10_000.0
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Of the scaling, by the names that config.json uses."""
    interleaved: bool = False
    """Neighbours are pairs; else element i and element i + dim / 2."""


@dataclass(frozen=True)
class Cached:
    """What the KV cache holds for a token."""

    heads: int
    key: int
    """Elements of a key."""
    value: int
    shared: bool = False
    """Values are the first elements of keys, and not held by themselves."""

    @property
    def elements(self) -> int:
        return self.heads * (self.key + (0 if self.shared else self.value))


@dataclass(frozen=True)
class Attention:
    """Self-attention with grouped queries."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv: Linear
    out: Linear
    scale: float
    rope: Rope | None = None
    alibi: float | None = None
    """What slopes of linear biases are multiplied by; None: there are none."""
    window: int | None = None
    """Tokens that a token sees, itself among them; None: all."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    """Of each head, before the rotation."""
    norm_by_head: bool = False
    """Each head has a scale of its own for query_norm and key_norm."""
    grouped_rows: bool = False
    """qkv is stored KV head by KV head: its queries, its key, its value."""

    @property
    def cached(self) -> Cached:
        return Cached(self.kv_heads, self.head_dim, self.head_dim)

    def weights(self, hidden: int) -> int:
        """Weights read for a token."""
        return (2 * self.heads + 2 * self.kv_heads) * self.head_dim * hidden


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: what is cached is one compressed vector for all heads.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.
    """

    heads: int
    plain_dim: int
    """Elements of a query and key without position."""
    value_dim: int
    rank: int
    """Elements of the compressed keys and values."""
    rope: Rope
    query: Linear
    """From the hidden state, or from its compression."""
    query_down: Linear | None
    query_norm: Norm | None
    query_rank: int
    """Inputs of `query`."""
    kv_down: Linear
    kv_norm: Norm
    kv_up: Linear
    out: Linear
    scale: float
    window: None = None

    @property
    def cached(self) -> Cached:
        return Cached(1, self.rank + self.rope.dim, self.rank, shared=True)

    def weights(self, hidden: int) -> int:
        """Weights read for a token."""
        query = self.heads * (self.plain_dim + self.rope.dim) * self.query_rank
        down = hidden * (
            self.rank + self.rope.dim + self.query_rank * (self.query_down is not None)
        )
        up = self.heads * (self.plain_dim + self.value_dim) * self.rank
        return query + down + up + self.heads * self.value_dim * hidden


@dataclass(frozen=True)
class MLP:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where it is not gated."""

    inner: int
    activation: str
    up: Linear
    """Where it is gated: gate and up, in this order."""
    down: Linear
    gated: bool = True

    def weights(self, hidden: int) -> int:
        """Weights read for a token."""
        return (2 + self.gated) * hidden * self.inner


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: a router picks `active` of `count` for each token."""

    count: int
    active: int
    router: Linear
    expert: MLP
    """Of each; names have {} for its number."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = False
    """Weights of the picked experts are made to add up to 1."""
    scale: float = 1.0
    """On the weights."""
    groups: int = 1
    active_groups: int = 1
    """Experts are picked from the best of as many groups."""
    group_score: Literal["best", "best two"] = "best"
    """What a group is judged by: its best expert's score, or the sum of its best two."""
    correction: str | None = None
    """Tensor added to the scores for picking, not for weighing."""
    shared: MLP | None = None
    """Computed for every token."""
    shared_gate: Linear | None = None
    """Its sigmoid scales what `shared` gives."""

    def weights(self, hidden: int) -> int:
        """Weights read for a token."""
        shared = self.shared.weights(hidden) if self.shared else 0
        return self.active * self.expert.weights(hidden) + shared + self.count * hidden


@dataclass(frozen=True)
class Layer:
    """Attention and feed-forward, each added to the residual stream."""

    attention: Attention | LatentAttention
    mlp: MLP | Experts
    attention_norm: Norm
    mlp_norm: Norm | None
    """None: `mlp` takes what attention_norm gives; only where they are parallel."""
    after_attention: Norm | None = None
    after_mlp: Norm | None = None
    """Of what is added to the residual stream."""
    parallel: bool = False
    """Both see the same residual stream."""


@dataclass(frozen=True)
class Positions:
    """Learned position embedding: row `offset` + position of a table of `rows`."""

    name: str
    rows: int
    offset: int = 0


@dataclass(frozen=True)
class Embedding:
    """From token ids to the residual stream."""

    name: str
    scale: float = 1.0
    positions: Positions | None = None
    norm: Norm | None = None


@dataclass(frozen=True)
class Head:
    """From the normalised residual stream to logits."""

    name: str
    """The embedding's where they share their weights."""
    own_name: str = "lm_head"
    """Of the tensor of a head that does not share them, which a checkpoint may have in spite of
    config.json."""
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    unit_rows: bool = False
    """Rows of its weights are scaled to length 1."""


@dataclass(frozen=True)
class QuantizationSpec:
    """Format in which a checkpoint stores quantized weights."""

    format: str
    """A key of gllm.kernels.weight_format.WEIGHT_FORMATS."""
    block: tuple[int, int] | None
    """Outputs and inputs that share a scale; None: a whole tensor does, or each output has one."""


@dataclass(frozen=True)
class Model:
    """A decoder-only model."""

    vocab_size: int
    hidden_size: int
    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    """Behind the last layer."""
    head: Head
    context_length: int
    """Tokens of the longest text the positions are made for."""
    layer_name: str = "model.layers.{}"
    optional_prefix: str = ""
    """What some checkpoints leave out at the beginning of names."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors in checkpoints that are not needed, besides those of all families."""
    prediction_layers: int = 0
    """Layers in checkpoints behind those of the model that predict further tokens; not computed."""
    notes: tuple[str, ...] = ()
    """Where results differ from those of transformers, for the log."""
    stored: QuantizationSpec | None = None
    """How weights may be stored besides as plain floats."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def head_is_tied(self) -> bool:
        """Whether the head's weights are the embedding's."""
        return self.head.name == self.embedding.name

    def outside_layers(self, layers: range) -> list[str]:
        """Names, without their ends, of what a stage with these layers has beside them."""
        names = []
        if layers.start == 0:
            parts = self.embedding.positions, self.embedding.norm
            names += [self.embedding.name, *(part.name for part in parts if part is not None)]
        if layers.stop == self.num_layers:
            names += [self.norm.name, self.head.name]
        return names

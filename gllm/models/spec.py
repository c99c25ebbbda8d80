"""A model as data: its layers, their arithmetic, and the names of their weights in a checkpoint.

A model family builds these specs from config.json. They need no torch, so that the frontend can
divide layers among stages and compute the size of the KV cache.

Tensor names are those of checkpoints, without `.weight` and `.bias`. Names within a layer are
relative to the layer.
"""

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
    heads: DimensionShard | None = None
    """Heads of this rank, if the scale has the shape [heads, head_dim]; None for all."""


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
class KVEntrySpec:
    """Shape of the keys and values of one token in the KV cache of one layer."""

    num_heads: int
    key_dim: int
    """Elements per key."""
    value_dim: int
    """Elements per value."""
    is_shared: bool = False
    """True if values are the first elements of the keys and are not stored separately."""

    @property
    def num_elements(self) -> int:
        """Elements stored per token and layer."""
        return self.num_heads * (self.key_dim + (0 if self.is_shared else self.value_dim))


@dataclass(frozen=True)
class AttentionSpec:
    """Specification of grouped-query attention, of which multi-head attention is a special case."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_proj: LinearSpec
    out_proj: LinearSpec
    scale: float
    """Factor of the attention scores."""
    rope: RopeSpec | None = None
    alibi_scale: float | None = None
    """Factor of the ALiBi slopes; None without ALiBi."""
    window: int | None = None
    """Size of the sliding window in tokens, the current one included; None for full attention."""
    softcap: float | None = None
    """Cap c of the scores: s becomes c * tanh(s / c)."""
    query_norm: NormSpec | None = None
    """Norm of each query head before the rotation."""
    key_norm: NormSpec | None = None
    """Norm of each key head before the rotation."""
    has_norm_per_head: bool = False
    """True if query_norm and key_norm have a separate scale for each head."""
    is_grouped_by_kv_head: bool = False
    """True if qkv_proj is stored KV head by KV head: its queries, its key, its value."""
    first_head: int = 0
    """Index of this rank's first query head, for ALiBi: its slopes are those of heads
    [first_head, first_head + num_heads) of total_num_heads."""
    total_num_heads: int | None = None
    """Query heads of all ranks; None if this rank has all."""

    @property
    def kv_entry(self) -> KVEntrySpec:
        """KV cache entry of one token."""
        return KVEntrySpec(self.num_kv_heads, self.head_dim, self.head_dim)

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights that are read to compute one token."""
        return (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim * hidden_size


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Specification of multi-head latent attention (MLA): one vector per token is cached.

    The vector is the compression of the keys and values of all heads. Source: DeepSeek-AI,
    "DeepSeek-V2" (2024), section 2.1.
    """

    num_heads: int
    nope_head_dim: int
    """Elements of a query and key without position encoding."""
    value_dim: int
    """Elements of a value."""
    kv_lora_rank: int
    """Elements of the compressed keys and values."""
    rope: RopeSpec
    q_proj: LinearSpec
    """Projection to queries, from the hidden state or from its compression."""
    q_down_proj: LinearSpec | None
    """Compression of the hidden state for queries, if there is one."""
    q_norm: NormSpec | None
    """Norm of the compressed hidden state."""
    q_input_size: int
    """Inputs of `q_proj`."""
    kv_down_proj: LinearSpec
    """Compression of keys and values, and the keys' rotary elements."""
    kv_norm: NormSpec
    kv_up_proj: LinearSpec
    out_proj: LinearSpec
    scale: float
    """Factor of the attention scores."""
    window: None = None
    """Always full attention."""

    @property
    def kv_entry(self) -> KVEntrySpec:
        """KV cache entry of one token."""
        return KVEntrySpec(1, self.kv_lora_rank + self.rope.dim, self.kv_lora_rank, is_shared=True)

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights that are read to compute one token."""
        query = self.num_heads * (self.nope_head_dim + self.rope.dim) * self.q_input_size
        compressed = self.kv_lora_rank + self.rope.dim
        if self.q_down_proj is not None:
            compressed += self.q_input_size
        kv_up = self.num_heads * (self.nope_head_dim + self.value_dim) * self.kv_lora_rank
        out = self.num_heads * self.value_dim * hidden_size
        return query + compressed * hidden_size + kv_up + out


@dataclass(frozen=True)
class MLPSpec:
    """Specification of a feed-forward block: down(act(gate(x)) * up(x)), or down(act(up(x)))."""

    intermediate_size: int
    activation: str
    """A name of gllm.kernels.activation."""
    up_proj: LinearSpec
    """Gate and up projection, in this order, if the block is gated."""
    down_proj: LinearSpec
    is_gated: bool = True

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights that are read to compute one token."""
        return (2 + self.is_gated) * hidden_size * self.intermediate_size


@dataclass(frozen=True)
class ExpertsSpec:
    """Specification of a mixture of experts (MoE): a router selects `top_k` experts per token."""

    num_experts: int
    top_k: int
    router: LinearSpec
    expert: MLPSpec
    """Each expert; tensor names have {} in place of its index."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to scores."""
    renormalize: bool = False
    """True if the weights of a token's experts are divided by their sum."""
    scaling_factor: float = 1.0
    """Factor of the experts' weights."""
    num_groups: int = 1
    top_k_groups: int = 1
    """Number of groups from which a token's experts are selected."""
    group_scoring: Literal["best", "best two"] = "best"
    """Score of a group: that of its best expert, or the sum of its best two."""
    correction_bias: str | None = None
    """Name of the tensor added to the scores for the selection, not for the weights."""
    shared_expert: MLPSpec | None = None
    """MLP that computes every token."""
    shared_expert_gate: LinearSpec | None = None
    """Gate whose sigmoid scales the output of the shared expert."""
    is_summed: bool = False
    """True if the block's output, including the shared expert's, is summed over the ranks. The down
    projections inside are not summed on their own."""

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights that are read to compute one token."""
        shared = self.shared_expert.weights_per_token(hidden_size) if self.shared_expert else 0
        experts = self.top_k * self.expert.weights_per_token(hidden_size)
        return experts + shared + self.num_experts * hidden_size


@dataclass(frozen=True)
class LayerSpec:
    """Specification of a decoder layer: attention, feed-forward block and norms."""

    attention: AttentionSpec | LatentAttentionSpec
    mlp: MLPSpec | ExpertsSpec
    attention_norm: NormSpec
    """Norm before attention."""
    mlp_norm: NormSpec | None
    """Norm before `mlp`; None in a parallel layer whose blocks share attention_norm."""
    post_attention_norm: NormSpec | None = None
    """Norm of attention's output before it is added."""
    post_mlp_norm: NormSpec | None = None
    """Norm of the feed-forward output before it is added."""
    is_parallel: bool = False
    """True if attention and `mlp` read the same residual stream."""


@dataclass(frozen=True)
class PositionEmbeddingSpec:
    """Specification of a learned position embedding: position p uses table row `offset` + p."""

    name: str
    num_rows: int
    offset: int = 0


@dataclass(frozen=True)
class EmbeddingSpec:
    """Specification of the token embedding, with optional learned positions and a norm after it."""

    name: str
    scale: float = 1.0
    """Factor of the embedding."""
    positions: PositionEmbeddingSpec | None = None
    norm: NormSpec | None = None
    rows: DimensionShard | None = None
    """Tokens of the vocabulary whose embeddings this rank holds; None for all."""


@dataclass(frozen=True)
class HeadSpec:
    """Specification of the LM head, which projects the normalized hidden state to logits."""

    name: str
    """Tensor name; equal to the embedding's if the weights are tied."""
    untied_name: str = "lm_head"
    """Name of the tensor of a head that is not tied; checkpoints may have one although config.json
    ties the weights."""
    has_bias: bool = False
    scale: float = 1.0
    """Factor of the logits."""
    softcap: float | None = None
    """Cap c of the logits: l becomes c * tanh(l / c)."""
    has_normalized_rows: bool = False
    """True if the rows of the weight are scaled to length 1."""
    rows: DimensionShard | None = None
    """Tokens of the vocabulary whose logits this rank computes; None for all."""


@dataclass(frozen=True)
class QuantizationSpec:
    """Format in which a checkpoint stores quantized weights, and the blocks that share a scale."""

    format: str
    """A key of gllm.kernels.weight_format.WEIGHT_FORMATS."""
    block: tuple[int, int] | None
    """Outputs and inputs that share a scale; None for one scale per tensor or per output."""


@dataclass(frozen=True)
class ModelSpec:
    """Specification of a decoder-only model, or of one tensor parallel rank's part of it.

    For one rank, the sizes within layers, such as numbers of heads, are those of the rank;
    vocab_size and hidden_size are those of the whole model.
    """

    vocab_size: int
    hidden_size: int
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    """Norm after the last layer."""
    head: HeadSpec
    context_length: int
    """Longest sequence in tokens that the position embedding supports."""
    layer_name_format: str = "model.layers.{}"
    """Prefix of a layer's tensors, with {} in place of its index."""
    ignored_tensors: tuple[str, ...] = ()
    """Patterns of tensors that this family does not read, besides those of all families."""
    num_prediction_layers: int = 0
    """Multi-token prediction layers after the model's own in a checkpoint; not computed."""
    notes: tuple[str, ...] = ()
    """Differences from the results of transformers, for the log."""
    quantization: QuantizationSpec | None = None
    """Format of the checkpoint's quantized weights, if it has any."""
    rank: int = 0
    """Tensor parallel rank, from 0."""
    ranks: int = 1
    """Number of tensor parallel ranks."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def optional_prefix(self) -> str:
        """Beginning of tensor names that checkpoints saved without the LM head omit."""
        return self.layer_name_format.partition(".")[0] + "."

    @property
    def is_head_tied(self) -> bool:
        """True if the LM head and the embedding share their weights."""
        return self.head.name == self.embedding.name

    def names_outside_layers(self, layers: range) -> list[str]:
        """Return the names of a stage's tensors outside of its layers, such as the embedding."""
        names = []
        if layers.start == 0:
            optional = self.embedding.positions, self.embedding.norm
            names += [self.embedding.name, *(part.name for part in optional if part is not None)]
        if layers.stop == self.num_layers:
            names += [self.norm.name, self.head.name]
        return names

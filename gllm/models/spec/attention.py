"""Blocks that keep keys and values: grouped-query attention and latent attention."""

from dataclasses import dataclass
from typing import Literal

from gllm.kernels.attention_window import AttentionWindow
from gllm.models.spec.entries import NO_KV_ENTRY, KVEntrySpec, StateEntrySpec
from gllm.models.spec.parts import LinearSpec, NormSpec, QueryScaleSpec, RopeSpec


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
    query_scale: QueryScaleSpec | None = None
    """Factor of the queries by their position."""
    alibi_scale: float | None = None
    """Factor of the ALiBi slopes; None without ALiBi."""
    window: AttentionWindow = None
    """Sliding window in tokens, the current one included, or chunk; None for full attention."""
    softcap: float | None = None
    """Cap c of the scores: s becomes c * tanh(s / c)."""
    query_norm: NormSpec | None = None
    """Norm of each query head before the rotation."""
    key_norm: NormSpec | None = None
    """Norm of each key head before the rotation."""
    value_norm: NormSpec | None = None
    """Norm of each value head."""
    has_norm_per_head: bool = False
    """True if query_norm and key_norm have a separate scale for each head."""
    has_output_gate: bool = False
    """True if the sigmoid of a gate scales the output of each head. The first tensor of qkv_proj
    then has twice the outputs: for each head its query and its gate. If qkv_proj names four
    tensors, the first is the gates' alone."""
    gate_proj: LinearSpec | None = None
    """Projection to a gate of each query head, whose activation scales the head's output; None
    without."""
    gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    """Activation of these gates."""
    has_projection_norm: bool = False
    """True if query_norm and key_norm are RMSNorms over the elements of all heads together, of all
    ranks."""
    norm_follows_rope: bool = False
    """True if query_norm and key_norm are applied after the rotation."""
    qkv_limit: float | None = None
    """Limit of the magnitude of queries, keys and values; None without."""
    kv_layers_back: int = 0
    """Number of layers back to the one whose keys and values this layer reads; qkv_proj has only
    queries then. 0 if the layer has its own keys and values."""
    is_grouped_by_kv_head: bool = False
    """True if qkv_proj is stored KV head by KV head: its queries, its key, its value."""
    sinks: str | None = None
    """Name of a tensor [heads] with the scores of a further key, whose value is zero; None without.
    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), section
    3.3, with the sink as in gpt-oss."""
    value_dim: int | None = None
    """Elements of a value if they are not head_dim; queries and keys have no norms then."""
    value_scale: float = 1.0
    """Factor of the values, if value_dim is set."""
    first_head: int = 0
    """Index of this rank's first query head, for ALiBi: its slopes are those of heads
    [first_head, first_head + num_heads) of total_num_heads."""
    total_num_heads: int | None = None
    """Query heads of all ranks; None if this rank has all."""

    @property
    def has_gate_proj(self) -> bool:
        """True if the gates of the outputs have a tensor of their own."""
        return self.has_output_gate and len(self.qkv_proj.names) == 4

    @property
    def kv_entry(self) -> KVEntrySpec:
        """KV cache entry of one token."""
        if self.kv_layers_back:
            return NO_KV_ENTRY
        return KVEntrySpec(self.num_kv_heads, self.head_dim, self.value_dim or self.head_dim)

    @property
    def state_entry(self) -> StateEntrySpec | None:
        """None: attention has no state besides the KV cache."""
        return None

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights that are read to compute one token."""
        value_dim = self.value_dim or self.head_dim
        outputs = self.num_heads * (self.head_dim * (1 + self.has_output_gate) + value_dim)
        outputs += 0 if self.kv_layers_back else self.num_kv_heads * (self.head_dim + value_dim)
        return outputs * hidden_size


@dataclass(frozen=True)
class IndexerSpec:
    """Specification of a lightning indexer, which selects the keys that each token attends to.

    Source: DeepSeek-AI, "DeepSeek-V3.2" (2025), section 2.1.
    """

    num_heads: int
    head_dim: int
    """Elements of an index query and an index key, of which the first are rotated."""
    q_proj: LinearSpec
    """Projection of the compressed hidden state to index queries."""
    k_proj: LinearSpec
    """Projection of the hidden state to an index key, which all heads share."""
    k_norm: NormSpec
    weights_proj: str
    """Name of the projection [heads, hidden] to a weight of each head, in float32."""
    is_interleaved: bool
    """True if neighbouring elements are rotated together."""


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
    rope_head_dim: int
    """Further elements of a query, and of a key that all heads share."""
    rope: RopeSpec | None
    """Rotary embedding of these elements; None to leave them as they are."""
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
    query_scale: QueryScaleSpec | None = None
    """Factor of late queries; None without."""
    gate_proj: LinearSpec | None = None
    """Projection to a gate of each head, whose sigmoid scales the head's output; None without."""
    window: None = None
    """Full attention, unless tokens select their keys."""
    num_selected: int | None = None
    """Keys that a token attends to at most; None for all before it."""
    indexer: IndexerSpec | None = None
    """Selects these keys; None if the layer before selects them, or no layer does."""

    @property
    def follows_selection(self) -> bool:
        """True if the layer attends to the keys that the layer before it has."""
        return self.num_selected is not None and self.indexer is None

    @property
    def kv_entry(self) -> KVEntrySpec:
        """KV cache entry of one token."""
        size = self.kv_lora_rank + self.rope_head_dim
        index_dim = 0 if self.indexer is None else self.indexer.head_dim
        return KVEntrySpec(1, size, self.kv_lora_rank, is_shared=True, index_dim=index_dim)

    @property
    def state_entry(self) -> StateEntrySpec | None:
        """None: attention has no state besides the KV cache."""
        return None

    def weights_per_token(self, hidden_size: int) -> int:
        """Return the number of weights that are read to compute one token."""
        query = self.num_heads * (self.nope_head_dim + self.rope_head_dim) * self.q_input_size
        compressed = self.kv_lora_rank + self.rope_head_dim
        if self.q_down_proj is not None:
            compressed += self.q_input_size
        kv_up = self.num_heads * (self.nope_head_dim + self.value_dim) * self.kv_lora_rank
        out = self.num_heads * (self.value_dim + (self.gate_proj is not None)) * hidden_size
        weights = query + compressed * hidden_size + kv_up + out
        if (indexer := self.indexer) is not None:
            weights += indexer.num_heads * indexer.head_dim * self.q_input_size
            weights += (indexer.head_dim + indexer.num_heads) * hidden_size
        return weights

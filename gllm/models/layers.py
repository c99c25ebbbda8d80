"""The parts that dense decoder-only models share.

Owns weights in memory and the order of operations within a layer and a stage. The arithmetic is in
gllm/kernels, names of tensors are those of Hugging Face checkpoints. Does not know files,
requests and processes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.activation import silu_and_mul
from gllm.kernels.attention import AttentionPlan, paged_attention, store_kv
from gllm.kernels.rms_norm import rms_norm
from gllm.kernels.rotary import apply_rotary, inverse_frequencies, rotary_angles
from gllm.models.config import ModelConfig
from gllm.models.loader import Weights

HEAD_ROWS = 256
"""Most rows that the LM head computes at once; its output is vocabulary-wide."""

LayerCache = tuple[Tensor, Tensor]
"""Keys and values of a layer, each [blocks, block_size, kv_heads, head_dim]."""
Angles = tuple[Tensor, Tensor]
"""cos and sin, each [tokens, 1, head_dim / 2] float32."""


@dataclass(frozen=True, slots=True)
class StageInputs:
    """What every stage needs of a micro-batch."""

    token_ids: Tensor
    """[tokens] int64; empty but on the first stage."""
    positions: Tensor
    """[tokens] int64, of each token in its sequence."""
    attention: AttentionPlan


class Linear:
    """y = x W^T + b, W stacked from the checkpoint's tensors of several projections."""

    def __init__(
        self, weights: Weights, parts: dict[str, int], in_features: int, bias: bool
    ) -> None:
        """`parts`: output features of each projection by its name."""
        names, rows = list(parts), list(parts.values())
        self.weight = weights.fused(names, "weight", rows, in_features)
        self.bias = weights.fused(names, "bias", rows) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, in_features] to [tokens, sum of the parts]."""
        return functional.linear(x, self.weight, self.bias)


class RMSNorm:
    """Root-mean-square normalisation with a learned scale."""

    def __init__(self, weights: Weights, size: int, eps: float) -> None:
        self.weight = weights.read("weight", size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size]; the result is alike."""
        return rms_norm(x, self.weight, self.eps)


class Attention:
    """Self-attention with grouped queries, rotary positions and the paged cache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        """`qk_norm`: queries and keys are normalised head by head before the rotation."""
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow}
        self.qkv = Linear(weights, parts, config.hidden_size, qkv_bias)
        self.out = Linear(weights, {"o_proj": config.hidden_size}, wide, out_bias)
        self.norms: tuple[RMSNorm, RMSNorm] | None = None
        if qk_norm:
            eps = config.rms_norm_eps
            query_norm = RMSNorm(weights.at("q_norm"), self.head_dim, eps)
            self.norms = query_norm, RMSNorm(weights.at("k_norm"), self.head_dim, eps)

    def __call__(
        self, x: Tensor, angles: Angles, attention: AttentionPlan, cache: LayerCache
    ) -> Tensor:
        """x [tokens, hidden]; the result is alike. Writes the tokens' keys and values to cache."""
        fused = self.qkv(x).view(len(x), -1, self.head_dim)
        query, key, value = fused.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.norms:
            query, key = self.norms[0](query), self.norms[1](key)
        store_kv(apply_rotary(key, angles), value, *cache, attention.slots)
        attended = paged_attention(apply_rotary(query, angles), *cache, attention)
        return self.out(attended.flatten(1))


class GatedMLP:
    """The feed-forward block: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, weights: Weights, bias: bool = False) -> None:
        inner = config.intermediate_size
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up = Linear(weights, parts, config.hidden_size, bias)
        self.down = Linear(weights, {"down_proj": config.hidden_size}, inner, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden]; the result is alike."""
        return self.down(silu_and_mul(self.gate_up(x)))


class DecoderLayer:
    """Attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(
        self, config: ModelConfig, weights: Weights, attention: Attention, mlp: GatedMLP
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(weights.at("input_layernorm"), size, eps)
        self.mlp_norm = RMSNorm(weights.at("post_attention_layernorm"), size, eps)
        self.attention = attention
        self.mlp = mlp

    def __call__(
        self, hidden: Tensor, angles: Angles, attention: AttentionPlan, cache: LayerCache
    ) -> Tensor:
        """hidden [tokens, hidden]: the residual stream; the result is alike."""
        attended = self.attention(self.attention_norm(hidden), angles, attention, cache)
        hidden = hidden + attended
        return hidden + self.mlp(self.mlp_norm(hidden))


class DenseStage(ABC):
    """One stage of a dense model: some layers, the embedding before the first of all, the final
    norm and the LM head behind the last. A family says how its layer is built.
    """

    def __init__(self, config: ModelConfig, weights: Weights, layers: range) -> None:
        """`weights`: at the checkpoint's root. Raises ModelError."""
        self.config = config
        self.frequencies, self.rotary_factor = inverse_frequencies(
            config.rope.kind, config.head_dim, config.rope.theta, config.rope.parameters
        )
        root = weights.at("model")
        shape = (config.vocab_size, config.hidden_size)
        self.embedding: Tensor | None = None
        self.head: Tensor | None = None
        if layers.start == 0:
            self.embedding = root.read("embed_tokens.weight", *shape)
        self.layers = [self.layer(config, root.at(f"layers.{index}")) for index in layers]
        if layers.stop == config.num_layers:
            self.norm = RMSNorm(root.at("norm"), config.hidden_size, config.rms_norm_eps)
            if not config.tie_word_embeddings:
                self.head = weights.read("lm_head.weight", *shape)
            elif self.embedding is not None:
                self.head = self.embedding
            else:
                self.head = root.read("embed_tokens.weight", *shape)

    @staticmethod
    def tensor_names(config: ModelConfig, layers: range) -> list[str]:
        """Names of the tensors outside of layers that a stage reads."""
        names = ["model.embed_tokens.weight"] if layers.start == 0 else []
        if layers.stop == config.num_layers:
            tied = config.tie_word_embeddings
            names += ["model.norm.weight"]
            names += ["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return names

    @staticmethod
    @abstractmethod
    def layer(config: ModelConfig, weights: Weights) -> DecoderLayer:
        """One layer from its weights, given at the layer's prefix."""

    def forward(
        self, inputs: StageInputs, hidden: Tensor | None, kv: Sequence[LayerCache]
    ) -> Tensor:
        """The residual stream [tokens, hidden] behind this stage's layers.

        hidden [tokens, hidden]: the same from the stage before, None on the first; kv: the cache
        of each of this stage's layers.
        """
        if self.embedding is not None:
            hidden = functional.embedding(inputs.token_ids, self.embedding)
        assert hidden is not None, "a stage that is not the first needs activations"
        angles = rotary_angles(inputs.positions, self.frequencies, self.rotary_factor)
        for layer, cache in zip(self.layers, kv, strict=True):
            hidden = layer(hidden, angles, inputs.attention, cache)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] float32 of hidden [rows, hidden], on the last stage only."""
        assert self.head is not None, "only the last stage has the LM head"
        result = torch.empty(len(hidden), len(self.head), dtype=torch.float32)
        for begin in range(0, len(hidden), HEAD_ROWS):
            rows = slice(begin, begin + HEAD_ROWS)
            result[rows] = functional.linear(self.norm(hidden[rows]), self.head)
        return result

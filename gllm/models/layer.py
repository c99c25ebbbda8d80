"""Decoder layer: attention and feed-forward block with the norms around them."""

from torch import Tensor

from gllm.models.attention import Attention, ForwardContext, LatentAttention, LayerCache
from gllm.models.basic_layers import Norm, optional_norm
from gllm.models.feed_forward import MLP, Experts
from gllm.models.loader import Weights
from gllm.models.spec import ExpertsSpec, LatentAttentionSpec, LayerSpec


class DecoderLayer:
    """Attention and feed-forward block, each added to the residual stream."""

    def __init__(self, spec: LayerSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.is_parallel = spec.is_parallel
        self.attention_norm = Norm(spec.attention_norm, weights, hidden_size)
        self.attention: Attention | LatentAttention
        if isinstance(spec.attention, LatentAttentionSpec):
            self.attention = LatentAttention(spec.attention, weights, hidden_size)
        else:
            self.attention = Attention(spec.attention, weights, hidden_size)
        self.post_attention_norm = optional_norm(spec.post_attention_norm, weights, hidden_size)
        self.mlp_norm = optional_norm(spec.mlp_norm, weights, hidden_size)
        self.mlp: MLP | Experts
        if isinstance(spec.mlp, ExpertsSpec):
            self.mlp = Experts(spec.mlp, weights, hidden_size)
        else:
            self.mlp = MLP(spec.mlp, weights, hidden_size)
        self.post_mlp_norm = optional_norm(spec.post_mlp_norm, weights, hidden_size)

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, context: ForwardContext, cache: LayerCache
    ) -> Tensor:
        """Return this layer's last addend of the residual stream, [tokens, hidden].

        The next layer adds it, together with its first norm.

        Args:
            hidden: residual stream [tokens, hidden] without `delta`; all other addends of this
                layer are added to it in place.
            delta: last addend of the previous layer; None for the first layer.
            context: inputs of the step.
            cache: KV cache of the layer.
        """
        normed = self.attention_norm.add_and_normalize(hidden, delta)
        attended = self.attention(normed, context, cache)
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        if self.is_parallel:
            return attended + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(hidden))
        assert self.mlp_norm is not None, "a sequential layer has a norm before each block"
        output = self.mlp(self.mlp_norm.add_and_normalize(hidden, attended))
        return output if self.post_mlp_norm is None else self.post_mlp_norm(output)

"""One decoder layer: attention and feed-forward with the norms around them.

Owns the order of operations within it. The arithmetic is in gllm/kernels, what there is to compute
in a description (spec.py). Does not know stages.
"""

from torch import Tensor

from gllm.models import spec
from gllm.models.attention import Attention, LatentAttention, LayerCache, Step
from gllm.models.feed_forward import MLP, Experts
from gllm.models.loader import Weights
from gllm.models.parts import Norm, norm_of


class Layer:
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self, described: spec.Layer, weights: Weights, hidden: int) -> None:
        self.parallel = described.parallel
        self.attention_norm = Norm(described.attention_norm, weights, hidden)
        self.attention: Attention | LatentAttention
        if isinstance(described.attention, spec.LatentAttention):
            self.attention = LatentAttention(described.attention, weights, hidden)
        else:
            self.attention = Attention(described.attention, weights, hidden)
        self.after_attention = norm_of(described.after_attention, weights, hidden)
        self.mlp_norm = norm_of(described.mlp_norm, weights, hidden)
        self.mlp: MLP | Experts
        if isinstance(described.mlp, spec.Experts):
            self.mlp = Experts(described.mlp, weights, hidden)
        else:
            self.mlp = MLP(described.mlp, weights, hidden)
        self.after_mlp = norm_of(described.after_mlp, weights, hidden)

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, step: Step, cache: LayerCache
    ) -> Tensor:
        """What this layer adds to the residual stream at last, [tokens, hidden].

        hidden [tokens, hidden]: the residual stream but for `delta`, what the layer before adds to
        it; everything up to the result is added to it in place.
        """
        normed = self.attention_norm.after(hidden, delta)
        attended = self.attention(normed, step, cache)
        if self.after_attention is not None:
            attended = self.after_attention(attended)
        if self.parallel:
            return attended + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(hidden))
        assert self.mlp_norm is not None, "halves one after the other have a norm each"
        made = self.mlp(self.mlp_norm.after(hidden, attended))
        return made if self.after_mlp is None else self.after_mlp(made)

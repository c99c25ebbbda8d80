"""Layer normalization."""

from torch import Tensor
from torch.nn import functional


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Apply LayerNorm over the last dimension: (x - mean) / sqrt(variance + eps) * weight + bias.

    x is [..., n]; weight [n], or [m, n] for x [..., m, n]; bias likewise. Mean and variance are
    computed in float32; the result has the shape and dtype of x. Source: Ba, Kiros and Hinton,
    "Layer Normalization" (2016), equation 4.
    """
    if weight.dim() == 1:
        return functional.layer_norm(x, weight.shape, weight, bias, eps)
    scaled = functional.layer_norm(x, x.shape[-1:], eps=eps) * weight
    return scaled if bias is None else scaled + bias

"""Layer normalisation.

Owns the formula and its precision. Does not know where in a model it is used.
"""

from torch import Tensor
from torch.nn import functional


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.

    x [..., n]; weight [n], or [m, n] for x [..., m, n]; bias alike. Mean and variance are taken in
    float32; the result has x's shape and dtype. Source: Ba, Kiros and Hinton, "Layer Normalization"
    (2016), equation 4.
    """
    if weight.dim() == 1:
        return functional.layer_norm(x, weight.shape, weight, bias, eps)
    scaled = functional.layer_norm(x, x.shape[-1:], eps=eps) * weight
    return scaled if bias is None else scaled + bias

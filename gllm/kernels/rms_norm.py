"""Root-mean-square normalisation.

Owns the formula and its precision. Does not know where in a model it is used.
"""

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, the mean taken in float32.

    x [..., n], weight [n] of the same dtype or of float32, in which case everything is computed in
    float32; the result has x's shape and dtype. Source: Zhang and Sennrich, "Root Mean Square Layer
    Normalization" (2019), equation 4.
    """
    return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)

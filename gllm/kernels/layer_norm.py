"""Layer normalization."""

from functools import partial

from torch import Tensor
from torch.nn import functional

from gllm.kernels.native.program import launch_host_function


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Apply LayerNorm over the last dimension: (x - mean) / sqrt(variance + eps) * weight + bias.

    x is [..., n]; weight [n], or [m, n] for x [..., m, n]; bias likewise. Mean and variance are
    computed in float32; the result has the shape and dtype of x. If the weight is float32,
    everything is computed in float32. Source: Ba, Kiros and Hinton, "Layer Normalization" (2016),
    equation 4.
    """
    return launch_host_function(partial(_normalize, weight=weight, bias=bias, eps=eps), x)


def _normalize(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the norm; the arguments are those of `layer_norm`."""
    if weight.dtype != x.dtype:
        bias = None if bias is None else bias.to(weight.dtype)
        return _normalize(x.to(weight.dtype), weight, bias, eps).to(x.dtype)
    if weight.dim() == 1:
        return functional.layer_norm(x, weight.shape, weight, bias, eps)
    scaled = functional.layer_norm(x, x.shape[-1:], eps=eps) * weight
    return scaled if bias is None else scaled + bias

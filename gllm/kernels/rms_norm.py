"""RMSNorm, with and without a preceding residual addition."""

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.native.library import KernelLibrary, NormArguments, library_for
from gllm.kernels.native.program import make_contiguous


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm over the last dimension: return x / sqrt(mean(x^2) + eps) * weight.

    The mean is computed in float32. x is [..., n]; weight is [n] of the same dtype or float32; the
    result has x's shape and dtype. Source: Zhang and Sennrich, "Root Mean Square Layer
    Normalization" (2019), equation 4.
    """
    if x.is_cuda:
        from gllm.kernels.triton import rms_norm as gpu

        return gpu.rms_norm(x, weight, eps)
    library = library_for(x, "norm")
    if library is not None:
        return _native(library, make_contiguous(x), None, weight, eps)
    return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add a sublayer's output `delta` to the residual stream in place; return the sum's RMSNorm.

    hidden and delta are [tokens, n]; weight is [n].
    """
    if hidden.is_cuda:
        from gllm.kernels.triton import rms_norm as gpu

        return gpu.add_rms_norm(hidden, delta, weight, eps)
    library = library_for(hidden, "norm")
    if library is not None and hidden.is_contiguous() and delta.is_contiguous():
        return _native(library, hidden, delta, weight, eps)
    return rms_norm(hidden.add_(delta), weight, eps)


def _native(
    library: KernelLibrary, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> Tensor:
    output, size = library.empty(hidden.shape, hidden.dtype), len(weight)
    tensors, has_float_weight = (hidden, delta, weight, output), weight.dtype == torch.float32
    rows = hidden.numel() // size
    library(NormArguments(*tensors, rows, size, eps, has_float_weight, hidden.dtype))
    return output

"""What Triton kernels share.

Owns the product of tiles. Triton's interpreter, by which kernels are tested without a GPU, computes
products and arithmetic of bfloat16 wrongly, silently; conversions are right. So kernels compute in
float32 between loads and stores, as they would anyway, and multiply tiles by `dot`.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, total):
    """total [m, n] float32 + a [m, k] times b [k, n], on tensor cores in the operands' type."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total)

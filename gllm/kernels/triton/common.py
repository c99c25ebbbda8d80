"""Device functions shared by the Triton kernels, and the number of processors of a GPU.

Triton's interpreter, which tests the kernels without a GPU, silently computes products and bfloat16
arithmetic wrongly; conversions are right. The kernels therefore compute in float32 between loads
and stores, and multiply tiles with `dot`.
"""

from functools import cache

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, total):
    """Return total [m, n] float32 + a [m, k] @ b [k, n], on tensor cores in the dtype of a."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total)


@triton.jit
def tokens_of(table, blocks, positions, there, BLOCK_SIZE: tl.constexpr):
    """Load the tokens int64 at positions of a history, -1 where not `there`.

    table [slots] int64: token per KV-cache slot; blocks: the block table of the history
    (gllm/kernels/history.py).
    """
    block = tl.load(blocks + positions // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    slots = block * BLOCK_SIZE + positions % BLOCK_SIZE
    return tl.load(table + slots, mask=there, other=-1)


@cache
def count_processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a device; 1 if it is not a GPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

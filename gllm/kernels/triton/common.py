"""What Triton kernels share.

Owns the product of tiles, looks into the histories of sequences, and how many processors a GPU has.
Triton's interpreter, by which kernels are tested without a GPU, computes products and arithmetic of
bfloat16 wrongly, silently; conversions are right. So kernels compute in float32 between loads and
stores, as they would anyway, and multiply tiles by `dot`.
"""

from functools import cache

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, total):
    """total [m, n] float32 + a [m, k] times b [k, n], on tensor cores in the operands' type."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total)


@triton.jit
def tokens_of(table, blocks, positions, there, BLOCK_SIZE: tl.constexpr):
    """Tokens int64 at positions of a history, -1 where not `there`; table: [slots] int64, blocks:
    the history's block table (gllm/kernels/history.py)."""
    block = tl.load(blocks + positions // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    slots = block * BLOCK_SIZE + positions % BLOCK_SIZE
    return tl.load(table + slots, mask=there, other=-1)


@cache
def count_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; 1 for one that has none."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

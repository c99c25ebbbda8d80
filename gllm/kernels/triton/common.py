"""Device functions shared by the Triton kernels, and the number of processors of a GPU.

Triton's interpreter, which tests the kernels without a GPU, silently computes products and bfloat16
arithmetic wrongly; conversions are right. The kernels therefore compute in float32 between loads
and stores, and multiply tiles with `dot`.
"""

import logging
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

log = logging.getLogger(__name__)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, total):
    """Return total [m, n] float32 + a [m, k] @ b [k, n], on tensor cores in the dtype of a.

    Triton device function.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total)


@triton.jit
def load_history_tokens(table, blocks, positions, there, BLOCK_SIZE: tl.constexpr):
    """Load a sequence's tokens [n] int64 at positions [n]; -1 where the mask `there` [n] is false.

    table [slots] int64: token per KV-cache slot; blocks: pointer to the block ids of the sequence
    (gllm/kernels/history.py); BLOCK_SIZE: tokens per block. Triton device function.
    """
    block = tl.load(blocks + positions // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    slots = block * BLOCK_SIZE + positions % BLOCK_SIZE
    return tl.load(table + slots, mask=there, other=-1)


@cache
def count_processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a GPU; 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class CompilationCounter:
    """Counter of the Triton kernels that this process compiles or loads from Triton's disk cache.

    Counts from its creation on; one per process. A compilation blocks the stage for about a second,
    so none should happen once the engine is ready.
    """

    def __init__(self) -> None:
        self.count = 0
        knobs.runtime.jit_post_compile_hook = self._on_compiled

    def _on_compiled(self, *, repr: str, **_: Any) -> None:
        """Count a compilation; repr: the kernel with its options and argument types."""
        self.count += 1
        log.warning("compiled while serving: %s", repr)

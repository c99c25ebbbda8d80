"""Short benchmark of each compiled kernel against torch; library.py uses the ratios.

Linear layers and attention are measured for decodes and for a prefill chunk, because a build may be
faster for one and slower for the other. 8-bit products are not measured: torch has none, and the
reference multiplies in float64. All inputs are constants, so that the state of random number
generators does not change.
"""

import time
from collections.abc import Callable
from functools import partial
from math import inf, prod
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.native.library import MAX_SLOWDOWN, KernelLibrary, Operation, using_library
from gllm.kernels.threads import using_num_threads

ROUNDS = 3
"""Minimum number of runs per implementation; the shortest one counts."""
SECONDS = 0.03
"""CPU time of the thread after which a build that measures slower is accepted as slower."""
TOKENS = 64
"""Rows per operation: a prefill chunk, or a large batch of decodes."""
SIZE = 512
"""Inputs and outputs of products: large enough to make the call overhead of Python negligible."""
DECODES = 4
"""Rows of a small batch of decodes."""
DECODE_INPUTS, DECODE_OUTPUTS = 1024, 2048
"""Sizes of the product for decodes: the 16-bit weight does not fit into the L2 cache."""
DECODE_CONTEXT = 512
"""Context length of the decodes: several key blocks of the kernel."""

Run = Callable[[], object]
Workload = Callable[[torch.dtype], Run]
CompareFunction = Callable[[KernelLibrary, KernelLibrary, Workload, torch.dtype], float]
"""Returns the ratio of the times of a workload with two libraries."""


class _AlwaysOrNever(KernelLibrary):
    """Library that computes every operation, or none if `library` is None."""

    def __init__(self, library: KernelLibrary | None) -> None:
        self._library = library

    def is_preferred(self, operation: Operation, dtype: torch.dtype) -> bool:
        return self._library is not None

    def __call__(self, arguments: object) -> None:
        assert self._library is not None
        self._library(arguments)  # type: ignore[arg-type]


def measure_slowdowns(
    library: KernelLibrary, dtype: torch.dtype, compare: CompareFunction | None = None
) -> dict[Operation, float]:
    """Benchmark the compiled CPU kernels: return the time relative to torch for each operation.

    Measures the CPU time of one thread, so that other processes do not count. For operations
    measured for decodes and for a prefill chunk, returns the geometric mean of both ratios.

    Args:
        library: compiled kernels.
        dtype: of all tensors.
        compare: measures one workload; by default `measure_ratio`.
    """
    compare = compare or measure_ratio
    compiled, by_torch = _AlwaysOrNever(library), _AlwaysOrNever(None)
    with using_num_threads(1):
        return {
            name: prod(compare(compiled, by_torch, workload, dtype) for workload in workloads)
            ** (1 / len(workloads))
            for name, workloads in WORKLOADS.items()
        }


def measure_ratio(
    compiled: KernelLibrary, by_torch: KernelLibrary, workload: Workload, dtype: torch.dtype
) -> float:
    """Return the shortest time of a workload with one kernel library relative to another.

    Args:
        compiled: library whose time is the numerator.
        by_torch: library whose time is the denominator; it leaves all operations to torch.
        workload: prepares the operation.
        dtype: of all tensors.
    """
    runs = []
    for library in (compiled, by_torch):
        with using_library(library):
            run = workload(dtype)
            run()
        runs.append((library, run))
    best = [inf, inf]
    rounds, deadline = 0, time.thread_time() + SECONDS
    while rounds < ROUNDS or (best[0] > MAX_SLOWDOWN * best[1] and time.thread_time() < deadline):
        rounds += 1
        for i, (library, run) in enumerate(runs):
            with using_library(library):
                begin = time.thread_time()
                run()
                best[i] = min(best[i], time.thread_time() - begin)
    return best[0] / best[1]


def _constant(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 0.5, dtype=dtype)


def _linear(dtype: torch.dtype, tokens: int, inputs: int, outputs: int) -> Run:
    from gllm.kernels.linear import linear, prepare

    x, matrix = (
        _constant(tokens, inputs, dtype=dtype),
        prepare(_constant(outputs, inputs, dtype=dtype)),
    )
    return lambda: linear(x, matrix, None)


def _attention(dtype: torch.dtype, sequences: int, tokens: int, context: int) -> Run:
    """Prepare attention of `sequences` sequences with `tokens` queries and `context` keys each."""
    from gllm.kernels.attention import paged_attention
    from gllm.kernels.attention_plan import PagedBatch, plan_attention
    from gllm.kernels.attention_scaling import AttentionScaling

    heads, kv_heads, dim, block = 4, 2, 64, 16
    blocks = sequences * context // block
    table = np.arange(blocks, dtype=np.int64).reshape(sequences, -1)
    start = np.arange(sequences + 1, dtype=np.int64) * tokens
    contexts = np.full(sequences, context, dtype=np.int64)
    rows = PagedBatch(table, start, contexts, 0, block, blocks)
    plan = plan_attention(rows, dtype)
    query = _constant(sequences * tokens, heads, dim, dtype=dtype)
    cache = _constant(blocks + 1, block, kv_heads, dim, dtype=dtype)
    scaling = AttentionScaling(dim**-0.5)
    return lambda: paged_attention(query, cache, cache, plan, scaling)


def _norm(dtype: torch.dtype) -> Run:
    from gllm.kernels.rms_norm import add_rms_norm

    hidden, weight = _constant(TOKENS, SIZE, dtype=dtype), _constant(SIZE, dtype=dtype)
    delta = torch.zeros_like(hidden)
    return lambda: add_rms_norm(hidden, delta, weight, 1e-5)


def _gate(dtype: torch.dtype) -> Run:
    from gllm.kernels.activation import act_and_mul

    both = _constant(TOKENS, 2 * SIZE, dtype=dtype)
    return lambda: act_and_mul("silu", both)


def _rotate(dtype: torch.dtype) -> Run:
    from gllm.kernels.qkv import rotate_and_store
    from gllm.kernels.qkv_layout import QKVLayout

    heads, kv_heads, dim = 4, 2, 64
    fused = _constant(TOKENS, heads + 2 * kv_heads, dim, dtype=dtype)
    cache = _constant(TOKENS, 1, kv_heads, dim, dtype=dtype)
    angles = _constant(TOKENS, 1, dim // 2, dtype=torch.float32)
    slots, layout = torch.arange(TOKENS), QKVLayout(heads, kv_heads)
    return lambda: rotate_and_store(fused, layout, (angles, angles), (cache, cache), slots)


WORKLOADS: MappingProxyType[Operation, tuple[Workload, ...]] = MappingProxyType(
    {
        "linear": (
            partial(_linear, tokens=DECODES, inputs=DECODE_INPUTS, outputs=DECODE_OUTPUTS),
            partial(_linear, tokens=TOKENS, inputs=SIZE, outputs=SIZE),
        ),
        "attention": (
            partial(_attention, sequences=DECODES, tokens=1, context=DECODE_CONTEXT),
            partial(_attention, sequences=1, tokens=TOKENS, context=2 * TOKENS),
        ),
        "norm": (_norm,),
        "gate": (_gate,),
        "rotate": (_rotate,),
    }
)
"""Workloads per operation; decodes first where both are measured."""

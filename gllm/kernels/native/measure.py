"""A short measurement of compiled kernels against torch, operation by operation.

Owns what is computed for it and the clock. Knows nothing of what its ratios decide (library.py).
Linear layers and attention are measured for decodes and for a prefill chunk, because a build may be
faster for one and slower for the other. 8-bit products are not measured: torch has none, and the
reference multiplies in float64. All numbers are constants, so that no generator of random numbers
is touched.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf, prod
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.native.library import SLOWER, Library, Operation, override

ROUNDS = 3
"""Least runs by either; the shortest counts."""
SECONDS = 0.03
"""Time of the thread after which a build that seems slower is believed to be so."""
TOKENS = 64
"""Rows of each operation: a prefill chunk, or a large batch of decodes."""
SIZE = 512
"""Inputs and outputs of products: large enough that calls from Python hardly count."""
DECODES = 4
"""Rows of a small batch of decodes."""
DECODE_INPUTS, DECODE_OUTPUTS = 1024, 2048
"""Of products for decodes: the weight does not fit into the second cache in 16 bits."""
DECODE_CONTEXT = 512
"""Keys that a decode's attention reads: several blocks of the kernel."""

Job = Callable[[], object]
Work = Callable[[torch.dtype], Job]


class _Forced(Library):
    """A library that computes every operation, or none."""

    def __init__(self, library: Library | None) -> None:
        self._library = library

    def serves(self, operation: Operation, dtype: torch.dtype) -> bool:
        return self._library is not None

    def __call__(self, arguments: object) -> None:
        assert self._library is not None
        self._library(arguments)  # type: ignore[arg-type]


def measure(library: Library, dtype: torch.dtype) -> dict[Operation, float]:
    """Return how many times as long as torch the library takes for each operation, on one thread
    and in this thread's own time: what others do meanwhile does not count.

    Where decodes and prefill chunks are measured it is the geometric mean of both ratios: a build
    that needs half the time for one may need twice the time for the other.
    """
    native, by_torch = _Forced(library), _Forced(None)
    threads = torch.get_num_threads()
    # With several threads a busy machine is measured: they wait for each other.
    torch.set_num_threads(1)
    try:
        return {
            name: prod(_ratio(native, by_torch, work, dtype) for work in works) ** (1 / len(works))
            for name, works in WORKS.items()
        }
    finally:
        torch.set_num_threads(threads)


def _ratio(native: Library, by_torch: Library, work: Work, dtype: torch.dtype) -> float:
    jobs = []
    for way in (native, by_torch):
        with _computing_by(way):
            job = work(dtype)
            job()
        jobs.append((way, job))
    best = [inf, inf]
    turns, end = 0, time.thread_time() + SECONDS
    while turns < ROUNDS or (best[0] > SLOWER * best[1] and time.thread_time() < end):
        turns += 1
        for i, (way, job) in enumerate(jobs):
            with _computing_by(way):
                begin = time.thread_time()
                job()
                best[i] = min(best[i], time.thread_time() - begin)
    return best[0] / best[1]


@contextmanager
def _computing_by(library: Library) -> Iterator[None]:
    token = override.set(library)
    try:
        yield
    finally:
        override.reset(token)


def _numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 0.5, dtype=dtype)


def _linear(dtype: torch.dtype, tokens: int, inputs: int, outputs: int) -> Job:
    from gllm.kernels.linear import linear, prepare

    x, matrix = (
        _numbers(tokens, inputs, dtype=dtype),
        prepare(_numbers(outputs, inputs, dtype=dtype)),
    )
    return lambda: linear(x, matrix, None)


def _attention(dtype: torch.dtype, sequences: int, tokens: int, context: int) -> Job:
    """tokens and context: of each sequence."""
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
    query = _numbers(sequences * tokens, heads, dim, dtype=dtype)
    cache = _numbers(blocks + 1, block, kv_heads, dim, dtype=dtype)
    scaling = AttentionScaling(dim**-0.5)
    return lambda: paged_attention(query, cache, cache, plan, scaling)


def _norm(dtype: torch.dtype) -> Job:
    from gllm.kernels.rms_norm import add_rms_norm

    hidden, weight = _numbers(TOKENS, SIZE, dtype=dtype), _numbers(SIZE, dtype=dtype)
    delta = torch.zeros_like(hidden)
    return lambda: add_rms_norm(hidden, delta, weight, 1e-5)


def _gate(dtype: torch.dtype) -> Job:
    from gllm.kernels.activation import gate

    both = _numbers(TOKENS, 2 * SIZE, dtype=dtype)
    return lambda: gate("silu", both)


def _rotate(dtype: torch.dtype) -> Job:
    from gllm.kernels.qkv import rotate_and_store
    from gllm.kernels.qkv_layout import QKVLayout

    heads, kv_heads, dim = 4, 2, 64
    fused = _numbers(TOKENS, heads + 2 * kv_heads, dim, dtype=dtype)
    cache = _numbers(TOKENS, 1, kv_heads, dim, dtype=dtype)
    angles = _numbers(TOKENS, 1, dim // 2, dtype=torch.float32)
    slots, layout = torch.arange(TOKENS), QKVLayout(heads, kv_heads)
    return lambda: rotate_and_store(fused, layout, (angles, angles), (cache, cache), slots)


WORKS: MappingProxyType[Operation, tuple[Work, ...]] = MappingProxyType(
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
"""What is computed for each operation: decodes first where both are measured."""

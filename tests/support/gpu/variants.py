"""Variants of kernels that launches would compile, without a GPU.

Owns what stands for a launch: Triton's own binder says which variant the arguments belong to, as it
does on a GPU of sm_90, and nothing runs. Outputs are whatever memory held before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from gllm.kernels.triton import common

PROCESSORS = 132
"""Of an H100 or H200."""


@cache
def _binder(kernel: InterpretedFunction) -> Any:
    """What Triton makes a launch's key by."""
    jit = JITFunction(kernel.fn, **{k: v for k, v in kernel.kwargs.items() if v is not None})
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(jit.signature, jit.params, backend)


@contextmanager
def recorded_variants() -> Iterator[set[str]]:
    """Let operations on CPU tensors take the GPU's way, with launches recorded in place of run.

    Yields the variants so far: the kernel's name, its arguments' types and constants, its options.
    """
    variants: set[str] = set()

    def run(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        _, specialization, options = _binder(self)(*args, **kwargs)
        variants.add(f"{self.fn.__module__}.{self.fn.__name__} {specialization} {options}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        patch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
        patch.setattr(common, "count_processors", lambda device: PROCESSORS)
        # Numbers that other operations may take for tokens.
        patch.setattr(torch, "empty", torch.zeros)
        yield variants

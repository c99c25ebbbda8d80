"""The kernels that are compiled, for CPUs: which build of them this processor runs.

Owns loading, and the arguments as C sees them. Knows nothing of what is computed; the operations'
own files (gllm/kernels) decide when to call, and go without where nothing was compiled.

The library is called on raw pointers and does not link against torch. It shares torch's pool of
threads, for torch has loaded the same OpenMP library before.
"""

import ctypes
from collections.abc import Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"}
FLAVORS = MappingProxyType(
    {
        "avx512_bf16": {*_AVX512, "avx512_bf16", "avx512_vnni"},
        "avx512": _AVX512,
        "avx2": {"avx2", "fma", "f16c"},
        "portable": set[str](),
    }
)
"""Builds and the features of a processor that each needs, best first."""

DTYPES = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})
"""Types that kernels compute on, as simd.h numbers them."""

Pointer, Long, Int, Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def _fields(*groups: tuple[str, Any]) -> list[tuple[str, Any]]:
    """Fields of a structure from groups of names of one type."""
    return [(name, kind) for names, kind in groups for name in names.split()]


class AttentionArguments(ctypes.Structure):
    """As in attention.cpp."""

    _fields_ = _fields(
        ("output query keys values block_table query_start context_len slopes", Pointer),
        ("rows table_row block_size heads kv_heads key_dim value_dim", Long),
        ("query_row key_row value_row window", Long),
        ("scale softcap", Float),
        ("dtype threads", Int),
    )


class NormArguments(ctypes.Structure):
    """As in elementwise.cpp."""

    _fields_ = _fields(
        ("hidden delta weight output", Pointer),
        ("rows size", Long),
        ("eps", Float),
        ("float_weight dtype threads", Int),
    )


class RotaryArguments(ctypes.Structure):
    """As in elementwise.cpp."""

    _fields_ = _fields(
        ("qkv cosine sine query_norm key_norm keys values slots", Pointer),
        ("tokens heads kv_heads head_dim dim", Long),
        ("eps", Float),
        ("interleaved float_weight dtype threads", Int),
    )


class GateArguments(ctypes.Structure):
    """As in elementwise.cpp."""

    _fields_ = _fields(
        ("gate_up output", Pointer), ("rows size", Long), ("activation dtype threads", Int)
    )


class LinearArguments(ctypes.Structure):
    """As in linear.cpp."""

    _fields_ = _fields(
        ("output input weight bias", Pointer),
        ("rows inputs outputs input_row", Long),
        ("gate float_output dtype threads", Int),
    )


class PackArguments(ctypes.Structure):
    """As in linear.cpp."""

    _fields_ = _fields(
        ("packed weight", Pointer), ("inputs outputs", Long), ("step dtype threads", Int)
    )


class UnpackArguments(ctypes.Structure):
    """As in linear.cpp."""

    _fields_ = _fields(
        ("output packed chosen", Pointer), ("rows inputs", Long), ("dtype threads", Int)
    )


class QuantizeArguments(ctypes.Structure):
    """As in int8.cpp."""

    _fields_ = _fields(
        ("x codes scales", Pointer), ("rows size", Long), ("dtype threads", Int)
    )


class Int8Arguments(ctypes.Structure):
    """As in int8.cpp."""

    _fields_ = _fields(
        ("x weights scales offsets bias output", Pointer),
        ("rows inputs outputs", Long),
        ("dtype float_output threads", Int),
    )


ACTIVATIONS = MappingProxyType({"silu": 1, "gelu_tanh": 2})
"""Those that are compiled, as in activation.h."""

FUNCTIONS = {
    "gllm_attention": AttentionArguments,
    "gllm_add_rms_norm": NormArguments,
    "gllm_rotate_and_store": RotaryArguments,
    "gllm_gate": GateArguments,
    "gllm_linear": LinearArguments,
    "gllm_pack": PackArguments,
    "gllm_unpack": UnpackArguments,
    "gllm_quantize_rows": QuantizeArguments,
    "gllm_linear_int8": Int8Arguments,
}


class Library:
    """One build. Calling it runs the function that takes the arguments."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._functions = {}
        for name, arguments in FUNCTIONS.items():
            function = library[name]
            function.argtypes, function.restype = [ctypes.POINTER(arguments)], None
            self._functions[arguments] = function
        run = library.gllm_run
        run.argtypes, run.restype = [Pointer, Long], None
        self._run = run

    def run(self, calls: ctypes.Array[Any], count: int) -> None:
        """Run recorded calls (program.py), without Python's lock meanwhile."""
        self._run(calls, count)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a result."""
        return torch.empty(shape, dtype=dtype)

    def function(self, arguments: ctypes.Structure) -> Any:
        """The one that takes the arguments."""
        return self._functions[type(arguments)]

    def __call__(self, arguments: ctypes.Structure) -> None:
        """Without Python's lock meanwhile."""
        self.function(arguments)(arguments)


def builds() -> dict[str, Path]:
    """The compiled libraries that this processor can run, best first."""
    features = _features()
    found = {}
    for flavor, needed in FLAVORS.items():
        paths = sorted(Path(__file__).parent.glob(f"_{flavor}.*"))
        if paths and needed <= features:
            found[flavor] = paths[0]
    return found


@cache
def library() -> Library | None:
    """The best build; None where nothing was compiled."""
    return next((Library(path) for path in builds().values()), None)


def native(tensor: Tensor) -> Library | None:
    """The library, where it computes on tensors like this one."""
    if tensor.is_cpu and tensor.dtype in DTYPES:
        return recorder.get() or library()
    return None


recorder: ContextVar[Library | None] = ContextVar("recorder", default=None)
"""What notes calls instead of running them, while a program is recorded (program.py)."""


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor begins."""
    return None if tensor is None else tensor.data_ptr()


def _features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())

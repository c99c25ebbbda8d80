"""The kernels that are compiled, for CPUs, as a library that Python calls.

Owns loading, the arguments as C sees them, and which operations the library computes rather than
torch. Knows nothing of what is computed; the operations' own files (gllm/kernels) decide when to
call, and go without where nothing was compiled.

The library is called on raw pointers and does not link against torch. It shares torch's pool of
threads, for torch has loaded the same OpenMP library before.
"""

import ctypes
import fcntl
import importlib
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from gllm.kernels.native.builds import VARIABLE, select

log = logging.getLogger(__name__)

Operation = Literal["linear", "linear_int8", "attention", "norm", "gate", "rotate"]
SLOWER = 1.25
"""Times as long as torch from which on torch computes an operation, by the geometric mean of
decodes and a prefill chunk: a short measurement is not exact, and compiled kernels sum in an order
that does not depend on the batch."""
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

    _fields_ = _fields(("x codes scales", Pointer), ("rows size", Long), ("dtype threads", Int))


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

    def serves(self, operation: Operation, dtype: torch.dtype) -> bool:
        """Return whether it computes the operation on a type of DTYPES."""
        return True

    def function(self, arguments: ctypes.Structure) -> Any:
        """The one that takes the arguments."""
        return self._functions[type(arguments)]

    def __call__(self, arguments: ctypes.Structure) -> None:
        """Without Python's lock meanwhile."""
        self.function(arguments)(arguments)


class MeasuredLibrary(Library):
    """The best build: it computes what it does not compute slower than torch on this machine.

    An operation is measured once for each type (measure.py), by the first process of a pipeline
    that needs it: its stages share a file, so that all of them compute alike.
    """

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self._name = name
        self._ratios: dict[torch.dtype, Mapping[Operation, float]] = {}
        self._lock = threading.Lock()
        self._file: int | None = None

    def share(self, descriptor: int) -> None:
        """Read and write measurements in a file that the pipeline's processes share."""
        self._file = descriptor

    def serves(self, operation: Operation, dtype: torch.dtype) -> bool:
        ratios = self._ratios.get(dtype)
        if ratios is None:
            with self._lock:
                ratios = self._ratios.get(dtype) or self._measured(dtype)
                self._ratios[dtype] = ratios
        return ratios.get(operation, 0.0) <= SLOWER

    def _measured(self, dtype: torch.dtype) -> Mapping[Operation, float]:
        """By this process, unless another has measured already."""
        if self._file is None:
            return self._measure(dtype)
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            text = os.pread(self._file, os.fstat(self._file).st_size, 0)
            known = json.loads(text) if text else {}
            if str(dtype) not in known:
                known[str(dtype)] = self._measure(dtype)
                os.pwrite(self._file, json.dumps(known).encode(), 0)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        ratios: Mapping[Operation, float] = known[str(dtype)]
        return ratios

    def _measure(self, dtype: torch.dtype) -> Mapping[Operation, float]:
        # When it is needed: it runs the operations, which are made of this module.
        module = importlib.import_module("gllm.kernels.native.measure")
        ratios: Mapping[Operation, float] = module.measure(self, dtype)
        slow = [f"{name} ({ratio:.1f} x)" for name, ratio in ratios.items() if ratio > SLOWER]
        if slow:
            log.warning(
                "torch computes %s in %s: the kernels' build %s takes longer here; "
                "%s=%s uses it nevertheless",
                *(", ".join(slow), dtype, self._name, VARIABLE, self._name),
            )
        return ratios


@cache
def library() -> Library | None:
    """The selected build; None where there is none.

    One that GLLM_CPU_KERNELS names computes all operations, and is not measured. Raises ValueError
    for a name that cannot be (builds.py).
    """
    build = select()
    if build.path is None:
        return None
    return Library(build.path) if build.is_named else MeasuredLibrary(build.path, build.name)


def log_kernels() -> None:
    """Say which build is used, or that there is none and why."""
    build = select()
    is_missing = build.path is None and not build.is_named
    name = "none, torch computes" if build.path is None else f"build {build.name}"
    log.log(
        logging.WARNING if is_missing else logging.INFO,
        "compiled kernels: %s (%s)",
        *(name, build.reason),
    )


def share_measurements(descriptor: int | None) -> None:
    """Share measurements with the pipeline's other processes, by a file that all have opened."""
    found = library()
    if isinstance(found, MeasuredLibrary) and descriptor is not None:
        found.share(descriptor)


def native(tensor: Tensor, operation: Operation) -> Library | None:
    """The library, where it computes this operation on tensors like this one."""
    if not tensor.is_cpu or tensor.dtype not in DTYPES:
        return None
    found = override.get() or library()
    return found if found is not None and found.serves(operation, tensor.dtype) else None


override: ContextVar[Library | None] = ContextVar("override", default=None)
"""Takes the place of the library: notes calls while a program is recorded (program.py)."""


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor begins."""
    return None if tensor is None else tensor.data_ptr()

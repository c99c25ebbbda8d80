"""Python interface to the compiled CPU kernels: loading, structures, choice per operation.

The modules of the operations (gllm/kernels) call `library_for` and use torch if it returns None.
The library receives raw pointers and does not link against torch. It has its own threads (pool.cpp;
threads.py sets their number).
"""

import ctypes
import fcntl
import importlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gllm.kernels.native.builds import BUILD_VARIABLE, BuildSelection, check_sources, select_build
from gllm.kernels.state_plan import StatePlan
from gllm.kernels.threads import num_threads

NUM_PLACES = 5
"""Places per rank of a group, `PLACES` in all_reduce.cpp."""
MAX_RANKS = 64
"""Most ranks of a group, as in all_reduce.cpp."""


log = logging.getLogger(__name__)

Operation = Literal[
    "linear",
    "linear_int8",
    "linear_grouped",
    "attention",
    "norm",
    "gate",
    "rotate",
    "recurrence",
]
MAX_SLOWDOWN = 1.25
"""Largest ratio of a kernel's time to torch's at which the kernel is used: the geometric mean of
decodes and a prefill chunk. Above 1, because a short measurement is not exact and compiled kernels
sum in an order that does not depend on the batch."""
DTYPES = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})
"""Supported dtypes and their numbers in `enum Dtype` of simd.h."""

Pointer, Long, Int, Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
Word = ctypes.c_uint32


def _fields(*groups: tuple[str, Any]) -> list[tuple[str, Any]]:
    """Return the fields of a structure from (space-separated names, type) groups."""
    return [(name, kind) for names, kind in groups for name in names.split()]


class RankSyncState(ctypes.Structure):
    """State in shared memory by which one tensor-parallel rank synchronizes with the others.

    C structure `RankSyncState` of all_reduce.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("sequence is_sleeping doorbell unused", Word),
        ("tags", ctypes.c_uint64 * 2),
        ("padding", ctypes.c_uint8 * 96),
    )


class RankGroupState(ctypes.Structure):
    """One tensor-parallel rank's pointers into shared memory and its counters for collectives.

    C structure `RankGroup` of all_reduce.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("lines closed parts", Pointer),
        ("rank_bytes", Long),
        ("offsets", Long * NUM_PLACES),
        ("rank size", Int),
        ("sequence spin_ns", Word),
        ("used", Word * NUM_PLACES),
    )


class BarrierArguments(ctypes.Structure):
    """Arguments of the compiled barrier among tensor-parallel ranks.

    C structure `BarrierArguments` of all_reduce.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("group", ctypes.POINTER(RankGroupState)),
        ("tag", ctypes.c_uint64),
        ("place is_acquire", Int),
    )


class CancelArguments(ctypes.Structure):
    """Arguments of the compiled function that ends every wait of every tensor-parallel rank.

    C structure `CancelArguments` of all_reduce.cpp, which documents the fields.
    """

    _fields_ = _fields(("group", ctypes.POINTER(RankGroupState)))


class KernelArguments(ctypes.Structure):
    """Base of the argument structures of compiled kernels that use several threads.

    The constructor accepts tensors for addresses, dtypes for numbers of the C `enum Dtype`, and
    None for null pointers.
    """

    def __init__(self, *values: Any, **named: Any) -> None:
        """Set the fields in order; `threads` is the number of threads of kernels."""
        converted = {name: _convert(value) for name, value in named.items()}
        super().__init__(*map(_convert, values), **converted)
        self.threads = num_threads()


def _convert(value: Any) -> Any:
    """Return what a C field takes for a value: the address of a tensor, the number of a dtype."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return DTYPES[value] if isinstance(value, torch.dtype) else value


class ReduceArguments(KernelArguments):
    """Arguments of the compiled all-reduce (sum or maximum) among tensor-parallel ranks.

    C structure `ReduceArguments` of all_reduce.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("group", ctypes.POINTER(RankGroupState)),
        ("part bias output", Pointer),
        ("rows width", Long),
        ("place collective float_part float_bias dtype threads", Int),
    )


class AttentionArguments(KernelArguments):
    """Arguments of the compiled paged attention kernel.

    C structure `AttentionArguments` of attention.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("output query keys values block_table query_start context_len slopes", Pointer),
        ("rows table_row block_size heads kv_heads key_dim value_dim", Long),
        ("query_row key_row value_row window", Long),
        ("scale softcap", Float),
        ("dtype int8_cache threads", Int),
        ("sinks", Pointer),
    )


class NormArguments(KernelArguments):
    """Arguments of the compiled RMSNorm kernel with an optional residual addition.

    C structure `NormArguments` of elementwise.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("hidden delta weight output", Pointer),
        ("rows size", Long),
        ("eps", Float),
        ("float_weight dtype threads", Int),
    )


class RotaryArguments(KernelArguments):
    """Arguments of the compiled kernel for QK norms, rotary embedding and the KV cache write.

    C structure `RotaryArguments` of elementwise.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("qkv cosine sine query_norm key_norm keys values slots", Pointer),
        ("tokens heads kv_heads head_dim dim row", Long),
        ("eps", Float),
        ("interleaved float_weight int8_cache dtype threads", Int),
    )


class GateArguments(KernelArguments):
    """Arguments of the compiled kernel that computes act(gate) * up.

    C structure `GateArguments` of elementwise.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("gate up output", Pointer),
        ("rows size gate_row up_row", Long),
        ("activation dtype threads", Int),
    )


class ActivateArguments(KernelArguments):
    """Arguments of the compiled elementwise activation kernel.

    C structure `ActivateArguments` of elementwise.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("input output", Pointer), ("rows size", Long), ("activation dtype threads", Int)
    )


class StatePlanArguments(ctypes.Structure):
    """Segments of a step and the slots of their states, for kernels of recurrent layers.

    C structure `StatePlan` of recurrent.cpp.
    """

    _fields_ = _fields(("segments groups", Pointer), ("num_groups", Long))


class ConvolutionArguments(KernelArguments):
    """Arguments of the compiled causal depthwise convolution.

    C structure `ConvolutionArguments` of recurrent.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("plan", StatePlanArguments),
        ("input weight bias state output", Pointer),
        ("channels size input_row", Long),
        ("activation dtype threads", Int),
    )


class RecurrenceArguments(KernelArguments):
    """Arguments of the compiled linear recurrence: gated delta rule or selective state update.

    C structure `RecurrenceArguments` of recurrent.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("plan", StatePlanArguments),
        ("query key value step beta rate bias skip state output", Pointer),
        ("heads key_heads key_dim value_dim", Long),
        ("query_row key_row value_row step_row beta_row", Long),
        ("min_step max_step query_scale decay_bound", Float),
        ("normalizes step_per_key dtype threads", Int),
    )


class ScanArguments(KernelArguments):
    """Arguments of the compiled selective scan of Mamba 1.

    C structure `ScanArguments` of recurrent.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("plan", StatePlanArguments),
        ("value step key query rate bias skip state output", Pointer),
        ("channels size value_row step_row key_row query_row", Long),
        ("dtype threads", Int),
    )


class GatedNormArguments(KernelArguments):
    """Arguments of the compiled RMSNorm with a gate.

    C structure `GatedNormArguments` of recurrent.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("input gate weight output", Pointer),
        ("rows groups weight_groups size gate_row", Long),
        ("eps", Float),
        ("gates_first activation float_weight dtype threads", Int),
    )


class LinearArguments(KernelArguments):
    """Arguments of the compiled linear layer with an unquantized weight.

    C structure `LinearArguments` of linear.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("output input weight bias", Pointer),
        ("rows inputs outputs input_row", Long),
        ("gate float_output dtype threads", Int),
    )


class HeadLinearArguments(KernelArguments):
    """Arguments of the compiled linear layer with a separate matrix for each attention head.

    C structure `HeadLinearArguments` of linear_output.h, which documents the fields.
    """

    _fields_ = _fields(
        ("output input weight", Pointer),
        ("rows heads inputs outputs", Long),
        ("input_row input_head output_row output_head weight_head", Long),
        ("dtype threads", Int),
    )


class PackArguments(KernelArguments):
    """Arguments of the compiled function that packs a weight for the linear layer.

    C structure `PackArguments` of pack.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("packed weight", Pointer), ("inputs outputs", Long), ("step dtype threads", Int)
    )


class UnpackArguments(KernelArguments):
    """Arguments of the compiled function that reads rows of a packed weight.

    C structure `UnpackArguments` of pack.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("output packed chosen", Pointer), ("rows inputs", Long), ("dtype threads", Int)
    )


class QuantizeArguments(KernelArguments):
    """Arguments of the compiled quantization of activations to int8.

    C structure `QuantizeArguments` of int8.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("x codes scales", Pointer),
        ("rows size", Long),
        ("dtype threads", Int),
        ("magnitudes", Pointer),
    )


class Int8Arguments(KernelArguments):
    """Arguments of the compiled linear layer with an int8 weight.

    C structure `Int8Arguments` of int8.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("x weights scales offsets bias output", Pointer),
        ("rows inputs outputs", Long),
        ("dtype float_output threads", Int),
        ("magnitudes", Pointer),
    )


class GroupScalesArguments(ctypes.Structure):
    """Scales or minimums of a weight of few bits.

    C structure `GroupScales` of grouped.cpp, which documents the fields.
    """

    _fields_ = _fields(("numbers units", Pointer), ("groups_per_unit kind", Long))


class GroupedArguments(KernelArguments):
    """Arguments of the compiled linear layer with a weight of few bits.

    C structure `GroupedArguments` of grouped.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("codes table", Pointer),
        ("scales minimums", GroupScalesArguments),
        ("x bias output", Pointer),
        ("rows inputs outputs output_row group", Long),
        ("width zero gate dtype float_output threads", Int),
        ("order", Pointer),
    )


class GroupedRowsArguments(KernelArguments):
    """Arguments of the compiled function that reads rows of a weight of few bits.

    C structure `GroupedRowsArguments` of grouped.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("codes table", Pointer),
        ("scales minimums", GroupScalesArguments),
        ("chosen output", Pointer),
        ("rows inputs group", Long),
        ("width zero dtype threads", Int),
    )


class ChecksumArguments(ctypes.Structure):
    """Arguments of the compiled checksums of KV blocks.

    C structure `ChecksumArguments` of checksum.cpp, which documents the fields.
    """

    _fields_ = _fields(
        ("checksums counts slots addresses slot_bytes", Pointer),
        ("num_slots num_tensors num_blocks block_size", Long),
    )


ACTIVATIONS = MappingProxyType({"silu": 1, "gelu_tanh": 2, "gelu": 3, "swiglu_oai": 5})
"""Compiled activations and their numbers in `enum Activation` of activation.h."""
NO_ACTIVATION = 0
"""Number of the identity there."""
SIGMOID = 4
"""Number of the sigmoid there; it gates experts and scores them, but is no feed-forward block's."""
SOFTPLUS = 6
"""Number of the softplus there, which gates the heads of some attention layers."""

FUNCTIONS = {
    "gllm_attention": AttentionArguments,
    "gllm_add_rms_norm": NormArguments,
    "gllm_rotate_and_store": RotaryArguments,
    "gllm_gate": GateArguments,
    "gllm_activate": ActivateArguments,
    "gllm_convolve": ConvolutionArguments,
    "gllm_recur": RecurrenceArguments,
    "gllm_scan": ScanArguments,
    "gllm_gated_norm": GatedNormArguments,
    "gllm_linear": LinearArguments,
    "gllm_linear_heads": HeadLinearArguments,
    "gllm_pack": PackArguments,
    "gllm_unpack": UnpackArguments,
    "gllm_quantize_rows": QuantizeArguments,
    "gllm_linear_int8": Int8Arguments,
    "gllm_linear_grouped": GroupedArguments,
    "gllm_read_grouped": GroupedRowsArguments,
    "gllm_reduce": ReduceArguments,
    "gllm_barrier": BarrierArguments,
    "gllm_cancel": CancelArguments,
    "gllm_checksum_blocks": ChecksumArguments,
}
"""C functions of a build and the structure that each one takes."""


class KernelLibrary:
    """Loaded shared library of compiled CPU kernels.

    Calling the object with an argument structure runs the kernel that takes this structure.
    """

    is_recording = False
    """True if calls are stored instead of run (program.py)."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._functions = {}
        for name, arguments in FUNCTIONS.items():
            function = library[name]
            function.argtypes, function.restype = [ctypes.POINTER(arguments)], None
            self._functions[arguments] = function
        sources = getattr(library, "gllm_sources", None)
        if sources is not None:
            sources.argtypes, sources.restype = [], ctypes.c_char_p
        check_sources(path, "" if sources is None else sources().decode())
        run = library.gllm_run
        run.argtypes, run.restype = [Pointer, Long], None
        self._run = run

    def run(self, calls: ctypes.c_void_p, count: int) -> None:
        """Run `count` recorded kernel calls (program.py) in one C call, without holding the GIL."""
        self._run(calls, count)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialized tensor for the output of a kernel."""
        return torch.empty(shape, dtype=dtype)

    def is_preferred(self, operation: Operation, dtype: torch.dtype) -> bool:
        """Return True: without measurements the library computes every operation."""
        return True

    def function(self, arguments: ctypes.Structure) -> Any:
        """Return the C function for an argument structure."""
        return self._functions[type(arguments)]

    def __call__(self, arguments: ctypes.Structure) -> None:
        """Run the kernel for an argument structure without holding the GIL."""
        self.function(arguments)(arguments)

    def call_after(self, check: Callable[[], None]) -> None:
        """Check the kernel calls so far for errors: call a function that raises if one failed.

        Kernels themselves cannot raise. A recorder stores the check and calls it after each replay.
        """
        check()


MeasureFunction = Callable[[KernelLibrary, torch.dtype], Mapping[Operation, float]]
"""Returns the ratio of a library's time to torch's for each operation in a dtype."""


class MeasuredKernelLibrary(KernelLibrary):
    """Library of compiled CPU kernels that is used only for operations where torch is not faster.

    Each operation is benchmarked against torch once per dtype, by the first worker that needs it.
    The workers share the results in a file, so that all pipeline stages use the same kernels.
    """

    def __init__(self, path: Path, name: str, measure: MeasureFunction | None = None) -> None:
        """Load a build; `measure` replaces measure_slowdowns of measure.py."""
        super().__init__(path)
        self._name = name
        self._measure_slowdowns = measure
        self._ratios: dict[torch.dtype, Mapping[Operation, float]] = {}
        self._lock = threading.Lock()
        self._file: int | None = None

    def share(self, descriptor: int) -> None:
        """Share benchmark results with the other workers of the pipeline in an open file."""
        self._file = descriptor

    def is_preferred(self, operation: Operation, dtype: torch.dtype) -> bool:
        """Return True if the kernel takes at most MAX_SLOWDOWN times as long as torch.

        The first call for a dtype measures it, unless another worker already has.
        """
        ratios = self._ratios.get(dtype)
        if ratios is None:
            with self._lock:
                ratios = self._ratios.get(dtype) or self._measured(dtype)
                self._ratios[dtype] = ratios
        return ratios.get(operation, 0.0) <= MAX_SLOWDOWN

    def _measured(self, dtype: torch.dtype) -> Mapping[Operation, float]:
        """Return the ratios of another process, or measure them."""
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
        if self._measure_slowdowns is None:
            # Imported late: measure.py runs the operations, which import this module.
            module = importlib.import_module("gllm.kernels.native.measure")
            self._measure_slowdowns = module.measure_slowdowns
        ratios = self._measure_slowdowns(self, dtype)
        slow = [f"{name} ({ratio:.1f} x)" for name, ratio in ratios.items() if ratio > MAX_SLOWDOWN]
        if slow:
            log.warning(
                "torch computes %s in %s: the kernel build %s is slower on this machine; "
                "%s=%s uses it anyway",
                ", ".join(slow),
                dtype,
                self._name,
                BUILD_VARIABLE,
                self._name,
            )
        return ratios


@cache
def load_library() -> KernelLibrary | None:
    """Load the selected library of compiled CPU kernels, once per process; None if there is none.

    A library that GLLM_CPU_KERNELS names computes all operations. Otherwise torch computes those in
    which it was measured to be faster.

    Raises:
        ValueError: GLLM_CPU_KERNELS names a library that cannot be used.
    """
    build = select_build()
    if build.path is None:
        return None
    return (
        KernelLibrary(build.path)
        if build.is_named
        else MeasuredKernelLibrary(build.path, build.name)
    )


def log_kernels(build: BuildSelection | None = None) -> None:
    """Log which library of compiled CPU kernels is used, or why there is none.

    build: the selected library, by default that of this process.
    """
    build = select_build() if build is None else build
    is_missing = build.path is None and not build.is_named
    name = "none, torch computes" if build.path is None else f"build {build.name}"
    level = logging.WARNING if is_missing else logging.INFO
    log.log(level, "compiled kernels: %s (%s)", name, build.reason)


def describe_build(dtype: torch.dtype) -> str:
    """Return the name of the CPU kernel library in use, or torch's version if torch is used.

    torch computes everything if no library was selected or it does not support the dtype.
    """
    if load_library() is None or dtype not in DTYPES:
        return f"torch {torch.__version__}"
    return f"build {select_build().name}"


def operations_by_torch(dtype: torch.dtype) -> list[Operation]:
    """Return the operations that torch computes on tensors of a dtype; all without a library."""
    library = load_library()
    return [
        name
        for name in get_args(Operation)
        if library is None or dtype not in DTYPES or not library.is_preferred(name, dtype)
    ]


def describe_kernels(dtype: torch.dtype) -> str:
    """Return the CPU kernel library in use for a dtype, and the operations that torch computes."""
    library = load_library()
    if library is None or dtype not in DTYPES:
        return describe_build(dtype)
    by_torch = operations_by_torch(dtype)
    suffix = f", torch {torch.__version__} for {', '.join(by_torch)}" if by_torch else ""
    return f"{describe_build(dtype)}{suffix}"


def share_measurements(descriptor: int | None) -> None:
    """Share the kernel benchmark results with the other workers of the pipeline in an open file.

    descriptor: file descriptor of the file; None: results are not shared.
    """
    library = load_library()
    if isinstance(library, MeasuredKernelLibrary) and descriptor is not None:
        library.share(descriptor)


def current_library() -> KernelLibrary | None:
    """Return the CPU kernel library in use in this context, or None; ignores benchmark results.

    The library is the one set by `using_library`, otherwise that of the process.
    """
    return library_override.get() or load_library()


def library_for(tensor: Tensor, operation: Operation) -> KernelLibrary | None:
    """Return the CPU kernel library if it should compute the operation on this tensor, else None.

    None means that torch computes it: the tensor is on a GPU, its dtype is not supported, or torch
    was measured to be faster.
    """
    if not tensor.is_cpu or tensor.dtype not in DTYPES:
        return None
    library = current_library()
    if library is None or not library.is_preferred(operation, tensor.dtype):
        return None
    return library


library_override: ContextVar[KernelLibrary | None] = ContextVar("override", default=None)
"""Replaces the library in a context; `using_library` sets it."""


@contextmanager
def using_library(library: KernelLibrary) -> Iterator[None]:
    """Replace the CPU kernel library within a `with` block, for example by a `KernelRecorder`."""
    token = library_override.set(library)
    try:
        yield
    finally:
        library_override.reset(token)


def plan_arguments(plan: StatePlan) -> StatePlanArguments:
    """Return the C structure of a plan in host memory; it is valid as long as the plan is."""
    segments, groups = plan.segments, plan.groups
    return StatePlanArguments(segments.data_ptr(), groups.data_ptr(), len(groups) - 1)


def data_pointer(tensor: Tensor | None) -> int | None:
    """Return the memory address of a tensor's first element; None if there is no tensor."""
    return None if tensor is None else tensor.data_ptr()

"""Recording and replay of the compiled-kernel calls of a stage, comparable to a CUDA graph.

A recorded program runs all kernels of a step in one call from Python, without the GIL. Otherwise a
step of few tokens spends much of its time between kernels. `RecordedProgram.run` updates what
changes from step to step: the number of tokens, their rotary angles and their cache slots.

Recording computes nothing: kernel calls are stored instead of run, and any other computation raises
`NotRecordableError`. Models that need other operations run without a program.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gllm.kernels.attention_plan import AttentionPlan
from gllm.kernels.native.library import (
    AttentionArguments,
    BarrierArguments,
    KernelLibrary,
    Operation,
    RotaryArguments,
    data_pointer,
    using_library,
)
from gllm.kernels.rotary import RotaryAngles

ALIGNED = 64
"""Alignment of buffers in bytes."""


class NotRecordableError(Exception):
    """Raised while recording kernel calls if the code runs anything but compiled kernels."""


class _OnlyViews(TorchDispatchMode):
    """Dispatch mode in which torch operations may only create views."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler here: a second of start-up time and 100 MB.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        schema = func._schema
        if schema.is_mutable or any(result.alias_info is None for result in schema.returns):
            raise NotRecordableError(str(func))
        result = func(*args, **(kwargs or {}))
        views = result if isinstance(result, list | tuple) else [result]
        if any(_memory_of(view) != _memory_of(args[0]) for view in views):
            raise NotRecordableError(f"{func} makes a copy")
        return result


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class KernelRecorder(KernelLibrary):
    """Kernel library that records the calls of a stage instead of running them, like graph capture.

    Output buffers are allocated with `tokens` rows.
    """

    is_recording = True

    def __init__(self, library: KernelLibrary, tokens: int, memory: Tensor) -> None:
        """Record calls of `library` with buffers in memory [bytes] uint8."""
        self.calls: list[ctypes.Structure] = []
        self.segment_ends: list[int] = []
        """Number of calls up to the end of each segment."""
        self.checks: list[Callable[[], None]] = []
        """Checks to call after each run of the calls."""
        self.tokens = tokens
        self.library = library
        self._memory = memory
        self._used = 0

    def __call__(self, arguments: ctypes.Structure) -> None:
        """Store the call."""
        self.calls.append(arguments)

    def end_segment(self) -> None:
        """End a segment of the calls; a replay can call a function between two segments."""
        self.segment_ends.append(len(self.calls))

    def call_after(self, check: Callable[[], None]) -> None:
        """Store a check to call after each replay; a check is stored once."""
        if check not in self.checks:
            self.checks.append(check)

    def is_preferred(self, operation: Operation, dtype: torch.dtype) -> bool:
        """Return True if the recorded library, not torch, should compute the operation."""
        return self.library.is_preferred(operation, dtype)

    def address(self, arguments: ctypes.Structure) -> int | None:
        """Return the address of the C function for an argument structure."""
        return ctypes.cast(self.library.function(arguments), ctypes.c_void_p).value

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate an output buffer [tokens, ...] from the recorder's memory.

        Buffers follow each other until `reuse` is called.

        Raises:
            NotRecordableError: The memory is used up, or the buffer is not one row per token.
        """
        if shape[0] != self.tokens:
            raise NotRecordableError(f"a buffer of shape {tuple(shape)}")
        begin, size = self._used, math.prod(shape) * dtype.itemsize
        self._used += -(-size // ALIGNED) * ALIGNED
        if self._used > len(self._memory):
            raise NotRecordableError("the buffer memory is too small")
        return self._memory[begin : begin + size].view(dtype).view(tuple(shape))

    def reuse(self) -> None:
        """Start allocating at the beginning of the memory again, reusing earlier buffers.

        The last buffer stays intact while the next one is written, if the next one is not larger
        than all buffers before the last.
        """
        self._used = 0


@contextmanager
def record_kernels(library: KernelLibrary, tokens: int, memory: Tensor) -> Iterator[KernelRecorder]:
    """Record this thread's kernel calls within a `with` block instead of running them.

    Args:
        library: compiled kernels.
        tokens: largest number of tokens of a step.
        memory: [bytes] uint8, for the output buffers of the kernels.

    Raises:
        NotRecordableError: The code computes something that is not a compiled kernel.
    """
    recorder = KernelRecorder(library, tokens, memory)
    with using_library(recorder), _OnlyViews():
        yield recorder


class RecordedProgram:
    """Recorded kernel calls of a stage, replayed for each step; comparable to a CUDA graph.

    One recording serves every step of at most `tokens` tokens.
    """

    def __init__(self, recorded: KernelRecorder, angles: Mapping[Any, RotaryAngles]) -> None:
        """Build the call table; angles: those used during the recording."""
        self.tokens = recorded.tokens
        # The table has their addresses.
        calls = self._calls = recorded.calls
        table = []
        for arguments in calls:
            table += [recorded.address(arguments), ctypes.addressof(arguments)]
        self._table = (ctypes.c_void_p * len(table))(*table)
        self._count = len(calls)
        self._segment_ends = recorded.segment_ends
        self._checks = recorded.checks
        self._library = recorded.library
        self._attentions = [call for call in calls if isinstance(call, AttentionArguments)]
        ropes = {data_pointer(cosine): rope for rope, (cosine, _) in angles.items()}
        self._rotations = [
            (call, ropes.get(call.cosine)) for call in calls if isinstance(call, RotaryArguments)
        ]
        # Rows of a call per token. Attention counts sequences instead.
        self._calls_with_rows = [
            (call, call.rows // self.tokens)
            for call in calls
            if not isinstance(call, AttentionArguments | RotaryArguments | BarrierArguments)
        ]
        self._num_tokens = 0

    def run(
        self,
        tokens: int,
        plans: Mapping[int | None, AttentionPlan],
        angles: Mapping[Any, RotaryAngles],
        on_segment: Callable[[int], None] | None = None,
    ) -> None:
        """Replay the recorded kernel calls for one step.

        Args:
            tokens: number of tokens of the step, at most `self.tokens`.
            plans: attention plan of the step for each window.
            angles: rotary angles of the step for each kind of rotary embedding.
            on_segment: called after each segment with the number of segments that have run; None to
                run all calls at once.

        Raises:
            GroupClosedError, GroupMismatchError: from the checks of collectives of the ranks.
        """
        if tokens != self._num_tokens:
            for call, rows_per_token in self._calls_with_rows:
                call.rows = tokens * rows_per_token
            self._num_tokens = tokens
        pointers = {
            rope: (data_pointer(cos), data_pointer(sin)) for rope, (cos, sin) in angles.items()
        }
        slots = data_pointer(next(iter(plans.values())).slots)
        for call, rope in self._rotations:
            call.tokens, call.slots = tokens, slots
            if rope is not None:
                call.cosine, call.sine = pointers[rope]
        fields = {window or 0: _cache_fields(plan) for window, plan in plans.items()}
        for call in self._attentions:
            for name, value in fields[call.window]:
                setattr(call, name, value)
        if on_segment is None:
            self._run_calls(0, self._count)
            return
        begin = 0
        for index, end in enumerate(self._segment_ends, start=1):
            self._run_calls(begin, end)
            on_segment(index)
            begin = end

    def _run_calls(self, begin: int, end: int) -> None:
        """Run some of the calls, and the checks."""
        entry_bytes = 2 * ctypes.sizeof(ctypes.c_void_p)
        address = ctypes.addressof(self._table) + begin * entry_bytes
        self._library.run(ctypes.c_void_p(address), end - begin)
        for check in self._checks:
            check()


def _cache_fields(plan: AttentionPlan) -> list[tuple[str, int]]:
    """Return the fields of AttentionArguments that depend on the plan."""
    rows = plan.rows
    return [
        ("block_table", rows.block_table.ctypes.data),
        ("query_start", rows.query_start.ctypes.data),
        ("context_len", rows.context_len.ctypes.data),
        ("rows", rows.block_table.shape[0]),
        ("table_row", rows.block_table.shape[1]),
        ("block_size", rows.block_size),
    ]

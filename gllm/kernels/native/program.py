"""Recording and replay of the compiled-kernel calls of a stage, comparable to a CUDA graph.

A recorded program runs all kernels of a step in one call from Python, without the GIL. Otherwise a
step of few tokens spends much of its time between kernels. `RecordedProgram.run` updates what
changes from step to step: the number of tokens, their rotary angles and their cache slots.

Recording computes nothing: kernel calls are stored instead of run. What no compiled kernel computes
is a host function (`launch_host_function`): a replay calls it between the kernels, with the rows of
the step. Any other computation raises `NotRecordableError`, and the model runs without a program.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gllm.kernels.attention_plan import AttentionPlan
from gllm.kernels.attention_window import AttentionWindow, encode_window
from gllm.kernels.native.library import (
    AttentionArguments,
    BarrierArguments,
    ConvolutionArguments,
    KernelLibrary,
    Operation,
    RecurrenceArguments,
    RotaryArguments,
    ScanArguments,
    data_pointer,
    library_override,
    plan_arguments,
    using_library,
)
from gllm.kernels.rotary import RotaryAngles
from gllm.kernels.state_plan import StatePlan

RECURRENCES = ConvolutionArguments, RecurrenceArguments, ScanArguments
"""Argument structures of kernels that update states, as a plan says."""
PLANNED = AttentionArguments, *RECURRENCES
"""Argument structures of kernels that process sequences, which a plan describes, not rows."""
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


@dataclass(slots=True)
class HostCall:
    """Recorded call of a host function (`launch_host_function`) on the rows of a step."""

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    """Tensors with a row for each token that the recording can compute."""
    output: Tensor | None
    """Receives the result; None if the function changes its first input."""
    has_context: bool
    """True if the function needs the inputs of the step."""
    rows: tuple[Tensor, ...] = field(default=(), init=False)
    """The inputs' rows of the step."""

    def select_rows(self, tokens: int) -> None:
        """Select the rows of a step of `tokens` tokens."""
        self.rows = tuple(each[:tokens] for each in self.inputs)

    def __call__(self, context: object) -> None:
        """Call the function; context: inputs of the step."""
        result = (
            self.function(context, *self.rows) if self.has_context else self.function(*self.rows)
        )
        if self.output is not None:
            self.output[: len(result)] = result


class KernelRecorder(KernelLibrary):
    """Kernel library that records the calls of a stage instead of running them, like graph capture.

    Output buffers are allocated with `tokens` rows.
    """

    is_recording = True

    def __init__(self, library: KernelLibrary, tokens: int, memory: Tensor) -> None:
        """Record calls of `library` with buffers in memory [bytes] uint8."""
        self.calls: list[ctypes.Structure] = []
        self.stops: list[tuple[int, HostCall | None]] = []
        """Host calls, and None at the end of each segment, each with the number of calls before."""
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
        self.stops.append((len(self.calls), None))

    def call_host(self, call: HostCall) -> None:
        """Store a host call."""
        if any(len(each) != self.tokens for each in call.inputs):
            raise NotRecordableError("an input of a host function has other rows than tokens")
        self.stops.append((len(self.calls), call))

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


def launch_host_function(
    function: Callable[..., Tensor],
    *inputs: Tensor,
    context: object = None,
    shape: Sequence[int] | None = None,
    is_in_place: bool = False,
) -> Tensor:
    """Return function(*inputs), for what no compiled kernel computes.

    While recording, the call is stored instead. It is the same function on the same rows, so
    a replay computes the same bits.

    Args:
        function: returns a tensor [tokens, ...] of the first input's dtype, or its first input,
            which it has changed.
        inputs: tensors with a row for each token.
        context: inputs of the step, passed to the function before `inputs`, as a replay passes its
            own; None for none.
        shape: shape of the result; None for that of the first input.
        is_in_place: True if the function returns its first input.
    """
    recorder = library_override.get()
    if not isinstance(recorder, KernelRecorder):
        return function(*inputs) if context is None else function(context, *inputs)
    first = inputs[0]
    output = None if is_in_place else recorder.empty(shape or first.shape, first.dtype)
    recorder.call_host(HostCall(function, inputs, output, context is not None))
    return first if output is None else output


def make_contiguous(x: Tensor) -> Tensor:
    """Return x [tokens, ...] whose rows follow each other in memory, as most kernels read it."""
    return x if x.is_contiguous() else launch_host_function(Tensor.contiguous, x)


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
        self._stops = recorded.stops
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
            if not isinstance(call, (*PLANNED, RotaryArguments, BarrierArguments))
        ]
        self._recurrences = [call for call in calls if isinstance(call, RECURRENCES)]
        self._num_tokens = 0

    def run(
        self,
        tokens: int,
        plans: Mapping[AttentionWindow, AttentionPlan],
        angles: Mapping[Any, RotaryAngles],
        states: StatePlan | None = None,
        on_segment: Callable[[int], None] | None = None,
        context: object = None,
    ) -> None:
        """Replay the recorded kernel calls for one step.

        Args:
            tokens: number of tokens of the step, at most `self.tokens`.
            plans: attention plan of the step for each window.
            angles: rotary angles of the step for each kind of rotary embedding.
            states: states of the step, if there are recurrent layers.
            on_segment: called after each segment with the number of segments that have run; None
                for no calls.
            context: inputs of the step for host functions.

        Raises:
            GroupClosedError, GroupMismatchError: from the checks of collectives of the ranks.
        """
        if tokens != self._num_tokens:
            for call, rows_per_token in self._calls_with_rows:
                call.rows = tokens * rows_per_token
            for _, host_call in self._stops:
                if host_call is not None:
                    host_call.select_rows(tokens)
            self._num_tokens = tokens
        pointers = {
            rope: (data_pointer(cos), data_pointer(sin)) for rope, (cos, sin) in angles.items()
        }
        slots = data_pointer(next(iter(plans.values())).slots)
        for call, rope in self._rotations:
            call.tokens, call.slots = tokens, slots
            if rope is not None:
                call.cosine, call.sine = pointers[rope]
        fields = {encode_window(window): _cache_fields(plan) for window, plan in plans.items()}
        for call in self._attentions:
            for name, value in fields[call.window]:
                setattr(call, name, value)
        if self._recurrences:
            assert states is not None, "a stage with recurrent layers has states"
            plan = plan_arguments(states)
            for call in self._recurrences:
                call.plan = plan
        begin, num_segments = 0, 0
        for end, host_call in self._stops:
            num_segments += host_call is None
            if host_call is None and on_segment is None:
                continue
            self._run_calls(begin, end)
            begin = end
            if host_call is not None:
                host_call(context)
            elif on_segment is not None:
                on_segment(num_segments)
        self._run_calls(begin, self._count)

    def _run_calls(self, begin: int, end: int) -> None:
        """Run some of the calls, and the checks."""
        if begin == end:
            return
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

"""A stage's calls of compiled kernels, recorded once and run at a stroke from then on.

Owns the recording, the buffers between calls, and what changes from step to step: the number of
tokens, their angles, where they are in the cache. Knows nothing of models. A step of a few tokens
spends much of its time between kernels otherwise, and takes Python's lock before each of them.

Recording computes nothing: kernels are noted instead of run, and whatever else would compute ends
it (`NotRecorded`). Models that need more than compiled kernels go without a program.
"""

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gllm.kernels.attention_plan import AttentionPlan
from gllm.kernels.native.library import (
    AttentionArguments,
    Library,
    Operation,
    RotaryArguments,
    override,
    pointer,
)
from gllm.kernels.rotary import Angles

ALIGNED = 64
"""Bytes: where buffers begin."""


class NotRecorded(Exception):
    """Something computes that is not a compiled kernel."""


class _OnlyViews(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler here: a second of start-up, 100 MB.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        schema = func._schema
        if schema.is_mutable or any(result.alias_info is None for result in schema.returns):
            raise NotRecorded(str(func))
        result = func(*args, **(kwargs or {}))
        views = result if isinstance(result, list | tuple) else [result]
        if any(_memory_of(view) != _memory_of(args[0]) for view in views):
            raise NotRecorded(f"{func} makes a copy")
        return result


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recorder(Library):
    """A library that notes its calls. Buffers are for `tokens` rows each."""

    def __init__(self, library: Library, tokens: int, memory: Tensor) -> None:
        """memory [bytes] uint8: where buffers are."""
        self.calls: list[ctypes.Structure] = []
        self.tokens = tokens
        self.library = library
        self._memory = memory
        self._used = 0

    def __call__(self, arguments: ctypes.Structure) -> None:
        self.calls.append(arguments)

    def serves(self, operation: Operation, dtype: torch.dtype) -> bool:
        return self.library.serves(operation, dtype)

    def address(self, arguments: ctypes.Structure) -> int | None:
        """Of the function that takes the arguments."""
        return ctypes.cast(self.library.function(arguments), ctypes.c_void_p).value

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A buffer behind those given out since `reuse`. Raises NotRecorded where none is left."""
        if shape[0] != self.tokens:
            raise NotRecorded(f"a buffer of shape {tuple(shape)}")
        begin, size = self._used, math.prod(shape) * dtype.itemsize
        self._used += -(-size // ALIGNED) * ALIGNED
        if self._used > len(self._memory):
            raise NotRecorded("too small a memory")
        return self._memory[begin : begin + size].view(dtype).view(tuple(shape))

    def reuse(self) -> None:
        """Give out the same memory again. What was made last is still there when the first buffer
        after this is written, if that one is not larger than all before the last."""
        self._used = 0


@contextmanager
def recording(library: Library, tokens: int, memory: Tensor) -> Iterator[Recorder]:
    """Calls of this thread are noted within. Raises NotRecorded."""
    made = Recorder(library, tokens, memory)
    token = override.set(made)
    try:
        with _OnlyViews():
            yield made
    finally:
        override.reset(token)


class Program:
    """The calls, to be run for any step of at most `tokens` tokens."""

    def __init__(self, recorded: Recorder, angles: Mapping[Any, Angles]) -> None:
        """angles: those that were recorded."""
        self.tokens = recorded.tokens
        calls = recorded.calls
        table = []
        for arguments in calls:
            table += [recorded.address(arguments), ctypes.addressof(arguments)]
        self._table = (ctypes.c_void_p * len(table))(*table)
        self._count = len(calls)
        self._library = recorded.library
        self._attentions = [call for call in calls if isinstance(call, AttentionArguments)]
        ropes = {pointer(cosine): rope for rope, (cosine, _) in angles.items()}
        self._rotations = [
            (call, ropes.get(call.cosine)) for call in calls if isinstance(call, RotaryArguments)
        ]
        # Rows of a call for each token; attention counts sequences.
        self._by_rows = [
            (call, call.rows // self.tokens)
            for call in calls
            if not isinstance(call, AttentionArguments | RotaryArguments)
        ]
        self._rows_of = 0

    def run(
        self,
        tokens: int,
        plans: Mapping[int | None, AttentionPlan],
        angles: Mapping[Any, Angles],
    ) -> None:
        """Run for a step of so many tokens; plans by window, angles as they were recorded."""
        if tokens != self._rows_of:
            for call, each in self._by_rows:
                call.rows = tokens * each
            self._rows_of = tokens
        pointers = {rope: (pointer(cos), pointer(sin)) for rope, (cos, sin) in angles.items()}
        slots = pointer(next(iter(plans.values())).slots)
        for call, rope in self._rotations:
            call.tokens, call.slots = tokens, slots
            if rope is not None:
                call.cosine, call.sine = pointers[rope]
        where = {window or 0: _where(plan) for window, plan in plans.items()}
        for call in self._attentions:
            for name, value in where[call.window]:
                setattr(call, name, value)
        self._library.run(self._table, self._count)


def _where(plan: AttentionPlan) -> list[tuple[str, int]]:
    """What a plan says of the cache, as attention takes it."""
    rows = plan.rows
    return [
        ("block_table", rows.block_table.ctypes.data),
        ("query_start", rows.query_start.ctypes.data),
        ("context_len", rows.context_len.ctypes.data),
        ("rows", rows.block_table.shape[0]),
        ("table_row", rows.block_table.shape[1]),
        ("block_size", rows.block_size),
    ]

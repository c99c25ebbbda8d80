"""Collectives without NCCL: ranks with fake devices of their own, whose hosts take turns.

A collective reads its input in a stream of the communicator's own, as NCCL does, and writes its
result once every rank's device has come to it. Who does not wait for it reads poison.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils._python_dispatch import _disable_current_modes

from gllm.kernels.all_reduce import GroupClosedError, GroupMismatchError
from gllm.transport.groups import StageGroups
from tests.support.gpu.fake_streams import FakeEvent, FakeQueues, calling_frame
from tests.support.gpu.memory_uses import Operation, uses_of
from tests.support.gpu.turns import Turns

Call = tuple[Any, Tensor]
"""What a collective is (its name, shape and so on), and a rank's input."""


class Mismatched(AssertionError):
    """Ranks whose devices come to different collectives at a time: NCCL would mix or hang them."""


class FakeWork:
    """A collective in the communicator's stream."""

    def __init__(self, queues: FakeQueues, done: FakeEvent) -> None:
        self._queues, self._done = queues, done

    def is_completed(self) -> bool:
        return self._done.query()

    def exception(self) -> None:
        return None

    def wait(self) -> bool:
        stream = self._queues.stream_now
        assert stream is not None
        stream.wait_for(self._done, calling_frame())
        return True


class FakeCommunicator:
    """One rank's end; see gllm.transport.nccl_group.Communicator."""

    def __init__(self, rank: int, queues: FakeQueues, arrived: list[list[Call]]) -> None:
        self.rank, self._queues, self._arrived = rank, queues, arrived
        self._stream = queues.stream()
        self._done = 0
        self.aborts = 0

    def allreduce(self, tensor: Tensor, op: ReduceOp.RedOpType) -> FakeWork:
        is_sum = op == ReduceOp.SUM
        assert is_sum or op == ReduceOp.MAX

        def reduce(parts: list[Tensor]) -> None:
            stacked = torch.stack(parts)
            tensor.copy_(stacked.sum(0, dtype=tensor.dtype) if is_sum else stacked.amax(0))

        return self._collective(("allreduce", is_sum), tensor, [tensor], reduce)

    def gather(self, outputs: list[Tensor], tensor: Tensor, root: int) -> FakeWork:
        assert bool(outputs) == (self.rank == root)

        def write(parts: list[Tensor]) -> None:
            for output, part in zip(outputs, parts if outputs else [], strict=True):
                output.copy_(part)

        return self._collective(("gather", root), tensor, outputs, write)

    def broadcast(self, tensor: Tensor, root: int) -> FakeWork:
        written = [] if self.rank == root else [tensor]

        def write(parts: list[Tensor]) -> None:
            for each in written:
                each.copy_(parts[root])

        return self._collective(("broadcast", root), tensor, written, write)

    def abort(self) -> None:
        self.aborts += 1

    def _collective(
        self,
        what: Any,
        tensor: Tensor,
        written: Sequence[Tensor],
        write: Callable[[list[Tensor]], None],
    ) -> FakeWork:
        assert tensor.is_contiguous(), "NCCL reads a tensor's memory from its beginning to its end"
        kinds = {self._queues.kind(each) for each in (tensor, *written) if each.numel()}
        assert kinds <= {"device"}, "NCCL reads memory of the device"
        begun, done = self._queues.event(), self._queues.event()
        assert self._queues.stream_now is not None
        self._queues.stream_now.record(begun)
        self._stream.follow(begun)
        call = what, tuple(tensor.shape), tensor.dtype

        def arrive() -> None:
            self._arrived[self.rank].append((call, tensor.clone()))

        def ready() -> bool:
            return all(len(calls) > self._done for calls in self._arrived)

        def finish() -> None:
            calls = [calls[self._done] for calls in self._arrived]
            self._done += 1
            # Also with this rank's own call: a replay may have overtaken the one before.
            if {made for made, _ in calls} != {call}:
                raise Mismatched(f"ranks call {[made for made, _ in calls]}, not {call}")
            write([part for _, part in calls])

        reads = uses_of([tensor], False)
        self._stream.put(Operation(f"{what} reads", arrive, reads))
        self._stream.put(Operation(f"{what}", finish, uses_of(written, True), ready=ready))
        self._stream.record(done)
        return FakeWork(self._queues, done)


class FakeHostGroup:
    """Group in host memory of ranks that take turns; `has_places`: parts have memory there."""

    is_waiting = False

    def __init__(self, rank: int, turns: Turns, calls: list[list[Any]], has_places: bool) -> None:
        self.rank, self.size = rank, len(calls)
        self._turns, self._calls, self._has_places = turns, calls, has_places
        self._done = 0
        self.is_cancelled = self.is_closed = False

    def partial(self, rows: int, width: int) -> Tensor | None:
        with _disable_current_modes():
            return torch.empty(rows, width) if self._has_places else None

    def sum(self, partial: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert bias is None
        parts = self._exchange("sum", partial)
        with _disable_current_modes():
            return torch.stack(parts).sum(0).to(dtype)

    def maximum(self, values: Tensor) -> Tensor:
        parts = self._exchange("maximum", values)
        with _disable_current_modes():
            return torch.stack(parts).amax(0)

    def gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None:
        parts = self._exchange(("gather", tuple(sizes)), part)
        with _disable_current_modes():
            return None if self.rank else torch.cat(parts, dim=1)

    def agree_on_step(self, step: int, error: str) -> str:
        steps = self._exchange("meet", (step, error))
        if len({step for step, _ in steps}) > 1:
            raise GroupMismatchError(f"the ranks are at steps {[step for step, _ in steps]}")
        return next((error for _, error in steps if error), "")

    def broadcast(self, values: Tensor | None, count: int) -> Tensor:
        received: Tensor = self._exchange(("broadcast", count), values)[0]
        assert len(received) == count
        return received

    def cancel(self) -> None:
        self.is_cancelled = True
        self._turns.progress()

    def close(self) -> None:
        self.is_closed = True

    def _exchange(self, what: Any, value: Any) -> list[Any]:
        """What every rank gives at its next call."""
        if isinstance(value, Tensor):
            value = value.clone()
        self._calls[self.rank].append((what, value))
        self._turns.progress()
        while any(len(calls) <= self._done for calls in self._calls):
            if self.is_cancelled:
                raise GroupClosedError("cancelled")
            self._turns.stall()
        calls = [calls[self._done] for calls in self._calls]
        self._done += 1
        assert len({name for name, _ in calls}) == 1, f"ranks call {[name for name, _ in calls]}"
        return [value for _, value in calls]


def fake_host_groups(size: int, turns: Turns, has_places: bool = False) -> list[StageGroups]:
    """Groups of each rank, whose hosts take turns."""
    orders: list[list[list[Any]]] = [[[] for _ in range(size)] for _ in range(2)]
    return [
        StageGroups(*(FakeHostGroup(rank, turns, calls, has_places) for calls in orders))
        for rank in range(size)
    ]

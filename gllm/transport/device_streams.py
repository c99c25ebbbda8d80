"""A device's queues of work: streams, events, graphs, and memory that the host and it exchange.

Owns the few words in which the rest speaks of them, and their meaning on CUDA. Knows nothing of
what is computed. Tests put a device of their own in its place (tests/runtime/fake_streams.py).

Work is put into a *stream* and runs later, in the order of its stream and in none across streams.
An *event* marks a place in a stream, for other streams and the host to wait for. A *graph* is work
that was recorded once, from the same memory to the same memory, and is put into a stream at a
stroke.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """A place in a stream, as of its last record."""

    def synchronize(self) -> None:
        """Let the host wait until the stream got there; at once where nothing was recorded."""

    def query(self) -> bool:
        """Return whether the stream got there, without a wait; True where nothing was recorded."""

    def since(self, earlier: "DeviceEvent") -> float:
        """Seconds of the device's between two timed events, both reached."""


class DeviceGraph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Put it into the current stream."""


class DeviceStream(Protocol):
    """Work in order."""

    def current(self) -> AbstractContextManager[None]:
        """Within it torch's operations go to this stream."""

    def wait(self, event: DeviceEvent) -> None:
        """What is put here from now on runs after the event; at once where it has no record."""

    def record(self, event: DeviceEvent) -> None:
        """Move the event behind all that is here now."""


class DeviceRuntime(Protocol):
    """One device."""

    @property
    def device(self) -> torch.device:
        """Where its memory is."""

    def bind_thread(self) -> None:
        """Make this the current device of the calling thread; every thread that uses it does so
        first."""

    def stream(self) -> DeviceStream:
        """A new stream."""

    def event(self, timed: bool = False) -> DeviceEvent:
        """A new event."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Unwritten memory of the host that the device copies from and to by itself."""

    def pin(self, memory: Tensor) -> None:
        """Let the device copy from and to this memory of the host by itself, as long as the process
        lives. Raises RuntimeError where the system does not allow that."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros in memory of the device, there when this returns."""

    def capture(self, stream: DeviceStream, work: Callable[[], None]) -> DeviceGraph:
        """`work`, which puts something into the stream, as a graph; it does not run now.

        It has to have run before, so that nothing is left to be set up. The memory that it makes is
        the graph's and is overwritten by each replay.
        """

    def synchronize(self) -> None:
        """Let the host wait until every stream is empty."""

    def room(self, work: Callable[[], None], share: float) -> int:
        """Bytes that `share` of the device's memory leaves beside what is in use, by others too,
        and what `work` takes at its peak; it runs."""

    def held(self, work: Callable[[], None]) -> int:
        """Run `work`; return the bytes of the device's memory that are in use behind it and were
        not before."""


class CudaEvent:
    """An event of CUDA."""

    def __init__(self, timed: bool) -> None:
        # A host that waits sleeps: by default it would keep a core busy.
        self.event = torch.cuda.Event(enable_timing=timed, blocking=True)

    def synchronize(self) -> None:
        """As in DeviceEvent."""
        self.event.synchronize()

    def query(self) -> bool:
        """As in DeviceEvent."""
        reached: bool = self.event.query()
        return reached

    def since(self, earlier: DeviceEvent) -> float:
        """As in DeviceEvent."""
        assert isinstance(earlier, CudaEvent)
        milliseconds: float = earlier.event.elapsed_time(self.event)
        return milliseconds / 1000


class CudaStream:
    """A stream of CUDA that does not wait for the default one."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """As in DeviceStream."""
        with torch.cuda.stream(self.stream):
            yield

    def wait(self, event: DeviceEvent) -> None:
        """As in DeviceStream."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def record(self, event: DeviceEvent) -> None:
        """As in DeviceStream."""
        assert isinstance(event, CudaEvent)
        event.event.record(self.stream)


class CudaRuntime:
    """One GPU through torch.cuda."""

    def __init__(self, index: int = 0) -> None:
        self._device = torch.device("cuda", index)
        self.bind_thread()
        self._memory = torch.cuda.graph_pool_handle()
        """Shared by all graphs: one runs at a time, in the order of one stream."""

    @property
    def device(self) -> torch.device:
        """As in DeviceRuntime."""
        return self._device

    def bind_thread(self) -> None:
        """As in DeviceRuntime."""
        torch.cuda.set_device(self._device)

    def stream(self) -> DeviceStream:
        """As in DeviceRuntime."""
        return CudaStream(self._device)

    def event(self, timed: bool = False) -> DeviceEvent:
        """As in DeviceRuntime."""
        return CudaEvent(timed)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As in DeviceRuntime."""
        # By itself it would take the thread's current device, and set up another GPU for that.
        with torch.cuda.device(self._device):
            return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def pin(self, memory: Tensor) -> None:
        """As in DeviceRuntime."""
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(code) != 0:
            raise RuntimeError(f"{memory.nbytes} bytes cannot be pinned (CUDA error {int(code)})")

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As in DeviceRuntime."""
        made = torch.zeros(*shape, dtype=dtype, device=self._device)
        # They are written by the default stream, for which no other one waits.
        torch.cuda.synchronize(self._device)
        return made

    def capture(self, stream: DeviceStream, work: Callable[[], None]) -> DeviceGraph:
        """As in DeviceRuntime."""
        assert isinstance(stream, CudaStream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on to use CUDA meanwhile.
        recording = torch.cuda.graph(
            graph, self._memory, stream.stream, capture_error_mode="thread_local"
        )
        with torch.cuda.device(self._device), recording:
            work()
        return graph

    def synchronize(self) -> None:
        """As in DeviceRuntime."""
        torch.cuda.synchronize(self._device)

    def room(self, work: Callable[[], None], share: float) -> int:
        """As in DeviceRuntime."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        self.synchronize()
        peak = torch.cuda.max_memory_reserved(self._device) - held
        torch.cuda.empty_cache()
        return max(int(total * share) - (total - free) - peak, 0)

    def held(self, work: Callable[[], None]) -> int:
        """As in DeviceRuntime."""
        before = self._free()
        work()
        return max(before - self._free(), 0)

    def _free(self) -> int:
        """Bytes of the device that nobody uses, those that torch only keeps among them."""
        self.synchronize()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

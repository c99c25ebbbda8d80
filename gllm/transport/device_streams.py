"""Interface of an asynchronous device: streams, events, graphs and memory; and its CUDA version.

Work put into a *stream* runs later, in the order of the stream; streams are not ordered among each
other. An *event* marks a position in a stream, for which other streams and the host can wait. A
*graph* is work that was captured once, with fixed memory, and is launched as a whole. Tests use a
simulated device (tests/support/gpu/fake_streams.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """Interface of an event: a position in a stream for which host and streams can wait."""

    def synchronize(self) -> None:
        """Make the host wait until the stream reaches the event; return at once if unrecorded."""

    def query(self) -> bool:
        """Return whether the stream has reached the event; True if it was never recorded."""

    def seconds_since(self, earlier: "DeviceEvent") -> float:
        """Return the device time in seconds between two timed events, both reached."""


class DeviceGraph(Protocol):
    """Interface of a captured graph of device operations, such as a CUDA graph."""

    def replay(self) -> None:
        """Launch the graph in the current stream."""


class DeviceStream(Protocol):
    """Interface of a stream: device operations queued in it run asynchronously, in order."""

    def current(self) -> AbstractContextManager[None]:
        """Return a context in which torch's operations are put into this stream."""

    def wait(self, event: DeviceEvent) -> None:
        """Make all later work in this stream wait for the event, if it was recorded."""

    def record(self, event: DeviceEvent) -> None:
        """Record the event after all work in this stream."""


class DeviceRuntime(Protocol):
    """Interface of one device: creates its streams, events and graphs and allocates its memory."""

    @property
    def device(self) -> torch.device:
        """The torch device of its memory."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability; None if the device is no GPU."""

    def bind_thread(self) -> None:
        """Make this the current device of the calling thread, before the thread uses it."""

    def host_work(self) -> AbstractContextManager[None]:
        """Return a context, within that of a stream, whose operations the host runs at once.

        Their tensors are in the memory of the host.
        """

    def stream(self) -> DeviceStream:
        """Create a stream."""

    def event(self, timed: bool = False) -> DeviceEvent:
        """Create an event."""

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate uninitialized pinned memory of the host."""

    def pin_memory(self, memory: Tensor) -> None:
        """Pin memory of the host until `unpin_memory`. Raises RuntimeError if that fails."""

    def unpin_memory(self, memory: Tensor) -> None:
        """Undo `pin_memory`, before the memory is freed; the device no longer uses it."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros in device memory, written when this returns."""

    def capture(self, stream: DeviceStream, work: Callable[[], None]) -> DeviceGraph:
        """Return a graph of the work that `work` puts into the stream; it does not run now.

        `work` has run before, so that everything is initialized. Memory that it allocates belongs
        to the graph and is overwritten by each replay.
        """

    def synchronize(self) -> None:
        """Make the host wait until all streams are empty."""

    def measure_free_bytes(self, work: Callable[[], None], share: float) -> int:
        """Run `work`; return the bytes of device memory that remain free at its peak.

        Args:
            work: allocates the memory of one step.
            share: share of the device's memory that may be used, by all processes together.
        """

    def measure_used_bytes(self, work: Callable[[], None]) -> int:
        """Run `work`; return by how many bytes the device memory in use has grown."""


class CudaEvent:
    """CUDA event, optionally with timestamps; implements DeviceEvent with torch.cuda.Event."""

    def __init__(self, timed: bool) -> None:
        """Create an event, with timestamps if it is timed."""
        # Blocking: a waiting host sleeps instead of keeping a core busy.
        self.event = torch.cuda.Event(enable_timing=timed, blocking=True)

    def synchronize(self) -> None:
        """Make the host wait until the stream reaches the event; return at once if unrecorded."""
        self.event.synchronize()

    def query(self) -> bool:
        """Return whether the stream has reached the event; True if it was never recorded."""
        is_reached: bool = self.event.query()
        return is_reached

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Return the device time in seconds between two timed events, both reached."""
        assert isinstance(earlier, CudaEvent)
        milliseconds: float = earlier.event.elapsed_time(self.event)
        return milliseconds / 1000


class CudaStream:
    """CUDA stream that does not synchronize with the default stream; implements DeviceStream."""

    def __init__(self, device: torch.device) -> None:
        """Create a stream on a GPU."""
        self.stream = torch.cuda.Stream(device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Return a context in which torch's operations are put into this stream."""
        with torch.cuda.stream(self.stream):
            yield

    def wait(self, event: DeviceEvent) -> None:
        """Make all later work in this stream wait for the event, if it was recorded."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def record(self, event: DeviceEvent) -> None:
        """Record the event after all work in this stream."""
        assert isinstance(event, CudaEvent)
        event.event.record(self.stream)


class CudaRuntime:
    """One CUDA GPU; implements DeviceRuntime with torch.cuda."""

    def __init__(self, index: int = 0) -> None:
        """Open the GPU with this index."""
        self._device = torch.device("cuda", index)
        self.bind_thread()
        self._memory = torch.cuda.graph_pool_handle()
        """Memory pool of all graphs, of which one runs at a time, in the order of one stream."""

    @property
    def device(self) -> torch.device:
        """The torch device of its memory."""
        return self._device

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability; None if the device is no GPU."""
        return torch.cuda.get_device_capability(self._device)

    def bind_thread(self) -> None:
        """Make this the current device of the calling thread, before the thread uses it."""
        torch.cuda.set_device(self._device)

    def host_work(self) -> AbstractContextManager[None]:
        """Return a context without effect: a stream has the operations on tensors of the GPU."""
        return nullcontext()

    def stream(self) -> DeviceStream:
        """Create a stream."""
        return CudaStream(self._device)

    def event(self, timed: bool = False) -> DeviceEvent:
        """Create an event."""
        return CudaEvent(timed)

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate uninitialized pinned memory of the host."""
        # Otherwise torch would use the thread's current device and initialize another GPU.
        with torch.cuda.device(self._device):
            return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def pin_memory(self, memory: Tensor) -> None:
        """Pin memory of the host until `unpin_memory`. Raises RuntimeError if that fails."""
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(code) != 0:
            raise RuntimeError(f"{memory.nbytes} bytes cannot be pinned (CUDA error {int(code)})")

    def unpin_memory(self, memory: Tensor) -> None:
        """Undo `pin_memory`, before the memory is freed; the device no longer uses it."""
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros in device memory, written when this returns."""
        zeros = torch.zeros(*shape, dtype=dtype, device=self._device)
        # The default stream writes the zeros, and no other stream waits for it.
        torch.cuda.synchronize(self._device)
        return zeros

    def capture(self, stream: DeviceStream, work: Callable[[], None]) -> DeviceGraph:
        """Return a graph of the work that `work` puts into the stream; it does not run now."""
        assert isinstance(stream, CudaStream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile.
        recording = torch.cuda.graph(
            graph, self._memory, stream.stream, capture_error_mode="thread_local"
        )
        with torch.cuda.device(self._device), recording:
            work()
        return graph

    def synchronize(self) -> None:
        """Make the host wait until all streams are empty."""
        torch.cuda.synchronize(self._device)

    def measure_free_bytes(self, work: Callable[[], None], share: float) -> int:
        """Run `work`; return the bytes of device memory that remain free at its peak."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        self.synchronize()
        peak = torch.cuda.max_memory_reserved(self._device) - held
        torch.cuda.empty_cache()
        return max(int(total * share) - (total - free) - peak, 0)

    def measure_used_bytes(self, work: Callable[[], None]) -> int:
        """Run `work`; return by how many bytes the device memory in use has grown."""
        before = self._free()
        work()
        return max(before - self._free(), 0)

    def _free(self) -> int:
        """Return the free bytes of the device, including those that torch has cached."""
        self.synchronize()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

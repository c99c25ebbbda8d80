"""CPU implementation of the device runtime, for runs without a GPU: work runs immediately.

Has streams, events and graphs, and attention plans of one layout for the graphs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.attention_plan import (
    AttentionPlan,
    DecodeGroup,
    GatherIndices,
    PagedBatch,
    plan_attention,
)
from gllm.kernels.attention_window import AttentionWindow
from gllm.runtime.worker.batch import PlanAttention, Windows
from gllm.transport.device_streams import DeviceEvent, DeviceGraph, DeviceStream


class HostEvent:
    """An event that records the time."""

    def __init__(self) -> None:
        self.at = 0.0

    def synchronize(self) -> None:
        """Return at once: the event has completed."""

    def query(self) -> bool:
        """Return True: the event has completed."""
        return True

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Return the seconds from an earlier event to this one."""
        assert isinstance(earlier, HostEvent)
        return self.at - earlier.at


class HostStream:
    """A stream whose work runs in the calling thread."""

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the current stream within the block."""
        yield

    def wait(self, event: DeviceEvent) -> None:
        """Return at once: the event has completed."""

    def record(self, event: DeviceEvent) -> None:
        """Record the current time in the event."""
        assert isinstance(event, HostEvent)
        event.at = time.perf_counter()


class HostGraph:
    """Work that runs again at each replay, on the same memory."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class HostQueues:
    """The CPU as a gllm.transport.device_streams.DeviceRuntime."""

    device = torch.device("cpu")
    capability: tuple[int, int] | None = None

    def bind_thread(self) -> None:
        """Do nothing: there is one device."""

    def host_work(self) -> AbstractContextManager[None]:
        """Return a context without effect: the host runs everything."""
        return nullcontext()

    def stream(self) -> DeviceStream:
        """Return a new stream."""
        return HostStream()

    def event(self, timed: bool = False) -> DeviceEvent:
        """Return a new event."""
        return HostEvent()

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate host memory."""
        return torch.empty(*shape, dtype=dtype)

    def pin_memory(self, memory: Tensor) -> None:
        """Do nothing: host memory needs no pinning."""

    def unpin_memory(self, memory: Tensor) -> None:
        """Do nothing: host memory needs no pinning."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate zeroed memory."""
        return torch.zeros(*shape, dtype=dtype)

    def capture(self, stream: DeviceStream, work: Callable[[], None]) -> DeviceGraph:
        """Run the work once and return a graph of it; the outputs must have their final size."""
        work()
        return HostGraph(work)

    def synchronize(self) -> None:
        """Return at once: no work is pending."""

    def measure_free_bytes(self, work: Callable[[], None], share: float) -> int:
        """Run the work and return a fixed number of bytes; host memory is not measured."""
        work()
        return 2**30

    def measure_used_bytes(self, work: Callable[[], None]) -> int:
        """Run the work and return 0; host memory is not measured."""
        work()
        return 0


def plan_of_one_layout(max_context: int) -> PlanAttention:
    """Return a planner for layers without windows and contexts up to `max_context`.

    Decodes are one group, padded to `max_context`, so that batches of the same size have the same
    layout.
    """

    def plan(
        rows: PagedBatch, dtype: torch.dtype, windows: Windows
    ) -> dict[AttentionWindow, AttentionPlan]:
        assert windows == {None}, "windows are not planned here"
        attention_plan = plan_attention(rows, dtype)
        if not 0 < rows.num_decodes == len(rows.context_len):
            return {None: attention_plan}
        places, context = np.arange(max_context), rows.context_len
        unseen = places >= context[:, None]
        blocks = np.minimum(places // rows.block_size, rows.block_table.shape[1] - 1)
        slots = rows.block_table[:, blocks] * rows.block_size + places % rows.block_size
        slots[unseen] = rows.num_blocks * rows.block_size
        bias = torch.zeros(unseen.shape, dtype=dtype)
        bias.masked_fill_(torch.from_numpy(unseen), float("-inf"))
        group = DecodeGroup(
            torch.arange(len(context)),
            torch.from_numpy(slots.reshape(-1)),
            bias[:, None, None],
            torch.from_numpy(context.copy()),
        )
        gathers = GatherIndices([group], [], torch.zeros(1, 1, dtype=dtype))
        return {None: replace(attention_plan, gathers=gathers)}

    return plan

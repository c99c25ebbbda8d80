"""A device of queues in the place of a GPU's, for runs without one: all work is done at once.

Owns streams, events and graphs on the CPU, and attention plans of one layout for them. Knows
nothing of what is computed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from gllm.runtime.batch import PlanAttention, Windows
from gllm.transport.device_streams import DeviceEvent, DeviceGraph, DeviceStream


class HostEvent:
    """A time."""

    def __init__(self) -> None:
        self.at = 0.0

    def synchronize(self) -> None:
        """As in gllm.transport.device_streams.DeviceEvent: it is over."""

    def query(self) -> bool:
        """As in gllm.transport.device_streams.DeviceEvent: it is over."""
        return True

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """As in gllm.transport.device_streams.DeviceEvent."""
        assert isinstance(earlier, HostEvent)
        return self.at - earlier.at


class HostStream:
    """The thread that is running."""

    @contextmanager
    def current(self) -> Iterator[None]:
        """As in gllm.transport.device_streams.DeviceStream."""
        yield

    def wait(self, event: DeviceEvent) -> None:
        """As in gllm.transport.device_streams.DeviceStream: it is over."""

    def record(self, event: DeviceEvent) -> None:
        """As in gllm.transport.device_streams.DeviceStream."""
        assert isinstance(event, HostEvent)
        event.at = time.perf_counter()


class HostGraph:
    """Work that is done anew at each replay, on the same memory."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class HostQueues:
    """The CPU as gllm.transport.device_streams.DeviceRuntime."""

    device = torch.device("cpu")

    def bind_thread(self) -> None:
        """As in Queues: there is one device."""

    def stream(self) -> DeviceStream:
        """As in Queues."""
        return HostStream()

    def event(self, timed: bool = False) -> DeviceEvent:
        """As in Queues."""
        return HostEvent()

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As in Queues."""
        return torch.empty(*shape, dtype=dtype)

    def pin_memory(self, memory: Tensor) -> None:
        """As in Queues: nothing to do."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As in Queues."""
        return torch.zeros(*shape, dtype=dtype)

    def capture(self, stream: DeviceStream, work: Callable[[], None]) -> DeviceGraph:
        """As in Queues, but it runs: what it makes has to have its size."""
        work()
        return HostGraph(work)

    def synchronize(self) -> None:
        """As in Queues: nothing runs."""

    def measure_free_bytes(self, work: Callable[[], None], share: float) -> int:
        """As in Queues; the CPU's memory is not counted."""
        work()
        return 2**30

    def measure_used_bytes(self, work: Callable[[], None]) -> int:
        """As in Queues; the CPU's memory is not counted."""
        work()
        return 0


def plan_of_one_layout(longest: int) -> PlanAttention:
    """Plans attention for layers without windows, of contexts up to `longest`. Decodes are one
    group, padded to the longest context that can be, so that as many of them are laid out alike."""

    def plan(
        rows: PagedBatch, dtype: torch.dtype, windows: Windows
    ) -> dict[int | None, AttentionPlan]:
        assert windows == {None}, "windows are not planned here"
        made = plan_attention(rows, dtype)
        if not 0 < rows.num_decodes == len(rows.context_len):
            return {None: made}
        places, context = np.arange(longest), rows.context_len
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
        return {None: replace(made, gathers=gathers)}

    return plan

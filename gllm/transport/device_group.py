"""Common part of the groups of ranks that compute on GPUs.

Every collective of a rank is queued by its compute thread, in its compute stream, so the order is
the same on all ranks. What concerns the host alone (agreement on steps, cancellation) goes through
a group in host memory.
"""

import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch import Tensor

from gllm.kernels.all_reduce import GroupClosedError, RankGroup
from gllm.transport.groups import StageGroups

CANCEL_SECONDS = 1.0
"""Limit for launches that are under way when a group is cancelled. They take microseconds, unless
the device's queue is full behind a collective that does not end."""


class DeviceRankGroup(RankGroup):
    """Base class of the communicators of tensor parallel ranks that compute on GPUs.

    Subclasses implement the collectives. Agreement on steps and cancellation go through the
    communicator in host memory.
    """

    can_capture: ClassVar[bool]
    """True if collectives can be part of CUDA graphs."""

    def __init__(self, host: StageGroups, cancel_seconds: float = CANCEL_SECONDS) -> None:
        """Create from the communicators of the same ranks in host memory.

        cancel_seconds: limit for launches in progress when the communicator is cancelled.
        """
        self._host, self._cancel_seconds = host, cancel_seconds
        self.rank, self.size = host.layers.rank, host.layers.size
        self._launching = threading.RLock()
        """Held while collectives are queued, so that none is aborted halfway."""
        self._is_cancelled = False

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Hold a lock while collectives, or a graph that contains some, are queued on the device.

        Raises:
            GroupClosedError: the communicator is cancelled.
        """
        with self._launching:
            if self._is_cancelled:
                raise GroupClosedError("the group of ranks is closed")
            yield

    def partial(self, rows: int, width: int) -> Tensor | None:
        """Return None: the input of `sum` may be anywhere in device memory."""
        return None

    @property
    def is_waiting(self) -> bool:
        """True if this rank waits for another one; may be read on any thread.

        Only waits of the host count, not those of the device.
        """
        return any(group.is_waiting for group in self._host)

    def agree_on_step(self, step: int, error: str) -> str:
        """Return the error of the first rank that has one before a step, or an empty string.

        The host waits, the device does not.
        """
        return self._host.layers.agree_on_step(step, error)

    @abstractmethod
    def end_step(self, step: int) -> None:
        """Record that all work of a step is queued. Called on the compute thread."""

    def cancel(self) -> None:
        """End every wait of every rank with GroupClosedError, now and later.

        The device finishes or aborts the queued collectives.
        """
        self._is_cancelled = True
        self._host.layers.cancel()
        self._host.head.cancel()
        is_held = self._launching.acquire(timeout=self._cancel_seconds)
        try:
            self._abort()
        finally:
            if is_held:
                self._launching.release()

    def close(self) -> None:
        """Free this rank's end; no other method but `cancel` runs at the same time or later."""
        self._host.layers.close()
        self._host.head.close()

    @abstractmethod
    def _abort(self) -> None:
        """End the collectives that are queued on the device; called more than once."""

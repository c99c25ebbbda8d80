"""Monitor of transfers by NCCL: aborts them if one fails or does not end in time.

NCCL itself would wait for ever, and torch's handling of such transfers would end the process.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gllm.transport.base import OnTransportError, TransportError
from gllm.transport.device_streams import DeviceEvent

log = logging.getLogger(__name__)

CHECK_INTERVAL_SECONDS = 1.0
"""Interval between two checks of the transfers in flight."""
UNNAMED_ERROR = (
    "NCCL reports an error that this version of PyTorch cannot name; NCCL_DEBUG=WARN logs it"
)


class TransferHandle(Protocol):
    """Interface of an asynchronous transfer, as torch.distributed.Work."""

    def is_completed(self) -> bool:
        """Return whether the transfer has ended, successfully or not."""

    def exception(self) -> BaseException | None:
        """Return the error of the transfer, if it failed. PyTorch 2.11 raises TypeError instead."""

    def wait(self) -> bool:
        """Make the current stream wait for the transfer."""


class Abortable(Protocol):
    """Interface of a process group whose pending transfers can be aborted."""

    def abort(self) -> None:
        """End all transfers in flight."""


@dataclass(slots=True)
class _Transfer:
    """A monitored transfer."""

    step: int
    begin: float
    handle: TransferHandle
    ended: DeviceEvent
    """Recorded after the transfer in the stream of transfers."""
    is_suspect: bool = False
    """True if it was complete at an earlier check while its stream had not passed it."""

    def failure(self) -> str | None:
        """Return why a completed transfer failed, "" if it did not, None if unknown yet."""
        try:
            error = self.handle.exception()
        except TypeError:
            # An error also completes a transfer, but its stream does not pass it.
            if self.ended.query():
                return ""
            was_suspect, self.is_suspect = self.is_suspect, True
            return UNNAMED_ERROR if was_suspect else None
        return "" if error is None else str(error) or type(error).__name__


class TransferMonitor:
    """Monitors asynchronous NCCL transfers and aborts all of them if one fails or times out."""

    def __init__(
        self,
        group: Abortable,
        timeout: float,
        on_error: OnTransportError = lambda error: None,
        bind_thread: Callable[[], None] = lambda: None,
        subject: str = "the transfer",
        check_interval: float = CHECK_INTERVAL_SECONDS,
    ) -> None:
        """Create a monitor; `start` runs it on a thread.

        Args:
            group: process group that is aborted on failure.
            timeout: limit per transfer in seconds.
            on_error: called with a TransportError when transfers are aborted.
            bind_thread: called first on the monitoring thread.
            subject: text for a step's transfers in error messages.
            check_interval: seconds between two checks of the thread.
        """
        self._subject, self._check_interval = subject, check_interval
        self.abort_reason = ""
        """Cause for which transfers were aborted; empty if they were not."""
        self._group, self._timeout = group, timeout
        self._on_error, self._bind_thread = on_error, bind_thread
        self._in_flight: deque[_Transfer] = deque()
        self._thread: threading.Thread | None = None
        self._has_stopped = threading.Event()

    def add(self, step: int, handle: TransferHandle, ended: DeviceEvent, now: float) -> None:
        """Monitor a transfer that began at `now` seconds and is followed by the event `ended`."""
        self._in_flight.append(_Transfer(step, now, handle, ended))

    def check_transfers(self, now: float) -> None:
        """Drop transfers that have ended; abort all if one failed or exceeds the timeout."""
        while self._in_flight and not self.abort_reason:
            transfer = self._in_flight[0]
            failure = transfer.failure() if transfer.handle.is_completed() else None
            if failure:
                self.abort(f"{self._subject} of step {transfer.step} failed: {failure}")
            elif failure is not None:
                self._in_flight.popleft()
                continue
            elif now - transfer.begin > self._timeout:
                late = f"did not end in {self._timeout:g} s"
                self.abort(f"{self._subject} of step {transfer.step} {late}")
            return

    def check(self) -> None:
        """Raise TransportError if transfers have been aborted."""
        if self.abort_reason:
            raise TransportError(self.abort_reason)

    def start(self) -> None:
        """Check the transfers periodically on a thread."""
        self._thread = threading.Thread(
            target=self._check_periodically, name="nccl-watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._has_stopped.set()
        if self._thread is not None:
            self._thread.join()

    def abort(self, cause: str) -> None:
        """Abort all transfers and report the cause."""
        # The cause first: threads that the abort releases read it.
        self.abort_reason = cause
        try:
            self._group.abort()
        finally:
            self._on_error(TransportError(cause))

    def _check_periodically(self) -> None:
        try:
            self._bind_thread()
            while not self.abort_reason:
                if self._has_stopped.wait(self._check_interval):
                    return
                self.check_transfers(time.monotonic())
        except Exception as error:
            log.exception("transfers are no longer monitored")
            if not self.abort_reason:
                self.abort(f"transfers cannot be monitored: {type(error).__name__}: {error}")

"""Parts of a READ whose layers are computed while it is answered.

The owner sends READY with the number of parts, from the first one on, that are in its KV cache.
"""

import struct
import time
from collections.abc import Callable

from gllm.kv_transfer.frames import KvConnection, KvFrameError, KvFrameKind, KvTransferError

POLL_SECONDS = 0.0005
"""Time between two looks at the counters of the owner's workers."""
SIGN_SECONDS = 0.5
"""Time without a new part after which READY is sent again, so that the receiver waits longer."""
MAX_PART_SECONDS = 60.0
"""Limit for the wait for one part."""
_READY = struct.Struct("!I")


class OwnerGate:
    """Owner's side: waits until parts are computed."""

    def __init__(
        self,
        num_parts: int,
        is_computed: Callable[[int], bool],
        is_held: Callable[[], bool],
        connection: KvConnection | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create a gate.

        Args:
            num_parts: Parts of the READ.
            is_computed: Returns whether a part is in the KV cache.
            is_held: Returns whether the ticket is still valid.
            connection: To the receiver; None if it expects no READY.
            clock: Time in seconds.
            sleep: Waits for a number of seconds.
        """
        self._num_parts, self._is_computed, self._is_held = num_parts, is_computed, is_held
        self._connection, self._clock, self._sleep = connection, clock, sleep
        self._num_ready = 0

    def wait_for_part(self, index: int) -> None:
        """Wait until a part and all before it are computed.

        Raises:
            OSError: The receiver has gone.
            KvTransferError: The blocks are not kept any more, or the part is late.
        """
        if index < self._num_ready:
            return
        now = self._clock()
        limit, next_sign = now + MAX_PART_SECONDS, now + SIGN_SECONDS
        while not self._find_ready(index):
            if not self._is_held():
                raise KvTransferError("the ticket is not held any more")
            if (now := self._clock()) > limit:
                raise KvTransferError("a layer was not computed in time")
            if now > next_sign:
                self._send()
                next_sign = now + SIGN_SECONDS
            self._sleep(POLL_SECONDS)
        self._send()

    def _find_ready(self, index: int) -> bool:
        """Count the computed parts; return whether they include one."""
        while self._num_ready < self._num_parts and self._is_computed(self._num_ready):
            self._num_ready += 1
        return index < self._num_ready

    def _send(self) -> None:
        if self._connection is not None:
            self._connection.send(KvFrameKind.READY, _READY.pack(self._num_ready))


class ReceiverGate:
    """Receiver's side: waits until the owner has announced parts."""

    def __init__(
        self, connection: KvConnection, num_parts: int, on_ready: Callable[[], None]
    ) -> None:
        """Create a gate.

        Args:
            connection: To the owner.
            num_parts: Parts of the READ.
            on_ready: Called with each announcement.
        """
        self._connection, self._num_parts, self._on_ready = connection, num_parts, on_ready
        self._num_ready = 0

    def wait_for_part(self, index: int) -> None:
        """Wait until a part and all before it may be read.

        Raises:
            OSError, KvFrameError: The connection ends.
            KvTransferError: The owner refuses, or the fetch has to end.
        """
        while index >= self._num_ready:
            _, payload = self._connection.receive(KvFrameKind.READY)
            if len(payload) != _READY.size:
                raise KvFrameError(f"READY has {len(payload)} bytes")
            (count,) = _READY.unpack(payload)
            if not self._num_ready <= count <= self._num_parts:
                raise KvFrameError(f"{count} of {self._num_parts} parts are ready")
            self._num_ready = count
            self._on_ready()

"""Tokens and parts of a READ that are computed while it is answered.

The owner sends READY with two numbers: the tokens, from the first requested one on, for which it
answers this READ, and the parts, from the first one on, that have these tokens in its KV cache. The
first READY with tokens fixes their number; the receiver requests the others with another READ.
"""

import struct
import time
from collections.abc import Callable

from gllm.transport.kv.frames import KvConnection, KvFrameError, KvFrameKind, KvTransferError

POLL_SECONDS = 0.0005
"""Time between two looks at the counters of the owner's workers."""
SIGN_SECONDS = 0.5
"""Time without a new part after which READY is sent again, so that the receiver waits longer."""
MAX_PART_SECONDS = 60.0
"""Limit for the wait for one part, or for the next tokens."""
_READY = struct.Struct("!II")


class OwnerGate:
    """Makes the sender of KV blocks wait until layers are computed, and notifies the receiver.

    Used if a prefill is read while it runs (layer by layer).
    """

    def __init__(
        self,
        is_held: Callable[[], bool],
        connection: KvConnection | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create for one READ request.

        Args:
            is_held: Returns True while the blocks stay reserved for the request.
            connection: Connection to the receiver; None if it expects no READY messages.
            clock: Returns the time in seconds.
            sleep: Waits for a number of seconds.
        """
        self._is_held = is_held
        self._connection, self._clock, self._sleep = connection, clock, sleep
        self._num_tokens = self._num_parts = 0
        self.num_ready = 0
        """Number of parts that are known to be computed."""
        self._is_computed: Callable[[int], bool] = lambda index: False

    def announce(self, num_tokens: int) -> None:
        """Report to the receiver how many tokens this request will return. Raises OSError."""
        self._num_tokens = num_tokens
        self._send()

    def watch(self, num_parts: int, is_computed: Callable[[int], bool]) -> None:
        """Set the number of parts, and the function that returns True for a computed part."""
        self._num_parts, self._is_computed = num_parts, is_computed

    def wait_for_part(self, index: int) -> None:
        """Wait until a head range of a layer and all before it are computed.

        Raises:
            OSError: The receiver has disconnected.
            KvTransferError: The blocks are no longer reserved, or the layer is not computed in
                time.
        """
        if index < self.num_ready:
            return
        self.wait(lambda: self._find_ready(index))
        self._send()

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait until a condition holds; repeat READY so that the receiver does not time out.

        Args:
            is_ready: Returns True once the requested tokens are scheduled or computed.

        Raises:
            OSError: The receiver has disconnected.
            KvTransferError: The blocks are no longer reserved, or the wait takes too long.
        """
        now = self._clock()
        limit, next_sign = now + MAX_PART_SECONDS, now + SIGN_SECONDS
        while not is_ready():
            if not self._is_held():
                raise KvTransferError("the ticket is not held any more")
            if (now := self._clock()) > limit:
                raise KvTransferError("a layer was not computed in time")
            if now > next_sign:
                self._send()
                next_sign = now + SIGN_SECONDS
            self._sleep(POLL_SECONDS)

    def _find_ready(self, index: int) -> bool:
        """Count the computed parts; return whether they include one."""
        while self.num_ready < self._num_parts and self._is_computed(self.num_ready):
            self.num_ready += 1
        return index < self.num_ready

    def _send(self) -> None:
        if self._connection is not None:
            payload = _READY.pack(self._num_tokens, self.num_ready)
            self._connection.send(KvFrameKind.READY, payload)


class ReceiverGate:
    """Makes the receiver of KV blocks wait until the sender reports layers as computed.

    Used if a prefill is read while it runs (layer by layer).
    """

    def __init__(
        self,
        connection: KvConnection,
        num_tokens: int,
        num_parts: int,
        on_ready: Callable[[], None],
    ) -> None:
        """Create for one READ request.

        Args:
            connection: Connection to the engine that has the blocks.
            num_tokens: Number of requested tokens.
            num_parts: Number of requested head ranges of layers.
            on_ready: Called for each READY message.
        """
        self._connection, self._on_ready = connection, on_ready
        self._max_tokens, self._num_parts = num_tokens, num_parts
        self._num_tokens = 0
        self.num_ready = 0
        """Number of parts that the owner has announced as computed."""

    def wait_for_tokens(self) -> int:
        """Wait for the number of tokens that the other engine will send, and return it.

        Raises:
            OSError, KvFrameError: The connection failed or sent invalid data.
            KvTransferError: The other engine refused, or the fetch was cancelled or is late.
        """
        while not self._num_tokens:
            self._receive()
        return self._num_tokens

    def wait_for_part(self, index: int) -> None:
        """Wait until a head range and all before it are computed. Raises as `wait_for_tokens`."""
        while index >= self.num_ready:
            self._receive()

    def _receive(self) -> None:
        _, payload = self._connection.receive(KvFrameKind.READY)
        if len(payload) != _READY.size:
            raise KvFrameError(f"READY has {len(payload)} bytes")
        num_tokens, count = _READY.unpack(payload)
        if num_tokens > self._max_tokens or num_tokens != (self._num_tokens or num_tokens):
            raise KvFrameError(f"{num_tokens} of {self._max_tokens} tokens are announced")
        if not self.num_ready <= count <= (self._num_parts if num_tokens else 0):
            raise KvFrameError(f"{count} of {self._num_parts} parts are ready")
        self._num_tokens, self.num_ready = num_tokens, count
        self._on_ready()

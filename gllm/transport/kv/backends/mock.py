"""Delay in place of a network, for studies on one machine.

Contents arrive as by another backend, but not before kappa x tokens / bandwidth.

Source: TetriInfer's mock of its transfers (Hu et al., "Inference without Interference", 2024).
"""

import time
from collections.abc import Callable

from gllm.transport.kv.backends.base import FetchTarget, KvBackend, ServedRead
from gllm.transport.kv.frames import KvConnection


def mock_seconds(bytes_per_token: int, num_tokens: int, bytes_per_second: float) -> float:
    """Return the duration of a KV transfer in seconds: bytes per token * tokens / bandwidth."""
    return bytes_per_token * num_tokens / bytes_per_second


class MockBackend:
    """KV transfer backend that delays another backend's transfers to imitate a slower link."""

    def __init__(
        self,
        inner: KvBackend,
        bytes_per_second: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create a backend that delays transfers.

        Args:
            inner: Backend that transfers the bytes.
            bytes_per_second: Bandwidth to imitate.
            clock: Returns the time in seconds.
            sleep: Waits for a number of seconds.

        Raises:
            ValueError: The bandwidth is not positive.
        """
        if not bytes_per_second > 0:
            raise ValueError("the bandwidth of the mock backend must be positive")
        self._inner, self._rate, self._clock, self._sleep = inner, bytes_per_second, clock, sleep

    def serve(self, connection: KvConnection, read: ServedRead) -> None:
        """Send the blocks as the inner backend does."""
        self._inner.serve(connection, read)

    def fetch(self, connection: KvConnection, target: FetchTarget) -> None:
        """Receive the blocks, and wait until a link of that bandwidth would have sent them.

        If the request is layer by layer, a part starts when it is computed and the one before has
        arrived.
        """
        end = self._clock()

        def wait_for_part(index: int) -> None:
            nonlocal end
            if target.request.is_per_layer:
                target.wait_for_part(index)
                end = max(end, self._clock())
            part = target.parts[index]
            bytes_per_token = part.pages.bytes_per_token(part.part.layer, part.part.heads)
            end += mock_seconds(bytes_per_token, target.request.num_tokens, self._rate)

        self._inner.fetch(connection, target._replace(wait_for_part=wait_for_part))
        while (left := end - self._clock()) > 0:
            self._sleep(min(left, 0.1))
            # Keeps the fetch alive, and ends it if it was cancelled.
            target.on_bytes(0)

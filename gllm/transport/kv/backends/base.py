"""Interface of a backend, and what both ends of a transfer pass to it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from gllm.transport.kv.frames import KvConnection, ReadPart, ReadRequest
from gllm.transport.kv.pages import KvPages, Slots


def skip_wait(index: int) -> None:
    """Return at once: the `wait_for_part` of transfers whose KV blocks are all computed."""


class ServedRead(NamedTuple):
    """A request of another engine to read KV blocks, with the KV caches and blocks to send."""

    request: ReadRequest
    pages: Sequence[KvPages]
    """KV cache of each worker of this machine, in the order of ReadPart.place."""
    descriptors: Sequence[int]
    """Read-only descriptors of the same caches."""
    block_ids: list[int]
    """Blocks of the sequence, from its first token on."""
    is_held: Callable[[], bool]
    """Returns whether the ticket is still valid."""
    yield_to_activations: Callable[[], None]
    """Waits as long as activations wait for the links of this machine."""
    wait_for_part: Callable[[int], None] = skip_wait
    """Waits until a part and all before it may be read, and notifies the receiver of a READ per
    layer. Raises OSError, KvTransferError."""


class TargetPart(NamedTuple):
    """A requested head range of one layer, and the KV cache positions to write it to."""

    part: ReadPart
    pages: KvPages
    """KV cache that the part is written to."""
    slots: Slots
    """Position of each token."""


class FetchTarget(NamedTuple):
    """A request to read KV blocks of another engine, with the local KV caches to write them to."""

    request: ReadRequest
    parts: Sequence[TargetPart]
    """The requested head ranges of layers with their destinations, in the order of the request."""
    on_bytes: Callable[[int], None]
    """Notes bytes that have been written; raises KvTransferError if the fetch has to end."""
    wait_for_part: Callable[[int], None] = skip_wait
    """Waits until the owner has announced a part and all before it; called once per part, in order.
    Raises OSError, KvFrameError, KvTransferError."""


class KvBackend(Protocol):
    """Interface of a transport of KV blocks between engines: TCP, shared memory or NIXL.

    One object serves all transfers of a process, on several threads.
    """

    def serve(self, connection: KvConnection, read: ServedRead) -> None:
        """Send the blocks of a READ; the mover confirms them afterwards.

        Raises:
            OSError, KvFrameError: The connection ends.
            KvTransferError: The READ is refused.
        """

    def fetch(self, connection: KvConnection, target: FetchTarget) -> None:
        """Receive the blocks of a READ that was sent before, and write them.

        Raises:
            OSError, KvFrameError: The connection ends.
            KvTransferError: The transfer has failed.
        """

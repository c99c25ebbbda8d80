"""Interface of a backend, and what both ends of a transfer pass to it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from gllm.transport.kv.frames import KvConnection, ReadPart, ReadRequest
from gllm.transport.kv.pages import KvPages, Slots


def skip_check() -> None:
    """Let a fetch go on: default of `check`, for one without a deadline."""


def skip_wait(index: int) -> None:
    """Do not wait: default of `wait_for_part`, if all KV blocks are computed beforehand."""


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
    """Returns True while the blocks stay reserved for this request."""
    yield_to_activations: Callable[[], None]
    """Waits while activations are queued for sending from this machine."""
    wait_for_part: Callable[[int], None] = skip_wait
    """Waits until a head range of a layer, by its index in the request, is computed, and notifies
    the receiver if the request is layer by layer. Raises OSError, KvTransferError."""


class TargetPart(NamedTuple):
    """A requested head range of one layer, and the KV cache positions to write it to."""

    part: ReadPart
    pages: KvPages
    """Local KV cache to write to."""
    slots: Slots
    """Slot in the KV cache of each token."""


class FetchTarget(NamedTuple):
    """A request to read KV blocks of another engine, with the local KV caches to write them to."""

    request: ReadRequest
    parts: Sequence[TargetPart]
    """The requested head ranges of layers with their destinations, in the order of the request."""
    on_bytes: Callable[[int], None]
    """Counts bytes that were written; raises KvTransferError if the fetch is cancelled or late."""
    wait_for_part: Callable[[int], None] = skip_wait
    """Waits until the other engine reports a head range of a layer, by its index, as computed;
    called once for each, in order. Raises OSError, KvFrameError, KvTransferError."""
    check: Callable[[], None] = skip_check
    """Raises KvTransferError if the fetch is cancelled or late. Waits for the connection call it;
    a backend that waits for something else calls it too."""


class KvBackend(Protocol):
    """Interface of a transport of KV blocks between engines: TCP, shared memory or NIXL.

    One object serves all transfers of a process, on several threads.
    """

    def serve(self, connection: KvConnection, read: ServedRead) -> None:
        """Send the requested KV blocks to another engine.

        Raises:
            OSError, KvFrameError: The connection failed or received invalid data.
            KvTransferError: The request is refused.
        """

    def fetch(self, connection: KvConnection, target: FetchTarget) -> None:
        """Receive KV blocks after a READ request was sent, and write them to the local KV caches.

        Nothing is written once this has returned or raised an error.

        Raises:
            OSError, KvFrameError: The connection failed or received invalid data.
            KvTransferError: The transfer failed.
        """

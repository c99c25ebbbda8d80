"""NIXL: one-sided reads by RDMA or NVLink (https://github.com/ai-dynamo/nixl).

The owner registers its KV cache with a NIXL agent and grants the agent's metadata, the address of
each worker's memory and the blocks. The receiver reads into its own registered memory; the owner's
process does nothing meanwhile. Needs `pip install nixl` on both machines.
"""

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gllm.config.kv_backends import NIXL_MISSING
from gllm.messages.kv_layout import KvLayout
from gllm.transport.kv.backends.base import FetchTarget, ServedRead
from gllm.transport.kv.frames import (
    KvConnection,
    KvFrameError,
    KvFrameKind,
    KvTransferError,
    ReadGrant,
)
from gllm.transport.kv.pages import KvPages, KvPagesError, find_slots

log = logging.getLogger(__name__)

_POLL_SECONDS = 50e-6
_RELEASE_SECONDS = 0.01
"""Interval between two attempts to free a transfer that is not cancelled yet."""
_DONE = "DONE"
_ENDED = (_DONE, "ERR")
"""States of a transfer that does not write any more."""
_DRAM = "DRAM"

_Extent = tuple[int, int, int]
"""Address, number of bytes and device of a piece of memory, as NIXL describes it."""


class NixlDetails(msgspec.Struct, frozen=True, array_like=True):
    """ReadGrant.details."""

    metadata: bytes
    """Metadata of the owner's NIXL agent."""
    addresses: list[int]
    """Begin of the memory of each place of the request, in ascending order of places."""
    layouts: list[KvLayout]


class NixlBackend:
    """KV transfer backend that reads the KV cache of another machine by RDMA, using NIXL."""

    def __init__(self, agent: Any = None) -> None:
        """Create the agent of this process.

        Args:
            agent: NIXL agent to use; None to create one.

        Raises:
            ImportError: NIXL is not installed.
        """
        self._agent = _create_agent() if agent is None else agent
        self._lock = threading.Lock()
        self._registered: dict[int, tuple[weakref.ref[KvPages], Any]] = {}
        """Caches that the agent knows and their descriptors, by address."""

    def serve(self, connection: KvConnection, read: ServedRead) -> None:
        """Grant the receiver access to the registered memory of the blocks."""
        read.wait_for_part(len(read.request.parts) - 1)
        places = sorted({part.place for part in read.request.parts})
        pages = [read.pages[place] for place in places]
        for page in pages:
            self.register(page)
        details = NixlDetails(
            self._agent.get_agent_metadata(),
            [page.address for page in pages],
            [page.layout for page in pages],
        )
        grant = ReadGrant(read.block_ids, msgspec.msgpack.encode(details))
        connection.send_struct(KvFrameKind.GRANT, grant)

    def fetch(self, connection: KvConnection, target: FetchTarget) -> None:
        """Read the blocks from the owner's memory."""
        target.wait_for_part(len(target.parts) - 1)
        grant = connection.receive_struct(KvFrameKind.GRANT, ReadGrant)
        try:
            details = msgspec.msgpack.decode(grant.details, type=NixlDetails)
            own, remote = find_extents(target, details, grant.block_ids)
        except (msgspec.DecodeError, KvPagesError) as error:
            raise KvFrameError(f"the grant is invalid: {error}") from error
        for part in target.parts:
            self.register(part.pages)
        name = self._agent.add_remote_agent(details.metadata)
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(own, mem_type=_DRAM),
            self._agent.get_xfer_descs(remote, mem_type=_DRAM),
            name,
        )
        state = ""
        try:
            state = self._agent.transfer(handle)
            while state not in _ENDED:
                target.check()
                time.sleep(_POLL_SECONDS)
                state = self._agent.check_xfer_state(handle)
        finally:
            self._release(handle)
        if state != _DONE:
            raise KvTransferError("NIXL reports an error")
        target.on_bytes(sum(size for _, size, _ in own))

    def _release(self, handle: Any) -> None:
        """Free a transfer, which cancels it; wait until nothing is written any more."""
        while True:
            try:
                self._agent.release_xfer_handle(handle)
                return
            except Exception as error:
                # NIXL has no common class of errors. Some transfers cannot be cancelled.
                log.debug("a NIXL transfer is not released: %s", error)
            time.sleep(_RELEASE_SECONDS)

    def register(self, pages: KvPages) -> None:
        """Let other agents read the memory of caches, and this agent write to it."""
        with self._lock:
            for address, (registered, descriptors) in list(self._registered.items()):
                # Caches of an earlier epoch are unmapped; later ones may have the same address.
                if registered() is None or (address == pages.address and registered() is not pages):
                    self._agent.deregister_memory(descriptors)
                    del self._registered[address]
            if pages.address not in self._registered:
                extent = (pages.address, pages.layout.num_bytes, 0, "")
                descriptors = self._agent.register_memory([extent], mem_type=_DRAM)
                self._registered[pages.address] = weakref.ref(pages), descriptors


def _create_agent() -> Any:
    """Create a NIXL agent. Raises ImportError if NIXL is not installed."""
    try:
        from nixl._api import nixl_agent
    except ImportError as error:
        raise ImportError(NIXL_MISSING) from error
    return nixl_agent(f"gllm-{time.monotonic_ns()}")


def find_extents(
    target: FetchTarget, details: NixlDetails, block_ids: Sequence[int]
) -> tuple[list[_Extent], list[_Extent]]:
    """Return corresponding pieces of own and remote memory, as large as both are contiguous.

    Raises:
        KvPagesError: The blocks do not have the tokens.
    """
    request = target.request
    places = sorted({part.place for part in request.parts})
    if not len(places) == len(details.addresses) == len(details.layouts):
        raise KvPagesError("the grant has the wrong number of workers")
    own: list[NDArray[np.int64]] = []
    remote: list[NDArray[np.int64]] = []
    sizes: list[NDArray[np.int64]] = []
    for part, pages, slots in target.parts:
        number = places.index(part.place)
        layout = details.layouts[number]
        theirs = find_slots(block_ids, layout.block_size, request.first_token, request.num_tokens)
        for (begin, stride, size), (their_begin, their_stride, _) in zip(
            pages.layout.find_strides(part.layer, part.heads),
            layout.find_strides(part.layer, part.heads),
            strict=True,
        ):
            own.append(pages.address + begin + slots * stride)
            remote.append(details.addresses[number] + their_begin + theirs * their_stride)
            sizes.append(np.full(len(slots), size, np.int64))
    return _merge(np.concatenate(own), np.concatenate(remote), np.concatenate(sizes))


def _merge(
    own: NDArray[np.int64], remote: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[list[_Extent], list[_Extent]]:
    """Join pieces that follow each other in both memories: each is a descriptor of its own."""
    is_break = (own[1:] != own[:-1] + sizes[:-1]) | (remote[1:] != remote[:-1] + sizes[:-1])
    begins = np.flatnonzero(np.concatenate([[True], is_break]))
    joined = np.add.reduceat(sizes, begins).tolist()
    return (
        [(address, size, 0) for address, size in zip(own[begins].tolist(), joined, strict=True)],
        [(address, size, 0) for address, size in zip(remote[begins].tolist(), joined, strict=True)],
    )

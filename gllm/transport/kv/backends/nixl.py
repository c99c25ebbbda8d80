"""NIXL: one-sided reads by RDMA or NVLink (https://github.com/ai-dynamo/nixl).

The owner registers its KV cache with a NIXL agent and grants the agent's metadata, the address of
each worker's memory and the blocks. The receiver reads into its own registered memory; the owner's
process does nothing meanwhile. Needs `pip install nixl` on both machines.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

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

_POLL_SECONDS = 50e-6
_DRAM = "DRAM"

_Extent = tuple[int, int, int]
"""Address, number of bytes and device of a piece of memory, as NIXL describes it."""


class _NixlDetails(msgspec.Struct, frozen=True, array_like=True):
    """ReadGrant.details."""

    metadata: bytes
    """Metadata of the owner's NIXL agent."""
    addresses: list[int]
    """Begin of the memory of each place of the request, in ascending order of places."""
    layouts: list[KvLayout]


class NixlBackend:
    """KV transfer backend that reads the KV cache of another machine by RDMA, using NIXL."""

    def __init__(self) -> None:
        """Create the agent of this process.

        Raises:
            ImportError: NIXL is not installed.
        """
        try:
            from nixl._api import nixl_agent
        except ImportError as error:
            raise ImportError(
                "the KV transfer backend nixl needs the package nixl: pip install nixl, or choose "
                "--kv-transfer tcp"
            ) from error
        self._agent: Any = nixl_agent(f"gllm-{time.monotonic_ns()}")
        self._lock = threading.Lock()
        self._registered: set[int] = set()
        """Addresses of caches that the agent knows."""

    def serve(self, connection: KvConnection, read: ServedRead) -> None:
        """Grant the receiver access to the registered memory of the blocks."""
        read.wait_for_part(len(read.request.parts) - 1)
        places = sorted({part.place for part in read.request.parts})
        pages = [read.pages[place] for place in places]
        for page in pages:
            self._register(page)
        details = _NixlDetails(
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
            details = msgspec.msgpack.decode(grant.details, type=_NixlDetails)
            own, remote = _find_extents(target, details, grant.block_ids)
        except (msgspec.DecodeError, KvPagesError) as error:
            raise KvFrameError(f"the grant is invalid: {error}") from error
        for part in target.parts:
            self._register(part.pages)
        name = self._agent.add_remote_agent(details.metadata)
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(own, mem_type=_DRAM),
            self._agent.get_xfer_descs(remote, mem_type=_DRAM),
            name,
        )
        state = self._agent.transfer(handle)
        # A read under way is not interrupted: nothing is written once this returns.
        while state not in ("DONE", "ERR"):
            time.sleep(_POLL_SECONDS)
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise KvTransferError("NIXL reports an error")
        target.on_bytes(sum(size for _, size, _ in own))

    def _register(self, pages: KvPages) -> None:
        with self._lock:
            if pages.address not in self._registered:
                extent = (pages.address, pages.layout.num_bytes, 0, "")
                self._agent.register_memory([extent], mem_type=_DRAM)
                self._registered.add(pages.address)


def _find_extents(
    target: FetchTarget, details: _NixlDetails, block_ids: Sequence[int]
) -> tuple[list[_Extent], list[_Extent]]:
    """Return corresponding pieces of own and remote memory: one per token, keys and values.

    Raises:
        KvPagesError: The blocks do not have the tokens.
    """
    request = target.request
    places = sorted({part.place for part in request.parts})
    if not len(places) == len(details.addresses) == len(details.layouts):
        raise KvPagesError("the grant has the wrong number of workers")
    own: list[_Extent] = []
    remote: list[_Extent] = []
    for part, pages, slots in target.parts:
        number = places.index(part.place)
        layout = details.layouts[number]
        offset, count = request.first_token, request.num_tokens
        theirs = find_slots(block_ids, layout.block_size, offset, count)
        for extents, address, cache, positions in (
            (own, pages.address, pages.layout, slots),
            (remote, details.addresses[number], layout, theirs),
        ):
            for begin, stride, size in cache.find_strides(part.layer, part.heads):
                extents += [(address + begin + int(slot) * stride, size, 0) for slot in positions]
    return own, remote

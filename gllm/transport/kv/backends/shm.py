"""Shared memory: the receiver maps the sender's KV cache and copies the tokens, once.

The descriptors travel over the Unix socket (SCM_RIGHTS) and are read-only.
"""

import os
import socket
from collections.abc import Sequence

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
from gllm.transport.kv.pages import KvPages, KvPagesError

_RUN_TOKENS = 1024
"""Tokens that are copied between two checks of the fetch."""
_MAX_PLACES = 64
"""Workers per READ; the kernel passes no more than 253 descriptors at once."""


class ShmBackend:
    """KV transfer backend that copies KV blocks between local processes by shared memory."""

    def serve(self, connection: KvConnection, read: ServedRead) -> None:
        """Send the descriptors of the KV caches; return once all requested parts are computed."""
        if connection.socket.family != socket.AF_UNIX:
            raise KvTransferError("shared memory needs a Unix socket")
        places = sorted({part.place for part in read.request.parts})
        if len(places) > _MAX_PLACES:
            raise KvTransferError(f"more than {_MAX_PLACES} workers in one request")
        layouts = msgspec.msgpack.encode([read.pages[place].layout for place in places])
        connection.send_struct(KvFrameKind.GRANT, ReadGrant(read.block_ids, layouts))
        descriptors = [read.descriptors[place] for place in places]
        socket.send_fds(connection.socket, [b"\0"], descriptors)
        for index in range(len(read.request.parts)):
            read.wait_for_part(index)

    def fetch(self, connection: KvConnection, target: FetchTarget) -> None:
        """Map the other engine's KV caches into memory and copy the blocks."""
        grant = connection.receive_struct(KvFrameKind.GRANT, ReadGrant)
        places = sorted({part.place for part in target.request.parts})
        descriptors = connection.receive_descriptors(len(places))
        try:
            layouts = msgspec.msgpack.decode(grant.details, type=list[KvLayout])
            if len(layouts) != len(places):
                raise KvFrameError(f"{len(layouts)} layouts of {len(places)} workers")
            sources = {
                place: KvPages(layout, descriptor, is_writable=False)
                for place, layout, descriptor in zip(places, layouts, descriptors, strict=True)
            }
        except (msgspec.DecodeError, KvPagesError) as error:
            raise KvFrameError(f"the grant is invalid: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            _copy(target, sources, grant.block_ids)
        except KvPagesError as error:
            raise KvTransferError(str(error)) from error
        finally:
            for pages in sources.values():
                pages.close()


def _copy(target: FetchTarget, sources: dict[int, KvPages], block_ids: Sequence[int]) -> None:
    """Copy all parts. Raises KvPagesError, KvTransferError."""
    request = target.request
    for index, (part, pages, slots) in enumerate(target.parts):
        target.wait_for_part(index)
        source = sources[part.place]
        num_bytes = pages.bytes_per_token(part.layer, part.heads)
        theirs = source.find_slots(block_ids, request.first_token, request.num_tokens)
        for begin in range(0, request.num_tokens, _RUN_TOKENS):
            run = slice(begin, begin + _RUN_TOKENS)
            pages.copy(part.layer, part.heads, slots[run], source, theirs[run])
            target.on_bytes(len(slots[run]) * num_bytes)

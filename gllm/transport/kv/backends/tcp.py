"""Runs of tokens as frames on a connection, with TLS or without.

Each chunk leaves behind the activations that wait at this machine: a KV cache is the least urgent
traffic of a link (gllm.pacing.traffic.TrafficClass).
"""

from collections.abc import Iterator

import numpy as np

from gllm.config.link_encodings import PLAIN
from gllm.messages.kv_layout import KvLayout
from gllm.transport.kv.backends.base import FetchTarget, ServedRead, TargetPart
from gllm.transport.kv.frames import (
    RUN_HEADER,
    KvConnection,
    KvFrameError,
    KvFrameKind,
    KvTransferError,
)
from gllm.transport.kv.pages import Bytes, KvPagesError
from gllm.transport.link.encodings import LinkEncoding, RowFormat, make_encoding

CHUNK_BYTES = 2**18
"""Bytes that are sent before activations may go first again."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class RunEncoding:
    """Encodes the keys and values of consecutive tokens of one layer for the network.

    They are sent unchanged, or quantized to integers with one scale per key or value of a token and
    head.
    """

    def __init__(self, name: str, layout: KvLayout, layer: int) -> None:
        """Prepare the encoding of one layer.

        Args:
            name: A name of LINK_ENCODINGS. KV caches with 8-bit elements are sent unchanged.
            layout: KV layout of the worker.
            layer: Index of the layer in the model; one that the worker has.

        Raises:
            KvPagesError: There is no such encoding.
        """
        self._encoding: LinkEncoding | None = None
        own = next(candidate for candidate in layout.layers if candidate.layer == layer)
        widths = [width for width in (own.key_bytes, own.value_bytes) if width]
        item_bytes = _ITEM_BYTES.get(layout.dtype)
        if name != PLAIN and item_bytes is not None:
            try:
                self._encoding = make_encoding(name)
            except ValueError as error:
                raise KvPagesError(str(error)) from error
            is_bfloat16 = layout.dtype == "bfloat16"
            self._rows = [
                RowFormat(width // item_bytes, item_bytes, is_bfloat16) for width in widths
            ]

    def encode(self, run: Bytes) -> Bytes:
        """Return the keys and then the values of consecutive tokens, encoded for the network."""
        if self._encoding is None:
            return run
        num_rows = len(run) // sum(row.num_bytes for row in self._rows)
        parts, begin = [], 0
        for row in self._rows:
            end = begin + num_rows * row.num_bytes
            parts.append(np.frombuffer(self._encoding.encode(run[begin:end].data, row), np.uint8))
            begin = end
        return np.concatenate(parts)

    def decode(self, encoded: Bytes) -> Bytes:
        """Return the decoded keys and values. Raises KvPagesError for a wrong length."""
        if self._encoding is None:
            return encoded
        sizes = [self._encoding.row_bytes(row) for row in self._rows]
        num_rows, rest = divmod(len(encoded), sum(sizes))
        if rest:
            raise KvPagesError(f"an encoded run of {len(encoded)} bytes")
        parts, begin = [], 0
        for row, size in zip(self._rows, sizes, strict=True):
            part = np.empty(num_rows * row.num_bytes, np.uint8)
            end = begin + num_rows * size
            self._encoding.decode(encoded[begin:end].data, row, part.data)
            parts.append(part)
            begin = end
        return np.concatenate(parts)


class TcpBackend:
    """KV transfer backend that sends KV blocks over a TCP connection, with or without TLS."""

    def serve(self, connection: KvConnection, read: ServedRead) -> None:
        """Send the blocks in chunks."""
        request = read.request
        for index, part in enumerate(request.parts):
            read.wait_for_part(index)
            pages = read.pages[part.place]
            encoding = RunEncoding(request.encoding, pages.layout, part.layer)
            step = _chunk_tokens(pages.bytes_per_token(part.layer, part.heads))
            slots = pages.find_slots(read.block_ids, request.first_token, request.num_tokens)
            for begin in range(0, request.num_tokens, step):
                if not read.is_held():
                    raise KvTransferError("the ticket is not held any more")
                read.yield_to_activations()
                chunk = slots[begin : begin + step]
                run = encoding.encode(pages.read(part.layer, part.heads, chunk))
                header = RUN_HEADER.pack(index, request.first_token + begin, len(chunk))
                connection.send(KvFrameKind.RUN, header, run.data)

    def fetch(self, connection: KvConnection, target: FetchTarget) -> None:
        """Receive the chunks and write them."""
        for index, part, first, count in _expected_runs(target):
            if not first:
                target.wait_for_part(index)
            arrived = connection.receive_run()
            if arrived[:3] != (index, target.request.first_token + first, count):
                raise KvFrameError(f"run {arrived[:3]} in place of {index, first, count}")
            layer, heads = part.part.layer, part.part.heads
            encoding = RunEncoding(target.request.encoding, part.pages.layout, layer)
            try:
                run = encoding.decode(arrived[3])
                part.pages.write(layer, heads, part.slots[first : first + count], run)
            except KvPagesError as error:
                raise KvFrameError(str(error)) from error
            target.on_bytes(len(arrived[3]))


def _expected_runs(target: FetchTarget) -> Iterator[tuple[int, TargetPart, int, int]]:
    """Yield index of the part, the part, and first token and length of each run, in order."""
    num_tokens = target.request.num_tokens
    for index, part in enumerate(target.parts):
        step = _chunk_tokens(part.pages.bytes_per_token(part.part.layer, part.part.heads))
        for begin in range(0, num_tokens, step):
            yield index, part, begin, min(step, num_tokens - begin)


def _chunk_tokens(bytes_per_token: int) -> int:
    """Return the tokens of a run, the same at both ends."""
    return int(np.clip(CHUNK_BYTES // bytes_per_token, 1, 2**16))

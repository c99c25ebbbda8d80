"""Logs of keys and values: the rendezvous of the workers at both ends of an edge that use NCCL.

Each worker appends to its own log and reads the other one's, which the data movers copy. A log is
an anonymous file with records: the lengths of key and value, key, value. This module imports no
torch.
"""

import os
import struct

import msgspec

MAX_LOG_BYTES = 2**20
"""Largest log; NCCL and gloo exchange some kilobytes."""
VERDICT_KEY = "gllm/transport"
"""Key of a TransportVerdict."""

_LENGTHS = struct.Struct("<II")


class TransportVerdict(msgspec.Struct, frozen=True):
    """Transport that two workers on different machines have agreed on, with the reason."""

    transport: str
    cause: str = ""
    """Reason why the transport is not NCCL; empty if it is."""


def open_log(descriptor: int) -> int:
    """Open the rendezvous log file behind a descriptor again, for reading and appending.

    Several threads may append, each through its own descriptor: records do not overlap.
    """
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_APPEND)


def append_record(descriptor: int, key: str, value: bytes) -> None:
    """Append a key and a value to a rendezvous log. Raises ValueError if the log is full."""
    name = key.encode()
    record = _LENGTHS.pack(len(name), len(value)) + name + value
    if os.fstat(descriptor).st_size + len(record) > MAX_LOG_BYTES:
        raise ValueError(f"the log of a meeting would exceed {MAX_LOG_BYTES} bytes")
    os.write(descriptor, record)


class LogReader:
    """Incremental reader of a rendezvous log to which a process appends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._offset = 0
        self._data = b""

    def read(self) -> list[tuple[str, bytes]]:
        """Return the records that were completed since the last call."""
        size = os.fstat(self._descriptor).st_size
        new = os.pread(self._descriptor, max(0, size - self._offset), self._offset)
        self._offset += len(new)
        self._data += new
        records: list[tuple[str, bytes]] = []
        while len(self._data) >= _LENGTHS.size:
            key, value = _LENGTHS.unpack_from(self._data)
            begin, end = _LENGTHS.size, _LENGTHS.size + key + value
            if len(self._data) < end:
                break
            name = self._data[begin : begin + key].decode(errors="replace")
            records.append((name, self._data[begin + key : end]))
            self._data = self._data[end:]
        return records

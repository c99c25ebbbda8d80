"""Disk in memory that may lose power at each write, and that may be full."""

import errno
import random

SECTOR_BYTES = 512
"""A write is torn between sectors."""


class SimulatedDisk:
    """Contents of one file, of which the latest writes may be lost."""

    def __init__(self, max_bytes: int = 2**62) -> None:
        self.data = bytearray()
        self.max_bytes = max_bytes
        self.fails = False
        """True if every access is an error."""
        self.num_writes = 0
        self._before: list[tuple[bytes, int, bytes]] = []
        """Contents before each write that may be lost, its offset and its bytes."""

    def crash_states(self, choice: random.Random, count: int) -> "list[SimulatedDisk]":
        """Return disks as they may be after a crash now.

        Sectors of the writes since the last `sync` are there or not, each by chance; truncations
        are never lost.
        """
        states = []
        for _ in range(count):
            disk = SimulatedDisk(self.max_bytes)
            disk.data = bytearray(self.data)
            for before, offset, written in reversed(self._before):
                for begin in range(0, len(written), SECTOR_BYTES):
                    if choice.random() < 0.5:
                        continue
                    start = offset + begin
                    end = start + len(written[begin : begin + SECTOR_BYTES])
                    disk.data[start:end] = before[start:end].ljust(end - start, b"\0")
                if choice.random() < 0.3:
                    # The new size was lost too.
                    del disk.data[max(len(before), offset) :]
            states.append(disk)
        return states

    def sync(self) -> None:
        """Let no earlier write be lost."""
        self._check()
        self._before.clear()

    def flip(self, place: int, mask: int = 4) -> None:
        """Damage a byte, as a failing medium does."""
        self.data[place] ^= mask

    def size(self) -> int:
        self._check()
        return len(self.data)

    def read(self, offset: int, num_bytes: int) -> bytes:
        self._check()
        return bytes(self.data[offset : offset + num_bytes])

    def write(self, offset: int, data: bytes) -> None:
        self._check()
        self.num_writes += 1
        # On a full disk a part may fit; what the file has already can be overwritten.
        end = max(offset, len(self.data), self.max_bytes)
        fitting = data[: end - offset]
        self._before.append((bytes(self.data), offset, fitting))
        self._write(offset, fitting)
        if len(fitting) < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")

    def truncate(self, num_bytes: int) -> None:
        self._check()
        if num_bytes < len(self.data):
            self._before.clear()
        self.data[num_bytes:] = bytes(max(0, num_bytes - len(self.data)))

    def prefetch(self, offset: int, num_bytes: int) -> None:
        self._check()

    def close(self) -> None:
        pass

    def _check(self) -> None:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")

    def _write(self, offset: int, data: bytes) -> None:
        if len(self.data) < offset:
            self.data.extend(bytes(offset - len(self.data)))
        self.data[offset : offset + len(data)] = data

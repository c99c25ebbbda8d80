"""Agent with the interface of NIXL that copies within this process, and transfers that hang."""

import ctypes
import threading
from itertools import count
from typing import Any

Extent = tuple[int, ...]
_names = count()


class FakeNixlAgent:
    """Agent of one engine; all agents of a process reach each other."""

    def __init__(self) -> None:
        self.name = f"fake-{next(_names)}"
        self.goes_on = threading.Event()
        """Cleared to let transfers hang after half of their pieces."""
        self.goes_on.set()
        self.can_cancel = True
        """False if a hanging transfer cannot be cancelled before it has ended."""
        self.num_extents: list[int] = []
        """Pieces of each transfer."""
        self.num_released = self.num_registrations = 0
        self.registered: dict[int, int] = {}
        """Sizes of registered memory by address."""

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def register_memory(self, extents: list[Any], mem_type: str) -> list[Any]:
        assert mem_type == "DRAM"
        for address, size, *_ in extents:
            assert address not in self.registered
            self.registered[address] = size
        self.num_registrations += 1
        return extents

    def deregister_memory(self, extents: list[Any]) -> None:
        for address, *_ in extents:
            del self.registered[address]

    def get_xfer_descs(self, extents: list[Extent], mem_type: str) -> list[Extent]:
        assert mem_type == "DRAM"
        return extents

    def initialize_xfer(
        self, kind: str, own: list[Extent], remote: list[Extent], name: str
    ) -> list[tuple[int, int, int]]:
        """Return the pieces that are not copied: own address, remote address, size."""
        assert kind == "READ"
        assert [size for _, size, _ in own] == [size for _, size, _ in remote]
        for address, size, _ in own:
            assert any(
                begin <= address and address + size <= begin + length
                for begin, length in self.registered.items()
            )
        self.num_extents.append(len(own))
        return [(mine[0], other[0], mine[1]) for mine, other in zip(own, remote, strict=True)]

    def transfer(self, handle: list[tuple[int, int, int]]) -> str:
        half = len(handle) // 2
        self._copy(handle, half)
        return "PROC"

    def check_xfer_state(self, handle: list[tuple[int, int, int]]) -> str:
        if self.goes_on.is_set():
            self._copy(handle, 0)
        return "PROC" if handle else "DONE"

    def release_xfer_handle(self, handle: list[tuple[int, int, int]]) -> None:
        if handle and not self.can_cancel:
            raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")
        handle.clear()
        self.num_released += 1

    @staticmethod
    def _copy(handle: list[tuple[int, int, int]], num_left: int) -> None:
        while len(handle) > num_left:
            own, remote, size = handle.pop()
            ctypes.memmove(own, remote, size)

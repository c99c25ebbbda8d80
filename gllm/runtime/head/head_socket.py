"""Address of the head's hub, without a name that others can find or that could be left behind."""

import os
import shutil
import tempfile
from pathlib import Path

from gllm.runtime.messaging.bus import Hub


class HeadSocket:
    """Binds a hub once, and gives each worker that is spawned its address.

    The socket's name is removed at once. Workers connect through this process's open descriptor of
    it, which only processes of the same user can reach, and which ends with this process.
    """

    def __init__(self, hub: Hub) -> None:
        self.connecting: set[int] = set()
        """Workers that have been spawned and have not connected."""
        self._hub = hub
        self._descriptor: int | None = None

    def expect(self, sender: int) -> str:
        """Expect a worker; return the address that it connects to."""
        self._hub.expect(sender)
        self.connecting.add(sender)
        if self._descriptor is None:
            self._descriptor = self._bind()
        return f"ipc:///proc/{os.getpid()}/fd/{self._descriptor}"

    def on_connected(self, sender: int) -> None:
        """Note that a worker has connected, or is no longer expected."""
        self.connecting.discard(sender)

    def close(self) -> None:
        """Close the descriptor of the address."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _bind(self) -> int:
        """Bind the hub; return a descriptor of the socket's file, whose name is removed."""
        folder = Path(tempfile.mkdtemp(prefix="gllm-"))
        try:
            self._hub.bind(f"ipc://{folder}/hub")
            return os.open(folder / "hub", os.O_PATH | os.O_CLOEXEC)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

"""Address of the head's hub: a private folder that exists only while workers connect."""

import shutil
import tempfile
from pathlib import Path

from gllm.runtime.bus import Hub


class HeadSocket:
    """Binds a hub anew for workers that are spawned, and removes the address afterwards.

    Nothing else can connect then, and a head process that is killed leaves no file.
    """

    def __init__(self, hub: Hub) -> None:
        self.connecting: set[int] = set()
        """Workers that have been spawned and have not connected."""
        self._hub = hub
        self._folder: Path | None = None

    def expect(self, sender: int) -> str:
        """Expect a worker; return the address that it connects to."""
        self._hub.expect(sender)
        self.connecting.add(sender)
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="gllm-"))
            self._hub.bind(f"ipc://{self._folder}/hub")
        return f"ipc://{self._folder}/hub"

    def on_connected(self, sender: int) -> None:
        """Remove the address if all workers have connected, or are no longer expected."""
        self.connecting.discard(sender)
        if not self.connecting:
            self.close()

    def close(self) -> None:
        """Remove the address."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

"""Messages between the head process and all workers, on its own machine and on others.

Workers of this machine have sessions with a hub of the head process. Messages of other workers
travel within the session of their node's agent, as frames with the epoch of the message.
"""

import os
import shutil
from collections.abc import Callable

from gllm.messages.base import WireMessage
from gllm.messages.codec import encode
from gllm.messages.nodes import WorkerFrame
from gllm.runtime.messaging.bus import Hub
from gllm.runtime.messaging.session import ANY_EPOCH
from gllm.runtime.messaging.socket_folder import create_socket_folder

PROCESS_EPOCH = -1
"""Epoch of a WorkerFrame whose message is about the process."""


class HeadSocket:
    """Unix socket of the head process to which new workers of the same user connect.

    Its file is removed at once; workers connect through this process's open descriptor, which ends
    with this process.
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

    def close(self) -> None:
        """Close the descriptor of the address."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _bind(self) -> int:
        """Bind the hub; return a descriptor of the socket's file, whose name is removed."""
        folder = create_socket_folder("gllm-")
        try:
            self._hub.bind(f"ipc://{folder}/hub")
            return os.open(folder / "hub", os.O_PATH | os.O_CLOEXEC)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class WorkerChannels:
    """Message channels between the head and the workers on all machines.

    Messages from before the last recovery, and of workers that are gone, are dropped and counted.
    """

    def __init__(self, hub: Hub, socket: HeadSocket) -> None:
        """Create the channels of an engine without workers.

        Args:
            hub: hub of the workers of this machine.
            socket: address of the hub.
        """
        self._hub = hub
        self.socket = socket
        """Address of the hub for workers of this machine."""
        self.connecting = socket.connecting
        """Workers that were started and have not connected."""
        self._routes: dict[int, Callable[[WorkerFrame], None]] = {}
        """Functions that send to the agents of workers on other machines, by worker."""
        self._epoch = ANY_EPOCH
        self._num_stale = 0

    @property
    def num_stale(self) -> int:
        """Dropped messages from before a recovery, or of workers that have ended."""
        return self._hub.num_stale + self._num_stale

    def expect_remote(self, sender: int, send: Callable[[WorkerFrame], None]) -> None:
        """Expect a worker of another machine.

        Args:
            sender: the worker.
            send: sends a frame to the worker's agent.
        """
        self._routes[sender] = send
        self.connecting.add(sender)

    def send(self, sender: int, message: WireMessage) -> None:
        """Queue a message; it is dropped if the worker has ended."""
        send = self._routes.get(sender)
        if send is None:
            self._hub.send(sender, message)
        else:
            epoch = self._epoch if message.is_fenced else PROCESS_EPOCH
            send(WorkerFrame(sender, epoch, encode(message)))

    def accepts(self, frame: WorkerFrame) -> bool:
        """Return True if a frame belongs to the current epoch and a known worker.

        Every other frame is counted as stale.
        """
        is_current = frame.epoch in (self._epoch, PROCESS_EPOCH)
        if is_current and frame.sender in self._routes:
            return True
        self._num_stale += 1
        return False

    def drop(self) -> None:
        """Count a frame that is dropped because its session is no longer valid."""
        self._num_stale += 1

    def forget(self, sender: int) -> None:
        """Drop all further messages of a worker that has ended."""
        self.connecting.discard(sender)
        if self._routes.pop(sender, None) is None:
            self._hub.forget(sender)

    def advance(self, epoch: int) -> None:
        """Begin an epoch: messages of earlier epochs are dropped."""
        self._epoch = epoch
        self._hub.advance(epoch)

    def close(self) -> None:
        """Stop delivery and close; messages are dropped from now on."""
        self._hub.close()
        self.socket.close()
        self._routes.clear()

"""A session with a peer, as both ends of a link see it."""

from collections.abc import Callable
from typing import Protocol

from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage


class PeerConnection:
    """Session with one peer, dialled or accepted; it ends once and does not come back."""

    def __init__(self, address: str, send: Callable[[WireMessage], None], now: float) -> None:
        """Create a session that has just begun.

        Args:
            address: of the peer, for logs.
            send: queues a message.
            now: time in seconds.
        """
        self.address = address
        self.last_heard = now
        """Time of the peer's last message; of the beginning before the first one."""
        self.is_open = True
        self.is_established = False
        """Set by the handler once both ends have accepted each other."""
        self._send = send

    def send(self, message: WireMessage) -> None:
        """Queue a message; it is dropped if the session has ended."""
        if self.is_open:
            self._send(message)


class PeerHandler(Protocol):
    """Owner of the sessions of a process. Calls come from the event loop, in order."""

    def on_connected(self, connection: PeerConnection) -> None:
        """Begin a session; messages may be sent. The peer may turn out not to be there."""

    def on_message(self, connection: PeerConnection, message: AnyMessage) -> None:
        """Handle a message. An exception ends the session."""

    def on_lost(self, connection: PeerConnection, cause: str) -> None:
        """Handle the end of a session that `ConnectionPool.close` did not end."""

    def on_tick(self) -> None:
        """Send heartbeats."""

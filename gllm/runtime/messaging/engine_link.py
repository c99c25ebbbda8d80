"""One engine that is attached to a router."""

import time
from collections.abc import Callable
from typing import NamedTuple

from gllm.messages.base import WireMessage
from gllm.messages.fleet import AnnounceEngine, EngineReport
from gllm.runtime.messaging.connection import PeerConnection


class Refusal(NamedTuple):
    """An engine whose session was refused."""

    address: str
    name: str
    """Empty if the engine did not announce itself."""
    cause: str
    time: float
    """time.time() of the refusal."""


class EngineLink:
    """One attached engine, from its first report to the end of its session."""

    def __init__(
        self,
        connection: PeerConnection,
        announce: AnnounceEngine,
        report: EngineReport,
        refuse: Callable[["EngineLink", str], None],
    ) -> None:
        self.announce = announce
        """The latest announcement."""
        self.report = report
        """The latest report."""
        self.attached_at = time.monotonic()
        """Time of the monotonic clock."""
        self.connection = connection
        self._refuse = refuse

    @property
    def name(self) -> str:
        """Name of the engine, unique among the attached ones."""
        return self.announce.name

    @property
    def address(self) -> str:
        """Address of the engine."""
        return self.connection.address

    @property
    def last_heard(self) -> float:
        """Time of the latest message, of the monotonic clock."""
        return self.connection.last_heard

    @property
    def is_attached(self) -> bool:
        """True until the session ends."""
        return self.connection.is_open

    @property
    def is_leaving(self) -> bool:
        """True if the engine drains, so that the end of its session is planned."""
        return self.report.state == "draining"

    def send(self, message: WireMessage) -> None:
        """Queue a message; it is dropped if the session has ended."""
        self.connection.send(message)

    def refuse(self, cause: str) -> None:
        """End the session and tell the engine why; `on_lost` is not called."""
        self._refuse(self, cause)

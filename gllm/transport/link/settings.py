"""Settings of a data mover that all of its edges share, and its count of refused connections."""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from gllm.transport.link.connection import TlsIdentity
from gllm.transport.link.frames import EdgeName

log = logging.getLogger(__name__)

MAX_ADDRESSES = 256
"""Number of addresses with a count of their own."""
OTHER_ADDRESSES = "other addresses"
CLOSED_EARLY = "the connection ended before its first frame"


class Refusals:
    """Thread-safe counters of refused data connections by IP address and of invalid messages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_malformed = 0
        """Invalid frames and handshakes."""
        self.by_address: Counter[str] = Counter()
        self.causes: dict[str, str] = {}
        """Last cause by address."""

    def add(self, address: str, cause: str, is_malformed: bool = False) -> None:
        """Count a refused connection.

        Args:
            address: IP address of the other end.
            cause: reason as text.
            is_malformed: True if the other end sent bytes that no data mover sends.
        """
        with self._lock:
            self.num_malformed += is_malformed
            if address not in self.by_address and len(self.by_address) >= MAX_ADDRESSES:
                address = OTHER_ADDRESSES
            self.by_address[address] += 1
            self.causes[address] = cause
        # Probes of load balancers and port scans connect and leave.
        level = logging.DEBUG if cause == CLOSED_EARLY else logging.WARNING
        log.log(
            level,
            "a data connection of %s was refused: %s",
            address,
            cause,
            extra={"about": address},
        )

    def snapshot(self) -> tuple[int, dict[str, int], dict[str, str]]:
        """Return the number of malformed messages; refusals and their last cause by address."""
        with self._lock:
            return self.num_malformed, dict(self.by_address), dict(self.causes)


@dataclass(frozen=True)
class LinkSettings:
    """Settings and callbacks of all connections between stages in one data mover process."""

    node: str
    """Name of this machine."""
    tls: TlsIdentity | None
    congestion: str | None
    policy: str
    """Name of the policy that selects the next bytes to send."""
    encoding: str
    """Name of the encoding of activations."""
    lost_seconds: float
    """Seconds without a connection after which a connection between stages is lost."""
    refusals: Refusals
    on_opened: Callable[[EdgeName], None]
    on_lost: Callable[[EdgeName, str], None]
    min_bytes_per_second: float = 0.0
    """Rate that every link carries at least, as the operator states."""

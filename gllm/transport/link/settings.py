"""Settings of a data mover that all of its edges share."""

from collections.abc import Callable
from dataclasses import dataclass

from gllm.transport.link.connection import TlsIdentity
from gllm.transport.link.frames import EdgeName
from gllm.transport.link.refusals import Refusals


@dataclass(frozen=True)
class LinkSettings:
    """Settings and callbacks."""

    node: str
    """Name of this machine."""
    tls: TlsIdentity | None
    congestion: str | None
    policy: str
    """Name of the link policy."""
    encoding: str
    """Name of the encoding of activations."""
    lost_seconds: float
    """Time after which an edge without a connection is lost."""
    refusals: Refusals
    on_opened: Callable[[EdgeName], None]
    on_lost: Callable[[EdgeName, str], None]

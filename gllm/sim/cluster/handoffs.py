"""Hand-offs of a simulated cluster: an engine prefills a request, and another one decodes it.

Source: "DistServe" (OSDI'24, arXiv 2401.09670), section 4: KV cache waits in the prefill engine
until the decode engine fetches it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from gllm.pacing.policy_registry import make_link_policy
from gllm.sim.cluster.requests import ClusterRequest
from gllm.sim.cluster.transfers import KvTransfer, TransferPath
from gllm.sim.event_loop import EventLoop
from gllm.sim.hardware.links import NetworkLink
from gllm.sim.link import SimulatedLink


@dataclass(frozen=True)
class LinkFailure:
    """Failure of the way from an engine to another one: transfers break, new ones are refused.

    Raises:
        ValueError: A time is negative.
    """

    source: str
    target: str
    time: float
    """Seconds."""
    seconds: float
    """Time until transfers are possible again."""

    def __post_init__(self) -> None:
        """Check the times."""
        if not (self.time >= 0 and self.seconds >= 0):
            raise ValueError(
                f"LinkFailure: time is {self.time} and seconds is {self.seconds}, but both must be "
                "at least 0"
            )


class KvNetwork:
    """Links that carry KV cache: one for each sending engine.

    Args:
        network: Bandwidth in bytes/s and latency in seconds of each link.
        bytes_per_token: KV cache of one token in bytes, over all layers.
    """

    def __init__(self, network: NetworkLink, bytes_per_token: int) -> None:
        self.network = network
        self.bytes_per_token = bytes_per_token
        self._links: dict[str, SimulatedLink] = {}

    def num_bytes(self, source: str, target: str, num_tokens: int) -> int:
        """Return the bytes that the link carries for the KV cache of a number of tokens."""
        return max(1, self.bytes_per_token * num_tokens)

    def path(self, source: str, target: str, loop: EventLoop) -> TransferPath:
        """Return the way from an engine to another one."""
        if source not in self._links:
            self._links[source] = SimulatedLink(loop, make_link_policy("serial"))
        return TransferPath(self._links[source], self.network)


class HandoffRecord(NamedTuple):
    """Times in seconds of one hand-off."""

    prefill: str
    """Engine that computed the prompt."""
    decode: str
    """Engine that continued; empty if the request never had one."""
    num_tokens: int
    """Tokens whose KV cache was held."""
    prefill_start_time: float
    """Time of the first micro-batch with the request at the prefill engine."""
    ready_time: float
    """Time of the first token."""
    fetch_time: float | None
    """Time at which the decode engine had blocks and asked for the KV cache."""
    arrival_time: float | None
    """Time at which the KV cache had arrived."""
    decode_time: float | None
    """Time of the first micro-batch with the request at the decode engine."""
    is_ok: bool
    """False if the decode engine computed the prompt instead."""


@dataclass(eq=False, slots=True)
class SimulatedHandoff:
    """A hand-off under way, from the first token until the KV cache has arrived or is lost."""

    request: ClusterRequest
    ticket: int
    source: str
    """Name of the engine that holds the blocks."""
    prefill_seq: int
    num_tokens: int
    num_output_tokens: int
    """Output tokens with which the decode engine continues."""
    ready_time: float
    target: str = ""
    """Name of the engine that decodes; empty until it has the request."""
    decode_seq: int = -1
    fetch_time: float | None = None
    arrival_time: float | None = None
    transfer: KvTransfer | None = None
    has_source: bool = True
    """False once the blocks at the source may be in use for others."""
    is_fetching: bool = False
    """True while the scheduler of the target waits for the end of its fetch."""

    @property
    def is_ok(self) -> bool:
        """True if the KV cache has arrived."""
        return self.arrival_time is not None


StartTimes = Callable[[str, int], float | None]
"""Returns the time of the first micro-batch of a sequence, by engine and sequence id."""


def make_record(handoff: SimulatedHandoff, start_time: StartTimes) -> HandoffRecord:
    """Return the times of a hand-off."""
    target = handoff.target
    return HandoffRecord(
        handoff.source,
        target,
        handoff.num_tokens,
        start_time(handoff.source, handoff.prefill_seq) or handoff.ready_time,
        handoff.ready_time,
        handoff.fetch_time,
        handoff.arrival_time,
        start_time(target, handoff.decode_seq) if target else None,
        handoff.is_ok,
    )

"""Hand-offs of a simulated cluster, and the KV transfers on its links.

One engine prefills a request, and another one decodes it.

Source: "DistServe" (OSDI'24, arXiv 2401.09670), section 4: KV cache waits in the prefill engine
until the decode engine fetches it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from gllm.pacing.traffic import TrafficClass
from gllm.sim.cluster.requests import ClusterRequest
from gllm.sim.costs.base import TransferCost
from gllm.sim.event_loop import EventLoop
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.link import MessageLink, SimulatedLink, make_link
from gllm.sim.pipeline import PipelineLinks


class TransferPath(NamedTuple):
    """Network link for KV cache transfers, with its bandwidth and latency.

    Pipeline stages and other transfers may share the link.
    """

    link: MessageLink
    network: NetworkLink
    """Bandwidth and latency of the link."""

    def cost(self, num_bytes: int) -> TransferCost:
        """Return the time that a message of `num_bytes` takes on the link."""
        return TransferCost(num_bytes / self.network.bandwidth, self.network.latency, num_bytes)


class KvTransfer(NamedTuple):
    """Simulated transfer of KV cache from one engine to another, with its size and callbacks."""

    source: str
    """Name of the engine that sends."""
    target: str
    """Name of the engine that receives."""
    num_bytes: int
    path: TransferPath
    on_done: Callable[[float], None]
    """Called with the time at which the last byte has arrived."""
    on_lost: Callable[[float], None] | None = None
    """Called in place of `on_done`, with the time at which the crash of an engine is detected."""


class KvTransfers:
    """Tracks the KV cache transfers in flight between the engines of a simulated cluster.

    If either engine crashes, the transfer stops and frees the link at once. It is reported as lost
    only when the cluster detects the crash.

    Args:
        on_end: Called with each transfer that has arrived or is lost, and the time.
    """

    def __init__(self, on_end: Callable[[KvTransfer, float], None]) -> None:
        self._on_end = on_end
        self._under_way: dict[int, KvTransfer] = {}
        """Transfers that travel, by number."""
        self._broken: dict[int, tuple[str, KvTransfer]] = {}
        """Engine that died and the transfer, by number."""
        self._num_transfers = 0

    def has_transfer_of(self, engine: str) -> bool:
        """Return True if a transfer from or to an engine is in flight."""
        return any(
            engine in (transfer.source, transfer.target) for transfer in self._under_way.values()
        )

    def start(self, transfer: KvTransfer) -> None:
        """Start a transfer between two running engines.

        Raises:
            ValueError: The transfer has no byte.
        """
        if transfer.num_bytes < 1:
            raise ValueError(f"num_bytes is {transfer.num_bytes}, but a transfer has at least 1")
        number = self._num_transfers
        self._num_transfers += 1
        self._under_way[number] = transfer
        cost = transfer.path.cost(transfer.num_bytes)
        transfer.path.link.send(
            TrafficClass.KV_CACHE, cost, self._on_arrival, number, owner=transfer
        )

    def cancel(self, transfer: KvTransfer) -> bool:
        """Cancel a transfer without a report; return False if it is not in flight."""
        for number, other in self._under_way.items():
            if other is transfer:
                del self._under_way[number]
                transfer.path.link.drop(transfer)
                return True
        return False

    def on_path_lost(self, source: str, target: str, now: float) -> None:
        """Report the transfers from one engine to another as lost."""
        for transfer in list(self._under_way.values()):
            if (transfer.source, transfer.target) == (source, target):
                self.cancel(transfer)
                self._report_lost(transfer, now)

    def on_engine_dead(self, engine: str) -> None:
        """Stop the transfers of a crashed engine; `on_engine_death_detected` reports them."""
        for number, transfer in list(self._under_way.items()):
            if engine in (transfer.source, transfer.target):
                del self._under_way[number]
                self._broken[number] = engine, transfer
                transfer.path.link.drop(transfer)

    def on_engine_death_detected(self, engine: str, now: float) -> None:
        """Report the stopped transfers of a crashed engine as lost, once the crash is detected."""
        for number, (dead_engine, transfer) in list(self._broken.items()):
            if dead_engine == engine:
                del self._broken[number]
                self._report_lost(transfer, now)

    def _report_lost(self, transfer: KvTransfer, now: float) -> None:
        if transfer.on_lost is not None:
            transfer.on_lost(now)
        self._on_end(transfer, now)

    def _on_arrival(self, now: float, number: int) -> None:
        transfer = self._under_way.pop(number, None)
        # A broken transfer may have been sent completely before.
        if transfer is not None:
            transfer.on_done(now)
            self._on_end(transfer, now)


@dataclass(frozen=True)
class LinkFailure:
    """Temporary failure of the network path between two engines: KV transfers fail during it.

    Raises:
        ValueError: A time is negative.
    """

    source: str
    """Name of the engine that sends."""
    target: str
    """Name of the engine that receives."""
    time: float
    """Start of the failure, in seconds from the start of the simulation."""
    seconds: float
    """Duration of the failure in seconds."""

    def __post_init__(self) -> None:
        """Check the times."""
        if not (self.time >= 0 and self.seconds >= 0):
            raise ValueError(
                f"LinkFailure: time is {self.time} and seconds is {self.seconds}, but both must be "
                "at least 0"
            )


class KvNetwork:
    """Network for KV cache transfers in which each sending engine has one link.

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
        """Return the link from one engine to another, made on first use."""
        if source not in self._links:
            self._links[source] = make_link(loop)
        return TransferPath(self._links[source], self.network)

    def pipeline_links(self, engine: str, loop: EventLoop) -> PipelineLinks | None:
        """Return the links of an engine's pipeline if they share this network; None: they do not.

        Args:
            engine: Name of the engine.
            loop: Event loop of the links.
        """
        return None


class HandoffRecord(NamedTuple):
    """Timestamps in seconds of one request's move from its prefill engine to its decode engine."""

    prefill: str
    """Name of the engine that computed the prompt."""
    decode: str
    """Name of the engine that decoded; empty if there was none."""
    num_tokens: int
    """Number of tokens in the KV cache that the prefill engine kept for the decode engine."""
    prefill_start_time: float
    """Time of the first micro-batch with the request on the prefill engine."""
    ready_time: float
    """Time of the first token."""
    fetch_time: float | None
    """Time at which the decode engine had reserved KV blocks and requested the transfer; None if it
    did not."""
    arrival_time: float | None
    """Time at which the KV cache arrived; None if it did not."""
    decode_time: float | None
    """Time of the first micro-batch with the request on the decode engine; None if there was
    none."""
    is_ok: bool
    """True if the KV cache arrived; False if the decode engine computed the prompt instead."""


@dataclass(eq=False, slots=True)
class SimulatedHandoff:
    """State of one request's move from its prefill engine to its decode engine.

    It begins with the first token and ends when the KV cache has arrived at the decode engine or is
    lost.
    """

    request: ClusterRequest
    ticket: int
    """Number that identifies the KV blocks kept on the prefill engine."""
    source: str
    """Name of the prefill engine, which keeps the KV blocks."""
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
    """False once the prefill engine may have given the KV blocks to other requests."""
    is_fetching: bool = False
    """True while the decode engine's scheduler waits for the transfer to end."""

    @property
    def is_ok(self) -> bool:
        """True if the KV cache has arrived."""
        return self.arrival_time is not None


StartTimes = Callable[[str, int], float | None]
"""Returns the time of the first micro-batch of a sequence, by engine and sequence id."""


def make_handoff_record(handoff: SimulatedHandoff, start_time: StartTimes) -> HandoffRecord:
    """Return the timestamps of one request's move from its prefill engine to its decode engine.

    Args:
        handoff: Engines, sequence ids and transfer times of the request.
        start_time: Returns the time of a sequence's first micro-batch, by engine and sequence id.
    """
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

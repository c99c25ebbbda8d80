"""KV transfers between the engines of a simulated cluster, as messages on its links."""

from collections.abc import Callable
from typing import NamedTuple

from gllm.pacing.traffic import TrafficClass
from gllm.sim.costs.base import TransferCost
from gllm.sim.hardware.links import NetworkLink
from gllm.sim.link import SimulatedLink


class TransferPath(NamedTuple):
    """Link that carries KV transfers; pipelines and other transfers may share it."""

    link: SimulatedLink
    network: NetworkLink
    """Bandwidth and latency of the link."""

    def cost(self, num_bytes: int) -> TransferCost:
        """Return the cost of a message."""
        return TransferCost(num_bytes / self.network.bandwidth, self.network.latency, num_bytes)


class KvTransfer(NamedTuple):
    """KV blocks on their way from an engine to another one."""

    source: str
    """Name of the engine that sends."""
    target: str
    """Name of the engine that receives."""
    num_bytes: int
    path: TransferPath
    on_done: Callable[[float], None]
    """Called with the time at which the last byte has arrived."""
    on_lost: Callable[[float], None] | None = None
    """Called in place of `on_done`, with the time at which the death of an end is known."""


class KvTransfers:
    """Transfers under way in a cluster.

    A transfer ends with either of its engines: the link is free for others at once, and the
    transfer is lost when the cluster knows that the engine is.

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

    @property
    def num_under_way(self) -> int:
        """Number of transfers that have neither arrived nor broken."""
        return len(self._under_way)

    def involve(self, engine: str) -> bool:
        """Return True if a transfer from or to an engine is under way."""
        return any(
            engine in (transfer.source, transfer.target) for transfer in self._under_way.values()
        )

    def start(self, transfer: KvTransfer) -> None:
        """Send a transfer from now on; both engines run.

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
        """Stop a transfer without a report; return False if it does not travel."""
        for number, other in self._under_way.items():
            if other is transfer:
                del self._under_way[number]
                transfer.path.link.drop(transfer)
                return True
        return False

    def on_path_lost(self, source: str, target: str, now: float) -> None:
        """Lose the transfers from an engine to another one."""
        for transfer in list(self._under_way.values()):
            if (transfer.source, transfer.target) == (source, target):
                self.cancel(transfer)
                if transfer.on_lost is not None:
                    transfer.on_lost(now)
                self._on_end(transfer, now)

    def on_engine_dead(self, engine: str) -> None:
        """Break the transfers from and to an engine."""
        for number, transfer in list(self._under_way.items()):
            if engine in (transfer.source, transfer.target):
                del self._under_way[number]
                self._broken[number] = engine, transfer
                transfer.path.link.drop(transfer)

    def on_engine_known_dead(self, engine: str, now: float) -> None:
        """Report the broken transfers of an engine as lost."""
        for number, (dead_engine, transfer) in list(self._broken.items()):
            if dead_engine == engine:
                del self._broken[number]
                if transfer.on_lost is not None:
                    transfer.on_lost(now)
                self._on_end(transfer, now)

    def _on_arrival(self, now: float, number: int) -> None:
        transfer = self._under_way.pop(number, None)
        # A broken transfer may have been sent completely before.
        if transfer is not None:
            transfer.on_done(now)
            self._on_end(transfer, now)

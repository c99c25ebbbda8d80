"""Edges between nodes: the wait until all of them are connected, and the times of their links.

This module imports no torch.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from gllm.messages.base import WireMessage
from gllm.messages.measurement import LinkTime, LinkTimes
from gllm.messages.nodes import LinkState
from gllm.recovery.placement import LOCAL_NODE, Placement

REPEAT_SECONDS = 60.0
"""Time in which two losses of edges between the same nodes are no coincidence."""

NodePair = tuple[str, str]
"""Names of the nodes that send and receive."""


REPORT_SECONDS = 1.0
"""Time between two looks at the measurements: nodes report theirs once per second."""


MIN_CHANGE = 0.02
"""Change of a rate or a round trip, relative, from which the driver is told."""


class EdgeGate:
    """Edges between nodes of one epoch that are not connected, and pairs that fail often."""

    def __init__(self) -> None:
        self._epoch = 0
        self._pairs: dict[int, NodePair] = {}
        """Nodes of the edges between nodes, by the edge's number."""
        self._missing: set[int] = set()
        self._lost: set[int] = set()
        """Edges of the epoch that were lost; both ends report it."""
        self._losses: dict[NodePair, deque[float]] = {}
        """Times of the last two losses."""

    @property
    def is_open(self) -> bool:
        """True if all edges between nodes are connected."""
        return not self._missing

    @property
    def missing_pairs(self) -> list[NodePair]:
        """Nodes of the edges that are not connected."""
        return [self._pairs[edge] for edge in sorted(self._missing)]

    def has_end(self, edge: int, node: str) -> bool:
        """Return True if an edge of the epoch begins or ends on a node."""
        return node in self._pairs.get(edge, ())

    def begin(self, placement: Placement) -> None:
        """Wait for the edges of an epoch."""
        self._epoch = placement.epoch
        self._pairs = remote_edges(placement)
        self._missing = set(self._pairs)
        self._lost.clear()

    def on_opened(self, epoch: int, edge: int) -> bool:
        """Handle the report that an edge is connected; return True if it was the last one."""
        if epoch != self._epoch or edge not in self._missing:
            return False
        self._missing.discard(edge)
        return self.is_open

    def on_lost(self, epoch: int, edge: int, now: float) -> tuple[NodePair, bool] | None:
        """Handle the loss of an edge.

        Returns:
            Its nodes, and True if edges between them were lost twice within REPEAT_SECONDS. None if
            it is no edge of the present epoch, or was lost before.
        """
        if epoch != self._epoch or edge not in self._pairs or edge in self._lost:
            return None
        self._lost.add(edge)
        pair = self._pairs[edge]
        losses = self._losses.setdefault(pair, deque(maxlen=2))
        losses.append(now)
        return pair, len(losses) == 2 and losses[1] - losses[0] <= REPEAT_SECONDS


def remote_edges(placement: Placement) -> dict[int, NodePair]:
    """Return the nodes of the edges between nodes, by the edge's number."""
    nodes = placement.nodes
    pairs = {
        edge.number: (nodes[edge.source_place], nodes[edge.target_place])
        for edge in placement.edges
    }
    return {number: pair for number, pair in pairs.items() if pair[0] != pair[1]}


class LinkTimesReporter:
    """Sends the driver the measured times of its links whenever they have changed."""

    def __init__(
        self,
        read: Callable[[], LinkTimes | None],
        send: Callable[[WireMessage], None],
        report_seconds: float = REPORT_SECONDS,
    ) -> None:
        """Start, on the running event loop.

        Args:
            read: returns the present times; None while no driver can use them.
            send: sends a message to the driver of the present epoch.
            report_seconds: time between two looks at the measurements.
        """
        self._read = read
        self._send = send
        self._report_seconds = report_seconds
        self._sent: LinkTimes | None = None
        """Times that the present driver has."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._report_seconds, self._report)

    def close(self) -> None:
        """Send nothing any more."""
        self._timer.cancel()

    def _report(self) -> None:
        self._timer = self._loop.call_later(self._report_seconds, self._report)
        times = self._read()
        if times is None:
            self._sent = None
        elif self._sent is None or _differ(times, self._sent):
            self._sent = times
            self._send(times)


def collect_link_times(
    placement: Placement,
    links: Mapping[str, Sequence[LinkState]],
    round_trips: Mapping[str, float | None],
) -> LinkTimes | None:
    """Return the times of the links of a placement.

    Several edges between two stages share the way between their machines: the slowest one counts.

    Args:
        placement: of the epoch.
        links: data connections that each node has reported, by its name in the placement.
        round_trips: seconds between the head and each other node; None before the first heartbeats.

    Returns:
        The times; None while a round trip is unknown.
    """
    nodes = [placement.workers_of(stage)[0].node for stage in range(placement.num_stages)]
    ways = [0.0 if node == LOCAL_NODE else round_trips.get(node) for node in nodes]
    pairs = remote_edges(placement)
    times = [LinkTime() for _ in nodes[1:]]
    for edge in placement.edges:
        if edge.number not in pairs:
            continue
        sent = [
            state
            for state in links.get(pairs[edge.number][0], ())
            if state.edge == edge.number and state.is_open
        ]
        if not sent or sent[0].round_trip_seconds is None:
            return None
        # A rate is known once messages have filled the link; before that it limits nothing.
        before = times[edge.source]
        rates = [rate for rate in (sent[0].bytes_per_second, before.bytes_per_second) if rate]
        times[edge.source] = LinkTime(
            min(rates, default=None), max(sent[0].round_trip_seconds, before.round_trip_seconds)
        )
    driver_round_trips = []
    for node, way in zip(nodes, ways, strict=True):
        # Messages between the driver and other machines pass through the head.
        if way is None or ways[0] is None:
            return None
        driver_round_trips.append(0.0 if node == nodes[0] else ways[0] + way)
    return LinkTimes(times, driver_round_trips)


def _differ(new: LinkTimes, old: LinkTimes) -> bool:
    """Return True if a time has changed by MIN_CHANGE, or belongs to another pipeline."""
    values, before = _flatten(new), _flatten(old)
    if len(values) != len(before):
        return True
    return any(abs(a - b) > MIN_CHANGE * b for a, b in zip(values, before, strict=True))


def _flatten(times: LinkTimes) -> list[float]:
    rates = [link.bytes_per_second or 0.0 for link in times.links]
    return [*rates, *(link.round_trip_seconds for link in times.links), *times.driver_round_trips]

"""Edges between nodes: the engine starts a generation when all of them are connected."""

from collections import deque

from gllm.recovery.placement import Placement

REPEAT_SECONDS = 60.0
"""Time in which two losses of edges between the same nodes are no coincidence."""

NodePair = tuple[str, str]
"""Names of the nodes that send and receive."""


class EdgeGate:
    """Edges between nodes of one generation that are not connected, and pairs that fail often."""

    def __init__(self) -> None:
        self._generation = 0
        self._pairs: dict[int, NodePair] = {}
        """Nodes of the edges between nodes, by the edge's number."""
        self._missing: set[int] = set()
        self._lost: set[int] = set()
        """Edges of the generation that were lost; both ends report it."""
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
        """Return True if an edge of the generation begins or ends on a node."""
        return node in self._pairs.get(edge, ())

    def begin(self, placement: Placement) -> None:
        """Wait for the edges of a generation."""
        self._generation = placement.generation
        self._pairs = remote_edges(placement)
        self._missing = set(self._pairs)
        self._lost.clear()

    def on_opened(self, generation: int, edge: int) -> bool:
        """Handle the report that an edge is connected; return True if it was the last one."""
        if generation != self._generation or edge not in self._missing:
            return False
        self._missing.discard(edge)
        return self.is_open

    def on_lost(self, generation: int, edge: int, now: float) -> tuple[NodePair, bool] | None:
        """Handle the loss of an edge.

        Returns:
            Its nodes, and True if edges between them were lost twice within REPEAT_SECONDS. None if
            it is no edge of the present generation, or was lost before.
        """
        if generation != self._generation or edge not in self._pairs or edge in self._lost:
            return None
        self._lost.add(edge)
        pair = self._pairs[edge]
        losses = self._losses.setdefault(pair, deque(maxlen=2))
        losses.append(now)
        return pair, len(losses) == 2 and losses[1] - losses[0] <= REPEAT_SECONDS


def remote_edges(placement: Placement) -> dict[int, NodePair]:
    """Return the nodes of the edges between nodes, by the edge's number."""
    nodes = {(worker.stage, worker.rank): worker.node for worker in placement.workers}
    pairs = {
        edge.number: (
            nodes[edge.source, edge.source_rank],
            nodes[edge.target, edge.target_rank],
        )
        for edge in placement.edges
    }
    return {number: pair for number, pair in pairs.items() if pair[0] != pair[1]}

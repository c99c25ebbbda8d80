"""Membership: the machines that are expected, have joined, are silent, were lost or refused.

Times are arguments. The hub of the nodes reports events and executes what follows; which stages a
member has is decided by `gllm.recovery.recovery`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from gllm.recovery.placement import LOCAL_NODE


class NodeStatus(StrEnum):
    """Status of a node in the cluster: member, spare, lost or left."""

    MEMBER = "member"
    """It has joined, and is one of the nodes with which the engine starts."""
    SPARE = "spare"
    """It has joined, and gets stages only when another node is lost."""
    LOST = "lost"
    """Its session has ended, or it has been silent for too long."""
    LEFT = "left"
    """It has ended its membership by itself."""


@dataclass(slots=True)
class NodeRecord:
    """Status, rank, last contact and losses of a node that has joined the cluster at least once."""

    name: str
    rank: int | None
    """Node rank that it has asked for; None without one."""
    status: NodeStatus
    joined_at: float
    """Time of the last joining."""
    heard_at: float
    """Time of the last message."""
    num_losses: int = 0
    last_cause: str = ""
    """Cause of the last loss; empty if there was none."""

    @property
    def is_alive(self) -> bool:
        """True if the node has joined and was not lost since."""
        return self.status in (NodeStatus.MEMBER, NodeStatus.SPARE)


class Membership:
    """Tracks which nodes have joined the cluster, gone silent, left, been lost or been refused.

    The head's node, which has rank 0, is not included. Reads no clock: time is an argument.
    """

    def __init__(
        self, num_nodes: int, node_timeout: float, join_timeout: float, max_spares: int = 64
    ) -> None:
        """Create the membership of a cluster that nobody has joined; `begin` starts the clock.

        Args:
            num_nodes: nodes with which the engine starts, including the head's.
            node_timeout: silence in seconds after which a node is lost.
            join_timeout: time in seconds for which missing nodes are awaited.
            max_spares: nodes beyond `num_nodes` that may join.
        """
        self.nodes: dict[str, NodeRecord] = {}
        """Nodes that have joined at least once, by name."""
        self.refused: dict[str, str] = {}
        """Last cause of a refusal, by address, until a node joins from there."""
        self.draining: frozenset[str] = frozenset()
        """Nodes whose stages move to others, and that are dismissed then."""
        self.drained: set[str] = set()
        """Nodes whose membership the head has ended, until they join anew."""
        self._num_nodes = num_nodes
        self._node_timeout = node_timeout
        self._join_timeout = join_timeout
        self._max_spares = max_spares
        self._deadline: float | None = None
        self._has_formed = False

    def begin(self, now: float) -> None:
        """Begin to wait for the nodes."""
        self._deadline = now + self._join_timeout

    @property
    def is_complete(self) -> bool:
        """True if as many nodes have joined and live as the engine needs at the start."""
        return len(self._members) + 1 >= self._num_nodes

    @property
    def members(self) -> list[str]:
        """Names of the connected members in the order of their ranks, from rank 1.

        Nodes without a rank have the ranks that nobody asked for, in the order in which they
        joined.
        """
        by_rank = {record.rank: record.name for record in self._members if record.rank is not None}
        others = iter([record.name for record in self._members if record.rank is None])
        for rank in range(1, self._num_nodes):
            if rank not in by_rank and (name := next(others, None)) is not None:
                by_rank[rank] = name
        return [by_rank[rank] for rank in sorted(by_rank)]

    @property
    def spares(self) -> list[str]:
        """Names of the connected spares, in the order in which they joined."""
        alive = [node for node in self.nodes.values() if node.status is NodeStatus.SPARE]
        return [node.name for node in sorted(alive, key=lambda node: node.joined_at)]

    def has_expired(self, now: float) -> bool:
        """Return True if the nodes have been awaited for too long."""
        return self._deadline is not None and not self.is_complete and now >= self._deadline

    def finish_forming(self) -> None:
        """Record that the engine starts with the present members; later nodes are spares."""
        self._has_formed = True

    def unsupported_reason(self, rank: int | None, name: str = "") -> str:
        """Return the reason for which a node can never join; empty if it may."""
        if name == LOCAL_NODE:
            return f"the name {LOCAL_NODE} belongs to the head: give this machine a --node-name"
        if rank is None or 0 < rank < self._num_nodes:
            return ""
        if rank == 0:
            return "node rank 0 is the head itself: give each machine a --node-rank of its own"
        return (
            f"there is no node rank {rank}, because the head was started with --nnodes "
            f"{self._num_nodes}: use the same --nnodes on all machines"
        )

    def on_joined(self, name: str, rank: int | None, is_spare: bool, now: float) -> str:
        """Handle a node that joins for the first time or again.

        A node that joins again replaces its lost record. A node with the rank of a lost one
        replaces that one.

        Args:
            name: unique among the nodes.
            rank: node rank; None for a node without one.
            is_spare: True if it takes stages only when another node is lost.
            now: time in seconds.

        Returns:
            Empty if the node has joined. Otherwise the cause for which it cannot join now; it may
            try again, because the head may not yet have noticed that an earlier session is over.
            See `unsupported_reason` for causes that stay.
        """
        if cause := self.unsupported_reason(rank, name) or self._conflict(name, rank):
            return cause
        before = self.nodes.get(name)
        is_member = not is_spare and not self._has_formed and not self.is_complete
        if before is not None and before.status is NodeStatus.LOST and rank == before.rank:
            # It returns; the recovery decides whether it gets its stages back.
            is_member = is_member or not is_spare
        if not is_member and len(self.spares) >= self._max_spares:
            return f"there are {self._max_spares} spare nodes already (--max-spares)"
        for other in self._records_of_rank(rank):
            if other.name != name:
                del self.nodes[other.name]
        self.drained.discard(name)
        status = NodeStatus.MEMBER if is_member else NodeStatus.SPARE
        self.nodes[name] = NodeRecord(name, rank, status, now, now)
        if before is not None:
            self.nodes[name].num_losses = before.num_losses
            self.nodes[name].last_cause = before.last_cause
        return ""

    def set_spare(self, name: str, is_spare: bool) -> None:
        """Mark a connected node as a spare without stages, or as a member."""
        if (record := self.nodes.get(name)) is not None and record.is_alive:
            record.status = NodeStatus.SPARE if is_spare else NodeStatus.MEMBER

    def note_cause(self, name: str, cause: str) -> None:
        """Store a cause that reports show for a node."""
        if (record := self.nodes.get(name)) is not None:
            record.last_cause = cause

    def record_message(self, name: str, now: float) -> None:
        """Record the time of a message of a node."""
        if (record := self.nodes.get(name)) is not None and record.is_alive:
            record.heard_at = now

    def on_lost(self, name: str, cause: str, now: float) -> None:
        """Handle the end of a node's session, or its silence."""
        self._end(name, NodeStatus.LOST, cause)

    def on_left(self, name: str, cause: str) -> None:
        """Handle a node that ends its membership by itself."""
        self._end(name, NodeStatus.LEFT, cause)

    def forget(self, name: str) -> None:
        """Forget a node whose membership the head has ended; it may join anew."""
        self.nodes.pop(name, None)
        self.drained.add(name)

    def on_refused(self, address: str, cause: str) -> None:
        """Handle a peer that was refused: by the handshake, or because of differences."""
        self.refused[address] = cause

    def on_accepted(self, address: str) -> None:
        """Forget the refusals of an address from which a node has joined."""
        self.refused.pop(address, None)

    def silent_nodes(self, now: float) -> list[str]:
        """Return the names of the connected nodes without a message for `node_timeout` seconds."""
        return [
            record.name
            for record in self.nodes.values()
            if record.is_alive and now - record.heard_at >= self._node_timeout
        ]

    def describe_missing(self) -> str:
        """Return a description of the missing nodes; empty if none is missing.

        For example `2 of 4 nodes; none from rank 1, 3; refused: 10.0.0.7 (another secret)`.
        """
        if self.is_complete:
            return ""
        parts = [f"{len(self._members) + 1} of {self._num_nodes} nodes"]
        ranks = {record.rank for record in self._members}
        if missing := [str(rank) for rank in range(1, self._num_nodes) if rank not in ranks]:
            parts.append(f"none from rank {', '.join(missing)}")
        if num_unranked := sum(record.rank is None for record in self._members):
            parts.append(f"{num_unranked} without a rank")
        ended = [node for node in self.nodes.values() if not node.is_alive]
        if ended:
            parts.append("lost: " + _list_causes((node.name, node.last_cause) for node in ended))
        if self.refused:
            parts.append("refused: " + _list_causes(self.refused.items()))
        return "; ".join(parts)

    @property
    def _members(self) -> list[NodeRecord]:
        return [node for node in self.nodes.values() if node.status is NodeStatus.MEMBER]

    def _records_of_rank(self, rank: int | None) -> list[NodeRecord]:
        if rank is None:
            return []
        return [node for node in self.nodes.values() if node.rank == rank]

    def _conflict(self, name: str, rank: int | None) -> str:
        """Return the cause for which a node cannot join beside the living ones; empty if it may."""
        record = self.nodes.get(name)
        if record is not None and record.is_alive:
            return (
                f"a node named {name} is a member already: give each machine a --node-name of its "
                "own; if this one was restarted, it can join once the earlier session is over"
            )
        for other in self._records_of_rank(rank):
            if other.is_alive:
                return (
                    f"node rank {rank} belongs to {other.name} already: give each machine a "
                    "--node-rank of its own; if this one replaces it, it can join once the other "
                    "one is lost"
                )
        return ""

    def _end(self, name: str, status: NodeStatus, cause: str) -> None:
        record = self.nodes.get(name)
        if record is None or not record.is_alive:
            return
        record.status, record.last_cause = status, cause
        record.num_losses += status is NodeStatus.LOST


def _list_causes(causes: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} ({cause})" for name, cause in causes)

"""A world of worker processes on several nodes that are lost, return and join as spares."""

from collections import Counter
from collections.abc import Sequence
from random import Random

from gllm.recovery.actions import Action, DismissNode, KillWorker, SpawnWorker
from gllm.recovery.node_layout import NodeMemory, NodeShape, extend_layers, repartition_layers
from gllm.recovery.partition import StageCosts
from gllm.recovery.placement import LOCAL_NODE, rank_names
from gllm.recovery.records import RecoveryLimits, RecoveryState
from gllm.recovery.recovery import Recovery
from tests.support.recovery.world import World


class NodeWorld(World):
    """Nodes, which of them the head takes to be alive, and the processes on each."""

    def __init__(
        self,
        degrees: Sequence[int],
        nodes: Sequence[str],
        limits: RecoveryLimits,
        seed: int = 0,
        should_measure: bool = False,
        can_repartition: bool = True,
        can_extend: bool = False,
        uses_joined_nodes: bool = False,
    ) -> None:
        super().__init__(degrees, limits, seed, should_measure)
        self.can_repartition = can_repartition
        self.shape = NodeShape(self.layers, list(degrees), list(nodes))
        self.recovery = Recovery(
            self.layers, limits, Random(seed), degrees, should_measure, nodes, self.repartition
        )
        if can_extend:
            self.recovery.extend = self.extend
        self.recovery.uses_joined_nodes = uses_joined_nodes
        self.recovery.find_costliest = max
        self.dismissed: list[str] = []
        """Nodes that were drained, in order."""
        self.num_reverts = 0
        """Planned changes whose epoch could not begin, so that the stages are those before."""
        self.up = dict.fromkeys(nodes, 99)
        """Capacity of each living node."""
        self.lost: set[str] = set()
        """Nodes that have not returned."""
        self.vacant_since: dict[str, float] = {}
        """Time since which the stages of a lost node have been waiting."""
        self.away: dict[str, set[int]] = {}
        """Processes that live on a lost node."""
        self.node_of: dict[int, str] = {}
        self.dropped: set[int] = set()
        """Processes whose stage does not exist any more."""
        self.num_failed_links = 0
        """Since the engine was ready."""
        self.is_returning = False
        """True while it returns to earlier stages, because of the memory."""
        self._arriving: set[int] = set()
        """Processes of a node that is joining."""

    def repartition(self, shape: NodeShape, survivors: Sequence[str]) -> NodeShape | None:
        """Return the stages on some nodes if their memory suffices."""
        assert set(survivors) <= self.up.keys()
        if not self.can_repartition:
            return None
        assert (shape.layers, shape.nodes) == (self.recovery.layers, self.recovery.stage_nodes)
        costs = StageCosts((1.0,) * self.layers[-1][1])
        return repartition_layers(shape, survivors, [costs] * len(self.layers), NodeMemory(costs))

    def extend(
        self, shape: NodeShape, nodes: Sequence[str], degrees: Sequence[int], should_gain: bool
    ) -> NodeShape | None:
        """Return the stages and further ones on other nodes."""
        assert set(nodes) <= self.up.keys() - set(shape.nodes)
        assert nodes
        costs = StageCosts((1.0,) * self.layers[-1][1])
        num_stages = len(shape.nodes) + len(nodes)
        return extend_layers(shape, nodes, degrees, [costs] * num_stages, NodeMemory(costs))

    def stage_nodes(self) -> set[str]:
        return set(self.shape.nodes)

    def is_new(self, sender: int) -> bool:
        before = self.before_change
        return before is not None and self.node_of[sender] not in before

    def run(self, actions: list[Action]) -> None:
        super().run(actions)
        assert self.recovery.stage_nodes[0] == LOCAL_NODE
        if self.is_attached and not self.given_up:
            assert set(self.recovery.stage_nodes) <= self.up.keys(), "it serves without a node"
            self.num_failed_links = 0

    def check_waiting(self) -> None:
        is_waiting_for_ever = self.recovery.is_overdue and bool(self.recovery.vacant_nodes)
        if not is_waiting_for_ever:
            super().check_waiting()

    def check_standbys(self) -> None:
        """Check the number of standby workers of each node."""
        known = self.alive - self.dropped - self.reserved
        standbys = [s for s in known if self.place[s] is None]
        counts = Counter(self.node_of[sender] for sender in standbys)
        for node, count in counts.items():
            is_spare = self.limits.spare_preloads and node not in self.recovery.stage_nodes
            most = max(self.limits.num_standbys, max(self.shape.degrees) * is_spare)
            assert count <= most

    def execute(self, action: Action) -> None:
        match action:
            case SpawnWorker(sender, place, node):
                assert node in self.up, "a process on a lost node"
                self.node_of[sender] = node
                if place is not None:
                    assert self.recovery.stage_nodes[self.names[place].stage] == node
            case KillWorker(sender) if sender in self._arriving:
                self._arriving.discard(sender)
                return
            case DismissNode(node):
                assert self.is_attached
                assert node not in self.recovery.stage_nodes
                for sender in [s for s in self.alive if self.node_of[s] == node]:
                    assert self.place[sender] is None
                    self.alive.discard(sender)
                    self._forget(sender)
                del self.up[node]
                self.dismissed.append(node)
                return
        super().execute(action)

    def change_shape(self, shape: NodeShape) -> None:
        """Follow other stages: workers of the n-th stage of a node keep it."""
        is_planned, self.is_planned = self.is_planned, False
        is_reverting = self.before_change is not None and not is_planned
        if not is_planned:
            self.before_change = None
        assert not any(self.pending.values())
        assert set(shape.nodes) <= {*self.up, ""}
        assert shape.layers[-1][1] == self.layers[-1][1], "all layers"
        old_keys, new_keys = self._keys(self.shape), self._keys(shape)
        if is_planned:
            assert set(shape.nodes) <= self.up.keys()
        elif is_reverting:
            self.num_reverts += 1
        elif len(shape.nodes) == len(self.shape.nodes):
            # A spare has got the stages, with other processes.
            assert (shape.degrees, shape.layers) == (self.shape.degrees, self.layers)
            if not self.is_returning:
                new_keys = old_keys
            # Stages that stay vacant still wait for the node that they were lost with.
            waiting = zip(shape.nodes, self.shape.nodes, strict=True)
            nodes = [own or before for own, before in waiting]
            shape = NodeShape(shape.layers, shape.degrees, nodes)
        else:
            is_complete = set(shape.nodes) <= self.up.keys()
            assert is_complete or self.is_returning, "cut anew over a lost node"
        for sender in self.alive:
            place = self.place[sender]
            if place is None:
                continue
            self.place[sender] = None
            if old_keys[place] in new_keys:
                self.place[sender] = new_keys.index(old_keys[place])
            else:
                self.dropped.add(sender)
        deaths = dict(zip(old_keys, self.num_deaths, strict=True))
        self.num_deaths = [deaths.get(key, 0) for key in new_keys]
        self.layers, self.names, self.shape = shape.layers, rank_names(shape.degrees), shape
        self.measured_layers = shape.layers

    def _mark(self, node: str, name: str) -> None:
        """Note the name of a node in the present shape."""
        nodes = [name if own == node else own for own in self.shape.nodes]
        self.shape = NodeShape(self.shape.layers, self.shape.degrees, nodes)

    @staticmethod
    def _keys(shape: NodeShape) -> list[tuple[str, int, int]]:
        counts: Counter[str] = Counter()
        keys = []
        for node, degree in zip(shape.nodes, shape.degrees, strict=True):
            keys += [(node, counts[node], rank) for rank in range(degree)]
            counts[node] += 1
        return keys

    def assign(self, action: object) -> None:
        assert self.recovery.placement is not None
        assert not self.dropped & self.alive, "a stage that was dropped may still compute"
        workers = self.recovery.placement.workers
        assert {worker.node for worker in workers} <= self.up.keys(), "a place on a lost node"
        assert all(self.node_of[worker.sender] == worker.node for worker in workers)
        super().assign(action)  # type: ignore[arg-type]

    # Events.

    def lose_node(self, node: str, is_death: bool, keeps_workers: bool = True) -> None:
        """Let the head lose a node."""
        has_stages = node in self.recovery.stage_nodes
        senders = {sender for sender in self.alive if self.node_of[sender] == node}
        is_forming = self.recovery.state in (RecoveryState.FORMING, RecoveryState.NEW)
        was_poisoned = self.was_poisoned
        self._on_gone(node)
        for sender in senders:
            if is_death:
                self.was_poisoned = was_poisoned
                self._count(sender, is_poison=False)
        living = {sender for sender in senders - self.killed if self.place[sender] is not None}
        self.away[node] = set() if is_death or not keeps_workers else living
        for sender in senders:
            self.alive.discard(sender)
            self._forget(sender)
        if has_stages and not is_forming:
            self.was_poisoned = False
            for waiting in self.pending.values():
                waiting.clear()
        self._mark(node, f"lost {node}")
        del self.up[node]
        self.lost.add(node)
        if node not in self.recovery.vacant_nodes:
            self.vacant_since[node] = self.now
        self.run(self.recovery.on_node_lost(node, f"{node} is lost", self.now, is_death))
        self._check_count()

    def leave(self, node: str) -> None:
        """Let a node end its membership."""
        self.away[node] = set()
        senders = {sender for sender in self.alive if self.node_of[sender] == node}
        is_forming = self.recovery.state in (RecoveryState.FORMING, RecoveryState.NEW)
        if node in self.recovery.stage_nodes and not is_forming:
            self.was_poisoned = False
        for sender in senders:
            self.alive.discard(sender)
            self._forget(sender)
        self._on_gone(node)
        self._mark(node, f"lost {node}")
        del self.up[node]
        self.lost.add(node)
        if node not in self.recovery.vacant_nodes:
            self.vacant_since[node] = self.now
        self.run(self.recovery.on_node_lost(node, f"{node} has left", self.now, has_left=True))

    def _on_gone(self, node: str) -> None:
        """Note that the stages before a planned change are not those of living nodes any more."""
        if self.before_change is not None and node in self.before_change:
            self.before_change = None

    def drain(self, node: str) -> bool:
        """Drain a node; return True if that is possible."""
        if self.recovery.refuse_drain(node):
            return False
        self.run(self.recovery.drain_node(node, self.now))
        assert self.recovery.drain_node(node, self.now) == [], "once is enough"
        return True

    def join(self, node: str, capacity: int = 99, is_spare: bool = True) -> set[int]:
        """Let a node join or return; return the processes that it keeps."""
        workers = self.away.pop(node, set())
        waits = node in self.recovery.vacant_nodes
        num_needed = self._num_ranks(f"lost {node}") if waits else 0
        wanted = set(self.recovery.returning_workers(node, capacity, sorted(workers)))
        assert wanted <= workers
        self.up[node] = capacity
        self.lost.discard(node)
        self._arriving = workers - wanted
        if waits and capacity >= num_needed:
            self._mark(f"lost {node}", node)
        self.alive |= wanted
        self.connected |= wanted
        actions = self.recovery.on_node_joined(node, capacity, sorted(workers), self.now, is_spare)
        self.run(actions)
        assert not self._arriving or self.given_up, "processes that are neither kept nor killed"
        if waits and capacity >= num_needed and not self.given_up:
            assert node not in self.recovery.vacant_nodes, "a node that returns gets its stages"
        return wanted

    def run_short_of_memory(self) -> None:
        """Let an epoch find out, before it is ready, that its memory does not suffice."""
        if self.recovery.state is not RecoveryState.INITIALIZING:
            return
        self.is_returning = True
        actions = self.recovery.on_memory_short(self.epoch, "no memory", self.now)
        if actions:
            self.was_poisoned = False
            for waiting in self.pending.values():
                waiting.clear()
        self.run(actions)
        self.is_returning = False

    def close_all(self) -> None:
        """Let all survivors close their instances."""
        for sender in sorted(self.closing):
            self.close(sender)

    def fail_link(self) -> None:
        """Let workers of two nodes lose each other."""
        states = (RecoveryState.NEW, RecoveryState.FORMING, RecoveryState.MEASURING)
        if self.recovery.state not in states:
            self.num_failed_links += 1
            self.was_poisoned = False
            for waiting in self.pending.values():
                waiting.clear()
        actions = self.recovery.on_epoch_failed(self.epoch, "no route", self.now)
        self.run(actions)
        self._check_count()

    def _num_ranks(self, node: str) -> int:
        stages = zip(self.shape.nodes, self.shape.degrees, strict=True)
        return sum(degree for own, degree in stages if own == node)

    def _check_count(self) -> None:
        is_over = max(*self.num_deaths, self.num_failed_assignments) > self.limits.max_restarts
        if not self.has_been_ready:
            is_over |= self.num_failed_links > self.limits.max_restarts
            if "did not return" in self.given_up:
                assert self.recovery.vacant_nodes
                oldest = min(self.vacant_since[node] for node in self.recovery.vacant_nodes)
                assert self.now >= oldest + self.limits.join_seconds
                return
        assert is_over == bool(self.given_up)

    def settle(self) -> None:
        """Answer to everything; nodes return once nothing else can happen."""
        for _ in range(300):
            if self.is_attached or self.given_up:
                return
            if self.act_fairly():
                continue
            if self.recovery.next_deadline < float("inf"):
                self.wait(max(0.0, self.recovery.next_deadline - self.now))
            elif not self.is_attached and not self.given_up:
                assert self.recovery.vacant_nodes, "it waits for nothing"
                self._return_node(self.recovery.vacant_nodes[0])
        raise AssertionError("no progress")

    def _return_node(self, node: str) -> None:
        """Let a lost node, or one that has joined with too little capacity, return."""
        if node in self.up:
            self.lose_node(node, is_death=False)
        self.join(node)

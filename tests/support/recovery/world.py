"""A world of worker processes that executes the actions of Recovery and checks each of them."""

from collections.abc import Sequence
from itertools import groupby, pairwise
from random import Random

from gllm.recovery.actions import (
    Action,
    AssignEpoch,
    AttachClient,
    BeginChange,
    ChangeShape,
    ChooseLayers,
    CloseInstances,
    DetachClient,
    GiveUp,
    InitializeCaches,
    KillWorker,
    MeasureWorkers,
    PrepareLayers,
    RejectParked,
    SpawnWorker,
    WarmUp,
)
from gllm.recovery.node_layout import NodeShape
from gllm.recovery.placement import Placement, rank_names
from gllm.recovery.records import STEADY_SECONDS, RecoveryLimits, RecoveryState
from gllm.recovery.recovery import Recovery


class World:
    """Processes, their instances and the client; every event that it reports could have happened.

    The world counts deaths on its own, so that a wrong count of the recovery shows.
    """

    def __init__(
        self,
        degrees: Sequence[int],
        limits: RecoveryLimits,
        seed: int = 0,
        should_measure: bool = False,
    ) -> None:
        self.limits = limits
        self.layers = [(2 * stage, 2 * stage + 2) for stage in range(len(degrees))]
        self.names = rank_names(degrees)
        self.recovery = Recovery(self.layers, limits, Random(seed), degrees, should_measure)
        self.measured_layers = self.layers
        """Layers that are chosen once all workers have measured."""
        self.num_measurements = 0
        self._was_measuring = False
        self.now = 100.0
        self.alive: set[int] = set()
        """Processes that have not been reaped."""
        self.killed: set[int] = set()
        self.place: dict[int, int | None] = {}
        """Place of each process that was ever spawned; None while it is a standby worker."""
        self.instances: dict[int, int] = {}
        """Epoch of the open instance, by sender."""
        self.closing: set[int] = set()
        self.pending: dict[str, set[int]] = {
            "measured": set(),
            "loaded": set(),
            "ready": set(),
            "warm": set(),
        }
        """Workers whose answer to the current phase is outstanding."""
        self.preparing: dict[int, set[int]] = {}
        """Workers that prepare a planned change, by its number; of the present one only."""
        self.reserved: set[int] = set()
        """Workers that were started for a planned change and have no place yet."""
        self.preloaded: dict[int, tuple[int, int]] = {}
        """Stage and rank whose layers a standby worker holds, by sender."""
        self.mapped: dict[int, list[tuple[int, tuple[int, int]]]] = {}
        """Rank and layers of each worker whose weights a standby worker maps, by sender."""
        self.before_change: set[str] | None = None
        """Nodes of the stages before a planned change that is not ready yet."""
        self.is_planned = False
        """True while a planned change of the stages begins."""
        self.num_prepared = 0
        """Planned changes that have been prepared until they happened."""
        self.connected: set[int] = set()
        """Processes that have sent their first message."""
        self.epoch = 0
        self.is_attached = False
        self.attached_at = 0.0
        self.has_been_ready = False
        self.has_rejected = False
        self.given_up = ""
        self.num_deaths = [0] * len(self.names)
        self.was_poisoned = False
        """True if the death that ended the last epoch was caused by a request."""
        self.served: Placement | None = None
        """Placement of the last epoch if it has served."""
        self.num_impossible = 0
        """Assignments that are still to fail."""
        self.num_failed_assignments = 0
        """Since the engine was ready."""
        self.has_failed_assignment = False
        """True if the last one failed, and the recovery does not know yet."""
        self.log: list[tuple[float, Action]] = []
        self.spawn_times: list[tuple[float, int | None]] = []

    def start(self) -> None:
        self.run(self.recovery.start(self.now))

    def run(self, actions: list[Action]) -> None:
        """Execute actions, with all checks."""
        for action in actions:
            if isinstance(action, PrepareLayers) and action.node is None:
                senders = action.placement.senders
                self.reserved |= {s for s in senders if self.place.get(s) is None}
        for action in actions:
            assert not self.given_up, "nothing follows the end"
            self.log.append((self.now, action))
            self.execute(action)
        if self.has_failed_assignment:
            self.has_failed_assignment = False
            self.run(self.recovery.on_assignment_failed(self.epoch, "no space", self.now))
            self._check_count()
        if self.recovery.state is not RecoveryState.DEAD:
            placed = [place for sender, place in self.place.items() if sender in self.alive]
            assert len(placed) - placed.count(None) <= len(self.names)
            self.check_waiting()
        assert (self.recovery.state is RecoveryState.READY) == self.is_attached or self.given_up
        self._was_measuring = self.recovery.state is RecoveryState.MEASURING

    def check_waiting(self) -> None:
        """Check that something will happen: a deadline, or the exit of a killed process."""
        if self.recovery.state is not RecoveryState.READY:
            is_awaited = bool(self.killed & self.alive)
            assert is_awaited or self.recovery.next_deadline < float("inf")

    def check_standbys(self) -> None:
        """Check the number of standby workers."""
        standbys = [s for s in self.alive - self.reserved if self.place[s] is None]
        assert len(standbys) <= self.limits.num_standbys

    def execute(self, action: Action) -> None:
        match action:
            case SpawnWorker(sender, place):
                assert sender not in {0, *self.place}
                held = [s for s in self.alive if self.place[s] == place and place is not None]
                assert not held, "the old process has not been reaped"
                self.alive.add(sender)
                self.place[sender] = place
                self.spawn_times.append((self.now, place))
                # Before the assignment that follows, a standby that gets a place has none here.
                if place is None:
                    self.check_standbys()
            case KillWorker(sender):
                assert sender in self.alive - self.killed
                self.killed.add(sender)
            case CloseInstances(epoch, senders):
                assert epoch == self.epoch
                assert not self.is_attached
                for sender in senders:
                    assert sender in self.alive - self.killed
                    # Before it measures a worker has nothing to close.
                    assert self._was_measuring or self.instances[sender] == epoch
                self.closing |= set(senders)
            case MeasureWorkers(placement):
                assert placement.epoch == self.epoch + 1
                assert set(placement.senders) <= (self.alive & self.connected) - self.killed
                assert not self.instances.keys() & self.alive
                self.num_measurements += 1
                self.instances |= dict.fromkeys(placement.senders, self.epoch)
                self.pending["measured"] = set(placement.senders)
            case PrepareLayers(_, placement, _, str(node), standby) if standby:
                self._map(placement, node, standby)
            case PrepareLayers(_, placement, _, str(node)):
                self._preload(placement, node)
            case PrepareLayers(number, placement):
                self._prepare(number, placement)
            case BeginChange(kind):
                assert self.is_attached
                assert kind
                self.num_prepared += not any(self.preparing.values())
                self.preparing.clear()
                self.was_poisoned, self.is_planned = False, True
                self.before_change = self.stage_nodes()
            case ChangeShape(shape):
                self.change_shape(shape)
            case ChooseLayers():
                assert not any(self.pending.values())
                self.instances.clear()
                self.layers = self.measured_layers
                self.run(self.recovery.change_layers(self.layers, "measured", self.now))
            case AssignEpoch():
                self.assign(action)
            case InitializeCaches(epoch):
                self._begin("ready", "loaded", epoch)
            case WarmUp(epoch):
                self._begin("warm", "ready", epoch)
            case AttachClient(epoch):
                assert not self.is_attached
                assert epoch == self.epoch
                assert not any(self.pending.values())
                self.is_attached = self.has_been_ready = True
                self.served = self.recovery.placement
                self.attached_at = self.now
                self.before_change = None
                self.has_rejected = False
                self.num_failed_assignments = 0
            case DetachClient():
                assert self.is_attached
                self.is_attached = False
                self.preparing.clear()
            case RejectParked():
                assert not self.is_attached
                assert self.has_been_ready
                assert not self.has_rejected
                self.has_rejected = True
            case GiveUp(cause):
                self.given_up = cause

    def assign(self, action: AssignEpoch) -> None:
        placement = action.placement
        assert placement.epoch > self.epoch
        assert self.recovery.placement == placement
        assert placement.layers == self.layers
        assert set(placement.senders) <= self.alive - self.killed, "no place on a dead worker"
        open_instances = self.instances.keys() & self.alive
        assert not open_instances, "two placements are at work"
        self.epoch = placement.epoch
        served, self.served = self.served, None
        may_keep = (
            served is not None
            and max(self.num_deaths) <= 1
            and [(worker.stage, worker.rank, worker.node) for worker in served.workers]
            == [(worker.stage, worker.rank, worker.node) for worker in placement.workers]
            and served.layers == placement.layers
        )
        assert action.keeps_kv_cache == may_keep
        if self.num_impossible:
            self.num_impossible -= 1
            self.num_failed_assignments += self.before_change is None
            self.has_failed_assignment = True
            return
        assert [(each.stage, each.rank) for each in self.names] == [
            (worker.stage, worker.rank) for worker in placement.workers
        ]
        for place, worker in enumerate(placement.workers):
            assert self.place[worker.sender] in (None, place)
            self.place[worker.sender] = place
            self.instances[worker.sender] = self.epoch
        self.pending["loaded"] = set(placement.senders)

    def _begin(self, phase: str, before: str, epoch: int) -> None:
        assert epoch == self.epoch
        assert not self.pending[before]
        assert self.recovery.placement is not None
        self.pending[phase] = set(self.recovery.placement.senders)

    def _prepare(self, number: int, placement: Placement) -> None:
        """Follow the preparation of a change beside the present epoch."""
        assert self.is_attached, "it is prepared while the engine serves"
        assert number not in self.preparing
        assert placement.epoch == self.epoch + 1
        assert set(placement.senders) <= self.alive - self.killed
        assert placement.layers[-1][1] == self.layers[-1][1], "all layers"
        self.preparing = {number: set(placement.senders)}
        assert {s for s in placement.senders if self.place[s] is None} <= self.reserved

    def _preload(self, placement: Placement, node: str) -> None:
        """Note the layers that standby workers of a spare load."""
        assert self.is_attached
        assert placement.layers == self.layers
        for worker in placement.workers_on(node):
            assert worker.sender in self.alive - self.killed
            assert self.place[worker.sender] is None
            self.preloaded[worker.sender] = (worker.stage, worker.rank)

    def _map(self, placement: Placement, node: str, standby: int) -> None:
        """Note the layers of the workers of its node that a standby worker maps."""
        assert self.is_attached
        assert self.limits.standbys_map
        assert standby in (self.alive & self.connected) - self.killed
        assert self.place[standby] is None
        assert self.recovery.placement is not None
        assert placement.workers == self.recovery.placement.workers
        own = [(w.rank, placement.layers[w.stage]) for w in placement.workers_on(node)]
        assert own, "it has a node with stages"
        assert self.mapped.get(standby) != own, "once is enough"
        self.mapped[standby] = own

    def stage_nodes(self) -> set[str]:
        """Return the nodes of the present stages."""
        return set()

    def is_new(self, sender: int) -> bool:
        """Return True if a worker is on a node that has got stages by a change not ready yet."""
        return False

    def change_shape(self, shape: NodeShape) -> None:
        """Follow other layers on the same workers."""
        assert shape.degrees == [len(list(g)) for _, g in groupby(n.stage for n in self.names)]
        if not self.is_planned:
            self.before_change = None
        self.is_planned = False
        self.layers = list(shape.layers)

    # Events.

    def prepare(self, sender: int) -> None:
        """Let a worker report that it has prepared its layers."""
        self.connect(sender)
        for number, waiting in list(self.preparing.items()):
            waiting.discard(sender)
            self.run(self.recovery.on_prepared(sender, number, self.now))

    def exit(self, sender: int, is_poison: bool = False) -> None:
        """Let a process exit, killed or of its own."""
        self._count(sender, is_poison)
        self.alive.discard(sender)
        self._forget(sender)
        self.run(self.recovery.on_exit(sender, f"{sender} died", self.now, is_poison))
        self._check_count()

    def fail_import(self, sender: int) -> None:
        """Let a process exit because its modules cannot be imported."""
        if self.has_been_ready:
            self._count(sender, False)
        self.alive.discard(sender)
        self._forget(sender)
        self.run(self.recovery.on_import_failed(sender, f"{sender} cannot import", self.now))

    def lose(self, sender: int, is_report: bool, is_poison: bool = False) -> None:
        """Let a worker fail or freeze."""
        is_placed = self.recovery.name_of(sender) is not None and sender not in self.killed
        ends = is_report and not self.has_been_ready and is_placed
        if not ends:
            self._count(sender, is_poison)
        event = self.recovery.on_failed if is_report else self.recovery.on_lost
        if is_placed:
            for waiting in self.pending.values():
                waiting.clear()
        self.run(event(sender, f"{sender} fails", self.now, is_poison))
        if ends:
            assert self.given_up, "a reported failure of the first start is final"
        else:
            self._check_count()

    def _count(self, sender: int, is_poison: bool) -> None:
        name = self.recovery.name_of(sender)
        if name is None or sender not in self.alive - self.killed or self.given_up:
            return
        is_trial = self.before_change is not None and sender in self.instances
        if (is_trial or self.is_new(sender)) and sender not in self.closing:
            self.was_poisoned = False
            return
        self.forget_old_deaths()
        if sender in self.closing:
            # Whatever killed the first worker may have killed this one too.
            is_poison = is_poison or self.was_poisoned
        if self.recovery.state is not RecoveryState.FORMING:
            self.was_poisoned = is_poison
        self.num_deaths[self.names.index(name)] += not is_poison

    def forget_old_deaths(self) -> None:
        """Count no death before a long time in which the engine was ready."""
        if self.is_attached and self.now - self.attached_at >= STEADY_SECONDS:
            self.num_deaths = [0] * len(self.names)

    def _check_count(self) -> None:
        is_over = max(*self.num_deaths, self.num_failed_assignments) > self.limits.max_restarts
        assert is_over == bool(self.given_up)

    def _forget(self, sender: int) -> None:
        self.reserved.discard(sender)
        for waiting in self.preparing.values():
            waiting.discard(sender)
        self.killed.discard(sender)
        self.instances.pop(sender, None)
        self.closing.discard(sender)
        if self.place.get(sender) is not None:
            for waiting in self.pending.values():
                waiting.clear()

    def connect(self, sender: int) -> None:
        """Let a process connect."""
        self.connected.add(sender)
        self.run(self.recovery.on_connected(sender, self.now))

    def close(self, sender: int) -> None:
        """Let a survivor report that it has closed its instance."""
        self.connect(sender)
        self.closing.discard(sender)
        if sender in self.alive - self.killed:
            self.instances.pop(sender, None)
        self.run(self.recovery.on_closed(sender, self.now))

    def answer(self, phase: str, sender: int, keeps_weights: bool = True) -> None:
        """Let a worker answer to a phase."""
        self.connect(sender)
        self.pending[phase].discard(sender)
        if phase == "measured":
            self.run(self.recovery.on_measured(sender, self.now, keeps_weights))
        elif phase == "loaded":
            self.run(self.recovery.on_loaded(sender, self.now, keeps_weights))
        elif phase == "ready":
            self.run(self.recovery.on_ready(sender, self.now))
        else:
            self.pending["warm"].clear()
            self.run(self.recovery.on_warm(self.now))

    def change_layers(self, pick: int) -> None:
        """Divide the layers anew, as a planned change."""
        total = self.layers[-1][1]
        ends = Random(pick).sample(range(1, total), len(self.layers) - 1)
        bounds = [0, *sorted(ends), total]
        layers = list(pairwise(bounds))
        actions = self.recovery.change_layers(layers, "other layers are faster", self.now)
        assert self.is_attached or not actions
        self.run(actions)

    def commit(self) -> None:
        """Let a step commit."""
        if self.is_attached:
            self.num_deaths = [0] * len(self.names)
        self.recovery.on_step_committed()

    def wait(self, seconds: float) -> None:
        """Let time pass; the timer fires at each deadline on the way."""
        end = self.now + seconds
        for _ in range(1000):
            deadline = self.recovery.next_deadline
            if deadline > end:
                break
            self.now = max(self.now, deadline)
            is_measuring = self.recovery.state is RecoveryState.MEASURING
            before = {
                s
                for s in self.alive - self.killed
                if s in self.instances or (is_measuring and self.recovery.name_of(s) is not None)
            }
            late = before - self.closing
            self.run_timer(late)
        else:
            raise AssertionError("the timer makes no progress")
        self.now = end

    def run_timer(self, assigned: set[int]) -> None:
        """Fire the timer; workers with an instance that it kills count as deaths."""
        actions = self.recovery.on_timer(self.now)
        for action in actions:
            place = self.place[action.sender] if isinstance(action, KillWorker) else None
            if isinstance(action, KillWorker) and action.sender in assigned:
                assert place is not None
                # Killed because the next epoch needs its memory: no death of its own.
                if "memory" not in action.cause and self.before_change is None:
                    self.num_deaths[place] += 1
                    self.was_poisoned = False
                for waiting in self.pending.values():
                    waiting.clear()
        self.run(actions)
        self._check_count()

    def settle(self) -> None:
        """Answer to everything that is outstanding until the engine is ready or has given up."""
        for _ in range(200):
            if self.is_attached or self.given_up:
                return
            if not self.act_fairly():
                self.wait(max(0.0, self.recovery.next_deadline - self.now))
        raise AssertionError("no progress")

    def finish_change(self) -> None:
        """Answer to everything until no planned change is left."""
        for _ in range(200):
            self.settle()
            waiting = [sender for each in self.preparing.values() for sender in each]
            if self.given_up or not waiting:
                return
            self.prepare(min(waiting))
        raise AssertionError("no progress")

    def act_fairly(self) -> bool:
        """Report one outstanding event; return False if there is none."""
        if gone := self.killed & self.alive:
            self.exit(min(gone))
            return True
        if self.closing:
            self.close(min(self.closing))
            return True
        for phase, waiting in self.pending.items():
            if waiting:
                self.answer(phase, min(waiting))
                return True
        if self.recovery.state is RecoveryState.MEASURING:
            self.connect(min(self.alive - self.connected))
            return True
        return False

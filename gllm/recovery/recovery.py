"""Recovery: the state machine of an engine's life, from the first start to its end.

The supervisor reports events with their time and executes the actions that each returns. The first
start, a restart and the use of a standby worker are one path: give each place a worker without an
instance, assign the next epoch, initialize the caches, warm up, attach the client.

Stages of a lost node get another node at once if a spare has the capacity. Otherwise they wait for
the same node (`choose_return_seconds`); then the layers are cut over the nodes that are left, if
their memory suffices; otherwise they wait on. An engine that has never been ready gives up after
`join_seconds` of this, because whoever started it wants to know; later it waits for ever, with the
parked requests rejected after `recovery_timeout`.

`Recovery` handles the events, and has the phase of the current epoch. Its parts keep the rest:
`Stages` the stages and the nodes, `WorkerPool` the processes and their deadlines, `PlannedChanges`
what is prepared while the engine serves.
"""

import math
from collections.abc import Callable, Sequence
from random import Random

from gllm.recovery.actions import (
    Action,
    AssignEpoch,
    AttachClient,
    BeginChange,
    ChangeShape,
    ChooseLayers,
    DetachClient,
    GiveUp,
    InitializeCaches,
    MeasureWorkers,
    RejectParked,
    WarmUp,
)
from gllm.recovery.kept_blocks import has_same_places
from gllm.recovery.node_layout import NodeShape
from gllm.recovery.phase_times import PhaseTimes, RecoveryPhase
from gllm.recovery.placement import LOCAL_NODE, Placement, RankName
from gllm.recovery.planned_changes import (
    Extend,
    FindCostliest,
    PlannedChange,
    PlannedChanges,
)
from gllm.recovery.records import (
    STANDBY_SECONDS,
    STEADY_SECONDS,
    Activity,
    RecoveryLimits,
    RecoveryState,
    RetryRecord,
    WorkerRecord,
)
from gllm.recovery.stages import Repartition, Stages, choose_return_seconds, predict_reload_seconds
from gllm.recovery.worker_pool import WorkerPool


class Recovery:
    """State machine of an engine's worker processes: starts, deaths, restarts and lost nodes.

    Its methods handle events and return the commands (actions) to execute. Does no I/O and reads no
    clock: time is an argument.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        limits: RecoveryLimits,
        jitter: Random,
        degrees: Sequence[int] | None = None,
        should_measure: bool = False,
        nodes: Sequence[str] | None = None,
        repartition: Repartition | None = None,
    ) -> None:
        """Create the state of an engine that has not started.

        Args:
            layers: first layer of each stage and first layer after it.
            limits: limits of a recovery.
            jitter: source of the random part of backoffs.
            degrees: number of ranks of each stage; None for one each.
            should_measure: divide the layers by measurements of the workers before the first
                epoch.
            nodes: name of the node of each stage; None for the head's node. All are alive, and have
                room for exactly the workers of their stages.
            repartition: divides the layers over the nodes that are left after a loss; None if they
                always wait for the lost ones.

        Raises:
            ValueError: stage 0 is not on the head's node.
        """
        self.state = RecoveryState.NEW
        self.epoch = 0
        """Number of the current epoch; 0 before the first."""
        self.placement: Placement | None = None
        """Placement of the current epoch; None before the first."""
        self.recovering_since: float | None = None
        """Time of the death that the engine recovers from; None if it never was ready, or is."""
        self.has_been_ready = False
        """True if an epoch has served."""
        self.is_overdue = False
        """True if this recovery has taken longer than the timeout: requests are rejected."""
        self.extend: Extend | None = None
        """Gives stages to nodes that join; None if they are spares only."""
        self.find_costliest: FindCostliest | None = None
        """Returns the costliest of some stages; None if spares hold no layers."""
        self.uses_joined_nodes = False
        """True if nodes that join get stages where that is faster, also if no stage has been
        lost."""
        self.predict_recompute: Callable[[], float] | None = None
        """Returns the seconds in which the running requests would be computed again; None if nobody
        knows."""
        self.phase_times = PhaseTimes()
        """Durations of the phases of the running recovery, or of the last one."""
        self._was_poisoned = False
        """True if a request ended the last epoch."""
        self._served: Placement | None = None
        """Placement of the last epoch if it has served, else None."""
        self._ready_since = math.inf
        """Time since which the engine is ready; infinity while it is not."""
        self._assignments = RetryRecord()
        """Epochs that could not be assigned since the engine was ready."""
        self._connections = RetryRecord()
        """Epochs whose workers could not reach each other since the engine was ready."""
        self._loading_since = 0.0
        """Time at which the current epoch began to load."""
        self._seconds_per_layer = 0.0
        """Longest time in which an epoch has loaded, over the layers of its largest stage."""
        self._has_begun_measuring = self._has_chosen_layers = False
        """Actions of the state MEASURING that have been returned."""
        self._limits = limits
        self._has_standbys = bool(limits.num_standbys or limits.spare_preloads)
        """True if workers without a place may be started."""
        self._jitter = jitter
        self._should_measure = should_measure
        degrees = [1] * len(layers) if degrees is None else degrees
        nodes = nodes or [LOCAL_NODE] * len(layers)
        places = [node for node, degree in zip(nodes, degrees, strict=True) for _ in range(degree)]
        self._pool = WorkerPool(places, limits, jitter)
        self._stages = Stages(layers, degrees, nodes, self._pool, repartition)
        self._changes = PlannedChanges(self._stages, self._pool, limits, jitter)
        self.draining = self._changes.draining
        """Nodes that get no stages any more, and are dismissed once they have none."""
        self.drain_errors = self._changes.drain_errors
        """Reason for which a drain was ended, by node."""

    @property
    def is_over(self) -> bool:
        """True if the engine has given up or was stopped."""
        return self.state is RecoveryState.DEAD

    @property
    def layers(self) -> list[tuple[int, int]]:
        """First layer of each stage and first layer after it, from the next epoch on."""
        return list(self._stages.layers)

    @property
    def degrees(self) -> list[int]:
        """Number of ranks of each stage, from the next epoch on."""
        return list(self._stages.degrees)

    @property
    def stage_nodes(self) -> list[str]:
        """Name of the node of each stage; empty while its node is lost."""
        return self._stages.living_nodes

    @property
    def vacant_nodes(self) -> list[str]:
        """Names of the lost nodes whose stages wait for a node."""
        return list(self._stages.vacancies)

    @property
    def return_until(self) -> float:
        """Time until which the lost nodes are awaited; infinity if none is lost."""
        return self._stages.return_until

    @property
    def next_deadline(self) -> float:
        """Time at which `on_timer` has to be called; infinity if only events are awaited."""
        if self.state is RecoveryState.NEW or self.is_over:
            return math.inf
        times = [worker.deadline for worker in self._pool.workers.values()]
        if self.recovering_since is not None and not self.is_overdue:
            times.append(self.recovering_since + self._limits.recovery_timeout)
        if self._stages.vacancies:
            times.append(self._join_time)
        if self.state is RecoveryState.FORMING:
            times += self._pool.respawn_times
            if self._stages.vacancies:
                times.append(self._stages.repartition_time)
            if self._pool.is_formed:
                times.append(max(self._assignments.retry_at, self._connections.retry_at))
        elif self.state is RecoveryState.READY:
            if self._has_standbys:
                times.append(self._pool.standby_time)
            if not self._changes.is_idle:
                times.append(self._changes.next_time)
        return min(times, default=math.inf)

    @property
    def senders(self) -> list[int]:
        """Processes that have not exited, standby workers included."""
        return list(self._pool.workers)

    def workers_on(self, node: str) -> list[int]:
        """Return the processes of a node that have not exited."""
        return [worker.sender for worker in self._pool.workers.values() if worker.node == node]

    def name_of(self, sender: int) -> RankName | None:
        """Return the stage and rank of a worker that has not exited; None for a standby worker."""
        worker = self._pool.workers.get(sender)
        return None if worker is None or worker.place is None else self._stages.names[worker.place]

    def is_exiting(self, sender: int) -> bool:
        """Return True if a process has exited or was killed."""
        return self._pool.running(sender) is None

    def start(self, now: float) -> list[Action]:
        """Start the engine."""
        if self.state is not RecoveryState.NEW:
            return []
        self.state = RecoveryState.FORMING
        return self._advance(now)

    def stop(self) -> None:
        """End the engine without an action; later events are ignored."""
        self.state = RecoveryState.DEAD

    def on_exit(self, sender: int, cause: str, now: float, is_poison: bool = False) -> list[Action]:
        """Handle the exit of a process that is reaped.

        Args:
            sender: the process.
            cause: description of the exit.
            now: time in seconds.
            is_poison: True if a request is known to have caused the death; it uses up no restart.
        """
        worker = self._pool.remove(sender)
        if worker is None or self.is_over:
            return []
        actions: list[Action] = []
        if worker.place is None:
            if worker.is_reserved and not worker.is_dropped:
                actions += self._changes.on_reserved_lost(now)
            elif not worker.is_dropped:
                self._pool.on_standby_exit(now)
            return [*actions, *self._advance(now)]
        if worker.activity is not Activity.EXITING:
            actions += self._on_death(worker.place, worker.activity, cause, now, is_poison)
        return [*actions, *self._advance(now)]

    def on_import_failed(
        self, sender: int, cause: str, now: float, is_poison: bool = False
    ) -> list[Action]:
        """Handle the exit of a worker whose modules cannot be imported.

        The first start gives up, because each further worker would fail in the same way.
        """
        worker = self._pool.workers.get(sender)
        if self.has_been_ready or self.is_over or worker is None or worker.place is None:
            return self.on_exit(sender, cause, now, is_poison)
        self._pool.remove(sender)
        return self._give_up(cause)

    def on_failed(
        self, sender: int, cause: str, now: float, is_poison: bool = False
    ) -> list[Action]:
        """Handle a worker's own report that it has failed and ends.

        During the first start the engine gives up, because the failure would occur again: the
        model cannot be read, for example.
        """
        worker = self._pool.running(sender)
        if worker is None:
            return []
        if not (self.has_been_ready or self.is_over or worker.place is None):
            return self._give_up(cause)
        return self.on_lost(sender, cause, now, is_poison)

    def on_lost(self, sender: int, cause: str, now: float, is_poison: bool = False) -> list[Action]:
        """Handle a worker that is frozen or cannot be reached: it is killed and replaced."""
        worker = self._pool.running(sender)
        if worker is None or self.is_over:
            return []
        activity = worker.activity
        actions: list[Action] = [self._pool.kill(worker, cause)]
        if worker.place is not None:
            actions += self._on_death(worker.place, activity, cause, now, is_poison)
        elif worker.is_reserved:
            worker.is_dropped = True
            actions += self._changes.on_reserved_lost(now)
        return actions

    def on_assignment_failed(self, epoch: int, cause: str, now: float) -> list[Action]:
        """Assign an epoch again after a delay, because no worker has got the assignment."""
        if epoch != self.epoch or self.state is not RecoveryState.LOADING:
            return []
        self.state = RecoveryState.FORMING
        self.phase_times.enter(RecoveryPhase.CLOSE, now)
        self._pool.mark_idle()
        cause = f"the stages could not be assigned: {cause}"
        if self._stages.is_trial:
            return self._revert_change(cause, now)
        if not self._count_failure(self._assignments, now):
            return self._give_up(cause)
        return []

    def on_epoch_failed(self, epoch: int, cause: str, now: float) -> list[Action]:
        """End an epoch without a death, because its workers cannot reach each other.

        It is tried again after a delay: for ever if the engine has been ready, because networks
        return; otherwise as often as an assignment.
        """
        has_no_instances = self.state in (RecoveryState.FORMING, RecoveryState.MEASURING)
        if epoch != self.epoch or has_no_instances or self.is_over:
            return []
        if self._stages.is_trial:
            return self._revert_change(cause, now)
        if not (self._count_failure(self._connections, now) or self.has_been_ready):
            return self._give_up(f"the stages could not be connected: {cause}")
        return [*self._leave(cause, now), *self._advance(now)]

    def on_connected(self, sender: int, now: float) -> list[Action]:
        """Handle the first message of a process: from now on it has to answer in time."""
        worker = self._pool.workers.get(sender)
        if worker is None or worker.has_connected:
            return []
        worker.has_connected = True
        if worker.activity is Activity.CLOSING:
            worker.begin_closing(now, self._limits)
        if self.state is RecoveryState.LOADING and self._pool.is_connected:
            self.phase_times.enter(RecoveryPhase.LOAD, now)
        return self._advance(now)

    def on_measured(self, sender: int, now: float, keeps_weights: bool = True) -> list[Action]:
        """Handle the report that a worker has measured its speed.

        Args:
            sender: id of the worker.
            now: time in seconds.
            keeps_weights: False if the process has to exit to free the memory of the measurement.
        """
        if self.state is RecoveryState.MEASURING and (worker := self._pool.finish_phase(sender)):
            worker.keeps_weights = keeps_weights
        return self._advance(now)

    def change_layers(
        self, layers: Sequence[tuple[int, int]], cause: str, now: float
    ) -> list[Action]:
        """Divide the layers: after `ChooseLayers`, or as a planned change while the engine serves.

        In other states a planned change is ignored; the caller has to request it again.
        """
        if self.is_over or len(layers) != len(self._stages.layers):
            return []
        if self.state is RecoveryState.MEASURING and self._has_chosen_layers:
            self._stages.layers = list(layers)
            self._should_measure = False
            self.state = RecoveryState.FORMING
            return [*self._pool.end_measuring(), *self._advance(now)]
        if self.state is not RecoveryState.READY or list(layers) == self._stages.layers:
            return []
        self._changes.request(NodeShape(list(layers), self.degrees, self.stage_nodes), cause)
        return self._advance(now)

    def on_progress(self, sender: int, now: float) -> None:
        """Handle progress of loading, which extends the worker's time."""
        worker = self._pool.workers.get(sender)
        if worker is not None and worker.activity is Activity.ASSIGNED:
            worker.deadline = now + self._limits.phase_seconds

    def on_loaded(self, sender: int, now: float, keeps_weights: bool = True) -> list[Action]:
        """Handle the report that a worker has loaded the weights of its stage.

        Args:
            sender: id of the worker.
            now: time in seconds.
            keeps_weights: False if the process has to exit to free the memory of its stage.
        """
        if self.state is RecoveryState.LOADING and (worker := self._pool.finish_phase(sender)):
            worker.keeps_weights = keeps_weights
        return self._advance(now)

    def on_ready(self, sender: int, now: float) -> list[Action]:
        """Handle the report that a worker has its KV cache."""
        if self.state is RecoveryState.INITIALIZING:
            self._pool.finish_phase(sender)
        return self._advance(now)

    def on_closed(self, sender: int, now: float) -> list[Action]:
        """Handle the report that a surviving worker has freed its KV cache."""
        worker = self._pool.workers.get(sender)
        if worker is None or worker.activity is not Activity.CLOSING:
            return []
        worker.mark_idle()
        return self._advance(now)

    def on_warm(self, now: float) -> list[Action]:
        """Handle the first token of the epoch, which the warm-up request requested."""
        if self.state is not RecoveryState.WARMING:
            return []
        self.state = RecoveryState.READY
        self.has_been_ready = True
        self._served = self.placement
        if self.recovering_since is not None:
            self._pool.delay_standbys(now + STANDBY_SECONDS)
        self.recovering_since, self.is_overdue = None, False
        self.phase_times.end(now)
        self._ready_since = now
        self._assignments, self._connections = RetryRecord(), RetryRecord()
        for worker in self._pool.placed:
            worker.deadline = math.inf
        self._stages.confirm()
        return [AttachClient(self.epoch), *self._advance(now)]

    def on_step_committed(self) -> None:
        """Handle a committed step of requests: earlier deaths no longer count."""
        if self.state is RecoveryState.READY:
            self._pool.forget_deaths()

    def on_timer(self, now: float) -> list[Action]:
        """Handle the passing of time: deadlines, backoffs and the recovery timeout."""
        if self.state is RecoveryState.NEW or self.is_over:
            return []
        actions: list[Action] = []
        for worker in list(self._pool.workers.values()):
            # The first late worker may have given the others another deadline.
            if worker.deadline <= now:
                actions += self._on_late(worker, now)
            if actions and isinstance(actions[-1], GiveUp):
                return actions
        if self._join_time <= now:
            return [*actions, *self._give_up(self._describe_vacancy())]
        if self.recovering_since is not None and not self.is_overdue:
            seconds = self._limits.recovery_timeout
            if self.recovering_since + seconds <= now:
                self.is_overdue = True
                cause = f"the engine did not recover within {seconds:g} seconds"
                actions.append(RejectParked(cause))
        return [*actions, *self._advance(now)]

    def on_node_lost(
        self,
        node: str,
        cause: str,
        now: float,
        is_death: bool = False,
        is_poison: bool = False,
        has_left: bool = False,
    ) -> list[Action]:
        """Handle the loss of a node: its workers count as lost, even if they still run.

        Args:
            node: name of the node.
            cause: description of the loss.
            now: time in seconds.
            is_death: True if the node's agent has died, which counts as a death of each of its
                workers; False if the node is silent, its connection was lost, or it has left.
            is_poison: True if a request is known to have caused the death.
            has_left: True if the node has left by itself: its stages do not wait for it.
        """
        if self.is_over or node == LOCAL_NODE or not self._stages.is_alive(node):
            return []
        # Nothing waits for a node that was to be dismissed.
        may_return = not has_left and node not in self.draining
        wait = self._return_seconds(node, now) if may_return else 0.0
        stages, gone = self._stages.remove_node(node, cause, now, wait)
        actions = self._changes.on_node_gone(node)
        if not stages or self.state is RecoveryState.NEW:
            return [*actions, *self._advance(now)]
        if self._stages.is_new(node) and self.state is not RecoveryState.READY:
            return [*actions, *self._revert_change(cause, now)]
        # What fits is known better than at an earlier loss, which may have been before the start.
        self._stages.allow_repartition()
        was_poisoned = self._was_poisoned
        is_counted = is_death and not is_poison
        self._forget_old_deaths(now)
        if is_counted and not self._pool.count_deaths(gone, was_poisoned, now):
            return self._give_up(self._pool.describe_restarts(cause))
        if self.state is not RecoveryState.FORMING:
            actions += self._leave(cause, now, is_poison)
        return [*actions, *self._advance(now)]

    def returning_workers(self, node: str, capacity: int, workers: Sequence[int]) -> list[int]:
        """Return the workers of an earlier session that a node may keep when it joins."""
        return list(self._stages.returning_workers(node, capacity, workers))

    def on_node_joined(
        self,
        node: str,
        capacity: int,
        workers: Sequence[int],
        now: float,
        is_spare: bool = True,
    ) -> list[Action]:
        """Handle a node that has joined or returned.

        A node that returns gets its stages back if no other node has got them, with its workers.
        Any other node is a spare, until a planned change gives it stages.

        Args:
            node: name of the node.
            capacity: number of workers that it can have.
            workers: ids of its surviving workers of an earlier session, which have no KV cache.
            now: time in seconds.
            is_spare: True if it takes stages only when others are lost.

        Returns:
            Actions, among them kills of the workers that are not needed.
        """
        if self.is_over or self._stages.is_alive(node):
            return []
        kills = self._stages.add_node(node, capacity, workers)
        self._changes.on_node_joined(node, is_spare)
        return [*kills, *self._advance(now)]

    def on_memory_short(self, epoch: int, cause: str, now: float) -> list[Action]:
        """Handle a start of the pipeline whose memory cannot hold one sequence of full length.

        Returns:
            Actions by which the engine waits for other nodes; none if that cannot help.
        """
        is_current = epoch == self.epoch and self.state is RecoveryState.INITIALIZING
        if not (is_current and self.has_been_ready and self._stages.has_former):
            return []
        return self._revert_change(cause, now)

    def refuse_drain(self, node: str) -> str:
        """Return the reason for which a node cannot be drained; empty if it can."""
        return self._changes.refuse_drain(node, self.state)

    def drain_node(self, node: str, now: float) -> list[Action]:
        """Start to move the stages of a connected node to other nodes.

        A node that is drained already stays so. `refuse_drain` has to permit it.
        """
        if self.is_over or not self._stages.is_alive(node) or node in self.draining:
            return []
        return [*self._changes.drain(node), *self._advance(now)]

    def on_prepared(self, sender: int, number: int, now: float, error: str = "") -> list[Action]:
        """Handle a worker's report that its weights for a change are loaded or will be later.

        Args:
            sender: id of the worker.
            number: number of the change.
            now: time in seconds.
            error: reason of a worker that cannot load them at all, which ends the change; else
                empty.
        """
        return [*self._changes.on_prepared(sender, number, error), *self._advance(now)]

    def on_preparation_failed(self, epoch: int, now: float) -> list[Action]:
        """Continue a planned change although a node could not prepare it."""
        if epoch == self.epoch + 1:
            self._changes.on_preparation_failed()
        return self._advance(now)

    def _on_late(self, worker: WorkerRecord, now: float) -> list[Action]:
        """Kill a worker that has missed its deadline."""
        if worker.activity is Activity.CLOSING:
            # Another place has died and was counted, so this is no death of its own.
            seconds = self._limits.close_seconds
            cause = f"it did not close its stage within {seconds:g} seconds"
            return [self._pool.kill(worker, cause)]
        cause = f"{self.state} took longer than {self._limits.phase_seconds:g} seconds"
        return self.on_lost(worker.sender, cause, now)

    @property
    def _join_time(self) -> float:
        """Time at which an engine that has never been ready no longer waits for a lost node."""
        vacancy = self._stages.oldest_vacancy
        if self.has_been_ready or vacancy is None:
            return math.inf
        return vacancy.since + self._limits.join_seconds

    def _describe_vacancy(self) -> str:
        """Return the reason for which the engine cannot start without a lost node."""
        vacancy = self._stages.oldest_vacancy
        assert vacancy is not None
        return (
            f"{vacancy.cause}; node {vacancy.node} did not return within "
            f"{self._limits.join_seconds:g} seconds, no spare node took its stages, and the other "
            "nodes cannot hold them"
        )

    def _return_seconds(self, node: str, now: float) -> float:
        """Return the time for which the stages of a node that is being lost wait for it."""
        stages = self._stages.stages_on(node)
        if self._limits.node_return_seconds is not None or not stages:
            return self._limits.node_return_seconds or 0.0
        seconds = predict_reload_seconds(
            self._seconds_per_layer,
            self._stages.count_layers(stages),
            # The first stage is never lost.
            len(self._stages.layers) - len(stages),
        )
        if self.predict_recompute is not None:
            seconds += self.predict_recompute()
        since = now if self.recovering_since is None else self.recovering_since
        left = math.inf if self.is_overdue else since + self._limits.recovery_timeout - now
        return choose_return_seconds(seconds, left)

    def _count_failure(self, record: RetryRecord, now: float) -> bool:
        """Count a failed epoch, and delay the next; return False if it was one too many."""
        # Not tried again at once, because the obstacle is still there.
        record.on_failure(now, self._jitter, num_earlier=1)
        return record.num_failures <= self._limits.max_restarts

    def _advance(self, now: float) -> list[Action]:
        """Begin the phase that the workers permit, or prepare a change; return the actions."""
        actions: list[Action] = []
        match self.state:
            case RecoveryState.READY:
                return self._prepare_change(now)
            case RecoveryState.FORMING:
                if self._stages.vacancies:
                    actions += self._stages.fill_vacancies(now)
                actions += self._pool.fill_places(now)
                retry_at = max(self._assignments.retry_at, self._connections.retry_at)
                if retry_at <= now and self._pool.is_formed:
                    actions += self._measure(now) if self._should_measure else self._assign(now)
            case RecoveryState.MEASURING:
                actions += self._measure(now)
            case RecoveryState.LOADING if self._pool.is_phase_finished:
                largest = max(end - begin for begin, end in self._stages.layers)
                seconds = (now - self._loading_since) / largest
                # Epochs whose workers keep weights load less.
                self._seconds_per_layer = max(self._seconds_per_layer, seconds)
                actions.append(InitializeCaches(self.epoch))
                self._begin_phase(RecoveryState.INITIALIZING, now)
                self.phase_times.enter(RecoveryPhase.ALLOCATE, now)
            case RecoveryState.INITIALIZING if self._pool.is_phase_finished:
                actions.append(WarmUp(self.epoch))
                self._begin_phase(RecoveryState.WARMING, now)
                self.phase_times.enter(RecoveryPhase.WARM_UP, now)
        return actions

    def _begin_phase(self, state: RecoveryState, now: float) -> None:
        self.state = state
        for worker in self._pool.placed:
            worker.begin_phase(now, self._limits)

    def _measure(self, now: float) -> list[Action]:
        """Let all workers measure at once, when none imports its modules any more."""
        if self.state is not RecoveryState.MEASURING:
            self._begin_phase(RecoveryState.MEASURING, now)
            self._has_begun_measuring = self._has_chosen_layers = False
        if self._pool.is_connected and not self._has_begun_measuring:
            self._has_begun_measuring = True
            return [MeasureWorkers(self._stages.make_placement(self.epoch + 1))]
        if self._pool.is_phase_finished and not self._has_chosen_layers:
            self._has_chosen_layers = True
            return [ChooseLayers()]
        return []

    def _assign(self, now: float) -> list[Action]:
        """Begin the next epoch; every place has a worker without an instance."""
        self.epoch += 1
        self.placement = self._stages.make_placement(self.epoch)
        self._loading_since = now
        self._begin_phase(RecoveryState.LOADING, now)
        is_started = self._pool.is_connected
        phase = RecoveryPhase.LOAD if is_started else RecoveryPhase.START
        self.phase_times.enter(phase, now)
        return [AssignEpoch(self.placement, self._can_keep_kv_cache(self.placement))]

    def _can_keep_kv_cache(self, placement: Placement) -> bool:
        """Return True if a new epoch may begin with the KV blocks of the one before.

        Not if that one has not served, or if a worker has died twice without a finished step
        between: the blocks might be the cause.
        """
        served, self._served = self._served, None
        if served is None or self._pool.most_deaths > 1:
            return False
        return has_same_places(served, placement)

    def _prepare_change(self, now: float) -> list[Action]:
        """Prepare what the next epoch needs, while the present one serves."""
        actions: list[Action] = []
        changes, is_idle = self._changes, self._changes.is_idle
        if not is_idle:
            actions += changes.dismiss_drained()
        if self._has_standbys:
            # Only now, because the imports of a standby worker would slow down a recovery.
            find_costliest = self.find_costliest if self._limits.spare_preloads else None
            actions += changes.fill_standbys(self.epoch, find_costliest, now)
        if not is_idle:
            actions += changes.prepare(self.epoch, self.extend, self.uses_joined_nodes, now)
            if change := changes.pop_due(now):
                actions += self._begin_change(change, now)
        return actions

    def _begin_change(self, change: PlannedChange, now: float) -> list[Action]:
        """End the epoch, and give the next one the stages of a change."""
        actions: list[Action] = [BeginChange(change.kind, change.cause)]
        actions += self._leave(change.cause, now)
        kills = self._stages.try_shape(change.shape)
        self._pool.assign_places(change.reserved)
        return [*actions, ChangeShape(change.shape), *kills, *self._advance(now)]

    def _revert_change(self, cause: str, now: float) -> list[Action]:
        """Return to the stages that served last, because the present ones cannot begin."""
        actions = [*self._leave(cause, now), *self._stages.restore(cause, now)]
        self._changes.end_drains(cause)
        return [*actions, *self._advance(now)]

    def _leave(self, cause: str, now: float, is_poison: bool = False) -> list[Action]:
        """Stop serving and begin a recovery, after a worker died or for a planned change.

        The preparation of a change that has not begun ends with it.

        Args:
            cause: reason, for logs and the status page.
            now: time in seconds.
            is_poison: True if a request has crashed a worker.

        Returns:
            Actions for the supervisor: detach the clients, close the stages of all workers.
        """
        self._was_poisoned = is_poison
        actions: list[Action] = []
        self._ready_since = math.inf
        if self.state is RecoveryState.READY:
            self.recovering_since = now
            self.phase_times.begin(now)
            actions.append(DetachClient(cause))
        self.state = RecoveryState.FORMING
        self.phase_times.enter(RecoveryPhase.CLOSE, now)
        actions += self._pool.close_instances(self.epoch, now)
        if self._changes.kind:
            actions += self._changes.end_preparation()
        return actions

    def _on_death(
        self, place: int, activity: Activity, cause: str, now: float, is_poison: bool
    ) -> list[Action]:
        """Count the death of a place and leave the epoch, or give up if it was one too many.

        Args:
            place: index of the place.
            activity: of its worker before the death.
            cause: description of the death.
            now: time in seconds.
            is_poison: True if a request has caused it.
        """
        is_closing, is_trial = activity is Activity.CLOSING, self._stages.is_trial
        if (is_trial and activity is Activity.ASSIGNED) or (
            is_trial and not is_closing and self._stages.is_new(self._stages.node_of(place))
        ):
            # No request has been computed by the new stages, and the ones before served.
            return self._revert_change(cause, now)
        if is_closing:
            # The ranks of a stage compute a request together, so it may kill several of them.
            is_poison = is_poison or self._was_poisoned
        self._forget_old_deaths(now)
        if not is_poison and not self._pool.count_death(place):
            return self._give_up(self._pool.describe_restarts(cause))
        self._pool.delay_respawn(place, now)
        if self.state is RecoveryState.FORMING:
            return []
        return self._leave(cause, now, is_poison)

    def _forget_old_deaths(self, now: float) -> None:
        """Forget the deaths before a long time without one, in which no request may have come."""
        if now - self._ready_since >= STEADY_SECONDS:
            self._pool.forget_deaths()

    def _give_up(self, cause: str) -> list[Action]:
        self.state = RecoveryState.DEAD
        return [GiveUp(cause)]

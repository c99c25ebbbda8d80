"""Recovery: the state machine of an engine's life, from the first start to its end.

The supervisor reports events with their time and executes the actions that each returns. The first
start, a restart and the use of a standby worker are one path: give each place a worker without an
instance, assign the next generation, initialize the caches, warm up, attach the client.

Stages of a lost node get another node at once if a spare has the capacity. Otherwise they wait for
the same node (`return_wait`); then the layers are cut over the nodes that are left, if
their memory suffices; otherwise they wait on. An engine that has never been ready gives up after
`join_seconds` of this, because whoever started it wants to know; later it waits for ever, with the
parked requests rejected after `recovery_timeout`.
"""

import math
from collections.abc import Iterator, Sequence

from gllm.recovery.actions import Action, AttachClient, GiveUp, RejectParked
from gllm.recovery.node_layout import NodeShape
from gllm.recovery.node_recovery import NodeRecovery
from gllm.recovery.placement import PlaceName
from gllm.recovery.records import Activity, RecoveryState, RetryRecord, WorkerRecord


class Recovery(NodeRecovery):
    """Decides which processes an engine has, and when it gives up."""

    @property
    def next_deadline(self) -> float:
        """Time at which `on_timer` has to be called; infinity if only events are awaited."""
        if self.state is RecoveryState.NEW or self.is_over:
            return math.inf
        return min(self._deadlines(), default=math.inf)

    @property
    def senders(self) -> list[int]:
        """Processes that have not exited, standby workers included."""
        return list(self._pool.workers)

    def workers_on(self, node: str) -> list[int]:
        """Return the processes of a node that have not exited."""
        return [each.sender for each in self._pool.workers.values() if each.node == node]

    def name_of(self, sender: int) -> PlaceName | None:
        """Return the place of a worker that has not exited; None for a standby worker."""
        worker = self._pool.workers.get(sender)
        return None if worker is None or worker.place is None else self._names[worker.place]

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
        """End the engine's life without an action; nothing follows."""
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
                actions += self._on_reserved_lost(now)
            elif not worker.is_dropped:
                self._pool.on_standby_exit(now)
            return [*actions, *self._advance(now)]
        if worker.activity is not Activity.EXITING:
            actions += self._on_death(worker.place, worker.activity, cause, now, is_poison)
        return [*actions, *self._advance(now)]

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
            actions += self._on_reserved_lost(now)
        return actions

    def on_assignment_failed(self, generation: int, cause: str, now: float) -> list[Action]:
        """Assign a generation again after a delay, because no worker has got the assignment."""
        if generation != self.generation or self.state is not RecoveryState.LOADING:
            return []
        self.state = RecoveryState.FORMING
        for worker in self._pool.placed:
            worker.rest()
        if self._before_change is not None:
            return self._revert_change(f"the stages could not be assigned: {cause}", now)
        # Not tried again at once, because the obstacle is still there.
        self._assignments.on_failure(now, self._jitter, num_earlier=1)
        if self._assignments.num_failures > self._limits.max_restarts:
            return self._give_up(f"the stages could not be assigned: {cause}")
        return []

    def on_generation_failed(self, generation: int, cause: str, now: float) -> list[Action]:
        """End a generation without a death, because its workers cannot reach each other.

        It is tried again after a delay: for ever if the engine has been ready, because networks
        return; otherwise as often as an assignment.
        """
        has_instances = self.state not in (RecoveryState.FORMING, RecoveryState.MEASURING)
        if generation != self.generation or not has_instances or self.is_over:
            return []
        if self._before_change is not None:
            return self._revert_change(cause, now)
        self._connections.on_failure(now, self._jitter, num_earlier=1)
        is_final = self._connections.num_failures > self._limits.max_restarts
        if is_final and not self.has_been_ready:
            return self._give_up(f"the stages could not be connected: {cause}")
        self._was_poisoned = False
        return [*self._leave(cause, now), *self._advance(now)]

    def on_connected(self, sender: int, now: float) -> list[Action]:
        """Handle the first message of a process: from now on it has to answer in time."""
        worker = self._pool.workers.get(sender)
        if worker is None or worker.has_connected:
            return []
        worker.has_connected = True
        if worker.activity is Activity.CLOSING:
            worker.begin_closing(now, self._limits)
        return self._advance(now)

    def on_measured(self, sender: int, now: float, keeps_weights: bool = True) -> list[Action]:
        """Handle a worker's measurement of its speed.

        keeps_weights: False if the process has to end to free the memory of the measurement.
        """
        if worker := self._finish_phase(sender, RecoveryState.MEASURING):
            worker.keeps_weights = keeps_weights
        return self._advance(now)

    def change_layers(
        self, layers: Sequence[tuple[int, int]], cause: str, now: float
    ) -> list[Action]:
        """Divide the layers: the answer to `ChooseLayers`, or a planned change while it serves.

        In other states a planned change is ignored; whoever wants it asks again.
        """
        if self.is_over or len(layers) != len(self._layers):
            return []
        if self.state is RecoveryState.MEASURING and self._has_chosen_layers:
            self._layers = list(layers)
            self._should_measure = False
            self.state = RecoveryState.FORMING
            return [*self._pool.end_measuring(), *self._advance(now)]
        if self.state is not RecoveryState.READY or list(layers) == self._layers:
            return []
        self._requested = NodeShape(list(layers), self.degrees, self.stage_nodes), cause
        return self._advance(now)

    def on_progress(self, sender: int, now: float) -> None:
        """Handle progress of loading, which extends the worker's time."""
        worker = self._pool.workers.get(sender)
        if worker is not None and worker.activity is Activity.ASSIGNED:
            worker.deadline = now + self._limits.phase_seconds

    def on_loaded(self, sender: int, now: float, keeps_weights: bool = True) -> list[Action]:
        """Handle the report that a worker has loaded the weights of its stage.

        keeps_weights: False if the process has to end to free the memory of its instance.
        """
        if worker := self._finish_phase(sender, RecoveryState.LOADING):
            worker.keeps_weights = keeps_weights
        return self._advance(now)

    def on_ready(self, sender: int, now: float) -> list[Action]:
        """Handle the report that a worker has its KV cache."""
        self._finish_phase(sender, RecoveryState.INITIALIZING)
        return self._advance(now)

    def on_closed(self, sender: int, now: float) -> list[Action]:
        """Handle the report that a survivor has closed its instance."""
        worker = self._pool.workers.get(sender)
        if worker is None or worker.activity is not Activity.CLOSING:
            return []
        worker.rest()
        return self._advance(now)

    def on_warm(self, now: float) -> list[Action]:
        """Handle the first token of the generation, which the warm-up request requested."""
        if self.state is not RecoveryState.WARMING:
            return []
        self.state = RecoveryState.READY
        self.has_been_ready = True
        self.recovering_since, self.is_overdue = None, False
        self._assignments, self._connections = RetryRecord(), RetryRecord()
        self._former_shape = self._before_change = None
        for worker in self._pool.placed:
            worker.deadline = math.inf
        return [AttachClient(self.generation), *self._advance(now)]

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
        if self._rejection_time <= now:
            self.is_overdue = True
            seconds = self._limits.recovery_timeout
            actions.append(RejectParked(f"the engine did not recover within {seconds:g} seconds"))
        return [*actions, *self._advance(now)]

    @property
    def _rejection_time(self) -> float:
        """Time at which the parked requests are rejected."""
        if self.recovering_since is None or self.is_overdue:
            return math.inf
        return self.recovering_since + self._limits.recovery_timeout

    @property
    def _join_time(self) -> float:
        """Time at which an engine that has never been ready no longer waits for a lost node."""
        vacancy = self._nodes.oldest_vacancy
        if self.has_been_ready or vacancy is None:
            return math.inf
        return vacancy.since + self._limits.join_seconds

    def _deadlines(self) -> Iterator[float]:
        yield self._rejection_time
        yield self._join_time
        yield from self._pool.deadlines
        if self.state is RecoveryState.FORMING:
            yield from self._pool.respawn_times
            yield self._recut_time
            if self._pool.is_formed:
                yield self._assign_time
        if self.state is RecoveryState.READY:
            yield self._pool.standby_time
            yield self._change_time

    def _on_late(self, worker: WorkerRecord, now: float) -> list[Action]:
        """Kill a worker that has missed its deadline."""
        if worker.activity is Activity.CLOSING:
            # Another place has died and was counted, so this is no death of its own.
            seconds = self._limits.close_seconds
            cause = f"it did not close its stage within {seconds:g} seconds"
            return [self._pool.kill(worker, cause)]
        cause = f"{self.state} took longer than {self._limits.phase_seconds:g} seconds"
        return self.on_lost(worker.sender, cause, now)

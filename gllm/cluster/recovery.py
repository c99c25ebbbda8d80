"""Recovery: the state machine of an engine's life, from the first start to its end.

The supervisor reports events with their time and executes the actions that each returns. The first
start, a restart and the use of a standby worker are one path: give each place a worker without an
instance, assign the next generation, initialize the caches, warm up, attach the client.
"""

import math
from collections.abc import Iterator, Sequence
from random import Random

from gllm.cluster.actions import (
    Action,
    AssignGeneration,
    AttachClient,
    ChooseLayers,
    DetachClient,
    GiveUp,
    InitializeCaches,
    MeasureWorkers,
    RejectParked,
    WarmUp,
)
from gllm.cluster.placement import Placement, PlaceName, Slot, make_placement, place_names
from gllm.cluster.records import (
    Activity,
    RecoveryLimits,
    RecoveryState,
    RetryRecord,
    WorkerRecord,
)
from gllm.cluster.worker_pool import WorkerPool


class Recovery:
    """Decides which processes an engine has, and when it gives up."""

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        limits: RecoveryLimits,
        jitter: Random,
        degrees: Sequence[int] | None = None,
        should_measure: bool = False,
    ) -> None:
        """Create the state of an engine that has not started.

        Args:
            layers: first layer of each stage and first layer after it.
            limits: limits of a recovery.
            jitter: source of the random part of backoffs.
            degrees: number of ranks of each stage; None for one each.
            should_measure: divide the layers by measurements of the workers before the first
                generation.
        """
        self.state = RecoveryState.NEW
        self.placement: Placement | None = None
        """Placement of the current generation."""
        self.recovering_since: float | None = None
        """Time of the death that the engine recovers from; None if it has not been ready before,
        or is ready."""
        self.has_been_ready = False
        self.is_overdue = False
        """True if this recovery has taken longer than the timeout: requests are rejected."""
        self.generation = 0
        """Number of the current generation; 0 before the first."""
        self._layers = list(layers)
        self._degrees = [1] * len(self._layers) if degrees is None else list(degrees)
        self._names = place_names(self._degrees)
        self._limits = limits
        self._jitter = jitter
        self._pool = WorkerPool(len(self._names), limits, jitter)
        self._assignments = RetryRecord()
        """Generations that could not be assigned since the engine was ready."""
        self._was_poisoned = False
        """True if a request ended the last generation."""
        self._should_measure = should_measure
        self._has_begun_measuring = self._has_chosen_layers = False
        """Actions of the state MEASURING that have been returned."""

    @property
    def layers(self) -> list[tuple[int, int]]:
        """First layer of each stage and first layer after it, from the next generation on."""
        return list(self._layers)

    @property
    def is_over(self) -> bool:
        """True if the engine has given up or was stopped."""
        return self.state is RecoveryState.DEAD

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
        if worker.place is None:
            self._pool.on_standby_exit(now)
            return self._advance(now)
        actions: list[Action] = []
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
        return actions

    def on_assignment_failed(self, generation: int, cause: str, now: float) -> list[Action]:
        """Assign a generation again after a delay, because no worker has got the assignment."""
        if generation != self.generation or self.state is not RecoveryState.LOADING:
            return []
        self.state = RecoveryState.FORMING
        for worker in self._pool.placed:
            worker.rest()
        # Not tried again at once, because the obstacle is still there.
        self._assignments.on_failure(now, self._jitter, num_earlier=1)
        if self._assignments.num_failures > self._limits.max_restarts:
            return self._give_up(f"the stages could not be assigned: {cause}")
        return []

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
        """Begin a generation with other layers; the answer to `ChooseLayers`, or a planned change.

        While the engine serves, the requests are parked as in a recovery, but no death counts.
        """
        if self.is_over or len(layers) != len(self._layers):
            return []
        has_changed, self._layers = list(layers) != self._layers, list(layers)
        if self.state is RecoveryState.MEASURING and self._has_chosen_layers:
            self._should_measure = False
            self.state = RecoveryState.FORMING
            return [*self._pool.end_measuring(), *self._advance(now)]
        waiting = (RecoveryState.NEW, RecoveryState.FORMING, RecoveryState.MEASURING)
        if not has_changed or self.state in waiting:
            return []
        self._was_poisoned = False
        return [*self._leave(cause, now), *self._advance(now)]

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
        self._assignments = RetryRecord()
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

    def _deadlines(self) -> Iterator[float]:
        yield self._rejection_time
        yield from self._pool.deadlines
        if self.state is RecoveryState.FORMING:
            yield from self._pool.respawn_times
            if self._pool.is_formed:
                yield self._assignments.retry_at
        if self.state is RecoveryState.READY:
            yield self._pool.standby_time

    def _on_late(self, worker: WorkerRecord, now: float) -> list[Action]:
        """Kill a worker that has missed its deadline."""
        if worker.activity is Activity.CLOSING:
            # Another place has died and was counted, so this is no death of its own.
            seconds = self._limits.close_seconds
            cause = f"it did not close its stage within {seconds:g} seconds"
            return [self._pool.kill(worker, cause)]
        cause = f"{self.state} took longer than {self._limits.phase_seconds:g} seconds"
        return self.on_lost(worker.sender, cause, now)

    def _finish_phase(self, sender: int, state: RecoveryState) -> WorkerRecord | None:
        """Note a worker's answer to a phase; return None if it was not expected."""
        return self._pool.finish_phase(sender) if self.state is state else None

    def _advance(self, now: float) -> list[Action]:
        """Do everything that the current state permits; return the actions."""
        actions: list[Action] = []
        if self.state is RecoveryState.FORMING:
            actions += self._pool.fill_places(now)
            if self._pool.is_formed and self._assignments.retry_at <= now:
                actions += self._measure(now) if self._should_measure else [self._assign(now)]
        elif self.state is RecoveryState.MEASURING:
            actions += self._measure(now)
        elif self.state is RecoveryState.LOADING and self._pool.is_phase_finished:
            actions.append(InitializeCaches(self.generation))
            self._begin_phase(RecoveryState.INITIALIZING, now)
        elif self.state is RecoveryState.INITIALIZING and self._pool.is_phase_finished:
            actions.append(WarmUp(self.generation))
            self._begin_phase(RecoveryState.WARMING, now)
        elif self.state is RecoveryState.READY:
            # Only now, because the imports of a standby worker would slow down a recovery.
            actions += self._pool.fill_standbys(now)
        return actions

    def _begin_phase(self, state: RecoveryState, now: float) -> None:
        self.state = state
        self._pool.begin_phase(now)

    def _measure(self, now: float) -> list[Action]:
        """Let all workers measure at once, when none imports its modules any more."""
        if self.state is not RecoveryState.MEASURING:
            self._begin_phase(RecoveryState.MEASURING, now)
            self._has_begun_measuring = self._has_chosen_layers = False
        if self._pool.is_connected and not self._has_begun_measuring:
            self._has_begun_measuring = True
            return [MeasureWorkers(self._make_placement(self.generation + 1))]
        if self._pool.is_phase_finished and not self._has_chosen_layers:
            self._has_chosen_layers = True
            return [ChooseLayers()]
        return []

    def _make_placement(self, generation: int) -> Placement:
        slots = [Slot(worker.sender) for worker in self._pool.placed]
        return make_placement(generation, self._layers, slots, self._degrees)

    def _assign(self, now: float) -> Action:
        """Begin the next generation; every place has a worker without an instance."""
        self.generation += 1
        self.placement = self._make_placement(self.generation)
        self._begin_phase(RecoveryState.LOADING, now)
        return AssignGeneration(self.placement)

    def _on_death(
        self, place: int, activity: Activity, cause: str, now: float, is_poison: bool
    ) -> list[Action]:
        """Count the death of a place and leave the generation, or give up if it was one too many.

        Args:
            place: index of the place.
            activity: of its worker before the death.
            cause: description of the death.
            now: time in seconds.
            is_poison: True if a request has caused it.
        """
        if activity is Activity.CLOSING:
            # The ranks of a stage compute a request together, so it may kill several of them.
            is_poison = is_poison or self._was_poisoned
        if not is_poison and not self._pool.count_death(place):
            if num_restarts := self._limits.max_restarts:
                cause += f"; restarts without a finished step before: {num_restarts}"
            return self._give_up(cause)
        self._pool.delay_respawn(place, now)
        if self.state is RecoveryState.FORMING:
            return []
        self._was_poisoned = is_poison
        return self._leave(cause, now)

    def _leave(self, cause: str, now: float) -> list[Action]:
        """End the current generation after a death, or for a planned change."""
        actions: list[Action] = []
        if self.state is RecoveryState.READY:
            self.recovering_since = now
            actions.append(DetachClient(cause))
        self.state = RecoveryState.FORMING
        return [*actions, *self._pool.close_instances(self.generation, now)]

    def _give_up(self, cause: str) -> list[Action]:
        self.state = RecoveryState.DEAD
        return [GiveUp(cause)]

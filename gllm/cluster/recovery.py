"""Recovery: the state machine of an engine's life, from the first start to its end.

The supervisor reports events with their time and executes the actions that each returns. The first
start, a restart and the use of a standby worker are one path: give each place a worker without an
instance, assign the next generation, initialize the caches, warm up, attach the client.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import count
from random import Random

from gllm.cluster.actions import (
    Action,
    AssignGeneration,
    AttachClient,
    CloseInstances,
    DetachClient,
    GiveUp,
    InitializeCaches,
    KillWorker,
    RejectParked,
    SpawnWorker,
    WarmUp,
)
from gllm.cluster.placement import Placement, Slot, make_placement
from gllm.cluster.records import (
    Activity,
    PlaceRecord,
    RecoveryLimits,
    RecoveryState,
    RetryRecord,
    WorkerRecord,
    backoff_seconds,
)


class Recovery:
    """Decides which processes an engine has, and when it gives up."""

    def __init__(
        self, layers: Sequence[tuple[int, int]], limits: RecoveryLimits, jitter: Random
    ) -> None:
        """Create the state of an engine that has not started.

        Args:
            layers: first layer of each stage and first layer after it.
            limits: limits of a recovery.
            jitter: source of the random part of backoffs.
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
        self._limits = limits
        self._jitter = jitter
        self._senders = count(1)
        self._places = [PlaceRecord() for _ in self._layers]
        self._workers: dict[int, WorkerRecord] = {}
        """Processes that have not exited, by sender."""
        self._standbys = RetryRecord()
        """Deaths of standby workers since one was used."""
        self._assignments = RetryRecord()
        """Generations that could not be assigned since the engine was ready."""
        self._has_deaths = False
        """True if a place has died since the last committed step."""

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

    def stage_of(self, sender: int) -> int | None:
        """Return the place of a worker that has not exited; None for a standby worker."""
        worker = self._workers.get(sender)
        return None if worker is None else worker.stage

    @property
    def senders(self) -> list[int]:
        """Processes that have not exited, standby workers included."""
        return list(self._workers)

    def is_exiting(self, sender: int) -> bool:
        """Return True if a process has exited or was killed."""
        worker = self._workers.get(sender)
        return worker is None or worker.activity is Activity.EXITING

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
        worker = self._workers.pop(sender, None)
        if worker is None or self.is_over:
            return []
        if worker.stage is None:
            self._standbys.on_failure(now, self._jitter)
            return self._advance(now)
        self._places[worker.stage].sender = None
        actions: list[Action] = []
        if worker.activity is not Activity.EXITING:
            actions += self._count_death(worker.stage, cause, now, is_poison)
            actions += self._leave(cause, now)
        return [*actions, *self._advance(now)]

    def on_failed(
        self, sender: int, cause: str, now: float, is_poison: bool = False
    ) -> list[Action]:
        """Handle a worker's own report that it has failed and ends.

        During the first start the engine gives up, because the failure would occur again: the
        model cannot be read, for example.
        """
        worker = self._workers.get(sender)
        if worker is None or worker.activity is Activity.EXITING:
            return []
        if not (self.has_been_ready or self.is_over or worker.stage is None):
            return self._give_up(cause)
        return self.on_lost(sender, cause, now, is_poison)

    def on_lost(self, sender: int, cause: str, now: float, is_poison: bool = False) -> list[Action]:
        """Handle a worker that is frozen or cannot be reached: it is killed and replaced."""
        worker = self._workers.get(sender)
        if worker is None or self.is_over or worker.activity is Activity.EXITING:
            return []
        actions = self._kill(worker, cause)
        if worker.stage is not None:
            actions += self._count_death(worker.stage, cause, now, is_poison)
            actions += self._leave(cause, now)
        return actions

    def on_assignment_failed(self, generation: int, cause: str, now: float) -> list[Action]:
        """Assign a generation again after a delay, because no worker has got the assignment."""
        if generation != self.generation or self.state is not RecoveryState.LOADING:
            return []
        self.state = RecoveryState.FORMING
        for worker in self._placed_workers:
            worker.rest()
        # Not tried again at once, because the obstacle is still there.
        self._assignments.on_failure(now, self._jitter, num_earlier=1)
        if self._assignments.num_failures > self._limits.max_restarts:
            return self._give_up(f"the stages could not be assigned: {cause}")
        return []

    def on_connected(self, sender: int, now: float) -> None:
        """Handle the first message of a process: from now on it has to answer in time."""
        worker = self._workers.get(sender)
        if worker is None or worker.has_connected:
            return
        worker.has_connected = True
        if worker.activity is Activity.CLOSING:
            worker.begin_closing(now, self._limits)

    def on_progress(self, sender: int, now: float) -> None:
        """Handle progress of loading, which extends the worker's time."""
        worker = self._workers.get(sender)
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
        worker = self._workers.get(sender)
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
        for worker in self._placed_workers:
            worker.deadline = math.inf
        return [AttachClient(self.generation), *self._advance(now)]

    def on_step_committed(self) -> None:
        """Handle a committed step of requests: earlier deaths no longer count."""
        if self._has_deaths and self.state is RecoveryState.READY:
            self._has_deaths = False
            for place in self._places:
                place.num_deaths = 0

    def on_timer(self, now: float) -> list[Action]:
        """Handle the passing of time: deadlines, backoffs and the recovery timeout."""
        if self.state is RecoveryState.NEW or self.is_over:
            return []
        actions: list[Action] = []
        for worker in list(self._workers.values()):
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
        yield from (worker.deadline for worker in self._workers.values())
        if self.state is RecoveryState.FORMING:
            yield from (place.respawn_at for place in self._places if place.sender is None)
            if self._is_formed:
                yield self._assignments.retry_at
        if self.state is RecoveryState.READY and self._num_missing_standbys:
            yield self._standbys.retry_at

    def _on_late(self, worker: WorkerRecord, now: float) -> list[Action]:
        """Kill a worker that has missed its deadline."""
        if worker.activity is Activity.CLOSING:
            # Another place has died and was counted, so this is no death of its own.
            seconds = self._limits.close_seconds
            return self._kill(worker, f"it did not close its stage within {seconds:g} seconds")
        cause = f"{self.state} took longer than {self._limits.phase_seconds:g} seconds"
        return self.on_lost(worker.sender, cause, now)

    def _finish_phase(self, sender: int, state: RecoveryState) -> WorkerRecord | None:
        """Note a worker's answer to the current phase; return None if it was not expected."""
        worker = self._workers.get(sender)
        if self.state is not state or worker is None or worker.activity is not Activity.ASSIGNED:
            return None
        worker.has_finished_phase, worker.deadline = True, math.inf
        return worker

    def _advance(self, now: float) -> list[Action]:
        """Do everything that the current state permits; return the actions."""
        actions: list[Action] = []
        if self.state is RecoveryState.FORMING:
            actions += self._fill_places(now)
            if self._is_formed and self._assignments.retry_at <= now:
                actions.append(self._assign(now))
        elif self.state is RecoveryState.LOADING and self._is_phase_finished:
            actions.append(InitializeCaches(self.generation))
            self._begin_phase(RecoveryState.INITIALIZING, now)
        elif self.state is RecoveryState.INITIALIZING and self._is_phase_finished:
            actions.append(WarmUp(self.generation))
            self._begin_phase(RecoveryState.WARMING, now)
        elif self.state is RecoveryState.READY and self._standbys.retry_at <= now:
            # Only now, because the imports of a standby worker would slow down a recovery.
            actions += [self._spawn(None) for _ in range(self._num_missing_standbys)]
        return actions

    @property
    def _placed_workers(self) -> list[WorkerRecord]:
        """Workers that hold a place, in the order of their stages."""
        senders = (place.sender for place in self._places)
        return [self._workers[sender] for sender in senders if sender is not None]

    @property
    def _is_formed(self) -> bool:
        """True if every place has a worker without an instance."""
        num_idle = sum(worker.activity is Activity.IDLE for worker in self._placed_workers)
        return num_idle == len(self._places)

    @property
    def _is_phase_finished(self) -> bool:
        return all(worker.has_finished_phase for worker in self._placed_workers)

    @property
    def _num_missing_standbys(self) -> int:
        alive = sum(worker.stage is None for worker in self._workers.values())
        return max(0, self._limits.num_standbys - alive)

    def _begin_phase(self, state: RecoveryState, now: float) -> None:
        self.state = state
        for worker in self._placed_workers:
            worker.begin_phase(now, self._limits)

    def _fill_places(self, now: float) -> list[Action]:
        """Give each empty place a standby worker or a new one, once its backoff is over."""
        actions: list[Action] = []
        for stage, place in enumerate(self._places):
            if place.sender is not None or place.respawn_at > now:
                continue
            standby = next(self._idle_standbys(), None)
            if standby is None:
                actions.append(self._spawn(stage))
                continue
            standby.stage, place.sender = stage, standby.sender
            self._standbys = RetryRecord()
        return actions

    def _idle_standbys(self) -> Iterator[WorkerRecord]:
        standbys = (worker for worker in self._workers.values() if worker.stage is None)
        return (worker for worker in standbys if worker.activity is Activity.IDLE)

    def _assign(self, now: float) -> Action:
        """Begin the next generation; every place has a worker without an instance."""
        self.generation += 1
        slots = [Slot(worker.sender) for worker in self._placed_workers]
        self.placement = make_placement(self.generation, self._layers, slots)
        self._begin_phase(RecoveryState.LOADING, now)
        return AssignGeneration(self.placement)

    def _spawn(self, stage: int | None) -> Action:
        sender = next(self._senders)
        self._workers[sender] = WorkerRecord(sender, stage)
        if stage is not None:
            self._places[stage].sender = sender
        return SpawnWorker(sender, stage)

    def _kill(self, worker: WorkerRecord, cause: str) -> list[Action]:
        worker.activity, worker.deadline = Activity.EXITING, math.inf
        return [KillWorker(worker.sender, cause)]

    def _count_death(self, stage: int, cause: str, now: float, is_poison: bool) -> list[Action]:
        """Count the death of a place, and give up if that was one too many."""
        place = self._places[stage]
        if not is_poison:
            self._has_deaths = True
            place.num_deaths += 1
            if num_restarts := self._limits.max_restarts:
                cause += f"; restarts without a finished step before: {num_restarts}"
            if place.num_deaths > num_restarts:
                return self._give_up(cause)
        place.respawn_at = now + backoff_seconds(place.num_deaths, self._jitter)
        return []

    def _leave(self, cause: str, now: float) -> list[Action]:
        """End the current generation after the death of one of its workers."""
        if self.state in (RecoveryState.FORMING, RecoveryState.DEAD):
            return []
        actions: list[Action] = []
        if self.state is RecoveryState.READY:
            self.recovering_since = now
            actions.append(DetachClient(cause))
        self.state = RecoveryState.FORMING
        closing: list[int] = []
        for worker in self._placed_workers:
            if worker.activity is not Activity.ASSIGNED:
                continue
            if worker.keeps_weights:
                worker.begin_closing(now, self._limits)
                closing.append(worker.sender)
            else:
                actions += self._kill(worker, "its memory is freed for the next generation")
        if closing:
            actions.append(CloseInstances(self.generation, closing))
        return actions

    def _give_up(self, cause: str) -> list[Action]:
        self.state = RecoveryState.DEAD
        return [GiveUp(cause)]

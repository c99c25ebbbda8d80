"""Generations of an engine: the phases from empty places to a generation that serves, and back.

`Recovery` reports what has happened; this part decides which phase begins by it.
"""

import math
from collections.abc import Callable, Iterator
from random import Random

from gllm.recovery.actions import (
    Action,
    AssignGeneration,
    ChooseLayers,
    DetachClient,
    InitializeCaches,
    MeasureWorkers,
    RejectParked,
    WarmUp,
)
from gllm.recovery.node_pool import NodePool
from gllm.recovery.placement import Placement
from gllm.recovery.records import RecoveryLimits, RecoveryState, RetryRecord, WorkerRecord
from gllm.recovery.stages import Stages
from gllm.recovery.worker_pool import WorkerPool

MIN_RETURN_SECONDS = 10.0
"""Shortest wait for a lost node: a manager starts a process again within this time, and a machine
that returns in time costs one pause instead of two."""


class Generations:
    """Phase of the current generation, and the times of the recovery that it belongs to."""

    def __init__(
        self,
        stages: Stages,
        nodes: NodePool,
        pool: WorkerPool,
        limits: RecoveryLimits,
        jitter: Random,
        should_measure: bool,
    ) -> None:
        """Create the state before the first generation.

        Args:
            stages: give each generation its placement.
            nodes: nodes of the stages.
            pool: workers of the stages.
            limits: limits of a recovery.
            jitter: source of the random part of backoffs.
            should_measure: let the workers measure their speed before the first generation.
        """
        self.state = RecoveryState.NEW
        self.number = 0
        """Number of the current generation; 0 before the first."""
        self.placement: Placement | None = None
        """Placement of the current generation."""
        self.recovering_since: float | None = None
        """Time of the death that the engine recovers from; None if it has not been ready before,
        or is ready."""
        self.has_been_ready = False
        self.is_overdue = False
        """True if this recovery has taken longer than the timeout: requests are rejected."""
        self.was_poisoned = False
        """True if a request ended the last generation."""
        self._stages = stages
        self._nodes = nodes
        self._pool = pool
        self._limits = limits
        self._jitter = jitter
        self._should_measure = should_measure
        self._assignments = RetryRecord()
        """Generations that could not be assigned since the engine was ready."""
        self._connections = RetryRecord()
        """Generations whose workers could not reach each other since the engine was ready."""
        self._loading_since = 0.0
        """Time at which the current generation began to load."""
        self._seconds_per_layer = 0.0
        """Longest time in which a generation has loaded, over the layers of its largest stage."""
        self._has_begun_measuring = self._has_chosen_layers = False
        """Actions of the state MEASURING that have been returned."""

    @property
    def has_instances(self) -> bool:
        """True if workers of the current generation may have instances."""
        return self.state not in (RecoveryState.FORMING, RecoveryState.MEASURING)

    @property
    def is_choosing_layers(self) -> bool:
        """True if the workers have measured, and the layers have to be divided by that."""
        return self.state is RecoveryState.MEASURING and self._has_chosen_layers

    @property
    def rejection_time(self) -> float:
        """Time at which the parked requests are rejected."""
        if self.recovering_since is None or self.is_overdue:
            return math.inf
        return self.recovering_since + self._limits.recovery_timeout

    @property
    def join_time(self) -> float:
        """Time at which an engine that has never been ready no longer waits for a lost node."""
        vacancy = self._nodes.oldest_vacancy
        if self.has_been_ready or vacancy is None:
            return math.inf
        return vacancy.since + self._limits.join_seconds

    @property
    def assignment_time(self) -> float:
        """Earliest time of the next generation, once all places have workers."""
        return max(self._assignments.retry_at, self._connections.retry_at)

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which `advance`, a rejection or the end of the engine is due."""
        yield self.rejection_time
        yield self.join_time
        if self.state is RecoveryState.FORMING:
            yield from self._pool.respawn_times
            yield self._stages.recut_time
            if self._pool.is_formed:
                yield self.assignment_time

    def describe_vacancy(self) -> str:
        """Return the reason for which the engine cannot start without a lost node."""
        vacancy = self._nodes.oldest_vacancy
        assert vacancy is not None
        return (
            f"{vacancy.cause}; node {vacancy.node} did not return within "
            f"{self._limits.join_seconds:g} seconds, no spare node took its stages, and the other "
            "nodes cannot hold them"
        )

    def return_seconds(
        self, node: str, predict_recompute: Callable[[], float] | None, now: float
    ) -> float:
        """Return the time for which the stages of a node that is being lost wait for it.

        Args:
            node: its name.
            predict_recompute: returns the seconds in which the running requests would be computed
                again; None if nobody knows.
            now: time in seconds.
        """
        stages = self._nodes.stages_on(node)
        if self._limits.node_return_seconds is not None or not stages:
            return self._limits.node_return_seconds or 0.0
        seconds = predict_reload_seconds(
            self._seconds_per_layer,
            self._stages.count_layers(stages),
            # The first stage is never lost.
            len(self._stages.layers) - len(stages),
        )
        if predict_recompute is not None:
            seconds += predict_recompute()
        return choose_return_seconds(seconds, self._seconds_left(now))

    def advance(self, now: float) -> list[Action]:
        """Begin the phases that the workers permit; return their actions."""
        actions: list[Action] = []
        if self.state is RecoveryState.FORMING:
            actions += self._stages.fill_vacancies(now)
            actions += self._pool.fill_places(now)
            if self._pool.is_formed and self.assignment_time <= now:
                actions += self._measure(now) if self._should_measure else [self._assign(now)]
        elif self.state is RecoveryState.MEASURING:
            actions += self._measure(now)
        elif self.state is RecoveryState.LOADING and self._pool.is_phase_finished:
            self._record_load(now)
            actions.append(InitializeCaches(self.number))
            self._begin_phase(RecoveryState.INITIALIZING, now)
        elif self.state is RecoveryState.INITIALIZING and self._pool.is_phase_finished:
            actions.append(WarmUp(self.number))
            self._begin_phase(RecoveryState.WARMING, now)
        return actions

    def start(self) -> None:
        """Begin to form the first generation."""
        self.state = RecoveryState.FORMING

    def stop(self) -> None:
        """End the engine's life; nothing follows."""
        self.state = RecoveryState.DEAD

    def reject_parked(self, now: float) -> list[Action]:
        """Reject the parked requests if the recovery has taken too long."""
        if self.rejection_time > now:
            return []
        self.is_overdue = True
        seconds = self._limits.recovery_timeout
        return [RejectParked(f"the engine did not recover within {seconds:g} seconds")]

    def finish_phase(self, sender: int, state: RecoveryState) -> WorkerRecord | None:
        """Note a worker's answer to a phase; return None if it was not expected."""
        return self._pool.finish_phase(sender) if self.state is state else None

    def end_measuring(self) -> list[Action]:
        """Form the first generation, because the layers have been divided by measurements."""
        self._should_measure = False
        self.state = RecoveryState.FORMING
        return [*self._pool.end_measuring()]

    def on_ready(self) -> None:
        """Note that the current generation serves."""
        self.state = RecoveryState.READY
        self.has_been_ready = True
        self.recovering_since, self.is_overdue = None, False
        self._assignments, self._connections = RetryRecord(), RetryRecord()
        self._pool.end_phases()

    def leave(self, cause: str, now: float, is_poison: bool = False) -> list[Action]:
        """Stop serving and begin a recovery, after a worker died or for a planned change.

        Args:
            cause: Reason, for logs and the status page.
            now: Time in seconds.
            is_poison: True if a request has crashed a worker.

        Returns:
            Actions for the supervisor: detach the clients, close the stages of all workers.
        """
        self.was_poisoned = is_poison
        actions: list[Action] = []
        if self.state is RecoveryState.READY:
            self.recovering_since = now
            actions.append(DetachClient(cause))
        self.state = RecoveryState.FORMING
        return [*actions, *self._pool.close_instances(self.number, now)]

    def withdraw_assignment(self) -> None:
        """Form the generation again, because no worker has got its assignment."""
        self.state = RecoveryState.FORMING
        self._pool.rest()

    def count_failed_assignment(self, now: float) -> bool:
        """Delay the next assignment after a failed one; return False if it was one too many."""
        return self._count_failure(self._assignments, now)

    def count_failed_connection(self, now: float) -> bool:
        """Delay the next assignment, because the workers could not reach each other.

        Returns:
            False if the engine has never been ready, and it was one failure too many.
        """
        return self._count_failure(self._connections, now) or self.has_been_ready

    def _record_load(self, now: float) -> None:
        """Note the time of loading; generations whose workers keep weights load less."""
        seconds = now - self._loading_since
        num_layers = max(end - begin for begin, end in self._stages.layers)
        self._seconds_per_layer = max(self._seconds_per_layer, seconds / num_layers)

    def _seconds_left(self, now: float) -> float:
        """Return the time until the running requests are rejected if the engine stops now."""
        if self.is_overdue:
            return math.inf
        since = now if self.recovering_since is None else self.recovering_since
        return since + self._limits.recovery_timeout - now

    def _count_failure(self, record: RetryRecord, now: float) -> bool:
        # Not tried again at once, because the obstacle is still there.
        record.on_failure(now, self._jitter, num_earlier=1)
        return record.num_failures <= self._limits.max_restarts

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
            return [MeasureWorkers(self._stages.make_placement(self.number + 1))]
        if self._pool.is_phase_finished and not self._has_chosen_layers:
            self._has_chosen_layers = True
            return [ChooseLayers()]
        return []

    def _assign(self, now: float) -> Action:
        """Begin the next generation; every place has a worker without an instance."""
        self.number += 1
        self.placement = self._stages.make_placement(self.number)
        self._loading_since = now
        self._begin_phase(RecoveryState.LOADING, now)
        return AssignGeneration(self.placement)


def choose_return_seconds(predicted_seconds: float, seconds_left: float) -> float:
    """Return the time for which the stages of a lost node wait for it.

    Nobody knows whether the node returns. A wait of the time that other stages would cost is at
    most twice as long as the best decision in hindsight (Karlin, Manasse, Rudolph and Sleator,
    "Competitive Snoopy Caching", Algorithmica 3, 1988).

    Args:
        predicted_seconds: time until the engine would serve without the node: its layers are
            loaded, and the running requests are computed again.
        seconds_left: time until the running requests are rejected; infinite if there is no limit.
    """
    wanted = max(predicted_seconds, MIN_RETURN_SECONDS)
    if predicted_seconds <= seconds_left < wanted + predicted_seconds:
        # The other nodes can still answer the requests.
        return seconds_left - predicted_seconds
    return wanted


def predict_reload_seconds(
    seconds_per_layer: float, num_lost_layers: int, num_stages_left: int
) -> float:
    """Return the time in which the other stages load the layers of lost ones, all at once."""
    return seconds_per_layer * math.ceil(num_lost_layers / num_stages_left)

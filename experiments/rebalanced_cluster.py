"""Cluster that places requests by best fit and moves those that have not started.

At each arrival, before the new request is placed, the errors of the length predictions are brought
up to date, and requests of which no step has scheduled anything may change their engine.

Source: "Aladdin" (arXiv 2405.06856), section on re-balancing, with an arrival as the heartbeat. A
request that is longer than predicted does not end early by its later predictions: our reading
(gllm/routing/rebalancing.py, whose decisions a router uses as well).
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gllm.routing.placement import LatencyModel, PlacedRequest, PlacementRules, PlacementWorker
from gllm.routing.rebalancing import Move, PredictionErrors, line_distance, rebalance
from gllm.scheduler.sequence import SchedulerRequest, Sequence
from gllm.sim.cluster.cluster import ClusterRun, SimulatedCluster
from gllm.sim.cluster.engine import ClusterEngine
from gllm.sim.cluster.requests import ClusterRequest
from gllm.sim.cluster.router import PolicyRouter
from gllm.sim.deployment import Deployment
from gllm.sim.workloads.requests import WorkloadRequest


class RequestMove(NamedTuple):
    """Move of a request to another engine."""

    request_index: int
    """Position in the workload."""
    source: str
    target: str
    seq: int
    """Sequence at the source, where it is recorded."""
    lowers_distances: bool
    """True if the sum of the distances of all engines fell."""


class RebalancedRun(NamedTuple):
    """Run of a cluster with moves. A moved request counts as resumed."""

    cluster: ClusterRun
    moves: list[RequestMove]
    num_chances: int
    """Arrivals at which some request had not started."""

    @property
    def num_started_moves(self) -> int:
        """Number of moves of requests that the source had scheduled, by its record."""
        return sum(
            self.cluster.engines[move.source].record.requests[move.seq].first_scheduled_time
            is not None
            for move in self.moves
        )


def find_unstarted(engine: ClusterEngine) -> list[int]:
    """Return the sequences of an engine of which no step has scheduled anything, in their order."""
    sequences = engine.pipeline.scheduler.table.sequences
    return [seq for seq in engine.requests if seq in sequences and _is_unstarted(sequences[seq])]


def withdraw(engine: ClusterEngine, seq: int, now: float) -> ClusterRequest:
    """Remove a request that has not started from an engine.

    Raises:
        ValueError: A step has scheduled part of it, or the engine does not have it.
    """
    if seq not in find_unstarted(engine):
        raise ValueError(f"engine {engine.name!r} has no unstarted request of sequence {seq}")
    engine.pipeline.abort([seq], now)
    return engine.requests.pop(seq)


def _is_unstarted(sequence: Sequence) -> bool:
    return not (
        sequence.has_run
        or sequence.num_scheduled_tokens
        or sequence.num_rows_in_flight
        or sequence.is_finished
    )


class RebalancedCluster(SimulatedCluster):
    """Cluster with the policy `aladdin` and re-balancing.

    Args:
        router: A new router with the policy.
        rules: Constraints of a move's target; the objective is that of all requests.
        model: Latency model of all engines.
    """

    def __init__(self, router: PolicyRouter, rules: PlacementRules, model: LatencyModel) -> None:
        super().__init__(router)
        self._rules = rules
        self._model = model
        self._errors: PredictionErrors[int] = PredictionErrors()
        """Of requests by their position, summed over the run."""
        self._moves: list[RequestMove] = []
        self._num_chances = 0

    # Events of requests.

    def _on_arrival(self, now: float, arrival: tuple[WorkloadRequest, SchedulerRequest]) -> None:
        for engine in self._routable:
            self._note_late(engine)
        unstarted = {each.name: find_unstarted(each) for each in self._routable}
        if any(unstarted.values()):
            self._num_chances += 1
            self._rebalance(unstarted, now)
        super()._on_arrival(now, arrival)

    def _submit(self, engine: ClusterEngine, request: ClusterRequest, now: float) -> None:
        known = request.length_estimate.expected(request.num_output_tokens)
        self._errors.on_placed(request.index, known)
        super()._submit(engine, request, now)

    def on_finished(self, engine: ClusterEngine, request: ClusterRequest, now: float) -> None:
        """Note an end with fewer tokens than were predicted at the placement."""
        # Simulated outputs have their maximum length.
        self._errors.on_finished(request.index, engine.name, request.request.max_tokens)
        super().on_finished(engine, request, now)

    def _note_late(self, engine: ClusterEngine) -> None:
        """Replace the expected outputs that requests of an engine exceed."""
        served = engine.records[-1].requests
        for seq, request in engine.requests.items():
            num_tokens = served[seq].line.num_tokens
            self._errors.on_progress(
                request.index, engine.name, num_tokens, request.length_estimate
            )

    # Moves.

    def _rebalance(self, unstarted: Mapping[str, list[int]], now: float) -> None:
        """Move requests, one after the other."""
        workers, movable = [], {}
        for engine in self._routable:
            placed = self._placed(engine, set(unstarted[engine.name]), now)
            movable[engine.name] = [(placed[seq], seq) for seq in unstarted[engine.name]]
            workers.append(self._worker(engine, list(placed.values())))
        for move in rebalance(workers, self._errors.by_worker(), self._rules):
            source, target = movable[move.source], movable[move.target]
            seq = next(seq for placed, seq in source if placed == move.request)
            source.remove((move.request, seq))
            target.append((move.request, self._move(move, seq, now)))

    def _move(self, move: Move, seq: int, now: float) -> int:
        """Move a request; return its sequence at the target."""
        target = self.engines[move.target]
        request = withdraw(self.engines[move.source], seq, now)
        before = self._distances(move)
        self._errors.on_moved(request.index, move.request, move.source, move.target)
        is_less = self._distances(move) < before
        self._moves.append(RequestMove(request.index, move.source, move.target, seq, is_less))
        self._submit(target, request, now)
        return next(reversed(target.requests))

    def _distances(self, move: Move) -> float:
        """Return the sum of the distances of both engines; those of the others do not change."""
        errors = self._errors.by_worker()
        return sum(
            line_distance(errors[name], self._model)
            for name in (move.source, move.target)
            if name in errors
        )

    def _placed(
        self, engine: ClusterEngine, unstarted: set[int], now: float
    ) -> dict[int, PlacedRequest]:
        """Return the requests of an engine by sequence."""
        served = engine.records[-1].requests
        placed = {}
        for seq, request in engine.requests.items():
            line = served[seq].line
            seconds = now - line.times[0] if line.times else 0.0
            placed[seq] = PlacedRequest(
                len(request.request.prompt_token_ids),
                self._errors.expected(request.index),
                line.num_tokens,
                seconds,
                is_begun=seq not in unstarted,
            )
        return placed

    def _worker(self, engine: ClusterEngine, placed: list[PlacedRequest]) -> PlacementWorker:
        config = engine.config
        num_kv_tokens = config.num_blocks * config.block_size
        return PlacementWorker(engine.name, self._model, placed, num_kv_tokens, config.max_num_seqs)

    # Results.

    def run_moves(self) -> RebalancedRun:
        """Run all events; return the records and the moves.

        Raises:
            ValueError: The workload is not sorted, or a request fits no engine.
        """
        return RebalancedRun(self.run(), self._moves, self._num_chances)


def simulate_rebalanced(
    deployments: Mapping[str, Deployment],
    jobs: Iterable[WorkloadRequest],
    router: PolicyRouter,
    rules: PlacementRules,
    model: LatencyModel,
) -> RebalancedRun:
    """Simulate a workload on a cluster with re-balancing.

    Args:
        deployments: Engines by name, ready at the beginning.
        jobs: Sorted by time; may be a generator.
        router: A new router with the policy `aladdin`.
        rules: Constraints of a move's target; the objective is that of all requests.
        model: Latency model of all engines.

    Raises:
        ValueError: The workload is not sorted, or a request fits no engine.
    """
    cluster = RebalancedCluster(router, rules, model)
    for name, deployment in deployments.items():
        cluster.add_engine(name, deployment)
    cluster.submit_each(jobs)
    return cluster.run_moves()

"""Re-balancing of requests that have not started, by the errors of earlier length predictions.

Each worker has an error: tokens and requests that it has more than were predicted when they were
placed. Its distance is that of the point (tokens, requests) from the line on which a decode step
takes as long as planned.

Simulated clusters use it (experiments/rebalanced_cluster.py). The router does not: in simulation it
changes the attainment little, up or down (experiments/pages/aladdin.md), and an engine would have
to give back requests that it has not scheduled.

Source: "Aladdin" (arXiv 2405.06856), section on re-balancing; the distance is our reading.
"""

from collections.abc import Mapping, Sequence
from math import hypot
from typing import NamedTuple

from gllm.routing.placement import (
    LatencyModel,
    PlacedRequest,
    PlacementRules,
    PlacementWorker,
    admits,
)


class PredictionError(NamedTuple):
    """Load of a worker beyond the prediction."""

    num_tokens: float = 0.0
    num_requests: int = 0

    def with_underestimate(self, num_expected_tokens: float) -> "PredictionError":
        """Add an ongoing request that is longer than predicted, with its new prediction."""
        return PredictionError(self.num_tokens + num_expected_tokens, self.num_requests + 1)

    def with_early_end(self, num_tokens: int, num_predicted_tokens: float) -> "PredictionError":
        """Subtract a request that has finished with fewer tokens than predicted."""
        return PredictionError(
            self.num_tokens + num_tokens - num_predicted_tokens, self.num_requests - 1
        )

    def moved(self, request: PlacedRequest, sign: int) -> "PredictionError":
        """Return the error after a request has come (1) or gone (-1)."""
        return PredictionError(
            self.num_tokens + sign * request.num_expected_tokens, self.num_requests + sign
        )


class Move(NamedTuple):
    """Move of a request that has not started."""

    request: PlacedRequest
    source: str
    target: str


def line_distance(error: PredictionError, model: LatencyModel) -> float:
    """Return the distance of a worker's error from the line of no error in step time."""
    norm = hypot(model.k2, model.c2)
    if not norm:
        return 0.0
    return abs(model.k2 * error.num_tokens + model.c2 * error.num_requests) / norm


def rebalance(
    workers: Sequence[PlacementWorker], errors: Mapping[str, PredictionError], rules: PlacementRules
) -> list[Move]:
    """Return moves of requests that have not started, each of which lowers the sum of distances.

    Greedy: from the worker with the largest error to the one with the smallest that admits the
    request, until no move helps.

    Args:
        workers: All workers with their requests.
        errors: Error of each worker by name; a worker without one has none.
        rules: Constraints that the target has to meet.
    """
    state = {worker.name: worker for worker in workers}
    error = {name: errors.get(name, PredictionError()) for name in state}
    moves: list[Move] = []
    while move := _best_move(state, error, rules):
        source, target = state[move.source], state[move.target]
        remaining = list(source.requests)
        remaining.remove(move.request)
        state[move.source] = source._replace(requests=remaining)
        state[move.target] = target._replace(requests=[*target.requests, move.request])
        error[move.source] = error[move.source].moved(move.request, -1)
        error[move.target] = error[move.target].moved(move.request, 1)
        moves.append(move)
    return moves


def _step_error(worker: PlacementWorker, error: PredictionError) -> float:
    """Return the signed error of a worker's step time in seconds."""
    return worker.model.k2 * error.num_tokens + worker.model.c2 * error.num_requests


def _best_move(
    workers: Mapping[str, PlacementWorker],
    error: Mapping[str, PredictionError],
    rules: PlacementRules,
) -> Move | None:
    """Return a move that lowers the sum of distances; None if there is none."""
    order = sorted(workers, key=lambda name: _step_error(workers[name], error[name]), reverse=True)
    for source in order:
        for request in workers[source].requests:
            if request.is_begun or not request.is_new:
                continue
            for target in reversed(order):
                if target == source:
                    break
                if _gain(workers, error, Move(request, source, target)) > 1e-9 and admits(
                    workers[target], request, rules
                ):
                    return Move(request, source, target)
    return None


def _gain(
    workers: Mapping[str, PlacementWorker], error: Mapping[str, PredictionError], move: Move
) -> float:
    """Return by how much a move lowers the sum of distances."""
    gain = 0.0
    for name, sign in ((move.source, -1), (move.target, 1)):
        model, before = workers[name].model, error[name]
        gain += line_distance(before, model)
        gain -= line_distance(before.moved(move.request, sign), model)
    return gain

"""Re-balancing of requests between engines, by the errors of earlier length predictions.

Each worker has an error: tokens and requests that it has more than were predicted when they were
placed. Its distance is that of the point (tokens, requests) from the line on which a decode step
takes as long as planned. A move goes from a worker with a larger error to one with a smaller one,
and lowers the sum of the distances.

The paper moves requests that no step has scheduled, and so do simulated clusters
(experiments/rebalanced_cluster.py). An engine gives those back at the cost of a message only if it
has not begun them; what a router moves (gllm/router/rebalancing.py) are running requests, which
continue elsewhere with their KV blocks, if that saves more time than it costs.

Source: "Aladdin" (arXiv 2405.06856), Alg. 2; the distance, the fading of errors and the rule for
running requests are ours. Pure: no clock, no I/O.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import hypot
from typing import Generic, NamedTuple, TypeVar

from gllm.routing.placement import (
    LatencyModel,
    PlacedRequest,
    PlacementRules,
    PlacementWorker,
    admits,
)
from gllm.scheduler.output_lengths import LengthEstimate

Key = TypeVar("Key", bound=Hashable)


class PredictionError(NamedTuple):
    """Load of a worker beyond the prediction."""

    num_tokens: float = 0.0
    num_requests: float = 0.0

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

    def scaled(self, factor: float) -> "PredictionError":
        """Return the error times a factor."""
        return PredictionError(self.num_tokens * factor, self.num_requests * factor)

    def minus(self, other: "PredictionError") -> "PredictionError":
        """Return the difference of two errors."""
        return PredictionError(
            self.num_tokens - other.num_tokens, self.num_requests - other.num_requests
        )


class _Late(NamedTuple):
    """An unfinished request that is longer than predicted."""

    worker: str
    num_expected_tokens: float


class PredictionErrors(Generic[Key]):
    """Errors of all workers, from the progress of their requests.

    A request that exceeds its prediction is in the error of its worker until it ends, by its latest
    prediction. It does not end early by its later predictions: otherwise its end would take back
    its count, and the errors of all workers would only fall. What ended requests and moves leave
    behind stays until `fade`.
    """

    def __init__(self) -> None:
        self._expected: dict[Key, float] = {}
        """Expected output of each unfinished request in tokens, the latest prediction."""
        self._late: dict[Key, _Late] = {}
        self._past: defaultdict[str, PredictionError] = defaultdict(PredictionError)
        """By worker: what ended requests and moves have left."""

    def on_placed(self, key: Key, num_expected_tokens: float) -> None:
        """Note the prediction with which a request is placed; later ones are ignored.

        Args:
            key: the request.
            num_expected_tokens: expected length of its whole output.
        """
        self._expected.setdefault(key, num_expected_tokens)

    def on_progress(self, key: Key, worker: str, num_tokens: int, estimate: LengthEstimate) -> None:
        """Replace the prediction of a request that has reached it.

        Args:
            key: a request that was placed.
            worker: the worker that has it.
            num_tokens: tokens of its output so far.
            estimate: predicts its output.
        """
        if num_tokens + 1 <= self._expected[key]:
            return
        self._expected[key] = expected = estimate.expected(num_tokens)
        self._late[key] = _Late(worker, expected)

    def on_finished(self, key: Key, worker: str, num_tokens: int) -> None:
        """Note the end of a request.

        Args:
            key: a request that was placed.
            worker: the worker that had it.
            num_tokens: tokens of its output.
        """
        expected, past = self._expected.pop(key), self._past[worker]
        if late := self._late.pop(key, None):
            self._past[worker] = past.with_underestimate(late.num_expected_tokens)
        elif num_tokens < expected:
            self._past[worker] = past.with_early_end(num_tokens, expected)

    def on_moved(self, key: Key, request: PlacedRequest, source: str, target: str) -> None:
        """Note that a request has moved from one worker to another."""
        if key in self._late:
            self._late[key] = self._late[key]._replace(worker=target)
            return
        self._past[source] = self._past[source].moved(request, -1)
        self._past[target] = self._past[target].moved(request, 1)

    def fade(self, factor: float, workers: Iterable[str]) -> None:
        """Scale what ended requests and moves have left, and forget other workers."""
        faded = {name: self._past[name].scaled(factor) for name in workers if name in self._past}
        self._past.clear()
        self._past.update(faded)

    def expected(self, key: Key) -> float:
        """Return the expected length of a request's whole output, in tokens."""
        return self._expected[key]

    def by_worker(self) -> dict[str, PredictionError]:
        """Return the error of each worker that has one."""
        errors = dict(self._past)
        for worker, num_tokens in self._late.values():
            earlier = errors.get(worker, PredictionError())
            errors[worker] = earlier.with_underestimate(num_tokens)
        return errors


def subtract_mean(
    errors: Mapping[str, PredictionError], workers: Sequence[str]
) -> dict[str, PredictionError]:
    """Return the error of each worker beyond the mean of all.

    Predictions that are too long or too short everywhere move nothing then, and one worker with
    more requests than predicted is unbalanced, whatever the others have.
    """
    known = [errors.get(name, PredictionError()) for name in workers]
    mean = PredictionError(
        sum(error.num_tokens for error in known) / max(1, len(known)),
        sum(error.num_requests for error in known) / max(1, len(known)),
    )
    return {name: error.minus(mean) for name, error in zip(workers, known, strict=True)}


class Move(NamedTuple):
    """Move of a request."""

    request: PlacedRequest
    source: str
    target: str


MayMove = Callable[[PlacedRequest, PlacementWorker, PlacementWorker], bool]
"""Function that says if a request may move from one worker to another, as they are now."""


def is_unstarted(request: PlacedRequest, source: PlacementWorker, target: PlacementWorker) -> bool:
    """Return True if no step has scheduled anything of a request: the rule of the paper."""
    return request.is_new and not request.is_begun


def saved_seconds(
    request: PlacedRequest, source: PlacementWorker, target: PlacementWorker
) -> float:
    """Return the time that all requests of two workers save if a running request moves.

    Each step of the source gets shorter for its other requests, and each step of the target longer
    for those there; the request itself gets the steps of the target. Both last until its expected
    end. The cost of the move is not subtracted.

    Args:
        request: a running request of the source.
        source: worker with its requests, this one among them.
        target: worker that has it not.
    """
    context = _context(request)
    num_source, num_target = len(source.requests), len(target.requests)
    source_context = sum(_context(each) for each in source.requests)
    target_context = sum(_context(each) for each in target.requests)
    before = source.model.decode_seconds(num_source, source_context)
    after = target.model.decode_seconds(num_target + 1, target_context + context)
    others_save = before - source.model.decode_seconds(num_source - 1, source_context - context)
    others_lose = after - target.model.decode_seconds(num_target, target_context)
    per_step = (num_source - 1) * others_save - num_target * others_lose + before - after
    return max(0.0, request.num_expected_tokens - request.num_output_tokens) * per_step


def line_distance(error: PredictionError, model: LatencyModel) -> float:
    """Return the distance of a worker's error from the line of no error in step time."""
    norm = hypot(model.k2, model.c2)
    if not norm:
        return 0.0
    return abs(model.k2 * error.num_tokens + model.c2 * error.num_requests) / norm


def rebalance(
    workers: Sequence[PlacementWorker],
    errors: Mapping[str, PredictionError],
    rules: PlacementRules,
    may_move: MayMove = is_unstarted,
) -> list[Move]:
    """Return moves of requests, each of which lowers the sum of distances.

    Greedy: from the worker with the largest error to the one with the smallest that admits the
    request, until no move helps.

    Args:
        workers: All workers with their requests.
        errors: Error of each worker by name; a worker without one has none.
        rules: Constraints that the target has to meet.
        may_move: Says which requests may move where.
    """
    state = {worker.name: worker for worker in workers}
    error = {name: errors.get(name, PredictionError()) for name in state}
    moves: list[Move] = []
    while move := _best_move(state, error, rules, may_move):
        source, target = state[move.source], state[move.target]
        remaining = list(source.requests)
        remaining.remove(move.request)
        state[move.source] = source._replace(requests=remaining)
        state[move.target] = target._replace(requests=[*target.requests, move.request])
        error[move.source] = error[move.source].moved(move.request, -1)
        error[move.target] = error[move.target].moved(move.request, 1)
        moves.append(move)
    return moves


def _context(request: PlacedRequest) -> int:
    return request.num_prompt_tokens + request.num_output_tokens


def _step_error(worker: PlacementWorker, error: PredictionError) -> float:
    """Return the signed error of a worker's step time in seconds."""
    return worker.model.k2 * error.num_tokens + worker.model.c2 * error.num_requests


def _best_move(
    workers: Mapping[str, PlacementWorker],
    error: Mapping[str, PredictionError],
    rules: PlacementRules,
    may_move: MayMove,
) -> Move | None:
    """Return a move that lowers the sum of distances; None if there is none."""
    order = sorted(workers, key=lambda name: _step_error(workers[name], error[name]), reverse=True)
    for source in order:
        for request in workers[source].requests:
            for target in reversed(order):
                if target == source:
                    break
                if (
                    _gain(workers, error, Move(request, source, target)) > 1e-9
                    and may_move(request, workers[source], workers[target])
                    and admits(workers[target], request, rules)
                ):
                    return Move(request, source, target)
    return None


def _gain(
    workers: Mapping[str, PlacementWorker],
    error: Mapping[str, PredictionError],
    move: Move,
) -> float:
    """Return by how much a move lowers the sum of distances."""
    gain = 0.0
    for name, sign in ((move.source, -1), (move.target, 1)):
        model, before = workers[name].model, error[name]
        gain += line_distance(before, model)
        gain -= line_distance(before.moved(move.request, sign), model)
    return gain

"""Moves of running requests between a router's engines, to correct errors of length predictions.

The decisions are those of `gllm.routing.rebalancing`. Here are what engines report, what a move
costs, and the limits: how often one request moves, and one move per engine at a time.
"""

from typing import NamedTuple

from gllm.router.client import FleetClient
from gllm.router.dispatcher import Dispatcher
from gllm.routing.handoff import Handoff
from gllm.routing.placement import LatencyModel, PlacedRequest, PlacementRules, PlacementWorker
from gllm.routing.rebalancing import PredictionErrors, rebalance, saved_seconds, subtract_mean
from gllm.routing.state import EngineSnapshot, median_coefficients
from gllm.runtime.head.request_stream import RequestStream
from gllm.transport.kv.transfer_estimate import TransferEstimate

REST_SECONDS = 5.0
"""Least time between two moves of a request: the effect of the first one shows by then."""
HALF_LIFE_SECONDS = 30.0
"""Time in which half of an error that ended requests have left is forgotten. New requests are
placed by the engines' real load, so an old error says little about it."""
CAUSE = "rebalanced"
"""Key under which the moves are counted among the migrations."""

Key = tuple[RequestStream, int]
"""A request and the index of one of its choices."""


class _Candidate(NamedTuple):
    """A running request that may move."""

    key: Key
    num_tokens: int
    """Tokens of prompt and output."""


class Rebalancing:
    """Moves running requests from engines with more load than predicted to those with less.

    Args:
        client: has the requests and moves them.
        dispatcher: has the engines, and predicts output lengths.
        max_moves: most moves of one request; 0: none moves.
    """

    def __init__(self, client: FleetClient, dispatcher: Dispatcher, max_moves: int) -> None:
        self.pause_seconds = 0.0
        """Time that moved requests have waited between the tokens of both engines, summed."""
        self._client = client
        self._dispatcher = dispatcher
        self._max_moves = max_moves
        self._rules = PlacementRules()
        self._errors: PredictionErrors[Key] = PredictionErrors()
        self._running: dict[Key, str] = {}
        """Engine of each sequence at the last tick."""
        self._moves: dict[RequestStream, tuple[int, float]] = {}
        """Number of moves of a running request, and the time of its latest one in seconds."""
        self._pauses: dict[tuple[str, str], TransferEstimate] = {}
        """Duration of moves by tokens, by source and target."""
        self._updated_at = 0.0
        if max_moves:
            client.handoffs.on_moved = self._on_moved

    def on_tick(self, now: float) -> None:
        """Note the progress of all requests, and start the moves that are worth their cost.

        To be called about twice per second. A sequence that begins and ends between two calls is
        in no error.

        Args:
            now: time in seconds, on the client's clock.
        """
        if not self._max_moves:
            return
        self._note_progress(now)
        self._start_moves(now)

    def _note_progress(self, now: float) -> None:
        running: dict[Key, str] = {}
        for engine in self._dispatcher.records:
            for stream, choice, _ in self._client.choices_on(engine).values():
                key, estimate = (stream, choice), self._dispatcher.estimate(stream.entry)
                running[key] = engine
                num_tokens = len(stream.entry.outputs[choice])
                self._errors.on_placed(key, estimate.expected())
                self._errors.on_progress(key, engine, num_tokens, estimate)
        for key, engine in self._running.items():
            stream, choice = key
            if choice in stream.alive:
                # Moved, or parked for a moment: its engine is the one that it had.
                running.setdefault(key, engine)
            else:
                self._errors.on_finished(key, engine, len(stream.entry.outputs[choice]))
        self._running = running
        self._moves = {stream: moves for stream, moves in self._moves.items() if stream.alive}
        age, self._updated_at = now - self._updated_at, now
        self._errors.fade(0.5 ** (age / HALF_LIFE_SECONDS), self._dispatcher.records)
        names = self._dispatcher.records
        self._pauses = {
            pair: pause for pair, pause in self._pauses.items() if names.keys() >= {*pair}
        }

    def _start_moves(self, now: float) -> None:
        engines = self._engines(now)
        if len(engines) < 2:
            return
        candidates: dict[int, _Candidate] = {}
        workers = [self._worker(engine, candidates, now) for engine in engines.values()]
        errors = self._errors.by_worker()
        if not self._dispatcher.policy.packs_requests:
            errors = subtract_mean(errors, list(engines))

        def may_move(
            request: PlacedRequest, source: PlacementWorker, target: PlacementWorker
        ) -> bool:
            candidate = candidates.get(id(request))
            if candidate is None:
                return False
            cost = self._pause(engines[source.name], engines[target.name], candidate.num_tokens)
            return saved_seconds(request, source, target) > cost

        busy = self._busy_engines()
        for request, source, target in rebalance(workers, errors, self._rules, may_move):
            # Later moves assume the earlier ones, which take some time.
            if busy & {source, target}:
                continue
            key = candidates[id(request)].key
            if self._client.move(key[0], target, CAUSE):
                busy |= {source, target}
                num_moves, _ = self._moves.get(key[0], (0, 0.0))
                self._moves[key[0]] = num_moves + 1, now
                self._errors.on_moved(key, request, source, target)

    def _engines(self, now: float) -> dict[str, EngineSnapshot]:
        """Return the engines that accept requests; one that has no step costs gets typical ones.

        Empty if no engine has any.
        """
        engines = self._dispatcher.candidates(self._dispatcher.records, now)
        known = [engine.coefficients for engine in engines if engine.coefficients is not None]
        typical = median_coefficients(known)
        if typical is None:
            return {}
        return {
            engine.name: engine._replace(coefficients=engine.coefficients or typical)
            for engine in engines
        }

    def _busy_engines(self) -> set[str]:
        """Return the engines from or to which a request is under way."""
        return {
            name
            for handoff in self._client.handoffs.running.values()
            if handoff.move_cause and not handoff.outcome
            for name in (handoff.pair.prefill, handoff.decode)
        }

    def _worker(
        self, engine: EngineSnapshot, candidates: dict[int, _Candidate], now: float
    ) -> PlacementWorker:
        """Return an engine with its requests; add those that may move to `candidates`."""
        assert engine.coefficients is not None
        placed = []
        for stream, choice, _ in self._client.choices_on(engine.name).values():
            entry = stream.entry
            num_tokens = len(entry.outputs[choice])
            expected = min(self._errors.expected((stream, choice)), entry.max_tokens)
            request = PlacedRequest(
                len(entry.prompt), expected, num_tokens, is_begun=True, slo=entry.slo
            )
            placed.append(request)
            num_moves, moved_at = self._moves.get(stream, (0, now - REST_SECONDS))
            has_rested = now - moved_at >= REST_SECONDS
            if entry.n == 1 and num_tokens and num_moves < self._max_moves and has_rested:
                candidates[id(request)] = _Candidate(
                    (stream, choice), len(entry.prompt) + num_tokens
                )
        mean = sum(request.num_prompt_tokens for request in placed) // max(1, len(placed))
        return PlacementWorker(
            engine.name,
            LatencyModel.from_step_costs(engine.coefficients, mean),
            placed,
            engine.num_kv_tokens * engine.weight,
            max(1, int(engine.max_num_seqs * engine.weight)),
        )

    # Costs.

    def _pause(self, source: EngineSnapshot, target: EngineSnapshot, num_tokens: int) -> float:
        """Return how long a request waits if it moves, in seconds.

        Before the first move between two engines the time to compute its tokens again, which is
        what a failed move costs.
        """
        estimate = self._pauses.get((source.name, target.name))
        measured = estimate.predict(num_tokens) if estimate is not None else None
        if measured is not None:
            return measured
        assert target.coefficients is not None
        model = LatencyModel.from_step_costs(target.coefficients, num_tokens)
        return model.prefill_seconds(num_tokens)

    def _on_moved(self, stream: RequestStream, handoff: Handoff, seconds: float) -> None:
        """Record the duration of a move, of whatever cause."""
        entry = stream.entry
        num_tokens = len(entry.prompt) + entry.num_output_tokens
        pair = handoff.pair.prefill, entry.engine
        pause = self._pauses.setdefault(pair, TransferEstimate())
        pause.observe(num_tokens, seconds, handoff.prefilled_at + seconds)
        if handoff.move_cause == CAUSE:
            self.pause_seconds += seconds

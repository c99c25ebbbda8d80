"""Decisions of a router about its requests: which engine gets one, and which one is refused.

Pure apart from the clock that it is given, so the simulation runs the same object.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from gllm.options.slo import Slo
from gllm.router.engine_record import EngineRecord, NextRequest
from gllm.routing.disaggregation.policy import EnginePair, PairPolicy, PairRequest
from gllm.routing.health import FleetHealth
from gllm.routing.lengths.accuracy import MeasuredLengthPredictor
from gllm.routing.lengths.registry import make_length_predictor
from gllm.routing.policies.predict import predict_all
from gllm.routing.policy import RoutingPolicy
from gllm.routing.prefix_index import PromptBlockHashes
from gllm.routing.scaling.engine_rate import RecentLengths
from gllm.routing.shedding import retry_after_seconds, shedding_reason
from gllm.routing.state import EngineSnapshot, RoutingRequest
from gllm.runtime.head.journal import JournalEntry
from gllm.runtime.head.request_stream import RequestStream
from gllm.scheduler.output_lengths import LengthEstimate, LengthQuery

log = logging.getLogger(__name__)


class Dispatcher:
    """Chooses the engine of each request by routing policy, engine load and engine health."""

    def __init__(
        self,
        policy: RoutingPolicy,
        health: FleetHealth,
        clock: Callable[[], float],
        length_predictor: str | None = None,
    ) -> None:
        """Create a dispatcher without engines.

        Args:
            policy: chooses among the engines that may get a request.
            health: says which engines are ejected or in slow start.
            clock: returns the time in seconds.
            length_predictor: name or file of the predictor of output lengths; None for the
                policy's.

        Raises:
            ValueError: there is no such predictor, or its file cannot be used.
        """
        self.records: dict[str, EngineRecord] = {}
        """Attached engines by name."""
        self.num_shed: Counter[str] = Counter()
        """Requests refused because of their SLO, by reason."""
        name = length_predictor or policy.length_predictor
        self.output_lengths = MeasuredLengthPredictor(name, make_length_predictor(name))
        """Predictor of the output lengths of all requests, with its accuracy."""
        self.mean_lengths: RecentLengths | None = None
        """Mean lengths of the requests that have finished lately; None before the first."""
        self.policy = policy
        self.health = health
        self._clock = clock

    @property
    def has_ready_engine(self) -> bool:
        """True if an engine accepts requests."""
        return any(record.accepts_requests for record in self.records.values())

    def choose(self, stream: RequestStream, names: Collection[str]) -> str | None:
        """Return the name of the engine that runs a request.

        Args:
            stream: the request.
            names: engines that may get it.

        Returns:
            None if none of them takes requests at present or has room, or the request has to wait
            because others were refused too.
        """
        now = self._clock()
        engines = self.candidates(names, now)
        if not engines:
            return None
        request = self._routing_request(stream.entry, engines[0].block_size, now)
        name = self._apply_policy(request, engines)
        if name is None:
            return None
        if stream.entry.num_refusals and not self.health.retry_budget.may_retry(now):
            return None
        stream.entry.num_refusals = 0
        record = self.records[name]
        num_cached = 0
        if self.policy.uses_prefixes:
            cached = self.policy.prefixes.cached_blocks(request.block_hashes)
            num_cached = cached.get(name, 0) * record.announce.block_size
        num_tokens = max(0, request.num_prompt_tokens - num_cached)
        record.on_chosen(NextRequest(num_tokens, request.length_estimate, request.slo))
        return name

    def has_room(self, name: str) -> bool:
        """Return True if an engine accepts requests and the policy may choose it for a short one.

        Args:
            name: name of an attached engine.
        """
        record = self.records[name]
        return record.accepts_requests and self.policy.has_room(record.snapshot())

    def on_output(self, entry: JournalEntry, length: int) -> None:
        """Record the lengths of a finished request, which predict those of later requests."""
        self.estimate(entry).record(length)
        lengths = RecentLengths(len(entry.prompt), length)
        self.mean_lengths = self.mean_lengths.mix(lengths) if self.mean_lengths else lengths

    def estimate(self, entry: JournalEntry) -> LengthEstimate:
        """Return the estimate of a request's output length, made when it is first needed."""
        if entry.length_estimate is None:
            query = LengthQuery(len(entry.prompt), entry.max_tokens, entry.prompt)
            entry.length_estimate = self.output_lengths.estimate(query)
        return entry.length_estimate

    def predict_output(self, entry: JournalEntry) -> int:
        """Predict the likely length of a request's output in tokens, earlier output included.

        The request carries the prediction to its engine once the predictor has seen outputs that
        say something about it; an engine has seen fewer outputs than its routers.
        """
        num_generated = min((len(entry.outputs[choice]) for choice in entry.alive), default=0)
        estimate = self.estimate(entry)
        length = max(1, round(estimate.likely(num_generated)))
        entry.predicted_output_tokens = length if estimate.is_known else 0
        return length

    def reason_to_shed(
        self, prompt: Sequence[int], max_tokens: int, priority: int, cache_salt: str, slo: Slo
    ) -> tuple[str, int] | None:
        """Return why a new request is refused: no engine is predicted to meet its SLO.

        Args:
            prompt: token ids.
            max_tokens: most tokens to generate.
            priority: requests of lower values run first.
            cache_salt: requests share cached prefixes only within one salt.
            slo: limits of the time to first token and per output token.

        Returns:
            The reason and the seconds after which a client may try again; None to accept it.
        """
        engines = self.candidates(self.records, self._clock())
        if not engines:
            return None
        estimate = self.output_lengths.estimate(LengthQuery(len(prompt), max_tokens, prompt))
        request = RoutingRequest(
            num_prompt_tokens=len(prompt),
            block_hashes=PromptBlockHashes(prompt, engines[0].block_size, cache_salt),
            num_output_tokens=max(1, round(estimate.expected())),
            max_tokens=max_tokens,
            priority=priority,
            slo=slo,
            length_estimate=estimate,
        )
        predictions = predict_all(request, engines, self.policy.prefixes)
        reason = shedding_reason(request, predictions)
        if reason is None:
            return None
        self.num_shed[reason] += 1
        return reason, retry_after_seconds(request, predictions.values())

    def _apply_policy(
        self, request: RoutingRequest, engines: Sequence[EngineSnapshot]
    ) -> str | None:
        """Return the policy's choice; that of the fewest requests if the policy fails.

        An engine may report figures that no policy expects, and no request is lost for that.
        """
        try:
            return self.policy.choose(request, engines)
        except Exception:
            # A warning, because equal ones are written once a minute.
            log.warning(
                "the routing policy failed; the engine with the fewest requests is taken",
                exc_info=True,
            )
            least = min(engines, key=lambda engine: engine.stats.unfinished + engine.num_sent)
            return least.name

    def candidates(self, names: Collection[str], now: float) -> list[EngineSnapshot]:
        """Return the engines that accept requests; ejected ones only if there are no others."""
        # In the order of attachment: that of a set of names differs from run to run.
        ready = [
            record
            for name, record in self.records.items()
            if name in names and record.accepts_requests
        ]
        weights = [self.health.weight(record.name, now) for record in ready]
        if not any(weights):
            weights = [1.0] * len(ready)
        pairs = zip(ready, weights, strict=True)
        return [record.snapshot(weight, now) for record, weight in pairs if weight]

    def _routing_request(self, entry: JournalEntry, block_size: int, now: float) -> RoutingRequest:
        num_generated = [len(entry.outputs[choice]) for choice in entry.alive]
        least = min(num_generated, default=0)
        self.predict_output(entry)
        estimate = self.estimate(entry).after(least)
        slo = entry.slo
        if slo is not None:
            slo = slo.remaining(now - entry.arrival, entry.num_output_tokens > 0)
        return RoutingRequest(
            num_prompt_tokens=len(entry.prompt) + sum(num_generated),
            block_hashes=PromptBlockHashes(entry.prompt, block_size, entry.cache_salt),
            num_output_tokens=max(1, round(estimate.expected())),
            max_tokens=entry.max_tokens - least,
            priority=entry.priority,
            session=entry.session,
            slo=slo,
            length_estimate=estimate,
            is_moved=entry.is_moved,
        )


class PairDispatcher:
    """Chooses the prefill and the decode engine of each request. Implements PairChooser."""

    def __init__(
        self, policy: PairPolicy, dispatcher: Dispatcher, clock: Callable[[], float]
    ) -> None:
        """Create the dispatcher.

        Args:
            policy: chooses the engines.
            dispatcher: has the engines and their load.
            clock: returns the time in seconds.
        """
        self.policy = policy
        self._dispatcher = dispatcher
        self._clock = clock

    def accepting(self, names: frozenset[str]) -> frozenset[str]:
        """Return the engines that accept requests, of those named."""
        records = self._dispatcher.records
        return frozenset(
            name for name in names if name in records and records[name].accepts_requests
        )

    def choose(self, stream: RequestStream, names: frozenset[str]) -> EnginePair | None:
        """Return the prefill and decode engines of a request; None to use the routing policy."""
        now = self._clock()
        engines = self._dispatcher.candidates(names, now)
        if not engines or stream.entry.num_refusals:
            return None
        pair = self.policy.choose(self._request(stream), engines, now)
        if pair is None or not all(name in names for name in pair if name):
            self.on_ended(stream)
            return None
        record = self._dispatcher.records[pair.prefill]
        estimate = self._dispatcher.estimate(stream.entry)
        record.on_chosen(NextRequest(len(stream.entry.prompt), estimate, stream.entry.slo))
        return pair

    def choose_decode(self, stream: RequestStream, names: frozenset[str]) -> str | None:
        """Return the decode engine of a prefilled request; None if there is none."""
        now = self._clock()
        engines = self._dispatcher.candidates(names, now)
        return self.policy.choose_decode(self._request(stream), engines, now) if engines else None

    def on_prefilled(self, stream: RequestStream) -> None:
        """Count a request as load of its decode engine alone."""
        self.policy.on_prefill_ended(stream, self._clock())

    def on_ended(self, stream: RequestStream) -> None:
        """Remove a request from the loads of its engines."""
        self.policy.on_ended(stream, self._clock())

    def on_engine_lost(self, engine: str) -> None:
        """Remove an engine and its load."""
        self.policy.on_engine_lost(engine)

    def _request(self, stream: RequestStream) -> PairRequest:
        """Return the request for the policy."""
        entry = stream.entry
        return PairRequest(stream, len(entry.prompt), self._dispatcher.predict_output(entry))

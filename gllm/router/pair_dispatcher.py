"""Choice of the engines that prefill and decode a request, by the pair policy of the router."""

from collections.abc import Callable

from gllm.router.dispatcher import Dispatcher
from gllm.routing.disaggregation.policy import EnginePair, PairPolicy, PairRequest
from gllm.routing.length_prediction import PredictedLength
from gllm.runtime.head.request_stream import RequestStream


class PairDispatcher:
    """Implements PairChooser with a pair policy, which gets the engines that take requests."""

    def __init__(
        self, policy: PairPolicy, dispatcher: Dispatcher, clock: Callable[[], float]
    ) -> None:
        """Create the dispatcher.

        Args:
            policy: chooses the engines.
            dispatcher: knows the engines and their load.
            clock: returns the time in seconds.
        """
        self.policy = policy
        self._dispatcher = dispatcher
        self._clock = clock

    def accepting(self, names: frozenset[str]) -> frozenset[str]:
        """See PairChooser."""
        records = self._dispatcher.records
        return frozenset(
            name for name in names if name in records and records[name].accepts_requests
        )

    def choose(self, stream: RequestStream, names: frozenset[str]) -> EnginePair | None:
        """See PairChooser."""
        now = self._clock()
        engines = self._dispatcher.candidates(names, now)
        if not engines or stream.entry.num_refusals:
            return None
        pair = self.policy.choose(self._request(stream), engines, now)
        if pair is None or not all(name in names for name in pair if name):
            self.on_ended(stream)
            return None
        self._dispatcher.records[pair.prefill].num_next_tokens = len(stream.entry.prompt)
        return pair

    def choose_decode(self, stream: RequestStream, names: frozenset[str]) -> str | None:
        """See PairChooser."""
        now = self._clock()
        engines = self._dispatcher.candidates(names, now)
        return self.policy.choose_decode(self._request(stream), engines, now) if engines else None

    def on_prefilled(self, stream: RequestStream) -> None:
        """See PairChooser."""
        self.policy.on_prefill_ended(stream, self._clock())

    def on_ended(self, stream: RequestStream) -> None:
        """See PairChooser."""
        self.policy.on_ended(stream, self._clock())

    def on_engine_lost(self, engine: str) -> None:
        """See PairChooser."""
        self.policy.on_engine_lost(engine)

    def _request(self, stream: RequestStream) -> PairRequest:
        """Return the request for the policy."""
        entry = stream.entry
        length = self._dispatcher.predict_output(entry)
        return PairRequest(stream, len(entry.prompt), PredictedLength(length, length + 1))

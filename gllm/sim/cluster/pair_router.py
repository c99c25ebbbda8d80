"""Router of a simulated cluster that chooses two engines for each request, by a pair policy."""

from collections.abc import Callable, Sequence

from gllm.routing.disaggregation.policy import EnginePair, PairPolicy, PairRequest, RoleChange
from gllm.routing.length_prediction import OracleLengthPredictor, PredictedLength
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.cluster.router import ClusterRouter, RoutableEngine, RouterNeeds
from gllm.sim.workloads.requests import WorkloadRequest

LengthPredictor = Callable[[int], PredictedLength]
"""Returns a prediction by the true number of output tokens."""


class PairRouter(ClusterRouter):
    """Router with a pair policy of production.

    Args:
        policy: A new pair policy.
        predict_length: Default: the exact length.
    """

    needs = RouterNeeds(statistics=True)

    def __init__(self, policy: PairPolicy, predict_length: LengthPredictor | None = None) -> None:
        self._policy = policy
        self._predict_length = predict_length or OracleLengthPredictor().predict
        self._pairs: dict[int, EnginePair] = {}
        self.decode_choice = policy.decode_choice

    def route(
        self,
        request: SchedulerRequest,
        job: WorkloadRequest,
        engines: Sequence[RoutableEngine],
        now: float,
    ) -> str | None:
        """Return the prefill engine that the policy chooses; `pair` has the decode engine too."""
        pair = None
        if engines:
            snapshots = [engine.snapshot(now) for engine in engines]
            pair = self._policy.choose(self._describe(request), snapshots, now)
        if pair is None:
            self._pairs.pop(request.seq, None)
            return None
        self._pairs[request.seq] = pair
        return pair.prefill

    def pair(self, request: SchedulerRequest) -> EnginePair:
        """Return the engines of a request that has been routed."""
        return self._pairs[request.seq]

    def route_decode(
        self, request: SchedulerRequest, engines: Sequence[RoutableEngine], now: float
    ) -> str | None:
        """Return the engine that decodes a request; None if there is none."""
        snapshots = [engine.snapshot(now) for engine in engines]
        name = self._policy.choose_decode(self._describe(request), snapshots, now)
        self._pairs[request.seq] = self._pairs[request.seq]._replace(decode=name)
        return name

    def role_changes(self, engines: Sequence[RoutableEngine], now: float) -> list[RoleChange]:
        """Return the role changes that the policy decides on."""
        return self._policy.role_changes([engine.snapshot(now) for engine in engines], now)

    def on_prefill_ended(self, request: SchedulerRequest, now: float) -> None:
        """Note that a request has its first token."""
        self._policy.on_prefill_ended(request.seq, now)

    def on_finished(self, request: SchedulerRequest, now: float) -> None:
        """Forget a request."""
        self._pairs.pop(request.seq, None)
        self._policy.on_ended(request.seq, now)

    def on_engine_lost(self, engine: str) -> None:
        """Note the loss of an engine."""
        self._policy.on_engine_lost(engine)

    def predict_output_tokens(self, request: SchedulerRequest) -> int:
        """Return the predicted output length of a request, counted from its prompt."""
        return max(1, self._predict_length(request.max_tokens).num_tokens)

    def _describe(self, request: SchedulerRequest) -> PairRequest:
        num_known = len(request.outputs[0]) if request.outputs else 0
        predicted = self._predict_length(max(1, request.max_tokens - num_known))
        return PairRequest(request.seq, len(request.prompt_token_ids) + num_known, predicted)

"""Routers of a simulated cluster: which engine serves a request.

A routing policy of production is a router through PolicyRouter.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from operator import itemgetter
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from gllm.options.slo import Slo
from gllm.routing.lengths.registry import BY_MAX_TOKENS, make_length_predictor
from gllm.routing.policy import RoutingPolicy
from gllm.routing.policy_registry import check_placement_heartbeat, make_policy
from gllm.routing.prefix_index import PromptBlockHashes
from gllm.routing.state import RoutingRequest
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.output_lengths import (
    FixedEstimate,
    LengthEstimate,
    LengthPredictor,
    LimitLengthPredictor,
)
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.cluster.requests import ClusterRequest
from gllm.sim.workloads.length_predictions import make_query

if TYPE_CHECKING:
    from gllm.sim.cluster.engine import ClusterEngine

ROUTED_IN_A_ROW = 1024
"""Requests that a router which reads nothing of the engines routes before the engines go on."""


class RouterNeeds(NamedTuple):
    """Flags for the parts of the engines' state that a router reads; others are not computed."""

    statistics: bool = False
    """Scheduler statistics, such as the numbers of waiting and running requests."""
    step_costs: bool = False
    """Linear step cost models that the engines fit to their step times."""
    prefixes: bool = False
    """Changes of the engines' prefix caches."""
    ongoing: bool = False
    """Unfinished requests of each engine with their progress."""
    request_counts: bool = False
    """Numbers of unfinished requests only, which the statistics include."""

    @property
    def only_counts(self) -> bool:
        """True if the router reads the numbers of unfinished requests and nothing else."""
        return self == ONLY_COUNTS

    @property
    def all_work(self) -> bool:
        """True if every engine has to be simulated up to an arrival before it can be routed."""
        return any(self) and not self.only_counts


ONLY_COUNTS = RouterNeeds(request_counts=True)


class ClusterRouter(ABC):
    """Base class of routers, which choose the engine of each request in a simulated cluster."""

    needs = RouterNeeds()
    """State of the engines that `route` reads."""
    reads_engines = True
    """True if `route` reads anything that the work of the engines changes, `needs.only_counts` set
    aside. They then run up to each arrival; otherwise they run up to every one of
    `num_routed_in_a_row`, and with `needs.only_counts` to any other one by which one of their
    requests may have ended."""
    num_routed_in_a_row = ROUTED_IN_A_ROW
    """Requests that are routed before the engines go on, unless `reads_engines`. More of them take
    more memory, and let each engine run longer in the CPU's cache."""
    lets_wait = True
    """True if `route` lets a request wait though there are engines, until one of them admits or
    finishes another request. The events of all engines then happen in the order of time; otherwise
    only those of each engine do, and `on_finished` is called engine by engine, possibly late."""
    keeps_order = False
    """True if a waiting request that `route` has refused is placed before all later ones."""
    heartbeat_seconds = 0.0
    """Time between two placements of the requests that arrive in between; 0: each is routed when it
    arrives."""

    @abstractmethod
    def route(
        self, request: ClusterRequest, engines: Sequence["ClusterEngine"], now: float
    ) -> str | None:
        """Return the name of the engine for a request; None to let the request wait.

        A waiting request stays in the central queue of the cluster. It is routed again when an
        engine becomes ready, admits a request or finishes one; `engines` is that engine alone then.

        Args:
            request: The request. One that returns from a failed engine has its output so far.
            engines: Engines that the router takes for ready and that can run the request; may be
                empty.
            now: Time in seconds.
        """

    def on_finished(self, request: SchedulerRequest, now: float) -> None:  # noqa: B027
        """Record a finished request. The default ignores it."""

    def on_engine_lost(self, engine: str) -> None:  # noqa: B027
        """Record the detected failure or the end of an engine. The default ignores it."""


class PolicyRouter(ClusterRouter):
    """Simulated router that chooses engines by a routing policy of the production router.

    The policy sees the same engine state as in production, but without reporting delay.

    Args:
        policy: Routing policy; must be new.
        slo: Latency limits (TTFT, TPOT) attached to all requests, or by SLO class those attached to
            the requests of the class; None: no limits.
        lengths: New predictor of output lengths; None: the length that a request carries, or if it
            carries none, the policy's predictor as in production.
        heartbeat_seconds: Time for which requests are collected, as `--placement-heartbeat`.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        slo: Slo | Mapping[str, Slo] | None = None,
        lengths: LengthPredictor | None = None,
        heartbeat_seconds: float = 0.0,
    ) -> None:
        self.heartbeat_seconds = heartbeat_seconds
        self.lets_wait = self.keeps_order = policy.waits_for_room
        self.needs = RouterNeeds(
            policy.uses_statistics,
            policy.uses_step_costs,
            policy.uses_prefixes,
            policy.uses_ongoing,
            policy.uses_request_counts,
        )
        self.reads_engines = self.needs.all_work
        self._policy = policy
        self._slo = slo
        self._output_lengths = lengths
        self._believes_requests = lengths is None
        """True if a request that carries a predicted length is believed to have it."""
        self._estimates: dict[int, LengthEstimate] = {}
        """Estimates of the unfinished requests, by sequence id of the workload."""
        self._finished: list[tuple[float, SchedulerRequest]] = []
        """Times and requests that have finished since the last choice, engine by engine."""

    def route(
        self, request: ClusterRequest, engines: Sequence["ClusterEngine"], now: float
    ) -> str | None:
        """Return the engine that the policy chooses; None without engines."""
        slo = self._slo_of(request)
        if slo is not None:
            slo = slo.remaining(now - request.arrival_time, request.num_output_tokens > 0)
        request.slo = slo
        if not engines:
            return None
        if self.needs.prefixes:
            for engine in engines:
                engine.update_index(self._policy.prefixes)
        self._record_finished()
        routing_request = self._describe(request, engines[0].config)
        return self._policy.choose(routing_request, [engine.snapshot(now) for engine in engines])

    def on_finished(self, request: SchedulerRequest, now: float) -> None:
        """Record a finished request; its length counts from the next choice on."""
        self._finished.append((now, request))

    def on_engine_lost(self, engine: str) -> None:
        """Drop the blocks of the engine from the prefix index."""
        self._policy.prefixes.forget(engine)

    def _record_finished(self) -> None:
        """Record the lengths of finished requests in the order of time, for predictions."""
        self._finished.sort(key=itemgetter(0))
        for _, request in self._finished:
            # Simulated outputs have their maximum length.
            self._estimates.pop(request.seq).record(request.max_tokens)
        self._finished.clear()

    def _describe(self, routed: ClusterRequest, config: SchedulerConfig) -> RoutingRequest:
        request = routed.request
        estimate = routed.length_estimate = self._estimate(request, config)
        output = request.outputs[0] if request.outputs else []
        hashes: Sequence[bytes] = ()
        if self.needs.prefixes:
            tokens = request.initial_token_ids(request.seq)
            hashes = PromptBlockHashes(tokens, config.block_size, request.cache_salt)
        rest = estimate.after(len(output))
        return RoutingRequest(
            len(request.prompt_token_ids) + len(output),
            hashes,
            max(1, round(rest.expected())),
            request.max_tokens,
            request.priority,
            routed.job.session,
            routed.slo,
            rest,
            routed.is_moved,
        )

    def _slo_of(self, routed: ClusterRequest) -> Slo | None:
        if isinstance(self._slo, Mapping):
            return self._slo.get(routed.job.slo_class)
        return self._slo

    def _estimate(self, request: SchedulerRequest, config: SchedulerConfig) -> LengthEstimate:
        """Return the estimate of a request's output length, made at its first choice."""
        estimate = self._estimates.get(request.seq)
        if estimate is not None:
            return estimate
        if self._output_lengths is None:
            name = self._policy.length_predictor
            self._output_lengths = (
                LimitLengthPredictor(config.expected_output_tokens)
                if name == BY_MAX_TOKENS
                else make_length_predictor(name)
            )
        if self._believes_requests and request.predicted_output_tokens:
            estimate = FixedEstimate(request.predicted_output_tokens)
        else:
            estimate = self._output_lengths.estimate(make_query(request, self._output_lengths))
        self._estimates[request.seq] = estimate
        return estimate


def make_router(
    name: str,
    seed: int,
    lengths: LengthPredictor | None = None,
    slo: Slo | Mapping[str, Slo] | None = None,
    heartbeat_seconds: float = 0.0,
) -> PolicyRouter:
    """Return a new simulated router by the name of its routing policy.

    Args:
        name: A routing policy of production (POLICIES).
        seed: Seed of the policy's random choices.
        lengths: New predictor of output lengths, as for PolicyRouter.
        slo: Latency limits of the requests, as for PolicyRouter.
        heartbeat_seconds: Time for which requests are collected, as for PolicyRouter.

    Raises:
        ValueError: There is no such policy, or it places requests at their arrival.
    """
    policy = make_policy(name, Random(seed))
    check_placement_heartbeat(name, heartbeat_seconds, "the policy")
    return PolicyRouter(policy, slo, lengths, heartbeat_seconds)

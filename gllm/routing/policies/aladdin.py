"""Best fit with latency constraints: fill the fullest engine that still meets each request's SLO.

Fewer engines then serve the same requests, and the others are idle and can be removed. A request
without an SLO has no limit of its own, but goes to no engine on which it would break that of
another one. Where no engine meets the constraints, the one with the least load gets the request. At
rates at which sorting all engines would take too long, they are divided into groups; the other
groups are tried before that.

The policy places one request at a time. The router passes it each request at its arrival, or with
`--placement-heartbeat` those of a heartbeat one after the other, longest prompts first, which is
the placement of the paper (`gllm/routing/rounds.py`).

Source: "Aladdin" (arXiv 2405.06856), its online placement; the norm is normalised here, and the
fallback for a fixed number of engines is ours.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import inf, log2
from random import Random
from typing import NamedTuple

from gllm.routing.placement import (
    LatencyModel,
    PlacedRequest,
    PlacementRules,
    WorkerLoad,
    load_norm,
    meets_constraints,
    tpot_limit,
    ttft_limit,
)
from gllm.routing.policy import RoutingPolicy
from gllm.routing.scaling.arrival_rate import ArrivalRate, least_stable_rate
from gllm.routing.state import EngineSnapshot, RoutingRequest, median_coefficients

UNKNOWN_MODEL = LatencyModel(0.0, 0.0, 0.0, 0.0, 0.0)
"""Model before an engine has fitted its steps: no constraint of time binds."""
MAX_SECONDS = 0.05
"""Time that the placement of a heartbeat may take."""
HEARTBEAT_SECONDS = 1.0
WORKER_SECONDS = 4e-6
"""Time per engine and comparison, with 64 requests on each engine (`benchmarks.placement`)."""
STABLE_SECONDS = 120.0
"""Time in which the mean rate of a group has to be known: that after which fewer engines are wanted
(`--scale-down-seconds`)."""


def predict_scheduling_seconds(
    num_workers: float, num_requests: float, worker_seconds: float
) -> float:
    """Return the time in seconds to place the requests of one scheduling interval: r a n log n.

    Args:
        num_workers: n: engines to choose from.
        num_requests: r: requests to place.
        worker_seconds: a: seconds per engine and comparison.
    """
    n = max(2.0, num_workers)
    return num_requests * worker_seconds * n * log2(n)


def num_scheduling_groups(
    num_workers: int,
    rate: float,
    heartbeat_seconds: float,
    worker_seconds: float,
    least_rate: float,
) -> int:
    """Return the least number of engine groups with which a placement takes at most MAX_SECONDS.

    A group gets at least the request rate from which its number of engines can be predicted, so
    there may be fewer groups than the time limit requires. The result is at least 1.

    Args:
        num_workers: engines of all groups.
        rate: requests per second of all groups.
        heartbeat_seconds: time between two placements.
        worker_seconds: seconds per engine and comparison.
        least_rate: least requests per second of a group (R in the paper).
    """
    groups = 1
    while groups < num_workers and rate / (groups + 1) >= least_rate:
        num_requests = rate * heartbeat_seconds / groups
        seconds = predict_scheduling_seconds(num_workers / groups, num_requests, worker_seconds)
        if seconds <= MAX_SECONDS:
            break
        groups += 1
    return groups


class SchedulingGroups:
    """Divides a router's engines into groups, so that placing a request sorts only one group.

    Requests are divided equally among the groups. An engine's group follows from a hash of its
    name, so that few engines change theirs when the number of groups or of engines does. Reads no
    clock: time is an argument.

    Source: "Aladdin" (arXiv 2405.06856), section on distributed scheduling; the rule is ours.
    """

    def __init__(self) -> None:
        self.num_groups = 1
        self._rate: ArrivalRate | None = None
        self._turn = 0
        self._group_by_name: dict[str, int] = {}

    def on_request(self, num_engines: int, now: float) -> None:
        """Count a request, and set the number of groups by the rate.

        Args:
            num_engines: Engines that may get the request.
            now: Time in seconds.
        """
        if self._rate is None:
            self._rate = ArrivalRate(now)
        self._rate.observe(1, now)
        num_groups = num_scheduling_groups(
            num_engines, self._rate.rate, HEARTBEAT_SECONDS, WORKER_SECONDS,
            least_stable_rate(STABLE_SECONDS),
        )  # fmt: skip
        if num_groups != self.num_groups:
            self.num_groups = num_groups
            self._group_by_name.clear()

    def divide(self, names: Sequence[str]) -> list[list[int]]:
        """Return the indexes of the engines of each group, that of the next request first.

        Args:
            names: Names of the engines. Groups without any of them are left out.
        """
        if self.num_groups == 1:
            return [[*range(len(names))]]
        if len(self._group_by_name) > 2 * len(names):
            # Engines that have gone.
            self._group_by_name.clear()
        groups: list[list[int]] = [[] for _ in range(self.num_groups)]
        for index, name in enumerate(names):
            group = self._group_by_name.get(name)
            if group is None:
                group = self._group_by_name[name] = _hash_to_group(name, self.num_groups)
            groups[group].append(index)
        self._turn = (self._turn + 1) % self.num_groups
        order = groups[self._turn :] + groups[: self._turn]
        return [group for group in order if group]


def _hash_to_group(name: str, num_groups: int) -> int:
    """Return the group of an engine: that with the highest hash together with its name."""
    return max(
        range(num_groups),
        key=lambda group: blake2b(f"{name}\0{group}".encode(), digest_size=8).digest(),
    )


class AladdinPolicy(RoutingPolicy):
    """Routing policy `aladdin`: the fullest engine that still meets the latency limits (best fit).

    A request goes to the most loaded engine on which it and the running requests meet their limits
    of latency and KV cache, each its own, otherwise to the least loaded one. Source: "Aladdin"
    (arXiv 2405.06856).

    Args:
        rng: breaks ties.
        rules: parameters of the constraints; their SLO is that of requests without their own.
        model: latency model of all engines; None: the one that each engine has fitted.
        groups: divides the engines; None: by the rate of the requests.
    """

    uses_statistics = False
    uses_step_costs = True
    uses_ongoing = True
    places_in_heartbeats = True
    packs_requests = True
    length_predictor = "by-prompt"

    def __init__(
        self,
        rng: Random,
        rules: PlacementRules | None = None,
        model: LatencyModel | None = None,
        groups: SchedulingGroups | None = None,
    ) -> None:
        super().__init__(rng)
        self._rules = rules or PlacementRules()
        self._model = model
        self._groups = groups or SchedulingGroups()

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return the fullest engine that admits the request, or the one with the least load."""
        if not engines:
            return None
        rules, length = self._rules, request.num_prompt_tokens
        expected = request.length_estimate.expected()
        placed = PlacedRequest(length, expected, slo=request.slo)
        tpot = tpot_limit(request.slo, rules)
        models = self._models(length, engines)
        self._groups.on_request(len(engines), engines[0].time)
        least: list[_Worker] = []
        for group in self._groups.divide([engine.name for engine in engines]):
            workers = [self._worker(engines[index], models[index], tpot) for index in group]
            self._rng.shuffle(workers)
            workers.sort(key=lambda worker: worker.load, reverse=True)
            for worker in workers:
                if worker.admits(placed, rules):
                    return worker.engine.name
            least.append(workers[-1])
        return min(least, key=lambda worker: worker.load).engine.name

    def _models(self, length: int, engines: Sequence[EngineSnapshot]) -> list[LatencyModel]:
        """Return the latency model of each engine; one that has none gets a typical one."""
        if self._model is not None:
            return [self._model] * len(engines)
        costs = [engine.coefficients for engine in engines]
        typical = None
        if None in costs:
            typical = median_coefficients([cost for cost in costs if cost is not None])
        return [
            LatencyModel.from_step_costs(known, length) if known else UNKNOWN_MODEL
            for known in (cost or typical for cost in costs)
        ]

    def _worker(
        self, engine: EngineSnapshot, model: LatencyModel, tpot_seconds: float
    ) -> "_Worker":
        """Return an engine with its load; a weight below 1 scales its limits.

        Args:
            engine: the engine.
            model: its latency model.
            tpot_seconds: limit of the request that is placed; infinite: none.
        """
        rules, gamma = self._rules, self._rules.gamma
        expected = []
        context = 0.0
        least_ttft = least_tpot = inf
        for request in engine.ongoing:
            length = request.length_estimate.expected(request.num_output_tokens)
            expected.append(length)
            context += request.num_prompt_tokens + gamma * length
            least_tpot = min(least_tpot, tpot_limit(request.slo, rules))
            if not request.num_output_tokens:
                least_ttft = min(least_ttft, ttft_limit(request.slo, rules))
        num_kv_tokens = engine.num_kv_tokens * engine.weight
        max_num_seqs = max(1, int(engine.max_num_seqs * engine.weight))
        load = load_norm(
            model, len(expected), context, num_kv_tokens, max_num_seqs,
            min(least_tpot, tpot_seconds),
        )  # fmt: skip
        return _Worker(
            engine, model, expected, context, num_kv_tokens, max_num_seqs, least_ttft, least_tpot,
            load,
        )  # fmt: skip


class _Worker(NamedTuple):
    """An engine, its limits, and its load."""

    engine: EngineSnapshot
    model: LatencyModel
    expected_outputs: list[float]
    """Expected length of the output of each ongoing request, in tokens."""
    context: float
    """Planned context of these requests, in tokens."""
    num_kv_tokens: float
    max_num_seqs: int
    ttft_seconds: float
    """As in WorkerLoad."""
    tpot_seconds: float
    """As in WorkerLoad."""
    load: float

    def admits(self, request: PlacedRequest, rules: PlacementRules) -> bool:
        """Return True if the engine meets all constraints with one more request."""
        load = WorkerLoad(
            self.model,
            len(self.engine.ongoing),
            self.max_num_seqs,
            self.num_kv_tokens,
            self.context,
            self.ttft_seconds,
            self.tpot_seconds,
            self._num_new_tokens,
            lambda: self._decode_slacks(rules),
            self._placed_requests,
        )
        return meets_constraints(load, request, rules)

    def _num_new_tokens(self) -> int:
        ongoing = self.engine.ongoing
        return sum(
            request.num_prompt_tokens for request in ongoing if not request.num_output_tokens
        )

    def _decode_slacks(self, rules: PlacementRules) -> Iterator[float]:
        now = self.engine.time
        for request in self.engine.ongoing:
            if request.num_output_tokens:
                tpot = tpot_limit(request.slo, rules)
                yield tpot * request.num_output_tokens - (now - request.first_token_time)

    def _placed_requests(self) -> list[PlacedRequest]:
        return [
            PlacedRequest(ongoing.num_prompt_tokens, length, ongoing.num_output_tokens)
            for ongoing, length in zip(self.engine.ongoing, self.expected_outputs, strict=True)
        ]

"""Best fit with latency constraints: fill the fullest engine that still meets each request's SLO.

Fewer engines then serve the same requests, and the others are idle and can be removed. Requests
without an SLO are limited by the KV cache alone. Where no engine meets the constraints, the one
with the least load gets the request. At rates at which sorting all engines would take too long,
they are divided into groups; the other groups are tried before that.

Source: "Aladdin" (arXiv 2405.06856), its online placement; the norm is normalised here, and the
fallback for a fixed number of engines is ours.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from gllm.options.slo import NO_SLO
from gllm.routing.output_by_prompt import PromptLengthPredictor
from gllm.routing.placement import (
    LatencyModel,
    PlacedRequest,
    PlacementRules,
    WorkerLoad,
    load_norm,
    meets_constraints,
)
from gllm.routing.policy import RoutingPolicy
from gllm.routing.scheduling_groups import SchedulingGroups
from gllm.routing.state import EngineSnapshot, RoutingRequest, median_coefficients

UNKNOWN_MODEL = LatencyModel(0.0, 0.0, 0.0, 0.0, 0.0)
"""Model before an engine has fitted its steps: no constraint of time binds."""


class AladdinPolicy(RoutingPolicy):
    """The fullest engine that meets the constraints of all its requests with one more.

    Args:
        rng: Breaks ties.
        rules: Parameters of the constraints; the SLO is that of each request.
        model: Latency model of all engines; None: the one that each engine has fitted.
        groups: Divides the engines; None: by the rate of the requests.
    """

    uses_statistics = False
    uses_step_costs = True
    uses_ongoing = True

    def __init__(
        self,
        rng: Random,
        rules: PlacementRules | None = None,
        model: LatencyModel | None = None,
        groups: SchedulingGroups | None = None,
    ) -> None:
        super().__init__(rng)
        self.output_lengths = PromptLengthPredictor()
        self._rules = rules or PlacementRules()
        self._model = model
        self._groups = groups or SchedulingGroups()

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return the fullest engine that admits the request, or the one with the least load."""
        if not engines:
            return None
        rules = replace(self._rules, slo=request.slo or NO_SLO)
        length = request.num_prompt_tokens
        placed = PlacedRequest(length, self.output_lengths.predict(length))
        models = self._models(length, engines)
        self._groups.on_request(len(engines), engines[0].time)
        least: list[_Worker] = []
        for group in self._groups.divide([each.name for each in engines]):
            workers = [self._worker(engines[index], models[index], rules) for index in group]
            self._rng.shuffle(workers)
            workers.sort(key=lambda each: each.load, reverse=True)
            for worker in workers:
                if worker.admits(placed, rules):
                    return worker.engine.name
            least.append(workers[-1])
        return min(least, key=lambda each: each.load).engine.name

    def on_finished(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Record the length of an output, which predicts later ones."""
        self.output_lengths.record(num_prompt_tokens, num_output_tokens)

    def _models(self, length: int, engines: Sequence[EngineSnapshot]) -> list[LatencyModel]:
        """Return the latency model of each engine; one that has none gets a typical one."""
        if self._model is not None:
            return [self._model] * len(engines)
        costs = [each.coefficients for each in engines]
        typical = None
        if None in costs:
            typical = median_coefficients([each for each in costs if each is not None])
        return [
            LatencyModel.from_step_costs(known, length) if known else UNKNOWN_MODEL
            for known in (each or typical for each in costs)
        ]

    def _worker(
        self, engine: EngineSnapshot, model: LatencyModel, rules: PlacementRules
    ) -> "_Worker":
        """Return an engine with its load; a weight below 1 scales its limits."""
        gamma, predict = rules.gamma, self.output_lengths.predict
        expected = [
            predict(each.num_prompt_tokens, each.num_output_tokens) for each in engine.ongoing
        ]
        context = sum(
            request.num_prompt_tokens + gamma * length
            for request, length in zip(engine.ongoing, expected, strict=True)
        )
        num_kv_tokens = engine.num_kv_tokens * engine.weight
        max_num_seqs = max(1, int(engine.max_num_seqs * engine.weight))
        load = load_norm(model, len(expected), context, num_kv_tokens, max_num_seqs, rules)
        return _Worker(engine, model, expected, context, num_kv_tokens, max_num_seqs, load)


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
    load: float

    def admits(self, request: PlacedRequest, rules: PlacementRules) -> bool:
        """Return True if the engine meets all constraints with one more request."""
        load = WorkerLoad(
            self.model,
            len(self.engine.ongoing),
            self.max_num_seqs,
            self.num_kv_tokens,
            self.context,
            self._num_new_tokens,
            self._decode_slacks,
            self._placed_requests,
        )
        return meets_constraints(load, request, rules)

    def _num_new_tokens(self) -> int:
        ongoing = self.engine.ongoing
        return sum(each.num_prompt_tokens for each in ongoing if not each.num_output_tokens)

    def _decode_slacks(self, tpot_seconds: float) -> Iterator[float]:
        now = self.engine.time
        for each in self.engine.ongoing:
            if each.num_output_tokens:
                yield tpot_seconds * each.num_output_tokens - (now - each.first_token_time)

    def _placed_requests(self) -> list[PlacedRequest]:
        return [
            PlacedRequest(each.num_prompt_tokens, length, each.num_output_tokens)
            for each, length in zip(self.engine.ongoing, self.expected_outputs, strict=True)
        ]

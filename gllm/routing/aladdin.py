"""Best fit with latency constraints: fill the fullest engine that still meets each request's SLO.

Fewer engines then serve the same requests, and the others are idle and can be removed. Requests
without an SLO are limited by the KV cache alone. Where no engine meets the constraints, the one
with the least load gets the request.

Source: "Aladdin" (arXiv 2405.06856), its online placement; the norm is normalised here, and the
fallback for a fixed number of engines is ours.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from gllm.config.slo import NO_SLO
from gllm.routing.output_by_prompt import PromptLengthPredictor
from gllm.routing.placement import (
    LatencyModel,
    PlacedRequest,
    PlacementRules,
    PlacementWorker,
    admits,
    capacity_norm,
)
from gllm.routing.policy import RoutingPolicy
from gllm.routing.state import EngineSnapshot, RoutingRequest, median_coefficients

UNKNOWN_MODEL = LatencyModel(0.0, 0.0, 0.0, 0.0, 0.0)
"""Model before an engine has fitted its steps: no constraint of time binds."""


class AladdinPolicy(RoutingPolicy):
    """The fullest engine that meets the constraints of all its requests with one more.

    Args:
        rng: Breaks ties.
        rules: Parameters of the constraints; the SLO is that of each request.
        model: Latency model of all engines; None: the one that each engine has fitted.
    """

    uses_statistics = False
    uses_step_costs = True
    uses_ongoing = True

    def __init__(
        self,
        rng: Random,
        rules: PlacementRules | None = None,
        model: LatencyModel | None = None,
    ) -> None:
        super().__init__(rng)
        self.output_lengths = PromptLengthPredictor()
        self._rules = rules or PlacementRules()
        self._model = model

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return the fullest engine that admits the request, or the one with the least load."""
        if not engines:
            return None
        rules = replace(self._rules, slo=request.slo or NO_SLO)
        placed = self._placed(request.num_prompt_tokens, 0, 0.0)
        workers = self._workers(request, engines)
        loads = {each.name: capacity_norm(each, rules) for each in workers}
        self._rng.shuffle(workers)
        workers.sort(key=lambda each: loads[each.name], reverse=True)
        for worker in workers:
            if admits(worker, placed, rules):
                return worker.name
        return workers[-1].name

    def on_finished(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Record the length of an output, which predicts later ones."""
        self.output_lengths.record(num_prompt_tokens, num_output_tokens)

    def _workers(
        self, request: RoutingRequest, engines: Sequence[EngineSnapshot]
    ) -> list[PlacementWorker]:
        """Return the engines as workers; a weight below 1 scales the limits of an engine."""
        fitted = [each.coefficients for each in engines if each.coefficients is not None]
        typical = median_coefficients(fitted)
        workers = []
        for engine in engines:
            costs, model = engine.coefficients or typical, self._model
            if model is None:
                length = request.num_prompt_tokens
                model = LatencyModel.from_step_costs(costs, length) if costs else UNKNOWN_MODEL
            workers.append(
                PlacementWorker(
                    engine.name,
                    model,
                    [self._placed(*each) for each in engine.ongoing],
                    engine.num_kv_tokens * engine.weight,
                    max(1, int(engine.max_num_seqs * engine.weight)),
                )
            )
        return workers

    def _placed(
        self, num_prompt_tokens: int, num_output_tokens: int, decode_seconds: float
    ) -> PlacedRequest:
        expected = self.output_lengths.predict(num_prompt_tokens, num_output_tokens)
        return PlacedRequest(num_prompt_tokens, expected, num_output_tokens, decode_seconds)

"""Pair policy `flow`: engines in proportion to the flow of a plan.

Source: HexGen-2 (ICLR 2025, arXiv 2502.07903), section 4.2: KV caches go from a prefill to a decode
replica in proportion to the maximum flow between them.
"""

from collections.abc import Iterable, Mapping, Sequence
from random import Random

from gllm.routing.disaggregation.policy import (
    DecodeChoice,
    EnginePair,
    PairPolicy,
    PairRequest,
    engines_of,
)
from gllm.routing.smooth_round_robin import SmoothRoundRobin
from gllm.routing.state import EngineSnapshot

Routes = Mapping[str, Mapping[str, float]]
"""Flow from each prefill engine to each decode engine by their names, in any unit; above 0."""


def parse_routes(routes: Iterable[str]) -> dict[str, dict[str, float]]:
    """Parse routes such as `p0:d1=2.5` into {prefill engine: {decode engine: flow}}.

    A flow is the relative number of requests of that pair of engines.

    Raises:
        ValueError: A route has another form, appears twice, or its flow is not above 0.
    """
    flows: dict[str, dict[str, float]] = {}
    for route in routes:
        engines, _, number = route.partition("=")
        prefill, _, decode = engines.partition(":")
        try:
            flow = float(number)
        except ValueError:
            flow = 0.0
        if not (prefill and decode and 0 < flow < float("inf")):
            raise ValueError(
                f"routes: {route!r} is not PREFILL:DECODE=FLOW with a flow above 0, as in p0:d1=2.5"
            )
        if decode in flows.setdefault(prefill, {}):
            raise ValueError(f"routes: {prefill}:{decode} appears twice: leave one out")
        flows[prefill][decode] = flow
    return flows


def format_routes(routes: Routes) -> str:
    """Format flows between engines as `p0:d1=2.5,p1:d0=1`, the inverse of `parse_routes`."""
    return ",".join(
        f"{prefill}:{decode}={flow:.6g}"
        for prefill, targets in routes.items()
        for decode, flow in targets.items()
    )


class FlowPairPolicy(PairPolicy):
    """Pair policy `flow`: weighted round-robin over (prefill, decode) engine pairs of a flow plan.

    The plan has the relative number of requests (flow) of each pair of engines. Engines that it
    does not name are used only if none of its engines is left.

    Args:
        rng: ignored; the choice is not random.
        routes: flow from each prefill engine to each decode engine; none: all engines get requests
            by their weights.
    """

    decode_choice = DecodeChoice.ARRIVAL

    def __init__(self, rng: Random, routes: Routes | None = None) -> None:
        super().__init__(rng)
        self._routes = routes or {}
        self._prefill_turns = SmoothRoundRobin()
        self._decode_turns: dict[str, SmoothRoundRobin] = {}
        """By the prefill engine; an empty name for engines without routes."""

    def choose(
        self, request: PairRequest, engines: Sequence[EngineSnapshot], now: float
    ) -> EnginePair | None:
        """Return the next prefill and decode engine in proportion to the flows."""
        flows = {prefill: sum(targets.values()) for prefill, targets in self._routes.items()}
        weights = _weights(engines, flows) or _weights(engines_of("prefill", engines), None)
        prefill = self._prefill_turns.choose(weights)
        if prefill is None:
            return None
        return self._assign(request, EnginePair(prefill, self._next_decode(prefill, engines)))

    def choose_decode(
        self, request: PairRequest, engines: Sequence[EngineSnapshot], now: float
    ) -> str | None:
        """Return another decode engine for a request that has lost its own."""
        known = self.loads.requests.get(request.key)
        name = self._next_decode(known.prefill if known else "", engines)
        return self._assign_decode(request, name) if name is not None else None

    def _next_decode(self, prefill: str, engines: Sequence[EngineSnapshot]) -> str | None:
        weights = _weights(engines, self._routes.get(prefill, {}))
        key = prefill if weights else ""
        if not weights:
            totals: dict[str, float] = {}
            for targets in self._routes.values():
                for decode, flow in targets.items():
                    totals[decode] = totals.get(decode, 0.0) + flow
            weights = _weights(engines, totals) or _weights(engines_of("decode", engines), None)
        return self._decode_turns.setdefault(key, SmoothRoundRobin()).choose(weights)


def _weights(
    engines: Sequence[EngineSnapshot], flows: Mapping[str, float] | None
) -> dict[str, float]:
    """Return the weights of engines that a plan names; None: of all engines."""
    if flows is None:
        return {engine.name: engine.weight for engine in engines}
    return {
        engine.name: engine.weight * flows[engine.name]
        for engine in engines
        if engine.name in flows
    }

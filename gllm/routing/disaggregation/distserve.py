"""Pair policy `distserve`: shortest queue, then the least loaded decode engine.

Source: "DistServe" (OSDI'24, arXiv 2401.09670), section 4.3: a request goes to the prefill instance
with the shortest queue, and after its prefill to the least loaded decode instance.
"""

from collections.abc import Sequence

from gllm.routing.disaggregation.policy import (
    DecodeChoice,
    EnginePair,
    PairPolicy,
    PairRequest,
    engines_of,
)
from gllm.routing.policies.simple import choose_least
from gllm.routing.state import EngineSnapshot


class DistServePairPolicy(PairPolicy):
    """Pair policy `distserve`: prefill and decode engine with the fewest unfinished requests.

    The decode engine is chosen when the prefill has ended. Source: "DistServe" (OSDI'24, arXiv
    2401.09670).
    """

    decode_choice = DecodeChoice.PREFILL_END

    def choose(
        self, request: PairRequest, engines: Sequence[EngineSnapshot], now: float
    ) -> EnginePair | None:
        """Return the prefill engine with the fewest unfinished requests."""

        def queue(engine: EngineSnapshot) -> float:
            num_requests = max(engine.num_requests, self.loads.of(engine.name).num_prefills)
            return (num_requests + 1) / engine.weight

        name = choose_least(engines_of("prefill", engines), queue, self._rng)
        return self._assign(request, EnginePair(name)) if name is not None else None

    def choose_decode(
        self, request: PairRequest, engines: Sequence[EngineSnapshot], now: float
    ) -> str | None:
        """Return the decode engine with the fewest unfinished requests."""

        def load(engine: EngineSnapshot) -> float:
            num_requests = max(engine.num_requests, self.loads.of(engine.name).num_decodes)
            return (num_requests + 1) / engine.weight

        name = choose_least(engines_of("decode", engines), load, self._rng)
        return self._assign_decode(request, name) if name is not None else None

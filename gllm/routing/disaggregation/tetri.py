"""Pair policy `tetri`: the least loaded prefill engine, then the better of two decode engines.

Source: "Inference without Interference" (TetriInfer, arXiv 2401.11181), sections 3.2 and 3.3.4.
The paper takes the engine with the least ratio of heavy to light decodes. Read literally, that
herds: heavy requests gather where the ratio is low because light ones are many. A heavy request
goes to the engine with fewer heavy decodes here, and a light one to that with fewer light ones.
"""

from collections.abc import Sequence

from gllm.routing.disaggregation.pair_loads import HEAVY_TOKENS
from gllm.routing.disaggregation.policy import (
    DecodeChoice,
    EnginePair,
    PairPolicy,
    PairRequest,
    engines_of,
)
from gllm.routing.policies.simple import choose_least
from gllm.routing.state import EngineSnapshot


class TetriPairPolicy(PairPolicy):
    """Pair policy `tetri`: prefill engine with the fewest tokens, better of two decode engines.

    After the first prefill chunk, of two random decode engines with enough free KV memory the one
    with fewer decodes of the same kind (long or short predicted output) is chosen. Source:
    "TetriInfer" (arXiv 2401.11181).
    """

    decode_choice = DecodeChoice.FIRST_CHUNK

    def choose(
        self, request: PairRequest, engines: Sequence[EngineSnapshot], now: float
    ) -> EnginePair | None:
        """Return the prefill engine with the fewest tokens to prefill."""

        def load(engine: EngineSnapshot) -> float:
            pending = max(engine.num_waiting_tokens, self.loads.of(engine.name).prefill_tokens)
            return (pending + request.num_prompt_tokens) / engine.weight

        name = choose_least(engines_of("prefill", engines), load, self._rng)
        return self._assign(request, EnginePair(name)) if name is not None else None

    def choose_decode(
        self, request: PairRequest, engines: Sequence[EngineSnapshot], now: float
    ) -> str | None:
        """Return the better of two random decode engines with enough free KV memory."""
        pool = engines_of("decode", engines)
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        fitting = [engine for engine in pool if self._free_tokens(engine) >= num_tokens]
        if fitting:
            pair = self._rng.sample(fitting, min(2, len(fitting)))
            name = self._least_interference(request, pair)
        else:
            name = choose_least(pool, lambda engine: -self._free_tokens(engine), self._rng)
        return self._assign_decode(request, name) if name is not None else None

    def _least_interference(
        self, request: PairRequest, engines: Sequence[EngineSnapshot]
    ) -> str | None:
        """Return the engine with the fewest decodes of the request's kind, then of both kinds."""
        is_heavy = request.num_output_tokens > HEAVY_TOKENS

        def num_alike(engine: EngineSnapshot) -> float:
            load = self.loads.of(engine.name)
            own = load.num_heavy_decodes if is_heavy else load.num_light_decodes
            return (own + 1) / engine.weight

        least = min(map(num_alike, engines))
        alike = [engine for engine in engines if num_alike(engine) == least]
        return choose_least(
            alike, lambda engine: self.loads.of(engine.name).num_decodes / engine.weight, self._rng
        )

    def _free_tokens(self, engine: EngineSnapshot) -> float:
        """Return the KV tokens that are neither in use nor predicted for assigned decodes."""
        used = max(engine.num_used_kv_tokens, self.loads.of(engine.name).decode_tokens)
        return engine.num_kv_tokens - used

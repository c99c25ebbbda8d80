"""Pair policy `splitwise`: join the shortest queue, with a mixed pool for overflow.

Source: "Splitwise" (ISCA'24, arXiv 2311.18677), section 4.2; the limit of the prompt queue and the
reserved memory of token machines from splitwise-sim (MIT).
"""

from collections.abc import Sequence
from random import Random

from gllm.routing.disaggregation.policy import (
    DecodeChoice,
    EnginePair,
    PairPolicy,
    PairRequest,
    RoleChange,
)
from gllm.routing.disaggregation.role_pools import OPPOSITE_ROLES, Pools, RolePools
from gllm.routing.policies.simple import choose_least
from gllm.routing.state import EngineSnapshot

MAX_PENDING_TOKENS = 8192
"""Prompt tokens that may wait on a machine with a queue."""


class SplitwisePairPolicy(PairPolicy):
    """Pair policy `splitwise`: chooses both engines at arrival, with a mixed pool for overload.

    Prefill goes to the engine with the fewest pending tokens, decode to the one with the least
    reserved KV memory. Source: "Splitwise" (ISCA'24, arXiv 2311.18677).
    """

    decode_choice = DecodeChoice.ARRIVAL

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.pools = RolePools(self.loads)
        """Pool of each machine."""

    def choose(
        self, request: PairRequest, engines: Sequence[EngineSnapshot], now: float
    ) -> EnginePair | None:
        """Return the prefill and the decode engine."""
        if not engines:
            return None
        # The request leaves the engines that it had before pools and loads are read.
        self.loads.remove(request.key)
        pools = self.pools.divide(engines)
        prefill = self._find_prefill(request, pools)
        decode = self._find_decode(request, pools)
        if prefill is None and pools.decode:
            prefill = self._least_pending(request, pools.decode)
            self._lend(prefill, pools, now)
        if decode is None and pools.prefill:
            decode = self._least_reserved(pools.prefill)
            self._lend(decode, pools, now)
        if prefill is None or decode is None:
            prefill = decode = self._least_pending(request, engines)
            self.pools.lend(prefill, now)
        return self._assign(request, EnginePair(prefill.name, decode.name))

    def choose_decode(
        self, request: PairRequest, engines: Sequence[EngineSnapshot], now: float
    ) -> str | None:
        """Return another decode engine for a request that has lost its own."""
        if not engines:
            return None
        pools = self.pools.divide(engines)
        decode = self._find_decode(request, pools)
        if decode is None:
            decode = self._least_reserved(pools.prefill or engines)
            self._lend(decode, pools, now)
        return self._assign_decode(request, decode.name)

    def on_engine_lost(self, engine: str) -> None:
        """Remove the engine from loads and pools."""
        super().on_engine_lost(engine)
        self.pools.forget(engine)

    def role_changes(self, engines: Sequence[EngineSnapshot], now: float) -> list[RoleChange]:
        """Return the engines that have been mixed for too long, with the other role."""
        overdue = self.pools.overdue(engines, now)
        return [RoleChange(machine.name, OPPOSITE_ROLES[machine.role]) for machine in overdue]

    def _find_prefill(self, request: PairRequest, pools: Pools) -> EngineSnapshot | None:
        """Return the best machine of the prompt pool, else of the mixed pool, if it has room."""
        for pool in (pools.prefill, pools.mixed):
            if not pool:
                continue
            engine = self._least_pending(request, pool)
            pending = self._pending_tokens(engine)
            if not pending or pending + request.num_prompt_tokens <= MAX_PENDING_TOKENS:
                return engine
        return None

    def _find_decode(self, request: PairRequest, pools: Pools) -> EngineSnapshot | None:
        """Return the best machine of the token pool, else of the mixed pool, if it has room."""
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        for pool in (pools.decode, pools.mixed):
            if not pool:
                continue
            engine = self._least_reserved(pool)
            if self._reserved_tokens(engine) + num_tokens < engine.num_kv_tokens:
                return engine
        return None

    def _lend(self, engine: EngineSnapshot, pools: Pools, now: float) -> None:
        """Move a machine from its home pool to the mixed one."""
        self.pools.lend(engine, now)
        for pool in (pools.prefill, pools.decode):
            if engine in pool:
                pool.remove(engine)
                pools.mixed.append(engine)

    def _least_pending(
        self, request: PairRequest, engines: Sequence[EngineSnapshot]
    ) -> EngineSnapshot:
        """Return the machine with the fewest pending tokens; there is at least one."""
        return self._least(
            engines,
            {
                engine.name: (self._pending_tokens(engine) + request.num_prompt_tokens)
                / engine.weight
                for engine in engines
            },
        )

    def _least_reserved(self, engines: Sequence[EngineSnapshot]) -> EngineSnapshot:
        """Return the machine with the least reserved memory; there is at least one."""
        return self._least(
            engines,
            {
                engine.name: (self._reserved_tokens(engine) + 1) / engine.weight
                for engine in engines
            },
        )

    def _least(self, engines: Sequence[EngineSnapshot], loads: dict[str, float]) -> EngineSnapshot:
        name = choose_least(engines, lambda engine: loads[engine.name], self._rng)
        return next(engine for engine in engines if engine.name == name)

    def _pending_tokens(self, engine: EngineSnapshot) -> int:
        """Return the prompt tokens that wait; those of other routers are in the statistics."""
        return max(engine.num_waiting_tokens, self.loads.of(engine.name).prefill_tokens)

    def _reserved_tokens(self, engine: EngineSnapshot) -> float:
        """Return the KV tokens that are in use or reserved for decodes of this router."""
        return max(engine.num_used_kv_tokens, self.loads.of(engine.name).decode_tokens)

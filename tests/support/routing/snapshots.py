"""Snapshots of engines for tests of routing."""

from gllm.routing.prefix_index import PrefixIndex
from gllm.routing.state import EngineSnapshot, RoutingRequest
from gllm.scheduler.plan import SchedulerStats
from gllm.scheduler.step_cost import StepCostCoefficients

NO_PREFIXES = PrefixIndex()
REQUEST = RoutingRequest(num_prompt_tokens=100)
COSTS = StepCostCoefficients(step=0.01, token=1e-4, decode=1e-4, context_token=1e-7)


def engine(name: str, weight: float = 1.0, num_sent: int = 0, **stats: float) -> EngineSnapshot:
    """Return a snapshot of an engine with room for 4,096 tokens."""
    return EngineSnapshot(
        name,
        stats=SchedulerStats(**stats),  # type: ignore[arg-type]
        coefficients=COSTS,
        num_blocks=256,
        weight=weight,
        num_sent=num_sent,
    )

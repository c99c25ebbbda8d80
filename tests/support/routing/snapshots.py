"""Snapshots of engines and requests for tests of routing."""

from collections.abc import Sequence
from typing import Any

from gllm.routing.prefix_index import PrefixIndex
from gllm.routing.state import EngineSnapshot, OngoingRequest, RoutingRequest
from gllm.scheduler.plan import SchedulerStats
from gllm.scheduler.step_cost import StepCostCoefficients

NO_PREFIXES = PrefixIndex()
REQUEST = RoutingRequest(num_prompt_tokens=100)
COSTS = StepCostCoefficients(step=0.01, token=1e-4, decode=1e-4, context_token=1e-7)


def request(**fields: Any) -> RoutingRequest:
    """Return a request with a prompt of 100 tokens."""
    return RoutingRequest(**{"num_prompt_tokens": 100, **fields})


def engine(
    name: str,
    weight: float = 1.0,
    num_sent: int = 0,
    num_sent_tokens: int = 0,
    coefficients: StepCostCoefficients | None = COSTS,
    ongoing: Sequence[OngoingRequest] = (),
    **stats: float,
) -> EngineSnapshot:
    """Return a snapshot of an engine with room for 4,096 tokens."""
    return EngineSnapshot(
        name,
        stats=SchedulerStats(**stats),  # type: ignore[arg-type]
        coefficients=coefficients,
        num_blocks=256,
        weight=weight,
        num_sent=num_sent,
        num_sent_tokens=num_sent_tokens,
        ongoing=ongoing,
    )

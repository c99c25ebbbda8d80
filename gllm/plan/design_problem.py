"""Task of a search over engine designs, and the figures of a design."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from gllm.plan.capacity import PLAN_RULES
from gllm.plan.engine_designs import EngineDesign
from gllm.plan.latency_limits import NO_LIMITS, LatencyLimits
from gllm.plan.objectives import OBJECTIVES, FleetFacts, Objective
from gllm.sim.capacity import CapacityRule
from gllm.sim.hardware.devices import DEVICES
from gllm.sim.options import SimulationConfig

MAKESPAN = "makespan"
"""Objective of an offline workload."""
TOO_SLOW = "too slow for the rate on the permitted devices"
"""Reason of a design whose engines are not enough."""


@dataclass(frozen=True)
class DesignProblem:
    """Task of a search."""

    config: SimulationConfig
    """Model or profile, links and workload; a design replaces the rest."""
    objective_name: str
    limits: LatencyLimits = NO_LIMITS
    rate: float | None = None
    """Requests per second that the fleet has to serve; None: one engine at its capacity."""
    max_devices: int = 16
    prices: Mapping[str, float] = field(default_factory=dict)
    """US dollars per hour by device."""
    rule: CapacityRule = PLAN_RULES["vidur"]

    @property
    def objective(self) -> Objective:
        """Quantity that is optimized."""
        return OBJECTIVES[self.objective_name]

    def facts(self, design: EngineDesign) -> FleetFacts:
        """Return the facts of a design that a score needs."""
        count = design.num_devices
        price, device = self.prices.get(design.device), DEVICES.get(design.device)
        power = device.power if device else None
        return FleetFacts(
            count,
            self.max_devices // count,
            None if price is None else count * price,
            None if power is None else count * power,
            self.rate,
            self.config.requests,
        )


class EngineLatencies(NamedTuple):
    """Latencies of an engine at its capacity in seconds; None: unknown."""

    ttft_p90: float | None = None
    tpot_p50: float | None = None
    itl_p99: float | None = None


UNKNOWN = EngineLatencies()


class AssessedDesign(NamedTuple):
    """A design and its figures, by closed forms or by simulation."""

    design: EngineDesign
    capacity: float
    """Requests per second of one engine; 0: none within the limits."""
    value: float
    """Value of the objective; NaN without a capacity."""
    score: float
    num_engines: int
    latencies: EngineLatencies = UNKNOWN
    note: str = ""


def check_problem(problem: DesignProblem, devices: Sequence[str]) -> None:
    """Raise ValueError if the objective lacks a fact of a device, or the rate."""
    objective = problem.objective
    name = problem.objective_name
    if objective.needs_rate and problem.rate is None:
        raise ValueError(f"--objective {name} needs a rate to serve: add --rate")
    for device in devices:
        if objective.needs == "price" and device not in problem.prices:
            known = device or "this machine's cores"
            raise ValueError(
                f"--objective {name} needs a price of {known}: add --prices vidur,"
                f"{device or 'DEVICE'}=DOLLARS_PER_HOUR, or choose --objective goodput-per-gpu"
            )
        spec = DEVICES.get(device)
        if objective.needs == "power" and (spec is None or spec.power is None):
            raise ValueError(f"--objective {name}: the power of {device or 'a core'} is unknown")


def assess_capacity(
    problem: DesignProblem,
    design: EngineDesign,
    capacity: float,
    latencies: EngineLatencies = UNKNOWN,
    note: str = "",
) -> AssessedDesign:
    """Return a design with the value and the score of its capacity in requests per second.

    Args:
        problem: The task.
        design: The design.
        capacity: Requests per second of one engine.
        latencies: Latencies at that rate.
        note: Reason of a capacity of 0.
    """
    facts, objective = problem.facts(design), problem.objective
    if not capacity > 0:
        return AssessedDesign(
            design, 0.0, float("nan"), -inf, 0, note=note or "no rate is in limits"
        )
    count = facts.count_engines(capacity)
    if problem.objective_name == MAKESPAN:
        count = facts.max_engines
    score = objective.score(capacity, facts)
    note = TOO_SLOW if score == -inf else note
    return AssessedDesign(
        design, capacity, objective.value(capacity, facts), score, count, latencies, note
    )

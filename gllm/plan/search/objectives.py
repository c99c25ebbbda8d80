"""Objectives of a search over designs of engines, and the figures of a design."""

from collections.abc import Callable
from math import ceil, inf
from typing import NamedTuple

from gllm.plan.problem import ServiceProblem
from gllm.plan.search.designs import EngineDesign
from gllm.sim.hardware.devices import DEVICES

MAKESPAN = "makespan"
"""Objective of an offline workload."""
TOO_SLOW = "too slow for the rate on the permitted devices"
"""Reason of a design whose engines are not enough."""
TOO_LARGE = "has more devices than there are together"
"""Reason of a design of which no engine fits the nodes."""


def max_engines(problem: ServiceProblem, design: EngineDesign) -> int:
    """Return how many engines of a design the permitted devices can hold.

    The ranks of a stage share a node. The stages of an engine do too, unless the link between nodes
    is known, because the search simulates them on one link.

    Args:
        problem: Limit of `devices` of one kind, and nodes, if there are any.
        design: Configuration of the engine.
    """
    most = int(problem.bounds["devices"]) // design.num_devices
    cluster, (tp, pp) = problem.cluster, design.parallelism
    if not cluster.nodes:
        return most
    counts = [node.num_devices for node in cluster.nodes if node.device == design.device]
    if cluster.network is None:
        return min(most, sum(count // (tp * pp) for count in counts))
    return min(most, sum(count // tp for count in counts) // pp)


def count_planned_engines(problem: ServiceProblem, design: EngineDesign, capacity: float) -> int:
    """Return the number of engines that serve the problem's request rate; 1 without a rate.

    Args:
        problem: Request rate, and limit of `devices`.
        design: Configuration of the engine.
        capacity: Requests per second of one engine. If it is 0, the result is one engine more than
            permitted.
    """
    if problem.rate is None:
        return 1
    if not capacity > 0:
        return max_engines(problem, design) + 1
    return max(1, ceil(problem.rate / capacity - 1e-9))


def engine_price(problem: ServiceProblem, design: EngineDesign) -> float:
    """Return the price of one engine's devices in US dollars per hour."""
    return design.num_devices * problem.prices[design.device]


def engine_power(design: EngineDesign) -> float:
    """Return the power limit of one engine's devices in watts."""
    power = DEVICES[design.device].power
    assert power is not None, "the search checks the needs of its objective"
    return design.num_devices * power


def planned_rate(problem: ServiceProblem, design: EngineDesign, capacity: float) -> float:
    """Return requests per second of one engine that its devices are paid for.

    With a rate to serve, what the planned engines could serve beyond it is worth nothing.
    """
    if problem.rate is None:
        return capacity
    return problem.rate / count_planned_engines(problem, design, capacity)


class Objective(NamedTuple):
    """Quantity by which a search compares engine designs, such as cost, and its direction."""

    unit: str
    """Unit of the value, for output."""
    is_least: bool
    """True if a smaller value is better."""
    value: Callable[[float, ServiceProblem, EngineDesign], float]
    """Returns the value by (requests per second of one engine, problem, design)."""
    needs: str = ""
    """Property of the devices that has to be known: price or power; empty: none."""
    needs_rate: bool = False
    """True if the problem has to have a request rate."""

    def score(self, capacity: float, problem: ServiceProblem, design: EngineDesign) -> float:
        """Return a score, higher is better; -inf if the devices are too few for the rate."""
        if not capacity > 0:
            return -inf
        if count_planned_engines(problem, design, capacity) > max_engines(problem, design):
            return -inf
        value = self.value(capacity, problem, design)
        return -value if self.is_least else value


OBJECTIVES = {
    "qps-per-dollar": Objective(
        "requests/s per $/h",
        False,
        lambda rate, problem, design: (
            planned_rate(problem, design, rate) / engine_price(problem, design)
        ),
        "price",
    ),
    "goodput-per-gpu": Objective(
        "requests/s per device",
        False,
        lambda rate, problem, design: planned_rate(problem, design, rate) / design.num_devices,
    ),
    "cost": Objective(
        "$/h",
        True,
        lambda rate, problem, design: (
            count_planned_engines(problem, design, rate) * engine_price(problem, design)
        ),
        "price",
        True,
    ),
    "power": Objective(
        "W",
        True,
        lambda rate, problem, design: (
            count_planned_engines(problem, design, rate) * engine_power(design)
        ),
        "power",
        True,
    ),
    "makespan": Objective(
        "s",
        True,
        lambda rate, problem, design: problem.num_requests / (rate * max_engines(problem, design)),
    ),
}
"""Objectives by name. `makespan` is of an offline workload on all devices: there the capacity of an
engine is its throughput with all requests at once."""


class EngineLatencies(NamedTuple):
    """Latency percentiles of an engine at its highest request rate, in seconds; None if unknown."""

    ttft_p90: float | None = None
    tpot_p50: float | None = None
    itl_p99: float | None = None


UNKNOWN = EngineLatencies()


class AssessedDesign(NamedTuple):
    """Estimated or simulated capacity, latencies and score of an engine design."""

    design: EngineDesign
    capacity: float
    """Highest requests per second of one engine within the limits; 0 if there is no such rate."""
    value: float
    """Value of the objective, in its unit; NaN if the capacity is 0."""
    score: float
    """Value of the objective with the sign for which higher is better."""
    num_engines: int
    """Number of engines for the problem's request rate."""
    latencies: EngineLatencies = UNKNOWN
    note: str = ""
    """Reason why the capacity is 0 or its search ended early; empty otherwise."""


def check_problem(problem: ServiceProblem) -> None:
    """Raise ValueError if the objective needs a price, a power limit or a rate that is missing."""
    name = problem.objective
    objective = OBJECTIVES[name]
    if name == MAKESPAN and problem.rate is not None:
        raise ValueError(
            f"--objective {name} has all requests at once, which have no rate: leave --rate out"
        )
    if objective.needs_rate and problem.rate is None:
        raise ValueError(f"--objective {name} needs a rate to serve: add --rate")
    for device in problem.devices:
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
    problem: ServiceProblem,
    design: EngineDesign,
    capacity: float,
    latencies: EngineLatencies = UNKNOWN,
    note: str = "",
) -> AssessedDesign:
    """Return value and score of an engine design by the capacity of one engine.

    Args:
        problem: Request rate, objective and limits.
        design: Configuration of the engine.
        capacity: Highest requests per second of one engine within the limits; 0 if there is none.
        latencies: Latencies at that rate.
        note: Reason why the capacity is 0, for output.
    """
    objective = OBJECTIVES[problem.objective]
    if not capacity > 0:
        return AssessedDesign(
            design, 0.0, float("nan"), -inf, 0, note=note or "no rate is in limits"
        )
    count = count_planned_engines(problem, design, capacity)
    if problem.objective == MAKESPAN:
        count = max_engines(problem, design)
    score = objective.score(capacity, problem, design)
    note = TOO_SLOW if score == -inf else note
    return AssessedDesign(
        design, capacity, objective.value(capacity, problem, design), score, count, latencies, note
    )

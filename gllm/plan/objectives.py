"""Objectives of a search over designs of engines."""

from collections.abc import Callable
from math import ceil, inf
from typing import NamedTuple


class FleetFacts(NamedTuple):
    """Facts that a score depends on besides the capacity of one engine."""

    num_devices: int
    """Devices of one engine."""
    max_engines: int
    price: float | None = None
    """US dollars per hour of one engine; None: unknown."""
    power: float | None = None
    """Limit of one engine in watts; None: unknown."""
    rate: float | None = None
    """Requests per second that the fleet has to serve; None: no requirement."""
    num_requests: int = 0
    """Requests of an offline workload."""

    def count_engines(self, capacity: float) -> int:
        """Return the number of engines for the rate; of an offline workload all."""
        if self.rate is None:
            return 1
        return max(1, ceil(self.rate / capacity - 1e-9)) if capacity > 0 else self.max_engines + 1


class Objective(NamedTuple):
    """Quantity that a search optimizes."""

    unit: str
    is_least: bool
    """True if a smaller value is better."""
    value: Callable[[float, FleetFacts], float]
    """Value by the capacity of one engine in requests per second."""
    needs: str = ""
    """Fact that has to be known: price, power or rate."""
    needs_rate: bool = False

    def score(self, capacity: float, facts: FleetFacts) -> float:
        """Return a score that is better if it is higher; -inf if the fleet cannot serve."""
        if not capacity > 0 or facts.count_engines(capacity) > facts.max_engines:
            return -inf
        value = self.value(capacity, facts)
        return -value if self.is_least else value


def _known(value: float | None) -> float:
    assert value is not None, "the search checks the needs of its objective"
    return value


OBJECTIVES = {
    "qps-per-dollar": Objective(
        "requests/s per $/h", False, lambda rate, facts: rate / _known(facts.price), "price"
    ),
    "goodput-per-gpu": Objective(
        "requests/s per device", False, lambda rate, facts: rate / facts.num_devices
    ),
    "cost": Objective(
        "$/h",
        True,
        lambda rate, facts: facts.count_engines(rate) * _known(facts.price),
        "price",
        True,
    ),
    "power": Objective(
        "W",
        True,
        lambda rate, facts: facts.count_engines(rate) * _known(facts.power),
        "power",
        True,
    ),
    "makespan": Objective(
        "s", True, lambda rate, facts: facts.num_requests / (rate * facts.max_engines)
    ),
}
"""Objectives by name. `makespan` is of an offline workload on all devices: there the capacity of an
engine is its throughput with all requests at once."""

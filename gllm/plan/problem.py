"""Record of a planning problem, the same for all strategies."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gllm.options.slo import NO_SLO, Slo
from gllm.plan.nodes import NO_NODES, DeviceCluster
from gllm.sim.hardware.shapes import MODELS, ModelShape
from gllm.sim.hardware.stages import look_up


@dataclass(frozen=True)
class ServiceProblem:
    """Input of every planner: model, workload, machines, latency limits and objective.

    A planning strategy reads the fields that it needs. Parameters of a single strategy, such as its
    cost model, are arguments of its search instead.
    """

    model: str
    """Name of the model in MODELS."""
    workload: str
    """Name of the workload."""
    cluster: DeviceCluster = NO_NODES
    """Nodes and links to choose from; empty: as many nodes of `devices` as are needed."""
    devices: tuple[str, ...] = ()
    """Kinds of devices to choose from."""
    rate: float | None = None
    """Requests per second to serve; None: as many as possible."""
    limits: Slo = NO_SLO
    objective: str = ""
    """Name of the quantity to optimize, where a strategy has several."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Upper limits of quantities of the whole service (devices, power, machines, ...) by name."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """US dollars per hour by device."""
    num_requests: int = 300
    """Least number of requests of a simulation."""
    min_seconds: float = 0.0
    """Shortest time in which the requests of a simulation arrive."""
    max_request_tokens: int | None = None
    """Tokens to which longer requests are cut, prompt and output together; None: none is cut."""
    seed: int = 0
    """Seed of lengths, arrivals and random choices."""

    @property
    def shape(self) -> ModelShape:
        """Shape of the model. Raises ValueError for an unknown name."""
        return look_up("model", self.model, MODELS)

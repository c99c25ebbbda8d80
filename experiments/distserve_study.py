"""Figures of DistServe's evaluation."""

from dataclasses import dataclass, field
from math import ceil

from experiments.claims import relative_change
from experiments.distserve_queue import QueuePoint
from experiments.distserve_workloads import PaperWorkload
from gllm.options.slo import TARGET_ATTAINMENT
from gllm.plan.goodput.placement import PhaseGoodput
from gllm.plan.goodput.systems import Outcome, System

SHARES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
"""Rates per GPU as shares of DistServe's goodput per GPU."""
SCALE_SHARE = 0.5
"""Share at which the limits are scaled."""


def least_scale(outcome: Outcome, ttft: float, tpot: float, target: float) -> float:
    """Return the least scale of both limits at which a share of the requests meets them."""
    pairs = zip(outcome.ttft, outcome.tpot, strict=True)
    scales = sorted(max(first / ttft, each / tpot) for first, each in pairs)
    return scales[ceil(target * len(scales)) - 1]


@dataclass
class WorkloadResult:
    """Figures of a workload."""

    workload: PaperWorkload
    systems: dict[str, System] = field(default_factory=dict)
    """By name; of vLLM++ and colocated engines the best ones."""
    goodputs: dict[str, float] = field(default_factory=dict)
    """Requests per second of the whole system."""
    outcomes: dict[tuple[str, float], Outcome] = field(default_factory=dict)
    """By system and share of DistServe's goodput per GPU."""

    def add_goodput(self, system: System, rate: float) -> None:
        """Add a system, or replace one of its name with less goodput per GPU."""
        name = system.name
        if name not in self.systems or rate / system.num_gpus > self.per_gpu(name):
            self.systems[name], self.goodputs[name] = system, rate

    def per_gpu(self, name: str) -> float:
        """Return the goodput of a system in requests per second per GPU."""
        return self.goodputs[name] / self.systems[name].num_gpus

    def gain(self, name: str, base: str) -> float | None:
        """Return the change of the goodput per GPU; infinite if only the base attains nothing.

        None if both attain nothing.
        """
        ours, base_goodput = self.per_gpu(name), self.per_gpu(base)
        return relative_change(ours, base_goodput) if ours or base_goodput else None

    def scale_gain(self, name: str, base: str) -> float | None:
        """Return by how much tighter the limits can be than a base's, at SCALE_SHARE."""
        limits = self.workload.ttft, self.workload.tpot
        scales = [
            least_scale(self.outcomes[each, SCALE_SHARE], *limits, TARGET_ATTAINMENT)
            for each in (name, base)
            if (each, SCALE_SHARE) in self.outcomes
        ]
        return scales[1] / scales[0] - 1 if len(scales) == 2 else None


@dataclass(frozen=True)
class Table2:
    """Attainment (0..1) at the rates of the paper's Table 2."""

    workload: PaperWorkload
    attained: dict[str, list[float]]
    """By system."""


@dataclass(frozen=True)
class HighPlacement:
    """Placement of Algorithm 1 beside that of Algorithm 2."""

    low: WorkloadResult
    system: System
    per_gpu: float
    """Goodput in requests per second per GPU."""
    prefill: PhaseGoodput
    decode: PhaseGoodput
    sized: System
    """As many engines as `sized_rate` needs."""
    sized_rate: float
    """Requests per second."""
    sized_attainment: float
    """Share (0..1) of the requests within both limits at that rate."""


@dataclass(frozen=True)
class TightLimit:
    """Best engines under a limit of TPOT: name, placement, and goodput per GPU."""

    tpot: float
    """Seconds."""
    best: dict[str, tuple[str, float]]
    """By name: colocated engines by policy, separated ones."""


@dataclass
class Study:
    """All figures of the experiment."""

    results: list[WorkloadResult]
    requests: int
    motivation: dict[str, dict[str, float]]
    table_2: list[Table2] = field(default_factory=list)
    high: list[HighPlacement] = field(default_factory=list)
    tight: list[TightLimit] = field(default_factory=list)
    queues: list[QueuePoint] = field(default_factory=list)
    throttled: list[tuple[str, System, float]] = field(default_factory=list)
    by_seed: dict[str, list[float]] = field(default_factory=dict)
    """Goodput per GPU of the first workload by system, one for each seed."""

"""Cases of Aladdin's evaluation in the simulator: fleets, split phases, the paper's example."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from experiments.linear_costs import LinearCostModel
from gllm.options.slo import Slo
from gllm.plan.scale.fleet_size import (
    FleetCase,
    FleetOutcome,
    WorkerSpec,
    least_fleet,
    simulate_fleet,
)
from gllm.plan.scale.latency_fit import FittedLatency, fit_latency
from gllm.plan.scale.service_plan import describe_worker
from gllm.routing.placement import SPLIT_DECODE_CONSTRAINTS, PlacedRequest, peak_kv_tokens
from gllm.sim.costs.base import CostModel, DecodeOnlyCostModel
from gllm.sim.costs.forest import ForestCostModel
from gllm.sim.hardware.shapes import MODELS

MODEL, DEVICE, LINK = "llama-2-70b", "A100-80G", "nvlink"
SLO = Slo(1.6, 0.075)
"""The paper's limits for Llama-2-70B on A100 (its Table 2)."""
KV_TOKENS = 60_000
"""M of two A100-80G: 160 GB without 140 GB of weights, 328 KB per token."""
TARGET = 0.99
MAX_WORKERS = 64
"""Largest fleet that is tried."""
QUICK_SECONDS = 20.0
"""Arrivals of a simulation of a quick page."""


@cache
def measured_fit() -> FittedLatency:
    """Return the linear model of Vidur's profile of Llama-2-70B on two A100."""
    return fit_latency(ForestCostModel())


@cache
def measured_worker(has_prefill: bool = True) -> WorkerSpec:
    """Return two A100 with the linear model of Vidur's profile.

    Args:
        has_prefill: False if another engine computes the prompts.
    """
    model = measured_fit().model
    cost: CostModel = LinearCostModel(model)
    if not has_prefill:
        cost = DecodeOnlyCostModel(cost)
    return WorkerSpec(MODEL, MODELS[MODEL].layers, cost, model, KV_TOKENS, 2)


@dataclass(frozen=True)
class FleetSearchTask:
    """Search for the smallest fleet of a policy."""

    workload: str
    rate: float
    policy: str
    seed: int = 0
    attainment: float = TARGET
    seconds: float = 120.0
    kind: str = "measured"
    """measured; decode: without prefill; roofline-N: N GPUs by the roofline."""
    start: int = 4

    @property
    def case(self) -> FleetCase:
        """Return the case to simulate."""
        slo, constraints = SLO, FleetCase.constraints
        if self.kind == "measured":
            worker = measured_worker()
        elif self.kind == "decode":
            worker = measured_worker(has_prefill=False)
            slo, constraints = Slo(None, SLO.tpot_seconds), SPLIT_DECODE_CONSTRAINTS
        else:
            worker, _ = describe_worker(MODEL, DEVICE, int(self.kind.rpartition("-")[2]), LINK)
        return FleetCase(
            worker, self.workload, self.rate, slo, self.policy, self.seed, self.seconds,
            constraints=constraints,
        )  # fmt: skip


def search_fleet(task: FleetSearchTask) -> FleetOutcome | None:
    """Return the smallest fleet; None if it has more than MAX_WORKERS workers."""
    return least_fleet(task.case, task.attainment, task.start, MAX_WORKERS)


@dataclass(frozen=True)
class FleetRunTask:
    """Simulation of a number of workers."""

    search: FleetSearchTask
    num_workers: int
    without: str = ""
    """Constraint that is left out."""


def run_fleet(task: FleetRunTask) -> FleetOutcome:
    """Return the latencies of a fleet."""
    case = task.search.case
    constraints = case.constraints - frozenset(task.without)
    return simulate_fleet(replace(case, constraints=constraints), task.num_workers)


EXAMPLE = (PlacedRequest(3, 4), PlacedRequest(3, 1), PlacedRequest(1, 3), PlacedRequest(2, 1))
"""Four requests, prompt and output in tokens, that arrive one after the other at two workers."""
EXAMPLE_MEMORY = 9
"""Tokens of KV cache of each worker."""


def example_peaks() -> tuple[float, float]:
    """Return the peak of the KV cache with the shortest queue, and with the best placement.

    The shortest queue, by requests, gives each worker every second request.
    """
    pairs = [EXAMPLE[0::2], EXAMPLE[1::2]]
    queue = max(peak_kv_tokens(pair) for pair in pairs)
    best = min(
        max(
            peak_kv_tokens([r for r, w in zip(EXAMPLE, places, strict=True) if w == worker])
            for worker in range(2)
        )
        for places in product(range(2), repeat=len(EXAMPLE))
    )
    return queue, best

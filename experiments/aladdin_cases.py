"""Cases of Aladdin's evaluation in the simulator: fleets, split phases, the paper's example."""

from collections.abc import Callable
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
from gllm.plan.scale.worker_type import build_engines
from gllm.routing.placement import SPLIT_DECODE_CONSTRAINTS, PlacedRequest, peak_kv_tokens
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.costs.base import CostModel, DecodeOnlyCostModel
from gllm.sim.costs.forest import ForestCostModel
from gllm.sim.deployment import Deployment
from gllm.sim.hardware.shapes import MODELS

MODEL, DEVICE, LINK = "llama-2-70b", "A100-80G", "nvlink"
SLO = Slo(1.6, 0.075)
"""The paper's limits for Llama-2-70B on A100 (its Table 2)."""
KV_TOKENS = 60_000
"""M of two A100-80G: 160 GB without 140 GB of weights, 328 KB per token."""
MAX_MODEL_LEN = 4096
"""Longest request of the paper's engines in tokens; longer ones are cut."""
SCHEDULER = SchedulerConfig(
    policy="vllm",
    max_num_batched_tokens=MAX_MODEL_LEN,
    max_num_seqs=128,
    prefix_cache=False,
    async_scheduling=False,
)
"""Engines that schedule prompts first, as early vLLM did."""
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
    return WorkerSpec(simulated_engine(cost), model, 2)


def simulated_engine(cost: CostModel, kv_tokens: int = KV_TOKENS) -> Deployment:
    """Return an engine of Llama-2-70B with step times and a KV cache in tokens."""
    num_blocks = kv_tokens // SCHEDULER.block_size
    return Deployment(
        MODEL, [MODELS[MODEL].layers], cost, SCHEDULER.resolve(1, num_blocks, MAX_MODEL_LEN)
    )


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
            degree = int(self.kind.rpartition("-")[2])
            engines, _ = build_engines(
                MODEL, DEVICE, LINK, (degree,), MAX_MODEL_LEN, scheduler=SCHEDULER
            )
            worker, _ = describe_worker(engines[degree], degree)
        return FleetCase(
            worker, self.workload, self.rate, slo, self.policy, self.seed, self.seconds,
            constraints=constraints, max_request_tokens=MAX_MODEL_LEN,
        )  # fmt: skip


def search_fleet(task: FleetSearchTask) -> FleetOutcome | None:
    """Return the smallest fleet; None if it has more than MAX_WORKERS workers."""

    def judge(count: int, check: Callable[[], None] | None) -> tuple[FleetOutcome, bool]:
        outcome = simulate_fleet(task.case, count, check)
        return outcome, outcome.attainment >= task.attainment

    return least_fleet(judge, task.start, MAX_WORKERS)


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

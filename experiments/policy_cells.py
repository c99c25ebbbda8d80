"""The default policy beside the other policies, over devices, stages, workloads, rates and seeds.

A cell is a step cost, a number of stages, a workload and a request rate. Every policy of a cell
gets the same requests. The default is judged by the best policy of the cell in each figure.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from experiments.base import OWN_REFERENCE, ExperimentOptions, ExperimentResult
from experiments.claims import PaperClaim
from experiments.parallel import map_parallel
from experiments.policy_verdicts import (
    OURS,
    CellFigures,
    PolicyCell,
    aim_claims,
    judge_cell,
    make_panels,
    policies_text,
)
from experiments.slo import LOW_RATE, MAX_LOW_RATE_REQUESTS, make_slo, measure_slo_limits
from experiments.trials import (
    MAX_MODEL_LEN,
    HardwareSetting,
    SimulationTrial,
    TrialRun,
    deploy_trial,
    estimate_capacities,
    make_base,
)
from gllm.options.slo import Slo
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_cost import DEFAULT_RIDGE_TOKENS
from gllm.sim.costs.base import CostModel
from gllm.sim.deployment import Deployment, simulate
from gllm.sim.metrics.delays import steady_throughput
from gllm.sim.metrics.plots import plot_grid
from gllm.sim.metrics.report import summarize_run
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.workloads.requests import WorkloadRequest, make_workload

NUM_BLOCKS = 40000
"""KV blocks of devices without a data sheet: no request waits for one."""
CAPACITY_REQUESTS = 400
STAGES = (1, 2, 4, 8)
SHARES = (0.3, 0.6, 0.8, 1.0, 1.1)
"""Rates as shares of the capacity, the throughput with all requests at once."""
BURST_SHARES = (0.6, 0.9)
SEEDS = (1, 2, 3)
WORKLOADS = {
    "azure-conv": ("azure-conv", "poisson", SHARES),
    "sharegpt-like": ("sharegpt-like", "poisson", SHARES),
    "azure-code": ("azure-code", "poisson", SHARES),
    "bursts": ("azure-conv", "burst:16", BURST_SHARES),
}
"""Trace, arrivals and shares by name."""


class TokenCost(CostModel):
    """Step cost by tokens, query-key pairs and context, equal on all stages.

    Args:
        seconds: Time by tokens.
        pair: Seconds per query-key pair.
        context_token: Seconds per token that a decode attends to.
    """

    def __init__(
        self, seconds: Callable[[int], float], pair: float = 0.0, context_token: float = 0.0
    ) -> None:
        self._seconds = seconds
        self._pair = pair
        self._context_token = context_token

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of a micro-batch."""
        seconds = self._seconds(work.num_tokens)
        if self._pair:
            seconds += self._pair * work.num_query_key_pairs
            seconds += self._context_token * work.num_decode_context_tokens
        return seconds


class EmulatedDevice(NamedTuple):
    """Step cost of an experiment, with lengths of requests that suit its speed."""

    description: str
    ridge_tokens: int
    cost: CostModel | Callable[[int], HardwareSetting]
    """Or model and device of a data sheet, by number of stages."""
    length_scale: float = 1.0
    """Factor of the lengths of the traces."""


def _l20(stages: int) -> HardwareSetting:
    models = {1: "qwen2.5-14b", 2: "qwen2.5-14b", 4: "qwen2.5-32b", 8: "llama-3.1-70b"}
    return HardwareSetting(models[stages], "L20", stages)


def _a800(stages: int) -> HardwareSetting:
    model = "qwen2.5-32b" if stages <= 2 else "llama-100b"
    return HardwareSetting(model, "A800-80G", stages, "network")


def _h200(stages: int) -> HardwareSetting:
    return HardwareSetting(
        "qwen2.5-32b" if stages == 1 else "llama-3.1-70b", "H200", stages, "nvlink"
    )


DEVICES = {
    "gpu": EmulatedDevice(
        "20 ms x hypot(n, 150) / 150", 150, TokenCost(lambda n: 0.020 * math.hypot(n, 150) / 150)
    ),
    "gpu-context": EmulatedDevice(
        "the same, and 10 ns per query-key pair, 0.3 us per token of a decode's context",
        150,
        TokenCost(lambda n: 0.020 * math.hypot(n, 150) / 150, 1e-8, 3e-7),
    ),
    "ridge-40": EmulatedDevice(
        "10 ms x hypot(n, 40) / 40; lengths x 0.5",
        40,
        TokenCost(lambda n: 0.010 * math.hypot(n, 40) / 40),
        0.5,
    ),
    "cpu": EmulatedDevice(
        "5 ms x (1 + n / 16); lengths x 0.2", 16, TokenCost(lambda n: 0.005 * (1 + n / 16)), 0.2
    ),
    "l20": EmulatedDevice(
        "roofline of an L20, PCIe: qwen2.5-14b at 1 and 2 stages, -32b at 4, llama-3.1-70b at 8",
        150,
        _l20,
    ),
    "a800": EmulatedDevice(
        "roofline of an A800, network: qwen2.5-32b at 1 and 2 stages, llama-100b at more",
        150,
        _a800,
    ),
    "h200": EmulatedDevice(
        "roofline of an H200, NVLink: qwen2.5-32b at 1 stage, llama-3.1-70b at more", 150, _h200
    ),
}
DIAGONAL = (
    PolicyCell("h200", 1, "azure-conv", 0.6),
    PolicyCell("h200", 1, "azure-code", 1.0),
    PolicyCell("h200", 2, "sharegpt-like", 0.3),
    PolicyCell("h200", 2, "bursts", 0.9),
    PolicyCell("l20", 4, "azure-conv", 1.0),
    PolicyCell("a800", 4, "azure-code", 0.8),
    PolicyCell("a800", 4, "sharegpt-like", 1.1),
    PolicyCell("l20", 8, "azure-code", 0.6),
)
"""Cells on emulated devices: every number of stages, workload and share."""
FIXED = "experiments.policies.fixed_throttle:FixedThrottlePolicy"
FIXED_NAME = "fixed"
POLICIES: dict[str, tuple[str, int | None, bool]] = {
    OURS: (OURS, None, False),
    "throttle-paper": ("throttle-paper", None, False),
    "balance": ("balance", None, False),
    "sarathi": ("sarathi", None, False),
    "vllm": ("vllm", None, False),
    "sarathi:512": ("sarathi", 512, False),
    FIXED_NAME: (FIXED, None, False),
    "fixed, own ridge": (FIXED, None, True),
}
"""By name: policy, tokens per micro-batch, and True if it gets the ridge of the device."""
SERVED_POLICIES = tuple(POLICIES)[:5]
"""Policies on emulated devices."""


def make_deployment(device: str, stages: int, policy: str) -> Deployment:
    """Return an engine of emulated devices with a policy of POLICIES."""
    name, limit, knows_ridge = POLICIES[policy]
    ridge = DEVICES[device].ridge_tokens if knows_ridge else None
    cost = DEVICES[device].cost
    if not isinstance(cost, CostModel):
        options = (("max_num_batched_tokens", limit), ("ridge_tokens", ridge))
        return deploy_trial(SimulationTrial(cost(stages), "", name, 1.0, 1, options=options))
    config = SchedulerConfig(policy=name, max_num_batched_tokens=limit, ridge_tokens=ridge)
    config = config.resolve(stages, NUM_BLOCKS, MAX_MODEL_LEN)
    return Deployment(device, [1] * stages, cost, config)


def make_requests(
    cell: PolicyCell, seed: int, count: int, rate: float, arrivals: str | None = None
) -> list[WorkloadRequest]:
    """Return the requests of a cell at a rate per second."""
    trace, kind, _ = WORKLOADS[cell.workload]
    scale = DEVICES[cell.device].length_scale
    return [
        job._replace(
            num_prompt_tokens=max(1, round(job.num_prompt_tokens * scale)),
            num_output_tokens=max(1, round(job.num_output_tokens * scale)),
        )
        for job in make_workload(trace, count, rate, arrivals or kind, seed)
    ]


def _serve(cell: PolicyCell, policy: str, jobs: list[WorkloadRequest]) -> RunRecord:
    return simulate(make_deployment(cell.device, cell.stages, policy), jobs)


class CellBase(NamedTuple):
    """Measures of the cells that differ in their share alone."""

    capacity: float
    """Requests per second with all of them at once, of the better of two policies."""
    slo: Slo
    """Limits: multiples of the latencies of the default next to no load."""


def measure_base(cell: PolicyCell, num_requests: int = CAPACITY_REQUESTS) -> CellBase:
    """Measure the capacity and the limits of a cell."""
    jobs = make_requests(cell, SEEDS[0], num_requests, 1.0, "static")
    capacity = max(
        steady_throughput(_serve(cell, policy, jobs))[1] for policy in ("throttle-paper", "sarathi")
    )
    lone = make_requests(cell, SEEDS[0], MAX_LOW_RATE_REQUESTS, LOW_RATE, "poisson")
    return CellBase(capacity, make_slo(summarize_run(_serve(cell, OURS, lone))))


class CellRun(NamedTuple):
    """A cell with a seed, a number of requests and the measures of its base."""

    cell: PolicyCell
    seed: int
    num_requests: int
    base: CellBase


def run_cell(run: CellRun) -> dict[str, CellFigures]:
    """Simulate every policy; return their figures by name."""
    rate = run.cell.share * run.base.capacity
    jobs = make_requests(run.cell, run.seed, run.num_requests, rate)
    figures: dict[str, CellFigures] = {}
    for policy, (_, _, knows_ridge) in POLICIES.items():
        if knows_ridge and DEVICES[run.cell.device].ridge_tokens == DEFAULT_RIDGE_TOKENS:
            figures[policy] = figures[FIXED_NAME]
            continue
        record = _serve(run.cell, policy, jobs)
        figures[policy] = CellFigures.from_summary(summarize_run(record, run.base.slo))
    return figures


def list_cells(quick: bool) -> list[PolicyCell]:
    """Return all cells, or a diagonal: each value with some of the others."""
    cells = [
        PolicyCell(device, stages, workload, share)
        for device in DEVICES
        for stages in STAGES
        for workload, (_, _, shares) in WORKLOADS.items()
        for share in shares
    ]
    return cells[::11] if quick else cells


def run(options: ExperimentOptions) -> ExperimentResult:
    """Run all policies in all cells with all seeds."""
    cells = list_cells(options.quick)
    seeds = SEEDS[:1] if options.quick else SEEDS
    bases = list(dict.fromkeys(cell._replace(share=1.0) for cell in cells))
    measure = partial(measure_base, num_requests=CAPACITY_REQUESTS // (4 if options.quick else 1))
    measured = map_parallel(measure, bases, options.jobs, options.progress, "capacity")
    measures = dict(zip(bases, measured, strict=True))
    runs = [
        CellRun(cell, seed, options.requests, measures[cell._replace(share=1.0)])
        for cell in cells
        for seed in seeds
    ]
    figures = map_parallel(run_cell, runs, options.jobs, options.progress, "run")
    verdicts = [
        judge_cell(cell, figures[index * len(seeds) : (index + 1) * len(seeds)])
        for index, cell in enumerate(cells)
    ]
    verdicts.sort(key=lambda verdict: -verdict.distance)
    devices = "\n".join(f"- **{name}**: {device.description}" for name, device in DEVICES.items())
    text = (
        f"Simulated: {len(verdicts)} cells of device, stages ({', '.join(map(str, STAGES))}), "
        f"workload and rate as a share of the capacity (the throughput with all requests at once); "
        f"{options.requests} requests, {len(seeds)} seeds. `bursts`: azure-conv, 16 requests at a "
        f"time. Step cost of each stage:\n\n{devices}\n\n{policies_text(verdicts)}"
    )
    return ExperimentResult(
        "The default policy over devices, stages and loads",
        text,
        aim_claims(verdicts),
        {"policies.svg": lambda path: plot_grid(make_panels(verdicts), path)},
        reference=OWN_REFERENCE,
    )


def emulated_trials(options: ExperimentOptions) -> list[SimulationTrial]:
    """Return the trials for emulated devices: some policies in the cells of DIAGONAL."""
    cells = DIAGONAL[::4] if options.quick else DIAGONAL
    trials = [
        SimulationTrial(setting, trace, OURS, 1.0, options.requests, arrivals)
        for setting, trace, arrivals in map(_load_of, cells)
    ]
    capacities = estimate_capacities(trials, options)
    limits = map_parallel(measure_slo_limits, trials, options.jobs, options.progress, "limit")
    return [
        replace(trial, policy=policy, rate=cell.share * capacities[make_base(trial)], slo=slo)
        for cell, trial, slo in zip(cells, trials, limits, strict=True)
        for policy in SERVED_POLICIES
    ]


def emulated_claims(runs: list[TrialRun], policy: str) -> list[PaperClaim]:
    """Return the aims of the default, from the runs of `emulated_trials`."""
    assert policy == OURS, "the aims are those of the default"
    cells = {_load_of(cell): cell for cell in DIAGONAL}
    figures: dict[PolicyCell, dict[str, CellFigures]] = {}
    for run in runs:
        cell = cells[run.trial.setting, run.trial.workload, run.trial.arrivals]
        figures.setdefault(cell, {})[run.trial.policy] = CellFigures.from_summary(run.figures)
    return aim_claims([judge_cell(cell, [each]) for cell, each in figures.items()])


def _load_of(cell: PolicyCell) -> tuple[HardwareSetting, str, str]:
    """Return the setting, trace and arrivals of a cell on a device with a data sheet."""
    setting, (trace, arrivals, _) = DEVICES[cell.device].cost, WORKLOADS[cell.workload]
    assert not isinstance(setting, CostModel), "only such devices can be emulated"
    return setting(cell.stages), trace, arrivals

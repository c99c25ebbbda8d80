"""The default policy beside the other policies, over devices, stages, workloads, rates and seeds.

A cell is a step cost, a number of stages, a workload and a request rate. Every policy of a cell
gets the same requests. The default is judged by the best policy of the cell in each figure.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import NamedTuple

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedLimit, PaperClaim
from experiments.parallel import map_parallel
from experiments.trials import MAX_MODEL_LEN
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.throttle_policy import DEFAULT_RIDGE_TOKENS
from gllm.sim.costs.base import CostModel
from gllm.sim.deployment import Deployment, roofline_deployment, simulate
from gllm.sim.metrics.delays import steady_throughput
from gllm.sim.metrics.plots import ChartPanel, plot_grid
from gllm.sim.metrics.report import format_table, summarize_run
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
E2EL_LIMIT, THROUGHPUT_LIMIT, ITL_LIMIT = 1.03, 0.99, 1.2
"""Aims: ratio of the default's mean E2EL, throughput and ITL p99 to the best policy's."""
STUDENT_T = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}
"""Factor of the 95 % interval of a mean, by number of seeds."""


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
    cost: CostModel | None
    """None for the roofline of a data sheet."""
    length_scale: float = 1.0
    """Factor of the lengths of the traces."""


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
        "roofline of an L20: qwen2.5-14b at 1 and 2 stages, -32b at more", 150, None
    ),
}
OURS = "throttle"
FIXED = "experiments.policies.fixed_throttle:FixedThrottlePolicy"
FIXED_NAME = "fixed"
POLICIES: dict[str, tuple[str, int | None, bool]] = {
    OURS: (OURS, None, False),
    "throttle-paper": ("throttle-paper", None, False),
    FIXED_NAME: (FIXED, None, False),
    "fixed, own ridge": (FIXED, None, True),
    "sarathi": ("sarathi", None, False),
    "sarathi:512": ("sarathi", 512, False),
    "vllm": ("vllm", None, False),
}
"""By name: policy, tokens per micro-batch, and True if it gets the ridge of the device."""


class PolicyCell(NamedTuple):
    """Load of a comparison, without its seed."""

    device: str
    stages: int
    workload: str
    share: float

    def __str__(self) -> str:
        return f"{self.device}, {self.stages} stages, {self.workload}, {self.share}"


class CellFigures(NamedTuple):
    """Figures of one policy in one run."""

    e2el: float
    """Mean in seconds."""
    throughput: float
    """Tokens per second until 80 % of the requests have arrived."""
    itl: float
    """p99 in seconds."""
    ttft: float
    tpot: float
    """Means in seconds."""
    bubbles: float
    """Bubble share of the worst stage, 0..1."""


def make_deployment(device: str, stages: int, policy: str) -> Deployment:
    """Return an engine of emulated devices with a policy of POLICIES."""
    name, limit, knows_ridge = POLICIES[policy]
    config = SchedulerConfig(
        policy=name,
        max_num_batched_tokens=limit,
        ridge_tokens=DEVICES[device].ridge_tokens if knows_ridge else None,
    )
    cost = DEVICES[device].cost
    if cost is None:
        model = "qwen2.5-14b" if stages <= 2 else "qwen2.5-32b"
        return roofline_deployment(model, "L20", stages, MAX_MODEL_LEN, scheduler=config)
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


def measure_cell_capacity(cell: PolicyCell, num_requests: int = CAPACITY_REQUESTS) -> float:
    """Return the requests per second with all requests at once, of the better of two policies."""
    jobs = make_requests(cell, SEEDS[0], num_requests, 1.0, "static")
    return max(
        steady_throughput(_serve(cell, policy, jobs))[1] for policy in ("throttle-paper", "sarathi")
    )


class CellRun(NamedTuple):
    """A cell with a seed, a number of requests and their rate per second."""

    cell: PolicyCell
    seed: int
    num_requests: int
    rate: float


def run_cell(run: CellRun) -> dict[str, CellFigures]:
    """Simulate every policy; return their figures by name."""
    jobs = make_requests(run.cell, run.seed, run.num_requests, run.rate)
    figures: dict[str, CellFigures] = {}
    for policy, (_, _, knows_ridge) in POLICIES.items():
        if knows_ridge and DEVICES[run.cell.device].ridge_tokens == DEFAULT_RIDGE_TOKENS:
            figures[policy] = figures[FIXED_NAME]
            continue
        summary = summarize_run(_serve(run.cell, policy, jobs))
        figures[policy] = CellFigures(
            summary["e2el"]["mean"],
            summary["steady_tokens_per_second"],
            summary["itl"]["p99"],
            summary["ttft"]["mean"],
            summary["tpot"]["mean"],
            max(summary["bubble_share"]),
        )
    return figures


class RatioInterval(NamedTuple):
    """Mean over seeds of our figure over that of a policy, with its 95 % interval."""

    mean: float
    half_width: float
    policy: str

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.half_width:.2f} {self.policy}"


class CellVerdict(NamedTuple):
    """Ratios of the default to the best policies of a cell."""

    cell: PolicyCell
    e2el: RatioInterval
    throughput: RatioInterval
    itl: RatioInterval
    """To the policy of the best E2EL."""
    least_itl: RatioInterval
    """To the policy with the least ITL p99, whatever its E2EL."""
    mean: CellFigures
    """Our figures, means over the seeds."""

    @property
    def misses(self) -> tuple[str, ...]:
        """Names of the aims that are missed."""
        flags = {
            "E2EL": self.e2el.mean > E2EL_LIMIT,
            "throughput": self.throughput.mean < THROUGHPUT_LIMIT,
            "ITL": self.itl.mean > ITL_LIMIT,
        }
        return tuple(name for name, is_missed in flags.items() if is_missed)

    @property
    def distance(self) -> float:
        """Largest excess over a limit, in units of what the limit permits."""
        return max(
            (self.e2el.mean - 1) / (E2EL_LIMIT - 1),
            (1 - self.throughput.mean) / (1 - THROUGHPUT_LIMIT),
            (self.itl.mean - 1) / (ITL_LIMIT - 1),
        )


def judge_cell(cell: PolicyCell, runs: Sequence[dict[str, CellFigures]]) -> CellVerdict:
    """Compare the default with the best policies of a cell.

    Args:
        cell: The cell.
        runs: Figures of all policies by name, one entry per seed.
    """
    means = {
        policy: CellFigures(*map(fmean, zip(*(run[policy] for run in runs), strict=True)))
        for policy in POLICIES
    }
    others = {policy: figures for policy, figures in means.items() if policy != OURS}

    def compare(field: str, policy: str) -> RatioInterval:
        ratios = [getattr(run[OURS], field) / getattr(run[policy], field) for run in runs]
        half = STUDENT_T[len(runs)] * stdev(ratios) / math.sqrt(len(runs)) if len(runs) > 1 else 0.0
        return RatioInterval(fmean(ratios), half, policy)

    best = min(others, key=lambda policy: others[policy].e2el)
    return CellVerdict(
        cell,
        compare("e2el", best),
        compare("throughput", max(others, key=lambda policy: others[policy].throughput)),
        compare("itl", best),
        compare("itl", min(others, key=lambda policy: others[policy].itl)),
        means[OURS],
    )


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
    measure = partial(
        measure_cell_capacity, num_requests=CAPACITY_REQUESTS // (4 if options.quick else 1)
    )
    measured = map_parallel(measure, bases, options.jobs, options.progress, "capacity")
    capacities = dict(zip(bases, measured, strict=True))
    runs = [
        CellRun(cell, seed, options.requests, cell.share * capacities[cell._replace(share=1.0)])
        for cell in cells
        for seed in seeds
    ]
    figures = map_parallel(run_cell, runs, options.jobs, options.progress, "run")
    verdicts = [
        judge_cell(cell, figures[index * len(seeds) : (index + 1) * len(seeds)])
        for index, cell in enumerate(cells)
    ]
    verdicts.sort(key=lambda verdict: -verdict.distance)
    return ExperimentResult(
        "The default policy over devices, stages and loads",
        _page(verdicts, options.requests, seeds),
        _claims(verdicts),
        {"policies.svg": lambda path: plot_grid(_panels(verdicts), path)},
        reference="none; the claims are our own aims",
    )


def _page(verdicts: Sequence[CellVerdict], requests: int, seeds: Sequence[int]) -> str:
    """Return the text of the page: setting, counts by device, cells that miss an aim."""
    devices = "\n".join(f"- **{name}**: {device.description}" for name, device in DEVICES.items())
    missed = [verdict for verdict in verdicts if verdict.misses]
    return (
        f"Simulated: {len(verdicts)} cells of device, stages ({', '.join(map(str, STAGES))}), "
        f"workload and rate as a share of the capacity (the throughput with all requests at once); "
        f"{requests} requests, {len(seeds)} seeds. `bursts`: azure-conv, 16 requests at a time. "
        "Step cost of each stage:\n\n"
        f"{devices}\n\n"
        f"Aims of `{OURS}`: mean E2EL at most {E2EL_LIMIT} x that of the best policy of the cell, "
        f"throughput at least {THROUGHPUT_LIMIT} x the best, ITL p99 at most {ITL_LIMIT} x that of "
        "the policy with the best E2EL. Other policies: "
        f"{', '.join(name for name in POLICIES if name != OURS)} (`fixed`: the former rule of "
        "`throttle` with a ridge of 150, or with the ridge of the device). Intervals: 95 %, over "
        f"seeds.\n\n## Cells that keep the aims\n\nAll three: {len(verdicts) - len(missed)} of "
        f"{len(verdicts)}. Mean ratio of E2EL: {fmean(v.e2el.mean for v in verdicts):.3f}.\n\n"
        f"{_counts(verdicts)}\n\n"
        f"## Cells that miss an aim, worst first\n\n{_misses(missed)}"
    )


def _counts(verdicts: Sequence[CellVerdict]) -> str:
    """Return the numbers of cells that keep the aims, by device and number of stages."""
    rows = []
    for device in DEVICES:
        for stages in STAGES:
            group = [v for v in verdicts if (v.cell.device, v.cell.stages) == (device, stages)]
            if not group:
                continue
            kept = [
                sum(aim not in v.misses for v in group) for aim in ("E2EL", "throughput", "ITL")
            ]
            rows.append(
                [
                    f"{device}, {stages}",
                    str(len(group)),
                    str(sum(not v.misses for v in group)),
                    *map(str, kept),
                    f"{fmean(v.e2el.mean for v in group):.3f}",
                    f"{max(v.e2el.mean for v in group):.2f}",
                    f"{min(v.throughput.mean for v in group):.3f}",
                    f"{fmean(v.itl.mean for v in group):.2f}",
                    str(sum(v.least_itl.mean <= ITL_LIMIT for v in group)),
                ]
            )
    header = ["device, stages", "cells", "all aims", "E2EL", "throughput", "ITL", "mean E2EL ratio"]
    header += ["worst E2EL", "worst throughput", "mean ITL ratio", "ITL within 1.2 x of the least"]
    return format_table(header, rows)


def _misses(verdicts: Sequence[CellVerdict]) -> str:
    rows = [
        [
            str(v.cell),
            ", ".join(v.misses),
            str(v.e2el),
            str(v.throughput),
            str(v.itl),
            str(v.least_itl),
            f"{v.mean.ttft:.2f} / {1e3 * v.mean.tpot:.0f} / {v.mean.e2el:.2f} / "
            f"{1e3 * v.mean.itl:.0f}; {100 * v.mean.bubbles:.0f} %",
        ]
        for v in verdicts
    ]
    header = ["cell", "missed", "E2EL / best", "throughput / best", "ITL p99 / that of best E2EL"]
    header += ["ITL p99 / least", "TTFT s / TPOT ms / E2EL s / ITL p99 ms; bubbles"]
    return format_table(header, rows) if rows else "None."


def _claims(verdicts: Sequence[CellVerdict]) -> list[PaperClaim]:
    count = len(verdicts)
    return [
        PaperClaim(
            f"cells that keep the aim of {aim}",
            ExpectedLimit(count, is_minimum=True, unit="cells", digits=0, name="our own aim, all"),
            sum(aim not in verdict.misses for verdict in verdicts),
            f"of {count}",
        )
        for aim in ("E2EL", "throughput", "ITL")
    ]


def _panels(verdicts: Sequence[CellVerdict]) -> list[ChartPanel]:
    """Return the sorted ratios of each figure over the cells."""
    panels = []
    for label, field in (("E2EL", "e2el"), ("throughput", "throughput"), ("ITL p99", "itl")):
        ratios = sorted(getattr(verdict, field).mean for verdict in verdicts)
        points = {"throttle": [(float(i), ratio) for i, ratio in enumerate(ratios)]}
        panels.append(ChartPanel(label, "cells, sorted", "ratio to the best", points))
    return panels

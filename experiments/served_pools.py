"""Pools of GPUs with prefill and decode apart, served on emulated devices, and colocated engines.

The prefill and decode engines are those of `gllm plan goodput`. Both sides are searched alike: the
highest rate at which enough simulated requests are within the limits. Each is then served at its
rate, and the same requests are simulated.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import msgspec

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedChange, ExpectedLimit, PaperClaim, relative_change
from experiments.distserve_workloads import WORKLOADS, PaperWorkload
from experiments.parallel import map_parallel
from experiments.planners import describe_engines, run_planner
from experiments.served_plans import (
    PlanLoad,
    ServedPlan,
    build_engines,
    serve_plan,
    simulate_plan,
)
from gllm.observability.latency import RequestTimeline, percentile, slo_attainment
from gllm.observability.progress import show_progress
from gllm.options.slo import Slo
from gllm.plan.layout import Parallelism
from gllm.plan.serving_plan import (
    EnginePlan,
    ExpectedFigures,
    LinkPlan,
    NodePlan,
    RouterPlan,
    ServingPlan,
    StagePlan,
)
from gllm.sim.hardware.devices import GBIT_BYTES, LINKS
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.metrics.report import format_table
from gllm.sim.monotone_search import find_last

DEVICE = "A100-80G"
POOLS = {"opt-13b": 4, "opt-66b": 8}
"""GPUs of the machine, by model."""
CUTS = {
    "opt-13b": tuple(Parallelism(*cut) for cut in ((1, 1), (2, 1), (1, 2), (4, 1))),
    "opt-66b": tuple(Parallelism(*cut) for cut in ((2, 1), (3, 1), (4, 1), (2, 2), (1, 4), (8, 1))),
}
"""Parallelism of colocated engines, by model."""
POLICIES: dict[str, dict[str, object]] = {
    "vllm": {"policy": "vllm"},
    "sarathi": {"policy": "sarathi", "max-num-batched-tokens": 512},
}
"""Fields of the scheduler of colocated engines, by the name on the page."""
MAX_TOKENS = 2048
"""Context of OPT."""
PLAN_SECONDS = 300
"""CPU time of the planner."""
SEED = 1001
"""Of the judged and served requests; the planner searches with 0."""
SERVED_SEED = 1002
SERVE_SECONDS = 90.0
"""Time in which the requests of a served plan arrive."""
STEPS_PER_DOUBLING = 16
"""Rates of a search between a rate and its double."""
RANGE = 4 * STEPS_PER_DOUBLING
"""Steps from the first rate to the ends of a search."""
POINTS = 0.05
"""Difference of the served from the simulated share that the page accepts."""


class Side(NamedTuple):
    """Engines of a pool that are searched and served."""

    title: str
    plan: ServingPlan
    """At the rate that was found."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all engines."""
        return sum(engine.num_devices for engine in self.plan.engines.values())

    @property
    def rate(self) -> float:
        """Requests per second."""
        assert self.plan.expected is not None
        return self.plan.expected.rate

    @property
    def rate_per_gpu(self) -> float:
        """Requests per second and GPU, at which sides of unlike sizes are compared."""
        return self.rate / self.num_gpus


def load_of(workload: PaperWorkload, seed: int) -> PlanLoad:
    """Return the requests of a workload of the paper with its limits."""
    return PlanLoad(workload.lengths, Slo(workload.ttft, workload.tpot), seed, MAX_TOKENS)


def plan_apart(workload: PaperWorkload, budget: int) -> ServingPlan:
    """Return the plan of `gllm plan goodput` for the GPUs of the pool.

    Raises:
        ValueError: There is none.
    """
    words = [
        "--model", workload.model, "--workload", workload.lengths, "--device", DEVICE,
        "--nodes", "1", "--gpus-per-node", str(POOLS[workload.model]), "--costs", "roofline",
        "--slo", f"ttft={workload.ttft:g},tpot={workload.tpot:g}", "--budget", str(budget),
    ]  # fmt: skip
    run = run_planner("goodput", words)
    if run.plan is None:
        raise ValueError(f"{workload.name}: {run.note}")
    return run.plan


def plan_colocated(
    workload: PaperWorkload, cut: Parallelism, policy: str, num_gpus: int
) -> ServingPlan | None:
    """Return as many engines for both phases as there are GPUs for; None if the model is too large.

    Args:
        workload: Names the model.
        cut: Parallelism of each engine.
        policy: A name of POLICIES.
        num_gpus: GPUs at most.
    """
    count = num_gpus // cut.num_gpus
    if not count:
        return None
    layers = cut.split_layers(MODELS[workload.model].layers)
    engines = {}
    for index in range(count):
        first = index * cut.num_gpus
        stages = [
            StagePlan(
                "node-0", layers[i], list(range(first + i * cut.tp, first + (i + 1) * cut.tp))
            )
            for i in range(cut.pp)
        ]
        scheduler = {**POLICIES[policy], "prefix-cache": False, "max-num-seqs": 192}
        engines[f"engine-{index}"] = EnginePlan(stages, scheduler=scheduler)
    link = LINKS["nvlink"]
    node = NodePlan(
        "node-0",
        [DEVICE] * (count * cut.num_gpus),
        link=LinkPlan(link.bandwidth / GBIT_BYTES, 1e3 * link.latency),
    )
    router = RouterPlan("node-0", policy="least-requests")
    plan = ServingPlan(workload.model, {"node-0": node}, engines, router=router)
    try:
        build_engines(plan)
    except ValueError:
        return None
    return plan


class SearchTask(NamedTuple):
    """Arguments of `find_rate`."""

    title: str
    plan: ServingPlan
    load: PlanLoad
    first_rate: float
    """Requests per second at which the search begins."""
    num_requests: int


def find_rate(task: SearchTask) -> Side:
    """Return a plan at the highest rate at which enough simulated requests are within the limits.

    The rate is 0 if none down to 2^-4 of the first attains that.
    """

    def at(step: int) -> ServingPlan:
        rate = task.first_rate * 2 ** (step / STEPS_PER_DOUBLING)
        return msgspec.structs.replace(task.plan, expected=ExpectedFigures("a search", rate))

    def attains(step: int, *_: int) -> bool:
        lines = simulate_plan(at(step), task.load, task.num_requests)
        return slo_attainment(lines, task.load.slo) >= task.load.slo.attainment

    step = find_last(attains, 0, STEPS_PER_DOUBLING // 2, -RANGE, RANGE)
    found = msgspec.structs.replace(task.plan, expected=ExpectedFigures("a search", 0.0))
    return Side(task.title, found if step is None else at(step))


class PoolResult(NamedTuple):
    """Sides of a pool, and their measurements."""

    workload: PaperWorkload
    apart: Side
    colocated: dict[str, Side]
    """The best cut, by policy."""
    judged: dict[str, tuple[list[RequestTimeline], ServedPlan]]
    """By the title of a side: the same requests simulated and served."""

    @property
    def best(self) -> Side:
        """The best colocated engines."""
        return max(self.colocated.values(), key=lambda side: side.rate_per_gpu)


def search_pool(workload: PaperWorkload, options: ExperimentOptions) -> PoolResult:
    """Find the rates of both sides of a pool."""
    load = load_of(workload, SEED)
    apart = plan_apart(workload, 20 if options.quick else PLAN_SECONDS)
    assert apart.expected is not None
    num_gpus = sum(engine.num_devices for engine in apart.engines.values())
    tasks = [SearchTask("apart", apart, load, apart.expected.rate, options.requests)]
    for cut, policy in product(CUTS[workload.model], POLICIES):
        plan = plan_colocated(workload, cut, policy, num_gpus)
        if plan is not None:
            rate = apart.expected.rate / 2
            tasks.append(SearchTask(policy, plan, load, rate, options.requests))
    found, *others = map_parallel(find_rate, tasks, options.jobs, options.progress)
    colocated = {
        policy: max(
            (side for side in others if side.title == policy), key=lambda side: side.rate_per_gpu
        )
        for policy in POLICIES
    }
    return PoolResult(workload, found, colocated, {})


def serve_pool(result: PoolResult, seconds: float) -> PoolResult:
    """Serve both sides of a pool at their rates, and simulate the same requests.

    A side without a rate is not served.
    """
    load, judged = load_of(result.workload, SERVED_SEED), {}
    for side in (result.apart, result.best):
        if not side.rate:
            continue
        served = serve_plan(side.plan, load, seconds)
        judged[side.title] = simulate_plan(side.plan, load, served.num_requests), served
    return result._replace(judged=judged)


def side_rows(result: PoolResult) -> list[list[str]]:
    """Return a row of the table for each side."""
    rows = []
    for side in (result.apart, *result.colocated.values()):
        row = [
            result.workload.name,
            side.title,
            describe_engines(side.plan),
            f"{side.rate:.2f}",
            f"{side.rate_per_gpu:.3f}",
        ]
        if side.title in result.judged:
            lines, served = result.judged[side.title]
            share = slo_attainment(lines, load_of(result.workload, SERVED_SEED).slo)
            ttft = [line.ttft for line in lines if line.ttft is not None]
            tpot = [line.tpot for line in lines if line.tpot is not None]
            row += [
                f"{100 * share:.1f} %",
                f"{100 * served.share:.1f} %",
                *_latencies(ttft, served.ttft_seconds),
                *_latencies(tpot, served.tpot_seconds),
            ]
        else:
            row += [""] * 6
        rows.append(row)
    return rows


def _latencies(simulated: Sequence[float], served: tuple[float, float]) -> list[str]:
    """Return median and 90th percentile in milliseconds, simulated and served."""
    ours = percentile(simulated, 50), percentile(simulated, 90)
    return [f"{1e3 * median:.0f}, {1e3 * high:.0f}" for median, high in (ours, served)]


HEADER = [
    "workload", "side", "engines", "requests/s", "per GPU", "simulated", "served",
    "TTFT simulated, ms", "TTFT served", "TPOT simulated, ms", "TPOT served",
]  # fmt: skip


def make_claims(results: Sequence[PoolResult]) -> list[PaperClaim]:
    """Return the paper's gain beside ours, and the difference of served from simulated shares."""
    claims = []
    for result in results:
        name, slo = result.workload.name, load_of(result.workload, SERVED_SEED).slo
        vllm = relative_change(result.apart.rate_per_gpu, result.colocated["vllm"].rate_per_gpu)
        best = relative_change(result.apart.rate_per_gpu, result.best.rate_per_gpu)
        expected = ExpectedChange(*result.workload.rate_gain, is_ratio=True)
        claims += [
            PaperClaim(f"{name}: goodput per GPU against vLLM", expected, vllm),
            PaperClaim(
                f"{name}: against the best colocated engines",
                "not compared",
                note=f"{best + 1:.2f} x",
            ),
        ]
        for title, (lines, served) in result.judged.items():
            claims.append(
                PaperClaim(
                    f"{name}, {title}: served share beside the simulated one",
                    ExpectedLimit(POINTS),
                    abs(served.share - slo_attainment(lines, slo)),
                )
            )
    return claims


def run(options: ExperimentOptions) -> ExperimentResult:
    """Plan pools for the paper's models, search both sides, and serve them."""
    workloads = [each for each in WORKLOADS if each.model in POOLS]
    if options.quick:
        del workloads[1:]
    searched = [search_pool(each, options) for each in workloads]
    seconds = 5.0 if options.quick else SERVE_SECONDS
    with show_progress("served pool", len(searched), is_shown=options.progress) as bar:
        results = []
        for result in searched:
            results.append(serve_pool(result, seconds))
            bar.update()
    text = f"""
Pools of 4 (OPT-13B) and 8 (OPT-66B) {DEVICE} with NVLink and the limits of DistServe's Table 1, for
90 % of the requests. "apart": prefill and decode engines of `gllm plan goodput`, which may leave
GPUs unused. The others are colocated engines on at most as many GPUs, the best of the cuts
{"; ".join(f"{model}: {', '.join(map(str, cuts))}" for model, cuts in CUTS.items())}, with vLLM's
policy and with Sarathi's (512 tokens a step). Step times of all sides are those of the data sheet.

The rate is the highest at which 90 % of {options.requests} simulated requests (seed {SEED}) are
within the limits, in steps of 4.4 %. Engines apart and the better colocated ones are then served at
it for {seconds:g} s by `gllm up --emulate` with requests of `gllm bench serve` (seed
{SERVED_SEED}): router, engines, hand-offs and HTTP are real. "simulated" is the same requests in
the simulator. Latencies: median and 90th percentile.

{format_table(HEADER, [row for result in results for row in side_rows(result)])}
"""
    return ExperimentResult(
        "Pools with prefill and decode apart, served on emulated devices",
        text,
        make_claims(results),
        reference="Zhong et al., DistServe, OSDI 2024",
    )

"""Planners on the shipped clusters: plan, price, bound, promised and measured attainment.

Each planner is run by its command line and writes its plan. The plan is then simulated from its
file alone, with another seed. With `--emulated`, a few plans are served by `gllm up --emulate`.
"""

import io
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.served_plans import MeasuredPlan, PlanLoad, last_line, measure_plan, serve_plan
from gllm.commands.plan.command import run_strategy
from gllm.observability.progress import show_progress
from gllm.options.slo import Slo
from gllm.plan.attainment import AttainmentVerdict
from gllm.plan.best_first import SearchBudget
from gllm.plan.emulated_plan import emulate_plan
from gllm.plan.nodes import cluster_names, named_cluster
from gllm.plan.prices import PRICE_TABLES
from gllm.plan.serving_plan import ServingPlan, read_plan
from gllm.sim.capacity import SearchEndedError
from gllm.sim.metrics.report import format_table

MODELS_AND_RATES = {"llama-3-8b": 12.0, "opt-30b": 3.0, "llama-2-70b": 1.5}
"""Models, with the requests per second that planners which take a rate plan for."""
WORKLOAD = "lognormal:600,1200,1800,40,100,160"
"""Prompts of 600 tokens in the median, outputs of 40: within the context of every model."""
SLO = Slo(2.0, 0.1, attainment=0.9)
MAX_TOKENS = 2048
PRICES = "hexgen-2"
"""The only table with prices of all devices of the shipped clusters."""
BUDGET_SECONDS = 20
"""CPU time of each planner, so that other programs on the machine change no plan."""
MEASURE_SECONDS = 120.0
"""CPU time of the measurement at most."""
NUM_REQUESTS = 5000
"""Requests of the independent measurement."""
SEED = 1001
"""Its seed; planners search with 0."""
LOAD = PlanLoad(WORKLOAD, SLO, SEED, MAX_TOKENS)
SERVE_SECONDS = 75
"""Time in which the requests of a served plan arrive."""


class Case(NamedTuple):
    """One planner, cluster and model, with the planner's flags."""

    planner: str
    cluster: str
    model: str
    arguments: tuple[str, ...]
    num_requests: int
    served_seconds: float = 0.0
    """Time in which the plan is served on emulated devices; 0: it is not."""


class CaseResult(NamedTuple):
    """Result of a case."""

    case: Case
    note: str
    """Reason why there is no plan; empty if there is one."""
    bound: str = ""
    """Line of the planner's output with its bound."""
    plan: ServingPlan | None = None
    measured: MeasuredPlan | None = None
    served: float | None = None
    """Share of the served requests within the limits, of those that were sent."""
    seconds: float = 0.0
    """CPU time of the planner."""


def make_cases(is_quick: bool, num_requests: int) -> list[Case]:
    """Return the cases: hetero and search on every cluster, the others on those of equal devices.

    `gllm plan pools` plans machines of its own, by measured step times: its page is splitwise.
    """
    models = dict(list(MODELS_AND_RATES.items())[:1]) if is_quick else MODELS_AND_RATES
    budget = ("--budget", "2" if is_quick else str(BUDGET_SECONDS))
    slo = ("--slo", f"ttft={SLO.ttft_seconds:g},tpot={SLO.tpot_seconds:g}", "--attainment", "0.9")
    cases = []
    for cluster in ["hom4"] if is_quick else cluster_names():
        nodes = named_cluster(cluster).nodes
        inventory = ",".join(f"{n.name}=10.0.0.{i + 1}:{n.num_devices}x{n.device}"
                             for i, n in enumerate(nodes))  # fmt: skip
        for model, rate in models.items():
            common = ("--model", model, "--workload", WORKLOAD)
            at_rate = ("--rate", f"{rate:g}")
            flags = {
                "hetero": (*common, "--cluster", cluster, *budget),
                "search": (
                    *common, "--nodes", inventory, *at_rate, *slo, *budget, "--jobs", "1",
                    "--prices", PRICES, "--policies", "vllm,sarathi:512", "--max-num-seqs", "128",
                ),
            }  # fmt: skip
            if len(nodes) == 1:
                device, count = nodes[0].device, str(nodes[0].num_devices)
                flags["goodput"] = (
                    *common, "--gpus-per-node", count, "--device", device, "--costs", "roofline",
                    *at_rate, *slo, *budget,
                )  # fmt: skip
                dollars = PRICE_TABLES[PRICES][device] * nodes[0].num_devices
                flags["scale"] = (
                    "--model", model, "--trace", WORKLOAD, "--device", device, *at_rate, *slo,
                    "--max-dollars", f"{dollars:g}", "--prices", PRICES, *budget,
                )  # fmt: skip
                flags["capacity"] = (
                    *common, "--device", device, "--tp", count, "--pp", "1", "--link", "nvlink",
                    "--slo", slo[1], *budget, "--jobs", "1",
                )  # fmt: skip
            cases += [
                Case(name, cluster, model, words, num_requests) for name, words in flags.items()
            ]
    return cases


NOT_RUN = "not run in the time that there was"
"""Note of a case that did not begin."""


def run_cases(cases: Sequence[Case], options: ExperimentOptions) -> list[CaseResult]:
    """Run cases one after another; those with a kept result are not run again.

    Plans that start the same processes are served once.
    """
    end = time.monotonic() + options.seconds
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
    results: list[CaseResult] = []
    served: dict[str, float] = {}
    with show_progress("plan", len(cases), is_shown=options.progress) as bar:
        for case in cases:
            result = None if options.results is None else find_result(case, options.results)
            if result is None and time.monotonic() < end:
                planned = case._replace(served_seconds=0.0)
                known = None if options.results is None else find_result(planned, options.results)
                result = serve_result(known or run_case(planned), case.served_seconds, served)
                if options.results is not None:
                    path = options.results / result_name(case)
                    path.write_bytes(msgspec.json.encode(result))
            result = result or CaseResult(case, NOT_RUN)
            if result.plan is not None and result.served is not None:
                served[service_key(result.plan)] = result.served
            results.append(result)
            bar.update()
    return results


def result_name(case: Case) -> str:
    """Return the name of the file with the result of a case."""
    served = "-served" if case.served_seconds else ""
    return f"{case.cluster}-{case.model}-{case.planner}{served}.json"


def find_result(case: Case, folder: Path) -> CaseResult | None:
    """Return the result of a case that a former run has kept; None if it has other arguments."""
    path = folder / result_name(case)
    if not path.exists():
        return None
    result = msgspec.json.decode(path.read_bytes(), type=CaseResult)
    return result if result.case == case else None


def serve_result(result: CaseResult, seconds: float, served: Mapping[str, float]) -> CaseResult:
    """Serve the plan of a result on emulated devices, if there is one and a time to serve it.

    Args:
        result: Result with the plan.
        seconds: Time in which requests arrive; 0: the plan is not served.
        served: Shares of the services before, by `service_key`: they are not started again.
    """
    case = result.case._replace(served_seconds=seconds)
    if not seconds or result.plan is None:
        return result._replace(case=case)
    share = served.get(service_key(result.plan))
    return result._replace(
        case=case, served=serve_plan(result.plan, LOAD, seconds).share if share is None else share
    )


def service_key(plan: ServingPlan) -> str:
    """Return a text that plans share if their emulated services are the same processes and load."""
    emulated = emulate_plan(plan)
    engines = {
        name: (engine.role, engine.scheduler, engine.flags, [
            (stage.layers, stage.num_ranks) for stage in engine.stages
        ])
        for name, engine in emulated.engines.items()
    }  # fmt: skip
    router, rate = emulated.router, plan.expected and plan.expected.rate
    key = (plan.model, rate, engines, router and (router.policy, router.preset, router.flags))
    return msgspec.json.encode((*key, plan.routes), order="sorted").decode()


class PlannerRun(NamedTuple):
    """Result of a planner's command."""

    plan: ServingPlan | None
    lines: list[str]
    """Its output."""
    note: str
    """Reason why there is no plan; empty if there is one."""


def run_planner(planner: str, arguments: Sequence[str]) -> PlannerRun:
    """Run `gllm plan`; budgets are CPU time, so that other programs change no plan.

    Args:
        planner: Name of the strategy.
        arguments: Its flags but the output file.
    """
    output, errors = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        with redirect_stdout(output), redirect_stderr(errors):
            words = [*arguments, "--output", str(path)]
            status = run_strategy(planner, words, time.process_time)
        lines = output.getvalue().splitlines()
        if not status and path.exists():
            return PlannerRun(read_plan(path), lines, "")
    reasons = [line for line in errors.getvalue().splitlines() if "gllm plan" in line]
    return PlannerRun(None, lines, last_line("\n".join(reasons or lines)))


def run_case(case: Case) -> CaseResult:
    """Run a planner, and measure its plan."""
    begin = time.process_time()
    plan, lines, note = run_planner(case.planner, case.arguments)
    seconds = time.process_time() - begin
    if plan is None:
        return CaseResult(case, note, seconds=seconds)
    bound = next((line for line in lines if line.lower().startswith("bound")), "none")
    try:
        measured = measure_plan(
            plan,
            LOAD,
            case.num_requests,
            SearchBudget(MEASURE_SECONDS, clock=time.process_time).deadline,
        )
    except (ValueError, SearchEndedError) as error:
        return CaseResult(case, f"not simulated: {error}", bound, plan, seconds=seconds)
    return CaseResult(case, "", bound, plan, measured, seconds=seconds)


def describe_engines(plan: ServingPlan) -> str:
    """Return the engines of a plan as text: number, role, devices of each stage."""
    counts: dict[str, int] = {}
    for engine in plan.engines.values():
        stages = [
            f"{stage.num_ranks} {plan.nodes[stage.node].devices[stage.devices[0]]}"
            for stage in engine.stages
        ]
        role = "" if engine.role == "mixed" else f"{engine.role} "
        text = f"{role}{' + '.join(stages)}"
        counts[text] = counts.get(text, 0) + 1
    return ", ".join(f"{count} x ({text})" for text, count in counts.items())


def price_plan(plan: ServingPlan) -> float:
    """Return the US dollars per hour of the devices that a plan's engines use."""
    return sum(
        stage.num_ranks * PRICE_TABLES[PRICES][plan.nodes[stage.node].devices[stage.devices[0]]]
        for engine in plan.engines.values()
        for stage in engine.stages
    )


def shorten_bound(line: str) -> str:
    """Return a planner's line about its bound without words that all lines have."""
    text = line.partition(": ")[2] or line
    text = re.sub(r" \(relaxation:.*?\)| by closed forms?|; \d+ judged", "", text)
    return text.replace("requests per second", "/s").replace("requests/s", "/s").rstrip(".")


def result_row(result: CaseResult) -> list[str]:
    """Return the cells of a case."""
    case, plan, measured = result.case, result.plan, result.measured
    cells = [case.cluster, case.model, case.planner]
    if plan is None or plan.expected is None:
        return [*cells, result.note, "", "", "", "", ""]
    promised = plan.expected.attainment
    cells += [
        describe_engines(plan),
        f"{price_plan(plan):.2f}",
        shorten_bound(result.bound),
        f"{plan.expected.rate:.3g}",
        "stable" if promised is None else f"{100 * promised:.1f} %",
    ]
    if measured is None:
        return [*cells, result.note]
    attained, verdict = measured.attainment, measured.attainment.verdict
    shown = f"{100 * attained.share:.1f} % ({100 * attained.low:.1f} to {100 * attained.high:.1f})"
    return [*cells, shown + (", overloaded" if verdict is AttainmentVerdict.OVERLOADED else "")]


HEADER = [
    "cluster", "model", "planner", "engines", "$/h", "bound", "requests/s", "promised", "measured",
]  # fmt: skip


def keeps_promise(result: CaseResult) -> bool:
    """Return True if a measured plan is not overloaded, and attains a promised goal."""
    assert result.measured is not None
    assert result.plan is not None
    assert result.plan.expected is not None
    attained = result.measured.attainment
    if attained.verdict is AttainmentVerdict.OVERLOADED:
        return False
    return result.plan.expected.attainment is None or attained.high >= SLO.attainment


def describe_runs(results: Sequence[CaseResult], options: ExperimentOptions) -> str:
    """Return a sentence about rows of several runs of the command; empty if there is one run."""
    if options.results is None:
        return ""
    seconds = sum(result.seconds for result in results)
    return f" The rows are of several runs; their planners took {seconds:.0f} s of CPU time."


def run(options: ExperimentOptions) -> ExperimentResult:
    """Run every planner on every shipped cluster, and measure its plans."""
    num_requests = 200 if options.quick else NUM_REQUESTS
    cases = make_cases(options.quick, num_requests)
    results = run_cases(cases, options)
    measured = [result for result in results if result.measured is not None]
    kept = sum(map(keeps_promise, measured))
    unplanned = len(results) - len(measured)
    num_left = sum(result.note == NOT_RUN for result in results)
    left = f"; {num_left} of these were not run" if num_left else ""
    text = f"""
Goals of a request: TTFT {SLO.ttft_seconds:g} s, TPOT {SLO.tpot_seconds:g} s, for
{100 * SLO.attainment:g} % of the requests. Workload `{WORKLOAD}` with Poisson arrivals. Prices:
table `{PRICES}`, of the devices that engines use. Planners have {BUDGET_SECONDS} s of CPU time and
seed 0.

`hetero` finds the highest rate of a cluster and promises 80 % of it, without goals of latency.
`search`, `goodput` and `scale` find the cheapest engines for the rate of the row, `capacity` the
highest rate of one engine on the whole machine. `goodput`, `scale` and `capacity` know equal
devices, so they are run on those clusters. `gllm plan pools` plans machines of its own:
[splitwise](splitwise.md).

Measured: the engines, links, router and routes of the written plan, {num_requests} requests with
seed {SEED}, the share within both limits and its interval. "stable": the planner promises that no
queue grows; `hetero` has no goals, so that its share may be 0, and `search` says so where its
budget ended before it simulated all engines together. Of {len(results)} cases {len(measured)}
have a measured plan, and {kept} of these keep their promise: they are not overloaded, and the
goal is within the interval or below it. Without one: {unplanned}, for the reason in the
row{left}.{describe_runs(results, options)}

{format_table(HEADER, [result_row(result) for result in results])}
"""
    return ExperimentResult("Planners on the shipped clusters", text)


MAX_SERVED_RATE = 25.0
"""Requests per second that a laptop's two cores stream beside the emulated engines."""
MAX_SERVED_DEVICES = 8
"""Devices whose processes start on them in a minute."""


def can_be_served(result: CaseResult) -> bool:
    """Return whether this machine can serve a plan on emulated devices at its rate."""
    plan = result.plan
    if plan is None or plan.expected is None:
        return False
    num_devices = sum(
        stage.num_ranks for engine in plan.engines.values() for stage in engine.stages
    )
    return plan.expected.rate <= MAX_SERVED_RATE and num_devices <= MAX_SERVED_DEVICES


def run_emulated(options: ExperimentOptions) -> ExperimentResult:
    """Serve the plans that this machine can serve with `gllm up --emulate`, one after another."""
    seconds = 5.0 if options.quick else SERVE_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        kept_options = replace(options, results=options.results or Path(folder))
        planned = run_cases(make_cases(options.quick, NUM_REQUESTS), kept_options)
        chosen = [result.case for result in planned if can_be_served(result)]
        if options.quick:
            del chosen[1:]
        chosen = [case._replace(served_seconds=seconds) for case in chosen]
        results = run_cases(chosen, kept_options)
    rows = [
        [*result_row(result), "" if result.served is None else f"{100 * result.served:.1f} %"]
        for result in results
    ]
    kept = sum(map(serves_promise, results))
    services = {service_key(result.plan) for result in results if result.plan is not None}
    text = f"""
Each plan is served for {seconds:g} s by `gllm up --emulate`, with requests of `gllm bench serve` at
the plan's rate: the router, the engines and HTTP are real, steps take the time of the cost model.
The other columns are those of [planners](planners.md).{describe_runs(results, options)}

Of {len(planned)} plans there, {len(chosen)} have at most {MAX_SERVED_RATE:g} requests/s and
{MAX_SERVED_DEVICES} devices, so that two cores serve them; they are {len(services)} different
services, since plans of several clusters start the same processes. {kept} of the {len(results)}
attain within {100 * SERVED_POINTS:g} points of what is promised, or more; where nothing is, of what
the simulation measured.

{format_table([*HEADER, "served"], rows)}
"""
    return ExperimentResult("Planners' plans served on emulated devices", text)


SERVED_POINTS = 0.05
"""Share of the requests by which a served plan may attain less than is promised."""


def serves_promise(result: CaseResult) -> bool:
    """Return whether a served plan attains what is promised, or else what was measured."""
    if result.plan is None or result.plan.expected is None or result.served is None:
        return False
    promised = result.plan.expected.attainment
    if promised is None:
        promised = 0.0 if result.measured is None else result.measured.attainment.share
    return result.served >= promised - SERVED_POINTS

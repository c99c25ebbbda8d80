"""Plan of a service that scales by its rate: worker type, number of workers by rate, plan.yaml."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf
from statistics import fmean
from typing import NamedTuple

from gllm.observability.latency import percentile
from gllm.plan.best_first import SearchBudget
from gllm.plan.engine_bounds import EngineBounds, measure_workload
from gllm.plan.layout import PlannedEngine, PlannedStage, changed_options, lay_out
from gllm.plan.nodes import DeviceCluster, DeviceNode, with_inner_link
from gllm.plan.problem import ServiceProblem
from gllm.plan.scale.fleet_size import (
    LONGEST_RUN,
    MAX_REQUESTS,
    MAX_WORKERS,
    QUICK_REQUESTS,
    FleetCase,
    JudgedFleet,
    WorkerSpec,
    judge_fleet,
    least_fleet,
)
from gllm.plan.scale.latency_fit import FittedLatency, fit_latency
from gllm.plan.scale.worker_type import (
    DEGREES,
    WorkerType,
    best_worker,
    build_engines,
    throughput_by_degree,
)
from gllm.plan.serving_plan import ExpectedFigures, RouterPlan, ServingPlan
from gllm.routing.scaling.autoscaler import ScaleRule, fit_scale_rule
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.capacity import SearchEndedError
from gllm.sim.deployment import Deployment
from gllm.sim.workloads.requests import cut_requests, longest_job, make_workload

RATE_SHARES = (1.0, 0.75, 0.5)
"""Rates at which the number of workers is searched, per planned rate."""
BASELINE = "least-tokens"
"""Policy that the placement is compared with: join the shortest queue."""
NUM_SAMPLES = 1000
"""Requests of which the mean lengths are taken."""
LONG_PROMPT_PERCENT = 99.0
"""Percentile of the prompts up to which the latency model is fitted."""
BOUND_FACTOR = 8
"""Engines at most, per engine that the closed form needs for the rate."""
MIN_LIMIT = 16
"""Least value of that limit: few engines serve less of the closed form's rate than many."""
MAX_ENGINE_RATE = 1e6
"""Requests per second of an engine in the rule of a number that does not depend on the rate."""
NUM_DIGITS = 6
"""Significant digits of the rule in a plan."""


JudgeFleet = Callable[[FleetCase, int, Callable[[], None] | None], JudgedFleet]
"""Tests a number of engines; the last argument is called now and then, and may raise an error."""


class ScalePoint(NamedTuple):
    """Fewest engines that serve one request rate, with the policy `aladdin` and with a baseline."""

    rate: float
    """Requests per second."""
    placed: JudgedFleet
    """Smallest fleet with the routing policy `aladdin`."""
    baseline: JudgedFleet | None = None
    """Smallest fleet with the routing policy BASELINE; None: more than four times as many, or not
    searched."""


class EngineOption(NamedTuple):
    """Engine on a number of GPUs: fewest engines for the planned rate, and their lower bound."""

    num_gpus: int
    max_rate: float
    """Requests per second that an engine cannot exceed within the limits, by a closed form."""
    min_engines: int
    """Lower bound of the number of engines for the planned rate; 0: no number suffices."""
    fleet: JudgedFleet | None = None
    """Smallest fleet that was found."""
    note: str = ""
    """Reason why there is no fleet."""


class ScaleResult(NamedTuple):
    """Result of `plan_scale`: GPUs per engine, and number of engines as a function of the rate.

    As in Aladdin, an engine is called a worker.
    """

    workers: list[WorkerType]
    """Throughput of an engine by number of GPUs."""
    options: list[EngineOption]
    """Fleets for the planned rate by number of GPUs per engine."""
    worker: WorkerSpec
    """Chosen engine type."""
    fit: FittedLatency
    """Linear latency model of the chosen engine type."""
    points: list[ScalePoint]
    """Numbers of engines at several request rates, the planned one first."""
    rule: ScaleRule
    """Number of engines as a function of the request rate, fitted to `points`: that of the plan."""
    scheduler: SchedulerConfig
    """Scheduler options of the engines, simulated and planned."""
    min_gpus: int
    """Lower bound of the number of GPUs for the planned rate, from the bounds of `options`."""
    num_cut: int = 0
    """Requests of the longest simulation that were shortened to the limit of tokens."""
    note: str = ""
    """Reason why the search ended early; empty if it did not."""

    def num_workers(self, rate: float) -> int:
        """Return the number of engines for a request rate per second."""
        return max(1, self.rule.num_engines(rate))


def mean_context(workload: str, seed: int = 0, max_request_tokens: int | None = None) -> float:
    """Return the mean number of KV cache tokens of a request over its lifetime (m_r in Aladdin).

    Args:
        workload: Name of the workload.
        seed: Seed of the sampled lengths.
        max_request_tokens: Tokens to which longer requests are cut; None: none is cut.
    """
    jobs = cut_requests(make_workload(workload, NUM_SAMPLES, seed=seed), max_request_tokens)
    return fmean(job.num_prompt_tokens + job.num_output_tokens / 2 for job in jobs)


def plan_rule(points: Sequence[tuple[float, int]]) -> ScaleRule:
    """Return the rule by which a router scales, with as many digits as the plan has.

    Args:
        points: Request rates per second, each with the number of engines that it needs. With a
            single one the number is proportional to the rate.
    """
    if len(points) < 2:
        ((rate, count),) = points
        return ScaleRule(count / rate)
    rule = fit_scale_rule(points)
    engine_rate = MAX_ENGINE_RATE if rule.k5 * MAX_ENGINE_RATE < 1 else 1 / rule.k5
    rounded = float(f"{engine_rate:.{NUM_DIGITS}g}")
    return ScaleRule(1 / rounded, float(f"{rule.c5:.{NUM_DIGITS}g}"))


def rule_flags(rule: ScaleRule) -> dict[str, object]:
    """Return the router's flags for a rule of `plan_rule`."""
    flags: dict[str, object] = {"scale-engine-rate": float(f"{1 / rule.k5:.{NUM_DIGITS}g}")}
    if rule.c5:
        flags["scale-engine-offset"] = rule.c5
    return flags


@dataclass
class ScaleSearch:
    """Search for the GPUs per engine and the number of engines at several request rates (Aladdin).

    Engines of all numbers of GPUs are compared at the planned rate, those with the most tokens per
    second and GPU by Aladdin's closed form first. The cheapest one is searched at lower rates, too,
    for the rule.

    Args:
        problem: Model, workload, request rate, latency limits, and one kind of devices. Requests
            that are longer than the engines accept are refused unless they are cut.
        num_gpus: GPUs per engine; None: the number with the cheapest fleet.
        rank_link: Name of the link between the GPUs of an engine.
        scheduler: Scheduler options of the engines, simulated and planned.
        budget: Time and evaluation limit.
        judge: Tests a fleet; default: by simulation.
        on_outcome: Called after each test of a fleet.
        on_best: Called with each fleet for the planned rate that is cheaper than those before: GPUs
            per engine and the fleet.
    """

    problem: ServiceProblem
    num_gpus: int | None = None
    rank_link: str = "nvlink"
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    budget: SearchBudget = field(default_factory=SearchBudget)
    judge: JudgeFleet = judge_fleet
    on_outcome: Callable[[], None] = lambda: None
    on_best: Callable[[int, JudgedFleet], None] = lambda num_gpus, fleet: None
    _met: JudgedFleet | None = None
    """Smallest fleet of the present search that meets the SLO."""
    _decided: dict[tuple[int, float, str, int], JudgedFleet] = field(default_factory=dict)
    """Decided tests, by GPUs per engine, rate, policy and number of engines."""

    def run(self) -> ScaleResult:
        """Search until the end of the budget or an interrupt; return the best plan so far.

        Raises:
            ValueError: A name is unknown, a latency limit is missing, a request is too long, or no
                engine or fleet meets the limits.
            SearchEndedError: The search ended before there was a plan.
        """
        problem = self.problem
        (device,), model = problem.devices, problem.model
        _, tpot = problem.limits.require("ttft", "tpot")
        assert problem.rate is not None, "workers are counted for a rate"
        uncut = make_workload(problem.workload, MAX_REQUESTS, problem.rate, seed=problem.seed)
        jobs = cut_requests(uncut, problem.max_request_tokens)
        num_cut = sum(job != cut for job, cut in zip(uncut, jobs, strict=True))
        longest = longest_job(jobs)
        degrees = DEGREES if self.num_gpus is None else (self.num_gpus,)
        engines, reasons = build_engines(
            model, device, self.rank_link, degrees, longest, self.scheduler
        )
        context = mean_context(problem.workload, problem.seed, problem.max_request_tokens)
        workers = throughput_by_degree(engines, tpot, context)
        if not best_worker(workers).rate:
            raise ValueError(
                f"slo: no number of {device} decodes {model} within {tpot:g} s per token: "
                "loosen tpot or choose another device"
            )
        self._jobs = jobs
        self._engines = engines
        options = [EngineOption(degree, 0.0, 0, note=reason) for degree, reason in reasons.items()]
        options += [self._bound(engine, degree) for degree, engine in engines.items()]
        able = [option for option in options if option.min_engines]
        if not able:
            raise ValueError(
                f"slo: no number of {device} serves a request of {model} within the limits: loosen "
                "a limit or the attainment"
            )
        min_gpus = min(option.num_gpus * option.min_engines for option in able)
        expected = {worker.num_gpus: worker.rate for worker in workers}
        chosen, options, note = self._choose_engine(
            sorted(options, key=lambda each: (-expected.get(each.num_gpus, 0.0), each.num_gpus))
        )
        worker, fit = self._describe(chosen.num_gpus)
        assert chosen.fleet is not None
        if not note:
            decided, note = self._decide(worker, chosen.fleet)
            options[options.index(chosen)] = chosen = chosen._replace(fleet=decided)
        assert chosen.fleet is not None
        points = [ScalePoint(problem.rate, chosen.fleet)]
        if not note:
            note = self._search_lower_rates(worker, chosen, points)
        if not note:
            note = self._compare(worker, points)
        rule = plan_rule([(point.rate, point.placed.num_workers) for point in points])
        return ScaleResult(
            workers, sorted(options), worker, fit, points, rule, self.scheduler, min_gpus,
            num_cut, note,
        )  # fmt: skip

    def _bound(self, engine: Deployment, degree: int) -> EngineOption:
        """Return the fewest engines that a closed form permits for the planned rate."""
        rate = EngineBounds(engine, measure_workload(self._jobs)).max_rate_of_run(
            10**9, 0.0, 0.0, self.problem.limits
        )
        assert self.problem.rate is not None
        if not rate:
            return EngineOption(degree, 0.0, 0, note="a token takes longer than the limit")
        return EngineOption(degree, rate, _min_engines(self.problem.rate, rate))

    def _describe(self, degree: int) -> tuple[WorkerSpec, FittedLatency]:
        prompts = sorted(job.num_prompt_tokens for job in self._jobs)
        longest = round(percentile(prompts, LONG_PROMPT_PERCENT))
        return describe_worker(self._engines[degree], degree, longest)

    def _case(self, worker: WorkerSpec, rate: float, policy: str = "aladdin") -> FleetCase:
        problem = self.problem
        return FleetCase(
            worker, problem.workload, rate, problem.limits, policy, problem.seed,
            problem.min_seconds, num_requests=problem.num_requests,
            max_request_tokens=problem.max_request_tokens,
        )  # fmt: skip

    def _least(
        self, case: FleetCase, start: int, most: int, least: int = 1, step: int | None = None
    ) -> JudgedFleet | None:
        def judge(count: int, check: Callable[[], None] | None) -> tuple[JudgedFleet, bool]:
            key = case.worker.num_gpus, case.rate, case.policy, count
            fleet = self._decided.get(key)
            if fleet is None:
                fleet = self.judge(case, count, check)
                self.on_outcome()
            if not fleet.attainment.is_open:
                self._decided[key] = fleet
            if fleet.is_met and (self._met is None or count < self._met.num_workers):
                self._met = fleet
            # A short run only rules fleets out.
            is_open = case.quick_requests is not None and fleet.attainment.is_open
            return fleet, fleet.is_met or is_open

        self._met = None
        return least_fleet(judge, start, most, self.budget, least, step)

    def _search(self, case: FleetCase, start: int, most: int, least: int) -> JudgedFleet | None:
        """Return the smallest fleet: longer runs begin with the least that short ones permit.

        After an error the smallest fleet so far is in `_met`.
        """
        quick = self._least(replace(case, quick_requests=QUICK_REQUESTS), start, most, least)
        if quick is None:
            return None
        likely = self._met
        try:
            return self._least(case, quick.num_workers, most, least, 1)
        finally:
            self._met = self._met or likely

    def _choose_engine(
        self, options: list[EngineOption]
    ) -> tuple[EngineOption, list[EngineOption], str]:
        """Return the cheapest option, all options with their fleets, and why the search ended.

        Options are tried in their order.
        """
        rate = self.problem.rate
        assert rate is not None
        best: EngineOption | None = None
        done, note = [option for option in options if not option.min_engines], ""
        able = [option for option in options if option.min_engines]
        for option in able:
            most = min(MAX_WORKERS, max(MIN_LIMIT, BOUND_FACTOR * option.min_engines))
            if best is not None and best.fleet is not None:
                num_gpus = best.num_gpus * best.fleet.num_workers
                # Among equals the fewest GPUs per engine win.
                is_smaller = option.num_gpus < best.num_gpus
                most = min(most, floor((num_gpus - (not is_smaller)) / option.num_gpus))
            if most < option.min_engines:
                done.append(option._replace(note="cannot be cheaper"))
                continue
            if note:
                done.append(option._replace(note=f"not tried: {note}"))
                continue
            worker, _ = self._describe(option.num_gpus)
            start = min(most, option.min_engines + 1)
            try:
                fleet = self._search(self._case(worker, rate), start, most, option.min_engines)
            except (SearchEndedError, KeyboardInterrupt) as error:
                note = str(error) or "interrupted"
                fleet = self._met
                if fleet is None:
                    done.append(option._replace(note=f"not tried to the end: {note}"))
                    continue
            if fleet is None:
                done.append(option._replace(note=f"more than {most} engines"))
                continue
            best = option._replace(fleet=fleet)
            done.append(best)
            self.on_best(best.num_gpus, fleet)
        if best is None:
            if note:
                raise SearchEndedError(note)
            limits = self.problem.limits
            raise ValueError(
                f"slo: no fleet keeps the limits of a share of {limits.attainment:g} of the "
                f"requests at {rate:g} requests per second: loosen a limit or the attainment"
            )
        return best, done, note

    def _decide(self, worker: WorkerSpec, fleet: JudgedFleet) -> tuple[JudgedFleet, str]:
        """Extend the test of an undecided fleet; add engines while a longer run refuses it.

        Returns:
            The fleet, which is undecided if the longest run decides nothing, and the reason why the
            search ended early.
        """
        assert self.problem.rate is not None
        case = self._case(worker, self.problem.rate)
        case = replace(case, num_requests=2 * MAX_REQUESTS, max_requests=LONGEST_RUN)
        number, note = fleet.num_workers, ""
        while fleet.attainment.is_open:
            try:
                judged = self.judge(case, number, self.budget.deadline)
            except (SearchEndedError, KeyboardInterrupt) as error:
                note = f"{number} engines: {str(error) or 'interrupted'}"
                break
            self.budget.end_evaluation()
            self.on_outcome()
            if judged.is_met or number == MAX_WORKERS:
                return judged, note
            number += 1
            # More engines are not worse: these figures stay until their own are known.
            fleet = fleet._replace(num_workers=number)
        return fleet, note

    def _search_lower_rates(
        self, worker: WorkerSpec, option: EngineOption, points: list[ScalePoint]
    ) -> str:
        """Add points at lower rates, which never need more engines; return why that ended."""
        (highest,) = points
        for share in RATE_SHARES[1:]:
            most = points[-1].placed
            rate = share * highest.rate
            start = ceil(share * highest.placed.num_workers)
            least = _min_engines(rate, option.max_rate)
            try:
                fleet = self._least(self._case(worker, rate), start, most.num_workers - 1, least)
            except (SearchEndedError, KeyboardInterrupt) as error:
                return f"lower rates: {str(error) or 'interrupted'}"
            points.append(ScalePoint(rate, fleet or most))
        return ""

    def _compare(self, worker: WorkerSpec, points: list[ScalePoint]) -> str:
        """Add the fleets of the baseline to points; return why that ended."""
        for index in reversed(range(len(points))):
            point = points[index]
            count = point.placed.num_workers
            case = self._case(worker, point.rate, BASELINE)
            try:
                # Where a fleet of four times the size is too small, a larger one is not tried.
                baseline = self._least(case, count, 4 * count)
            except (SearchEndedError, KeyboardInterrupt) as error:
                return f"{BASELINE}: {str(error) or 'interrupted'}"
            points[index] = point._replace(baseline=baseline)
            if baseline is None:
                break
        return ""


def _min_engines(rate: float, engine_rate: float) -> int:
    """Return the least number of engines, at least 1, for a rate, by that of one engine."""
    return max(1, ceil(rate / engine_rate - 1e-9))


def describe_worker(
    engine: Deployment, num_gpus: int, longest_prompt: int = 0
) -> tuple[WorkerSpec, FittedLatency]:
    """Return an engine type, and the linear fit of its latencies.

    Args:
        engine: The engine, with one stage.
        num_gpus: GPUs of the engine, its tensor-parallel degree.
        longest_prompt: Prompt tokens up to which the fit holds, where they are many.
    """
    fit = fit_latency(engine.cost, longest_prompt)
    return WorkerSpec(engine, fit.model, num_gpus), fit


def to_serving_plan(
    problem: ServiceProblem, result: ScaleResult, startup_seconds: float | None = None
) -> ServingPlan:
    """Convert the result of a `ScaleSearch` into a serving plan with one node for each engine.

    Args:
        problem: Model, workload, request rate and latency limits.
        result: Engine type and numbers of engines.
        startup_seconds: Time from the start of an engine until it serves; None: unknown.
    """
    assert problem.rate is not None, "workers are counted for a rate"
    (device,), gpus, engine = problem.devices, result.worker.num_gpus, result.worker.engine
    numbers = range(result.num_workers(problem.rate))
    scheduler = changed_options(result.scheduler)
    engines = [
        PlannedEngine(
            f"engine{index}",
            (PlannedStage((index,) * gpus, engine.layers[0]),),
            scheduler=scheduler,
            max_model_len=result.worker.max_model_len,
        )
        for index in numbers
    ]
    flags: dict[str, object] = {"scale": f"1:{len(numbers)}", **rule_flags(result.rule)}
    if startup_seconds is not None:
        flags["scale-startup-seconds"] = startup_seconds
    nodes = tuple(DeviceNode(f"node{index}", device, gpus) for index in numbers)
    link = None if engine.hardware is None else engine.hardware.stages[0].rank_link
    return lay_out(
        problem,
        with_inner_link(DeviceCluster(nodes), link),
        engines,
        RouterPlan("", policy="aladdin", flags=flags),
        ExpectedFigures(
            "",
            problem.rate,
            attainment=result.points[0].placed.attainment.share,
            startup_seconds=startup_seconds,
        ),
    )


def affordable_workers(
    price: float | None, gpus_per_worker: int, max_dollars: float | None
) -> float:
    """Return the largest number of engines within a price limit; infinite without a limit.

    Args:
        price: US dollars per hour of one GPU; None: unknown.
        gpus_per_worker: GPUs of an engine.
        max_dollars: Limit in US dollars per hour; None: no limit.

    Raises:
        ValueError: There is a limit, but the price is unknown.
    """
    if max_dollars is None:
        return inf
    if price is None:
        raise ValueError(
            "--max-dollars: the device has no price: give one with --prices DEVICE=DOLLARS"
        )
    return max_dollars // (price * gpus_per_worker)

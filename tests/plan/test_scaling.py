"""Planning of the number of engines: fits, worker types, optimal placement, fleet sizes."""

from collections.abc import Callable
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest

from experiments.aladdin_cases import simulated_engine
from experiments.linear_costs import LinearCostModel
from gllm.commands.plan.command import main
from gllm.observability.latency import RequestTimeline
from gllm.options.slo import Slo
from gllm.plan.attainment import Attainment, AttainmentVerdict
from gllm.plan.best_first import SearchBudget
from gllm.plan.engine_checks import check_engines
from gllm.plan.engine_times import EngineTimes, decode_step_work
from gllm.plan.problem import ServiceProblem
from gllm.plan.scale.fleet_size import (
    LONGEST_RUN,
    MAX_REQUESTS,
    FleetCase,
    FleetOutcome,
    JudgedFleet,
    WorkerSpec,
    judge_fleet,
    least_fleet,
    measure_fleet,
    simulate_fleet,
)
from gllm.plan.scale.latency_fit import fit_latency
from gllm.plan.scale.service_plan import ScaleResult, ScaleSearch, to_serving_plan
from gllm.plan.scale.worker_type import best_worker, build_engines, throughput_by_degree
from gllm.plan.serving_plan import read_plan
from gllm.routing.placement import (
    LatencyModel,
    PlacedRequest,
    PlacementRules,
    PlacementWorker,
    peak_kv_tokens,
)
from gllm.routing.policies.aladdin import num_scheduling_groups, predict_scheduling_seconds
from gllm.routing.scaling.autoscaler import ScaleRule
from gllm.routing.scaling.scale_config import ScaleConfig
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.capacity import SearchEndedError
from gllm.sim.cluster.cluster import ClusterRun
from gllm.sim.costs.forest import ForestCostModel
from gllm.sim.deployment import roofline_deployment
from gllm.sim.metrics.run_record import ServedRequest
from tests.plan.test_limited_capacity import TickingClock
from tests.support.routing.best_fit import place_heartbeat
from tests.support.routing.least_workers import least_workers

MODEL = LatencyModel(k1=0.3635e-3, c1=4e-3, k2=9.62e-8, c2=0.173e-3, c3=55.8e-3)
SLO = Slo(1.6, 0.075)
RULES = PlacementRules(SLO)
WORKER = WorkerSpec(simulated_engine(LinearCostModel(MODEL)), MODEL, num_gpus=2)


def test_latencies_of_vidurs_profile_are_linear() -> None:
    fitted = fit_latency(ForestCostModel())
    assert fitted.prefill_max_error <= 0.07
    assert fitted.decode_max_error <= 0.08
    assert min(fitted.model) >= 0
    # Aladdin's limits for this model are 1,600 ms and 75 ms.
    assert fitted.model.prefill_seconds(4096) == pytest.approx(1.5, rel=0.05)
    assert 1.3 * fitted.model.decode_seconds(1, 512) == pytest.approx(0.075, rel=0.1)


def test_fit_of_a_linear_model_is_that_model() -> None:
    fitted = fit_latency(LinearCostModel(MODEL)).model
    assert tuple(fitted) == pytest.approx(tuple(MODEL), rel=1e-6)


def test_best_fit_is_close_to_the_optimum() -> None:
    rng = Random(0)

    def open_worker(number: int) -> PlacementWorker:
        return PlacementWorker(str(number), MODEL, [], memory)

    for _ in range(50):
        requests = [
            PlacedRequest(rng.randint(50, 3000), rng.randint(10, 600))
            for _ in range(rng.randint(4, 12))
        ]
        memory = rng.choice([4000.0, 8000.0, inf])
        workers = place_heartbeat([], requests, RULES, open_worker)
        optimum = least_workers(requests, MODEL, RULES, memory, len(workers))
        assert optimum <= len(workers) <= 1.3 * optimum
        assert sum(len(each.requests) for each in workers) == len(requests)
        assert all(peak_kv_tokens(each.requests) <= memory for each in workers)


def test_optimum_of_placements_that_are_known() -> None:
    requests = [PlacedRequest(2190, 100)] * 4
    # Two prompts take 1.6 s, three 2.4 s.
    assert least_workers(requests, MODEL, RULES, inf) == 2
    assert least_workers(requests, MODEL, RULES, 2400) == 4
    assert least_workers([], MODEL, RULES, inf) == 0
    with pytest.raises(ValueError, match="fits no worker"):
        least_workers(requests, MODEL, RULES, 2000)
    with pytest.raises(ValueError, match="do not fit 1 workers"):
        least_workers(requests, MODEL, RULES, inf, max_workers=1)


def test_requests_that_end_apart_share_the_kv_cache() -> None:
    # One after the other each needs 60 tokens at most; together 91.
    short, long = PlacedRequest(30, 10), PlacedRequest(20, 40)
    assert peak_kv_tokens([short, long]) == 70
    assert least_workers([short, long], MODEL, RULES, 70) == 1
    assert least_workers([short, long], MODEL, RULES, 69) == 2


def test_worker_type_has_the_highest_throughput_per_gpu() -> None:
    engines, reasons = build_engines("llama-2-70b", "A100-80G", "nvlink", (1, 2, 4, 8), 4096)
    assert list(reasons) == [1]
    workers = throughput_by_degree(engines, 0.075, 850)
    assert [each.num_gpus for each in workers] == [2, 4, 8]
    best = best_worker(workers)
    assert best.rate == max(each.rate for each in workers)
    cost = roofline_deployment(
        "llama-2-70b", "A100-80G", 1, 4096, degrees=(best.num_gpus,), rank_link="nvlink"
    ).cost
    times = EngineTimes(cost)
    assert times.total(decode_step_work(best.slo_batch, 850)) <= 0.075
    assert times.total(decode_step_work(best.slo_batch + 1, 850)) > 0.075
    with pytest.raises(ValueError, match="does not fit"):
        build_engines("llama-2-70b", "V100", "nvlink", (1, 2), 4096)


def test_aladdin_serves_with_fewer_workers_than_the_shortest_queue() -> None:
    case = FleetCase(WORKER, "sharegpt-like", 4.0, SLO, seconds=40.0)
    aladdin = simulate_fleet(case, 3)
    queue = simulate_fleet(
        FleetCase(WORKER, "sharegpt-like", 4.0, SLO, "least-tokens", seconds=40.0), 3
    )
    careless = simulate_fleet(
        FleetCase(WORKER, "sharegpt-like", 4.0, SLO, seconds=40.0, constraints=frozenset("bce")), 3
    )
    assert aladdin.attainment > queue.attainment
    # Without (d), prompts interrupt decodes that have no slack.
    assert careless.attainment <= aladdin.attainment - 0.3


def test_a_request_at_both_limits_is_within_them() -> None:
    lines = {
        index: RequestTimeline(0.0, times, len(times))
        for index, times in enumerate(([1.0, 1.5], [1.0, 1.75], [1.25, 1.75], [1.25, 2.0], [1.0]))
    }
    served = {index: ServedRequest(1, line.num_tokens, line) for index, line in lines.items()}
    outcome = measure_fleet(ClusterRun({}, served, []), Slo(1.0, 0.5), 3)
    assert outcome == (3, 0.4, 0.6, (0.0, 0.5, 0.5, 0.75, 0.75))


def judge_runs(case: FleetCase, tried: list[int] | None = None):
    """Return a judge of single runs, as of the paper's: 99 % of the requests are within the SLO."""

    def judge(count: int, check: object) -> tuple[FleetOutcome, bool]:
        if tried is not None:
            tried.append(count)
        outcome = simulate_fleet(case, count, check)  # type: ignore[arg-type]
        return outcome, outcome.attainment >= 0.99

    return judge


def test_a_running_simulation_of_a_fleet_is_cut_off_at_the_budget() -> None:
    case = FleetCase(WORKER, "fixed:500,50", 20.0, SLO, seconds=60.0)
    clock = TickingClock(1.0)
    with pytest.raises(SearchEndedError, match="the budget of 10 s is spent"):
        least_fleet(judge_runs(case), start=8, budget=SearchBudget(10.0, clock=clock))
    assert clock.now <= 11.0


def test_least_fleet_is_found_between_failures_and_successes() -> None:
    case = FleetCase(WORKER, "fixed:500,50", 2.0, SLO, seconds=20.0)
    tried: list[int] = []
    best = least_fleet(judge_runs(case, tried), start=8)
    assert best is not None
    assert best.attainment >= 0.99
    assert best.num_workers == 1 or simulate_fleet(case, best.num_workers - 1).attainment < 0.99
    assert len(tried) <= 5
    tight = FleetCase(WORKER, "fixed:500,50", 2.0, Slo(0.01, 0.075), seconds=5.0)
    assert least_fleet(judge_runs(tight), max_workers=4) is None
    # Numbers that are known to be too small are not simulated.
    tried.clear()
    assert least_fleet(judge_runs(case, tried), min_workers=3) is not None
    assert min(tried) == 3


def test_an_overloaded_fleet_does_not_pass_however_short_its_queue_is_yet() -> None:
    """Most requests of a short run are within the SLO, of a long one few."""
    slo = Slo(5.0, 5.0, attainment=0.5)
    case = FleetCase(WORKER, "fixed:500,5", 8.0, slo, seconds=10.0)
    assert simulate_fleet(case, 1).attainment >= 0.5
    assert not judge_fleet(case, 1).is_met
    assert judge_fleet(case, 4).is_met


def test_groups_are_as_few_as_are_fast_and_predictable() -> None:
    assert num_scheduling_groups(64, 25.0, 1.0, 1e-6, 4.0) == 1
    assert num_scheduling_groups(1000, 100.0, 1.0, 1e-6, 4.0) == 4
    seconds = predict_scheduling_seconds(1000 / 4, 100 / 4, 1e-6)
    assert seconds <= 0.05 < predict_scheduling_seconds(1000 / 3, 100 / 3, 1e-6)
    # No group gets less than the rate R.
    assert num_scheduling_groups(1000, 100.0, 1.0, 1e-6, 40.0) == 2


FLAGS = ["--slo", "ttft=1.6,atgt=0.075", "--trace", "fixed:400,8", "--attainment", "0.5"]
FLAGS += ["--seconds", "8"]


class LinearFleets:
    """Fleets whose engines sustain a rate in proportion to GPUs, TPOT limit and 1 / length."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.interrupt_after = inf
        self.has_met = False
        self.num_refused: float = -1
        """Largest fleet that only a long run refuses; -1: short runs decide."""

    def __call__(
        self, case: FleetCase, num_workers: int, check: Callable[[], None] | None = None
    ) -> JudgedFleet:
        """Return a verdict without a simulation."""
        self.num_runs += 1
        if self.num_runs > self.interrupt_after:
            raise KeyboardInterrupt
        (job, *_) = case.jobs(2)
        assert case.slo.tpot_seconds is not None
        engine_rate = 600 * case.worker.num_gpus**0.9 * case.slo.tpot_seconds
        needed = 0.4 + case.rate * (job.num_prompt_tokens + 200) / engine_rate / 15
        verdict = AttainmentVerdict.MET if num_workers >= needed else AttainmentVerdict.MISSED
        share = min(1.0, num_workers / needed)
        if verdict is AttainmentVerdict.MET and self.num_refused >= 0:
            is_refused = num_workers <= self.num_refused
            if case.max_requests == MAX_REQUESTS:
                verdict = AttainmentVerdict.UNDECIDED
            elif is_refused:
                verdict = AttainmentVerdict.MISSED
        attainment = Attainment(verdict, share, share, share, case.max_requests, reaches_goals=True)
        self.has_met |= attainment.is_met
        return JudgedFleet(num_workers, attainment)


def search(workload: str = "fixed:400,40", rate: float = 20.0, **fields: Any) -> ScaleResult:
    """Return the plan of Llama-2-70B on A100s, within Aladdin's limits unless others are given."""
    limits = fields.pop("limits", Slo(1.6, 0.075, attainment=0.9))
    problem = ServiceProblem(
        fields.pop("model", "llama-2-70b"), workload, devices=("A100-80G",), rate=rate,
        limits=limits, max_request_tokens=fields.pop("max_request_tokens", None),
    )  # fmt: skip
    return ScaleSearch(problem, **{"judge": LinearFleets(), **fields}).run()


def test_requests_beyond_the_context_are_refused_or_cut_and_counted() -> None:
    with pytest.raises(ValueError, match=r"request of 4100 tokens.*context.* 4096.*--max-request"):
        search("fixed:4000,100")
    # The KV cache of two GPUs holds 21,000 tokens.
    with pytest.raises(ValueError, match=r"KV cache.*longest request has 30100 tokens"):
        search("fixed:30000,100", model="llama-3.1-70b", num_gpus=2)
    assert search(num_gpus=4).num_cut == 0
    assert search(num_gpus=4, max_request_tokens=200).num_cut == MAX_REQUESTS


def test_longer_requests_change_the_plan_whose_engines_accept_them() -> None:
    model, limits = "llama-3.1-70b", Slo(10.0, 0.2, attainment=0.9)
    short, long = (
        search(f"fixed:{prompt},20", 2.0, model=model, limits=limits, num_gpus=4)
        for prompt in (3800, 16_000)
    )
    assert long.num_workers(2.0) > short.num_workers(2.0)
    # The model's context, which has no flag.
    assert short.worker.max_model_len == long.worker.max_model_len == 131_072
    problem = ServiceProblem(model, "", devices=("A100-80G",), rate=2.0, limits=limits)
    plan = check_engines(to_serving_plan(problem, long))
    assert not any(engine.flags for engine in plan.engines.values())


@pytest.mark.parametrize(
    "scheduler", [SchedulerConfig(), SchedulerConfig(policy="vllm", max_num_seqs=9)]
)
def test_the_engines_of_the_plan_are_those_that_were_simulated(scheduler: SchedulerConfig) -> None:
    result = search(num_gpus=4, scheduler=scheduler)
    problem = ServiceProblem("llama-2-70b", "", devices=("A100-80G",), rate=20.0)
    plan = to_serving_plan(problem, result)
    simulated = result.worker.engine.scheduler
    for engine in plan.engines.values():
        # The model's context, which has no flag.
        emitted = SchedulerConfig(**engine.scheduler).resolve(
            1, simulated.num_blocks, 4096, num_ranks=engine.num_devices
        )
        assert not engine.flags
        assert emitted == simulated
    assert plan.nodes["node0"].link is not None


def test_the_router_runs_as_many_engines_as_the_table_says() -> None:
    result = search(rate=40.0, num_gpus=4)
    problem = ServiceProblem("llama-2-70b", "", devices=("A100-80G",), rate=40.0)
    router = to_serving_plan(problem, result).router
    assert router is not None
    config = ScaleConfig(
        router.flags["scale"],
        router.flags["scale-engine-rate"],
        router.flags.get("scale-engine-offset", 0.0),
    )
    assert config.scale_engine_rate is not None
    rule = ScaleRule(1 / config.scale_engine_rate, config.scale_engine_offset)
    assert [rule.num_engines(point.rate) for point in result.points] == [
        point.placed.num_workers for point in result.points
    ]


def test_cheaper_demands_never_cost_more_and_no_plan_is_below_its_bound() -> None:
    counts = []
    for rate, tpot in ((40.0, 0.075), (40.0, 0.1), (25.0, 0.1), (3.0, 0.1)):
        result = search(rate=rate, limits=Slo(1.6, tpot, attainment=0.9))
        num_gpus = result.worker.num_gpus * result.num_workers(rate)
        assert result.min_gpus <= num_gpus
        counts.append(num_gpus)
        numbers = [point.placed.num_workers for point in result.points]
        assert numbers == sorted(numbers, reverse=True)
        fixed = search(rate=rate, limits=Slo(1.6, tpot, attainment=0.9), num_gpus=8)
        assert num_gpus <= 8 * fixed.num_workers(rate)
    assert counts == sorted(counts, reverse=True)


def test_longer_runs_decide_the_fleet_of_the_plan() -> None:
    """One that they refuse gets more engines; at the end of the budget it stays undecided."""
    decided = search().points[0].placed
    judge = LinearFleets()
    judge.num_refused = decided.num_workers + 1
    larger = search(judge=judge).points[0].placed
    assert larger.num_workers == decided.num_workers + 2
    assert larger.attainment.is_met
    assert larger.attainment.num_requests == LONGEST_RUN
    judge = LinearFleets()
    judge.num_refused, budget = 0, SearchBudget()

    def refuse(case: FleetCase, count: int, check: object) -> JudgedFleet:
        if case.max_requests == LONGEST_RUN:
            raise SearchEndedError("the budget is spent")
        return judge(case, count)

    undecided = search(judge=refuse, budget=budget)
    assert undecided.points[0].placed.num_workers == decided.num_workers
    assert not undecided.points[0].placed.attainment.is_met
    assert undecided.note == f"{decided.num_workers} engines: the budget is spent"


def test_short_runs_leave_an_answer_where_the_long_ones_are_cut_off() -> None:
    judge = LinearFleets()
    judge.num_refused = 0
    expected = search(judge=judge, num_gpus=4).points[0].placed

    def cut_off(case: FleetCase, count: int, check: object) -> JudgedFleet:
        if case.quick_requests is None:
            raise SearchEndedError("the budget is spent")
        return judge(case, count)

    result = search(judge=cut_off, num_gpus=4)
    assert result.points[0].placed.num_workers == expected.num_workers
    assert result.note == "the budget is spent"


def test_an_interrupt_leaves_the_best_plan_so_far() -> None:
    fleets, found = LinearFleets(), []
    fleets.interrupt_after = 6
    result = search(judge=fleets, on_best=lambda num_gpus, fleet: found.append((num_gpus, fleet)))
    assert "interrupted" in result.note
    assert (result.worker.num_gpus, result.points[0].placed) == found[-1]
    assert result.num_workers(20.0) == found[-1][1].num_workers
    for count in range(8):
        fleets = LinearFleets()
        fleets.interrupt_after = count
        try:
            note = search(judge=fleets, num_gpus=4).note
        except SearchEndedError:
            assert not fleets.has_met
        else:
            # Also where the search has only found that some number suffices.
            assert fleets.has_met
            assert "interrupted" in note or fleets.num_runs <= count


def test_command_writes_a_plan_that_scales(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "plan.yaml"
    flags = ["--rate", "4", "--gpus", "4", "--startup-seconds", "90", "--output", str(file)]
    assert main(["scale", *FLAGS, *flags]) == 0
    plan = read_plan(file)
    text = capsys.readouterr().out
    assert f"{len(plan.engines)} for 4 requests per second" in text
    assert "bound: no plan for 4 requests per second has fewer than 4 GPUs" in text
    assert "best so far: " in text
    assert plan.router is not None
    assert plan.router.policy == "aladdin"
    scale = ScaleConfig(
        plan.router.flags["scale"],
        plan.router.flags["scale-engine-rate"],
        scale_startup_seconds=plan.router.flags["scale-startup-seconds"],
    )
    assert scale.limits() == (1, len(plan.engines))
    assert {each.num_devices for each in plan.engines.values()} == {4}
    assert plan.expected is not None
    assert plan.expected.startup_seconds == 90
    assert plan.nodes["node0"].price == pytest.approx(4 * 2.21)


@pytest.mark.parametrize(
    ("flags", "status", "text"),
    [
        (["--rate", "4", "--gpus", "4", "--max-dollars", "5"], 1, "beyond --max-dollars: 0 eng"),
        (["--rate", "4", "--gpus", "4", "--budget", "1e-6"], 1, "is spent: raise --budget"),
        (["--rate", "4", "--slo", "ttft=1"], 2, "limit ttft and tpot of each request"),
        (["--rate", "4", "--slo", "ttft=1,atgt=0.001"], 2, "loosen tpot"),
        (["--rate", "4", "--gpus", "1"], 2, "does not fit"),
        (["--rate", "4", "--gpus", "1", "--rank-link", "pcie"], 2, "--rank-link"),
        (["--rate", "4", "--trace", "nothing"], 2, "nothing"),
        (["--rate", "4", "--gpus", "4", "--prices", "H100=1", "--max-dollars", "5"], 2, "no price"),
    ],
)
def test_command_names_what_cannot_be_planned(
    capsys: pytest.CaptureFixture, flags: list[str], status: int, text: str
) -> None:
    assert main(["scale", *FLAGS, *flags]) == status
    captured = capsys.readouterr()
    assert text in captured.out + captured.err

"""Planning of the number of engines: fits, worker types, optimal placement, fleet sizes."""

from math import inf
from pathlib import Path
from random import Random

import pytest

from experiments.linear_costs import LinearCostModel
from gllm.commands.plan.command import main
from gllm.observability.latency import RequestTimeline
from gllm.options.slo import Slo
from gllm.plan.best_first import SearchBudget
from gllm.plan.engine_times import EngineTimes, decode_step_work
from gllm.plan.scale.fleet_size import (
    FleetCase,
    WorkerSpec,
    least_fleet,
    measure_fleet,
    simulate_fleet,
)
from gllm.plan.scale.latency_fit import fit_latency
from gllm.plan.scale.worker_type import best_worker, throughput_by_degree
from gllm.plan.serving_plan import read_plan
from gllm.routing.placement import (
    LatencyModel,
    PlacedRequest,
    PlacementRules,
    PlacementWorker,
    peak_kv_tokens,
)
from gllm.routing.policies.aladdin import num_scheduling_groups, predict_scheduling_seconds
from gllm.routing.scaling.scale_config import ScaleConfig
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
WORKER = WorkerSpec("llama-2-70b", 80, LinearCostModel(MODEL), MODEL, 60_000, num_gpus=2)


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
    workers = throughput_by_degree("llama-2-70b", "A100-80G", 0.075, 850)
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
        throughput_by_degree("llama-2-70b", "V100", 0.075, 850, degrees=(1, 2))


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


def test_a_running_simulation_of_a_fleet_is_cut_off_at_the_budget() -> None:
    case = FleetCase(WORKER, "fixed:500,50", 20.0, SLO, seconds=60.0)
    clock = TickingClock(1.0)
    with pytest.raises(SearchEndedError, match="the budget of 10 s is spent"):
        least_fleet(case, 0.99, start=8, budget=SearchBudget(10.0, clock=clock))
    assert clock.now <= 11.0


def test_least_fleet_is_found_between_failures_and_successes() -> None:
    case = FleetCase(WORKER, "fixed:500,50", 2.0, SLO, seconds=20.0)
    tried = []
    best = least_fleet(case, 0.99, start=8, on_outcome=lambda o: tried.append(o.num_workers))
    assert best is not None
    assert best.attainment >= 0.99
    assert best.num_workers == 1 or simulate_fleet(case, best.num_workers - 1).attainment < 0.99
    assert len(tried) <= 5
    tight = FleetCase(WORKER, "fixed:500,50", 2.0, Slo(0.01, 0.075), seconds=5.0)
    assert least_fleet(tight, 0.99, max_workers=4) is None


def test_groups_are_as_few_as_are_fast_and_predictable() -> None:
    assert num_scheduling_groups(64, 25.0, 1.0, 1e-6, 4.0) == 1
    assert num_scheduling_groups(1000, 100.0, 1.0, 1e-6, 4.0) == 4
    seconds = predict_scheduling_seconds(1000 / 4, 100 / 4, 1e-6)
    assert seconds <= 0.05 < predict_scheduling_seconds(1000 / 3, 100 / 3, 1e-6)
    # No group gets less than the rate R.
    assert num_scheduling_groups(1000, 100.0, 1.0, 1e-6, 40.0) == 2


FLAGS = ["--slo", "ttft=1.6,atgt=0.075", "--trace", "fixed:400,40", "--seconds", "8"]


def test_command_writes_a_plan_that_scales(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "plan.yaml"
    flags = ["--rate", "4", "--gpus", "4", "--startup-seconds", "90", "--output", str(file)]
    assert main(["scale", *FLAGS, *flags]) == 0
    plan = read_plan(file)
    text = capsys.readouterr().out
    assert f"{len(plan.engines)} for 4 requests per second" in text
    assert plan.router is not None
    assert plan.router.policy == "aladdin"
    scale = ScaleConfig(
        plan.router.flags["scale"],
        plan.router.flags["scale-engine-rate"],
        plan.router.flags["scale-startup-seconds"],
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

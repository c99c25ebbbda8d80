"""Invariants of every planner: what its answers promise, whatever the question.

A planner takes part by a `PlannerAdapter` in PLANNERS. Questions are small, so that one answer is
simulated in a second; those that need many answers or long runs are for `make test-all`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from math import inf
from typing import NamedTuple

import pytest

from gllm.commands.plan.hetero import UNMEASURED_SHARE
from gllm.options.flags import FlagParser, add_flags, config_from_flags
from gllm.options.slo import NO_SLO, Slo
from gllm.plan.attainment import (
    Attainment,
    AttainmentTest,
    AttainmentVerdict,
    JudgedRequest,
    goals_of,
    judge_line,
)
from gllm.plan.best_first import SearchBudget
from gllm.plan.capacity import PLAN_RULES, measure_capacity
from gllm.plan.engine_bounds import EngineBounds, measure_workload
from gllm.plan.engine_checks import check_engines
from gllm.plan.goodput.engines import EngineCosts, make_engine
from gllm.plan.goodput.planner import GoodputPlan, GoodputPlanner
from gllm.plan.goodput.systems import run_system
from gllm.plan.hetero.planner import make_serving_plan, plan_replicas
from gllm.plan.hetero.simulation import build_engine_deployment, make_jobs, plan_fleet
from gllm.plan.hetero.workload import sample_workload
from gllm.plan.nodes import equal_nodes, with_inner_link
from gllm.plan.pools.clusters import (
    ClusterPoint,
    PointVerdict,
    SampleSize,
    build_machine,
    judge_point,
    judge_requests,
)
from gllm.plan.pools.planner import POLICY, PoolSearch, lay_out_pools
from gllm.plan.problem import ServiceProblem
from gllm.plan.processes import ENGINE_CONFIGS, LaunchOptions, commands_for
from gllm.plan.scale.fleet_size import FleetCase, JudgedFleet, fleet_deployments, judge_fleet
from gllm.plan.scale.service_plan import ScaleSearch, affordable_workers, to_serving_plan
from gllm.plan.search.designs import DesignSpace, design_of
from gllm.plan.search.fleet import (
    FleetForecast,
    choose_fleet,
    forecast_closed,
    lay_out_fleet,
)
from gllm.plan.search.planner import DesignPlanner, build_planned_engine
from gllm.plan.serving_plan import ExpectedFigures, ServingPlan, check_plan
from gllm.plan.strategies import UnservableError
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.cluster.cluster import simulate_cluster
from gllm.sim.configured import simulate_requests
from gllm.sim.deployment import Deployment
from gllm.sim.hardware.devices import DEVICES, LINKS
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.hardware.stages import build_hardware
from gllm.sim.metrics.slowdowns import SPLITWISE_SLOS, SloMargin
from gllm.sim.options import SimulationConfig, build_workload
from gllm.sim.workloads.requests import sample_arrival_times


class PlanQuestion(NamedTuple):
    """A question to a planner: traffic, latency limits, and the devices to choose from."""

    rate: float = 8.0
    """Requests per second to serve."""
    slo: Slo = Slo(0.1, 0.05, attainment=0.9)
    num_nodes: int = 1
    devices_per_node: int = 4
    device: str = "A100-80G"
    model: str = "opt-13b"
    workload: str = "uniform:64,512,4,12"
    seed: int = 0
    is_estimated: bool = False
    """True to judge by closed forms, where a planner can: to see its plan, not its decision."""


class PlanAnswer(NamedTuple):
    """Answer of a planner: what it costs, and the plan that would be written."""

    cost: float
    """Devices, or dollars: what the planner makes small."""
    plan: ServingPlan
    engines: Mapping[str, Deployment]
    """Engines that the planner has judged, by their names in the plan."""
    simulate: Callable[[int, int], Sequence[JudgedRequest]]
    """Simulates the judged engines, with a number of requests and a seed."""
    longest: int = 512 + 12
    """Tokens of the longest request."""


class PlannerAdapter(NamedTuple):
    """A planner as the invariants see it."""

    answer: Callable[[PlanQuestion], PlanAnswer]
    """Answers a question. Raises UnservableError if nothing serves it."""
    goals: tuple[float, ...] | None = None
    """Shares of the requests that have to keep its limits; None: those of the question."""
    has_devices: bool = True
    """False if its devices are types of machines, not those of the question."""
    is_for_rate: bool = True
    """False if it maximizes the rate: its cost is the time per request."""
    unlike: frozenset[str] = frozenset()
    """Scheduler options that only started engines use: those of KV transfers."""


def answer_goodput(question: PlanQuestion, placement: str) -> PlanAnswer:
    """Answer by `gllm plan goodput --rate`."""
    problem = ServiceProblem(
        question.model,
        question.workload,
        equal_nodes(question.num_nodes, question.devices_per_node, question.device),
        limits=question.slo,
        seed=question.seed,
    )
    costs = EngineCosts("roofline", question.device)
    planner = GoodputPlanner(problem, costs, SearchBudget(), network="network")
    place = planner.place_together if placement == "together" else planner.place_apart
    plan: GoodputPlan = place(question.rate)
    system, written = plan.system, planner.lay_out(plan)
    assert system.decode is not None
    judged = {
        phase: make_engine(
            costs, question.model, engine, "distserve", admission, async_scheduling=True
        )
        for phase, engine, admission in (
            ("prefill", system.prefill, "auto"),
            ("decode", system.decode, "distserve"),
        )
    }
    assert system.async_scheduling

    def simulate(count: int, seed: int) -> Sequence[JudgedRequest]:
        return run_system(system, question.workload, question.rate, count, seed).judged(
            question.slo
        )

    engines = {name: judged[engine.role] for name, engine in written.engines.items()}
    return PlanAnswer(system.num_gpus, written, engines, simulate)


def answer_hetero(question: PlanQuestion) -> PlanAnswer:
    """Answer by `gllm plan hetero`, which maximizes the rate: its cost is the time per request.

    It knows no limits of latencies: only the stability of its plan is judged.
    """
    cluster = replace(
        with_inner_link(
            equal_nodes(question.num_nodes, question.devices_per_node, question.device),
            LINKS["nvlink"],
        ),
        network=LINKS["network"],
    )
    problem = ServiceProblem(question.model, question.workload, cluster, seed=question.seed)
    try:
        plan = plan_replicas(problem, max_vain_restarts=0)
    except ValueError as error:
        raise UnservableError(str(error)) from None
    rate = UNMEASURED_SHARE * plan.best.score.flow
    if rate < question.rate:
        raise UnservableError(f"{rate} requests/s")
    fleet = plan_fleet(problem, plan.planner, plan.best, question.seed)

    def simulate(count: int, seed: int) -> Sequence[JudgedRequest]:
        lengths = sample_workload(question.workload, count, seed)
        times = sample_arrival_times("poisson", count, rate, seed)
        run = fleet.serve(make_jobs(lengths, times, fleet.max_model_len))
        lines = [run.requests[index].line for index in range(count)]
        return [judge_line(line, NO_SLO)._replace(scores=(1.0,)) for line in lines]

    written = make_serving_plan(plan, ExpectedFigures("", rate, capacity=plan.best.score.flow))
    engines = {
        name: build_engine_deployment(problem, plan.best.engines()[name][0], fleet.max_model_len)
        for name in written.engines
    }
    return PlanAnswer(1 / rate, written, engines, simulate)


def simulate_equal(
    config: SimulationConfig, deployment: Deployment, question: PlanQuestion, rate: float
) -> Callable[[int, int], Sequence[JudgedRequest]]:
    """Return a simulation of equal engines behind a router."""

    def simulate(count: int, seed: int) -> Sequence[JudgedRequest]:
        fresh = replace(config, requests=count, seed=seed, rate=rate)
        served = simulate_requests(fresh, deployment, build_workload(fresh))
        return [judge_line(served[index].line, question.slo) for index in range(count)]

    return simulate


def answer_search(question: PlanQuestion) -> PlanAnswer:
    """Answer by `gllm plan search --rate --objective cost`."""
    nodes = equal_nodes(question.num_nodes, question.devices_per_node, question.device)
    problem = ServiceProblem(
        question.model,
        question.workload,
        nodes,
        (question.device,),
        question.rate,
        question.slo,
        "cost",
        {"devices": question.num_nodes * question.devices_per_node},
        {question.device: 1.0},
        seed=question.seed,
    )
    config = SimulationConfig(requests=250, link="nvlink")
    planner = DesignPlanner(problem, config, SHORT_RULE)
    space = DesignSpace((question.device,), (1,), (1, 2), (("vllm", None), ("sarathi", 512)), (64,))
    try:
        outcome = planner.search(
            list(space.designs(8)), SearchBudget(), uses_closed_forms=question.is_estimated
        )
    except ValueError as error:
        raise UnservableError(str(error)) from None
    results = [result for _, result in outcome.evaluated if result.score > -inf]
    if not results:
        raise UnservableError("no design")
    if question.is_estimated:
        best, forecast = results[0], forecast_closed(planner, results[0])
    else:
        best, forecast = choose_fleet(planner, results, config.routing_policy)
    if not forecast.is_within:
        raise UnservableError("no fleet")
    engine, chosen = planner.deployment_of(best.design), planner.configure(best.design)
    plan = lay_out_fleet(problem, best.design, engine, chosen, forecast)
    fleet = replace(chosen, engines=forecast.num_engines)
    simulate = simulate_equal(fleet, engine, question, question.rate)
    assert best.value == best.num_engines * best.design.num_devices
    return PlanAnswer(best.value, plan, dict.fromkeys(plan.engines, engine), simulate)


def answer_capacity(question: PlanQuestion) -> PlanAnswer:
    """Answer by `gllm plan capacity` for an engine on each node."""
    config = SimulationConfig(
        model=question.model,
        device=question.device,
        workload=question.workload,
        seed=question.seed,
        engines=question.num_nodes,
        pipeline_parallel_size=1,
        tensor_parallel_size=(question.devices_per_node,),
        requests=250,
        link="nvlink",
    )
    moments = measure_workload(build_workload(replace(config, requests=1000)))
    try:
        engine = build_planned_engine(config, moments.longest_tokens)
    except ValueError as error:
        raise UnservableError(str(error)) from None
    config = replace(config, max_model_len=engine.scheduler.max_model_len)
    point = EngineBounds(engine, moments).best_point(question.slo)
    start = 1.0 if point is None else 0.9 * point.rate * config.engines
    rate = start
    if not question.is_estimated:
        rate = measure_capacity(config, start, SHORT_RULE, question.slo, is_judged=True).rate
    if rate < question.rate:
        raise UnservableError(f"{rate} requests/s")
    problem = ServiceProblem(question.model, question.workload, limits=question.slo)
    forecast = FleetForecast(config.engines, ExpectedFigures("", rate, rate), True)
    plan = lay_out_fleet(problem, design_of(config, engine), engine, config, forecast)
    simulate = simulate_equal(config, engine, question, rate)
    return PlanAnswer(1 / rate, plan, dict.fromkeys(plan.engines, engine), simulate)


def answer_scale(question: PlanQuestion) -> PlanAnswer:
    """Answer by `gllm plan scale`, whose limit of dollars stands for the inventory."""
    problem = ServiceProblem(
        question.model,
        question.workload,
        devices=(question.device,),
        rate=question.rate,
        limits=question.slo,
        min_seconds=5.0,
        seed=question.seed,
    )
    try:
        judge = met_fleet if question.is_estimated else judge_fleet
        result = ScaleSearch(problem, judge=judge).run()
    except ValueError as error:
        raise UnservableError(str(error)) from None
    worker, count = result.worker, result.num_workers(question.rate)
    num_devices = question.num_nodes * question.devices_per_node
    if count > affordable_workers(1.0, worker.num_gpus, num_devices):
        raise UnservableError(f"{count} engines")

    def simulate(num_requests: int, seed: int) -> Sequence[JudgedRequest]:
        case = FleetCase(worker, question.workload, question.rate, question.slo, seed=seed)
        engines = fleet_deployments(case, count)
        run = simulate_cluster(engines, case.jobs(num_requests), case.router())
        lines = (run.requests[index].line for index in range(num_requests))
        return [judge_line(line, question.slo) for line in lines]

    plan = to_serving_plan(problem, result)
    engines = dict.fromkeys(plan.engines, worker.engine)
    return PlanAnswer(count * worker.num_gpus, plan, engines, simulate)


def answer_pools(question: PlanQuestion) -> PlanAnswer:
    """Answer by `gllm plan pools --objective machines`.

    Its latency limits are Splitwise's, its inventory is a number of machines.
    """
    problem = ServiceProblem(
        "llama-2-70b",
        "code",
        rate=question.rate,
        objective="machines",
        max_request_tokens=1024,
        seed=question.seed,
    )
    judge = served_point if question.is_estimated else judge_point
    plan = PoolSearch(problem, SearchBudget(), judge).plan("HH")
    most = question.num_nodes * question.devices_per_node
    if plan is None or plan.cluster.num_machines > most:
        raise UnservableError("too few machines")
    point = ClusterPoint(
        plan.cluster,
        problem.workload,
        question.rate,
        SampleSize(8),
        model=problem.model,
        max_request_tokens=problem.max_request_tokens,
    )

    def simulate(count: int, seed: int) -> Sequence[JudgedRequest]:
        return judge_requests(replace(point, seed=seed), count)[0]

    written = lay_out_pools(plan, problem)
    judged = {
        role: build_machine(machine, POLICY, model=problem.model, longest=1024)
        for role, machine in (("prefill", plan.cluster.prompt), ("decode", plan.cluster.token))
    }
    engines = {name: judged[engine.role] for name, engine in written.engines.items()}
    return PlanAnswer(plan.cluster.num_machines, written, engines, simulate, 1024)


def met_fleet(
    case: FleetCase, num_workers: int, check: Callable[[], None] | None = None
) -> JudgedFleet:
    """Accept every fleet."""
    return JudgedFleet(num_workers, Attainment(AttainmentVerdict.MET, 1.0, 1.0, 1.0, 1))


def served_point(point: ClusterPoint, check: Callable[[], None] | None = None) -> PointVerdict:
    """Accept every cluster."""
    return PointVerdict(True, SloMargin("ttft", 50, 1.0, 2.0))


SHORT_RULE = replace(PLAN_RULES["sustained"], min_seconds=10.0)
"""Runs of 10 s at least, which are extended until they decide."""
PLANNERS = {
    "hetero": PlannerAdapter(answer_hetero, is_for_rate=False),
    "goodput": PlannerAdapter(lambda question: answer_goodput(question, "together")),
    "goodput-apart": PlannerAdapter(lambda question: answer_goodput(question, "apart")),
    "search": PlannerAdapter(answer_search),
    "capacity": PlannerAdapter(answer_capacity, is_for_rate=False),
    "scale": PlannerAdapter(answer_scale),
    "pools": PlannerAdapter(
        answer_pools,
        tuple(slo.percent / 100 for slo in SPLITWISE_SLOS),
        has_devices=False,
        unlike=frozenset({"kv_push"}),
    ),
}
"""Planners by name."""
QUESTION = PlanQuestion()
ESTIMATED = QUESTION._replace(is_estimated=True)
EASIER = {
    "looser limits": QUESTION._replace(slo=Slo(0.4, 0.2, attainment=0.9)),
    "fewer requests within them": QUESTION._replace(slo=QUESTION.slo._replace(attainment=0.8)),
    "lower rate": QUESTION._replace(rate=2.0),
    "larger nodes": QUESTION._replace(devices_per_node=8),
    "more nodes": QUESTION._replace(num_nodes=2),
}
"""Questions whose answer may not cost more than that of QUESTION."""


@cache
def answer(name: str, question: PlanQuestion) -> PlanAnswer:
    """Return the answer of a planner, computed once."""
    return PLANNERS[name].answer(question)


planners = pytest.mark.parametrize("name", PLANNERS)


@planners
def test_plans_fit_the_inventory_and_start(name: str) -> None:
    """No device is used twice or does not exist; `gllm serve` accepts every command line."""
    plan = check_engines(answer(name, ESTIMATED).plan)
    check_plan(plan)
    assert plan.model == QUESTION.model or not PLANNERS[name].has_devices
    if not PLANNERS[name].has_devices:
        return
    counts = [len(node.devices) for node in plan.nodes.values()]
    assert max(counts) <= QUESTION.devices_per_node
    assert sum(counts) <= QUESTION.num_nodes * QUESTION.devices_per_node
    assert {device for node in plan.nodes.values() for device in node.devices} == {QUESTION.device}


@planners
def test_engines_fit_the_memory_of_their_devices(name: str) -> None:
    """Weights and the KV cache of the longest request fit 90 % of each device."""
    plan, longest = answer(name, ESTIMATED).plan, answer(name, ESTIMATED).longest
    for engine in plan.engines.values():
        layers = [stage.layers for stage in engine.stages]
        degrees = [stage.num_ranks for stage in engine.stages]
        (device,) = {device for name in engine.nodes for device in plan.nodes[name].devices}
        hardware = build_hardware(plan.model, device, len(layers), degrees=degrees, layers=layers)
        tokens = 16 * min(hardware.stage_kv_blocks(16, 0.9))
        context = MODELS[plan.model].max_context
        # The flag is left out where it is the model's context.
        length = engine.flags.get("max-model-len", context)
        assert min(tokens, context) >= length >= longest
        assert engine.flags.get("max-model-len") != context


LONG = ESTIMATED._replace(
    rate=0.02,
    slo=Slo(100.0, 1.0, attainment=0.9),
    device="RTX4090",
    model="llama-3.1-8b",
    workload="uniform:1000,50000,4,4",
)
"""Requests that one device has no memory for, beside the weights."""


@pytest.mark.parametrize("name", ["hetero", "search", "capacity", "scale"])
def test_engines_hold_the_longest_request(name: str) -> None:
    """Weights and KV cache by hand: those of a stage are divided among its ranks."""
    plan, shape = answer(name, LONG).plan, MODELS[LONG.model]
    for engine in plan.engines.values():
        num_tokens = engine.flags.get("max-model-len", shape.max_context)
        assert num_tokens > 49_000
        weight_bytes = shape.parameters * shape.bytes_per_weight
        model_bytes = weight_bytes + num_tokens * shape.layers * shape.kv_bytes
        for stage in engine.stages:
            used = model_bytes * stage.layers / shape.layers / stage.num_ranks
            # The first and the last stage have some more.
            assert used <= 0.92 * DEVICES[LONG.device].memory

    # Single devices, of which none holds the request.
    num_devices = 2 if name == "hetero" else 1
    with pytest.raises(UnservableError):
        answer(name, LONG._replace(devices_per_node=num_devices))


@planners
def test_judged_engines_are_those_that_start(name: str) -> None:
    """Scheduler, context, layers and ranks of each process are those of the simulation."""
    found = answer(name, ESTIMATED)
    parser = FlagParser(add_help=False)
    for config in ENGINE_CONFIGS:
        add_flags(parser, config)
    specs = [
        spec
        for node in found.plan.nodes
        for spec in commands_for(found.plan, node, LaunchOptions(node_secret_file="secret"))
        if not spec.is_router and not spec.node_rank
    ]
    assert {spec.name for spec in specs} == set(found.engines) == set(found.plan.engines)
    for spec in specs:
        judged, written = found.engines[spec.name], found.plan.engines[spec.name]
        values = parser.parse_args(spec.arguments)
        started = config_from_flags(SchedulerConfig, values)
        length = values.max_model_len or MODELS[found.plan.model].max_context
        assert length == judged.scheduler.max_model_len
        assert [stage.layers for stage in written.stages] == list(judged.layers)
        resolved = started.resolve(len(judged.layers), judged.scheduler.num_blocks, length)
        ignored = (
            {"preset"}
            | PLANNERS[name].unlike
            | ({"kv_admission"} if written.role == "prefill" else set())
        )
        for field in fields(SchedulerConfig):
            # Only where KV caches are fetched do the rules of admission differ.
            if field.name not in ignored:
                chosen = getattr(resolved, field.name)
                assert chosen == getattr(judged.scheduler, field.name), (spec.name, field.name)


@pytest.mark.full
@planners
@pytest.mark.parametrize("easier", EASIER)
def test_an_easier_question_does_not_cost_more(name: str, easier: str) -> None:
    assert answer(name, EASIER[easier]).cost <= answer(name, QUESTION).cost


@pytest.mark.full
@planners
@pytest.mark.parametrize("rate", [2.0, 8.0])
def test_plans_attain_the_slo_in_a_longer_run_with_another_seed(name: str, rate: float) -> None:
    """Neither overloaded nor missed: the interval of the share reaches the goal."""
    question = QUESTION._replace(rate=rate)
    goals = PLANNERS[name].goals or goals_of(question.slo)
    test = AttainmentTest(goals, min_requests=5000, max_requests=5000)
    result = test.judge(answer(name, question).simulate(5000, question.seed + 1))
    assert result.verdict in (AttainmentVerdict.MET, AttainmentVerdict.UNDECIDED), str(result)
    if len(goals) == 1:
        assert result.share >= goals[0] - 0.01, str(result)


@pytest.mark.full
@planners
def test_copies_of_a_plan_are_a_plan(name: str) -> None:
    """Twice the nodes serve twice the rate at no more than twice the cost."""
    once = answer(name, QUESTION)
    if PLANNERS[name].is_for_rate:
        twice = answer(name, QUESTION._replace(num_nodes=2, rate=2 * QUESTION.rate))
        assert twice.cost <= 2 * once.cost
    else:
        # Rates are searched in steps of 2.5 %.
        twice = answer(name, QUESTION._replace(num_nodes=2))
        assert twice.cost <= once.cost / 2 * 1.05


@pytest.mark.full
@pytest.mark.parametrize("name", ["goodput-apart", "search"])
def test_no_plan_has_fewer_devices(name: str) -> None:
    num_devices = round(answer(name, QUESTION).cost)
    for fewer in range(1, num_devices):
        with pytest.raises(UnservableError):
            answer(name, QUESTION._replace(devices_per_node=fewer))


@planners
@pytest.mark.parametrize("question", [ESTIMATED, pytest.param(QUESTION, marks=pytest.mark.full)])
def test_no_plan_promises_more_than_its_capacity(name: str, question: PlanQuestion) -> None:
    expected = answer(name, question).plan.expected
    assert expected is not None
    assert 0 < expected.rate <= (expected.capacity or expected.rate)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        # It simulates ever larger clusters for minutes.
        pytest.param(name, marks=pytest.mark.long) if name == "pools" else name
        for name in PLANNERS
    ],
)
def test_a_service_without_the_devices_is_refused(name: str) -> None:
    with pytest.raises(UnservableError):
        answer(name, QUESTION._replace(rate=1e4))
    if PLANNERS[name].has_devices:
        with pytest.raises(UnservableError):
            answer(name, QUESTION._replace(device="RTX4090", devices_per_node=1))


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in PLANNERS if PLANNERS[name].has_devices])
def test_the_device_counts(name: str) -> None:
    """A slower device does not cost fewer, and one that is too small is not used."""
    fast = answer(name, QUESTION._replace(device="H200")).cost
    assert fast <= answer(name, QUESTION).cost
    slow = QUESTION._replace(device="L20", rate=2.0, slo=EASIER["looser limits"].slo)
    assert answer(name, slow).cost >= answer(name, slow._replace(device="H200")).cost

"""Goodput planner: DistServe's algorithms against brute force, constraints, layout, command."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gllm.commands.plan.command import main
from gllm.options.slo import Slo
from gllm.plan.attainment import Attainment, AttainmentVerdict
from gllm.plan.best_first import SearchBudget
from gllm.plan.engine_times import prefill_work
from gllm.plan.goodput import systems
from gllm.plan.goodput.bounds import NUM_BOUND_REQUESTS, bound_phase
from gllm.plan.goodput.engines import (
    DISTSERVE_COSTS,
    EngineCosts,
    fit_batches,
    make_engine,
    parse_batches,
)
from gllm.plan.goodput.placed_systems import SystemPlacer
from gllm.plan.goodput.placement import (
    PHASES,
    PhaseGoodput,
    PlacementUnit,
    count_engines,
    count_for_cluster,
    engine_choices,
    place_units,
    unit_choices,
)
from gllm.plan.goodput.planner import RATE_STEP, GoodputPlan, GoodputPlanner
from gllm.plan.goodput.systems import (
    NUM_STEPS,
    GoodputTask,
    JudgedPlan,
    Outcome,
    RunTask,
    System,
    measure_goodput,
    run_system,
)
from gllm.plan.layout import Parallelism, PlannedEngine, Stages, lay_out, place_engines
from gllm.plan.nodes import DeviceCluster, equal_nodes
from gllm.plan.problem import ServiceProblem
from gllm.plan.processes import check_configurations, commands_for
from gllm.plan.serving_plan import ExpectedFigures, LinkPlan, RouterPlan, check_plan, read_plan
from gllm.plan.strategies import UnservableError
from gllm.sim.capacity import SearchEndedError
from gllm.sim.costs.distserve import read_coefficients
from gllm.sim.deployment import ModelFitError
from gllm.sim.hardware.devices import LINKS
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.workloads.requests import make_workload
from tests.plan.test_limited_capacity import TickingClock
from tests.support.examples import num_examples

CLUSTERS = st.builds(equal_nodes, st.integers(1, 4), st.sampled_from((1, 2, 3, 4, 8)))
SHAPES = st.sampled_from([(40, 40), (72, 64), (96, 96), (12, 24)])
"""Heads and layers."""
FIXED = "fixed:512,64"
EIGHT = equal_nodes(1, 8)


def make_problem(**fields: object) -> ServiceProblem:
    """Return a problem on eight GPUs with short simulations, with some fields replaced."""
    problem = ServiceProblem("opt-13b", FIXED, EIGHT, limits=make_limits(), num_requests=8)
    return replace(problem, **fields)  # type: ignore[arg-type]


def make_limits(ttft: float = 0.2, tpot: float = 0.1) -> Slo:
    return Slo(ttft, tpot, attainment=0.9)


@pytest.mark.parametrize("first_rate", [0.5, 4.0, 300.0])
@pytest.mark.parametrize("threshold", [0.4, 17.0, 90.0])
def test_the_goodput_is_just_below_the_first_rate_that_fails(
    monkeypatch: pytest.MonkeyPatch, threshold: float, first_rate: float
) -> None:
    def run_system(system: System, lengths: str, rate: float, *_: int) -> Outcome:
        return Outcome((0.1 if rate <= threshold else 0.3,), (0.0,))

    monkeypatch.setattr(systems, "run_system", run_system)
    system = System("", "opt-13b", DISTSERVE_COSTS, Parallelism(1))
    task = GoodputTask(system, FIXED, Slo(0.2, 0.1), 8, first_rate=first_rate)
    assert threshold - first_rate / NUM_STEPS <= measure_goodput(task) <= threshold
    assert measure_goodput(task._replace(slo=Slo(0.05, 0.1))) == 0
    assert measure_goodput(task._replace(slo=Slo(0.5, 0.1), max_rate=threshold)) <= threshold
    with pytest.raises(ValueError, match="tighter limits"):
        measure_goodput(task._replace(slo=Slo(0.5, 0.1)))


def layer_nodes(stages: Stages) -> list[int]:
    """Return the node of each layer."""
    return [stage.devices[0] for stage in stages for _ in range(stage.layers)]


@given(CLUSTERS, SHAPES)
@settings(max_examples=num_examples(25, 200))
def test_units_keep_both_phases_of_a_layer_on_one_node(
    cluster: DeviceCluster, shape: tuple[int, int]
) -> None:
    heads, layers = shape
    for unit in unit_choices(cluster, heads, layers):
        assert unit.num_gpus <= unit.num_nodes * cluster.devices_per_node
        count = (len(cluster.nodes) // unit.num_nodes) * (
            cluster.devices_per_node // unit.gpus_per_node
        )
        engines = []
        for index, pair in enumerate(place_units(cluster, unit, count, layers)):
            assert layer_nodes(pair[0]) == layer_nodes(pair[1])
            engines += [
                PlannedEngine(f"{phase}-{index}", stages, phase)
                for phase, stages in zip(PHASES, pair, strict=True)
            ]
        figures = ExpectedFigures("test", 1.0)
        plan = lay_out(make_problem(), cluster, engines, RouterPlan(""), figures)
        # No two stages share a device, and every node has the devices of its stages.
        check_plan(plan)
        assert sum(engine.num_devices for engine in plan.engines.values()) == count * unit.num_gpus
        with pytest.raises(ValueError, match="add nodes"):
            place_units(cluster, unit, count + 1, layers)


@given(CLUSTERS, SHAPES)
@settings(max_examples=num_examples(25, 200))
def test_engine_choices_are_all_that_a_cluster_holds(
    cluster: DeviceCluster, shape: tuple[int, int]
) -> None:
    heads, layers = shape
    expected = {
        Parallelism(tp, pp)
        for tp in range(1, cluster.devices_per_node + 1)
        for pp in range(1, cluster.num_devices + 1)
        if heads % tp == 0
        and layers % pp == 0
        and pp <= len(cluster.nodes) * (cluster.devices_per_node // tp)
    }
    choices = list(engine_choices(cluster, heads, layers))
    assert len(choices) == len(set(choices))
    assert set(choices) == expected
    for engine in choices:
        (stages,) = place_engines(cluster, [(engine, engine.split_layers(layers))])
        assert len(stages) == engine.pp
        assert all(len(stage.devices) == engine.tp for stage in stages)


class FakeMeasurement:
    """Goodputs below the planner's bounds by random factors; both phases attain less than one."""

    def __init__(self, seed: int, problem: ServiceProblem, costs: EngineCosts) -> None:
        self.seed, self.problem, self.costs = seed, problem, costs
        self.jobs = make_workload(problem.workload, NUM_BOUND_REQUESTS, seed=problem.seed)
        self.num_calls = 0
        self._bounds: dict[tuple[str, Parallelism], float] = {}

    def bound(self, phase: str, engine: Parallelism) -> float:
        """Return the planner's bound of one phase."""
        key = phase, engine
        if key not in self._bounds:
            bound = bound_phase(self.problem, self.costs, self.jobs, phase, engine)
            self._bounds[key] = bound.score
        return self._bounds[key]

    def phase(self, phase: str, engine: Parallelism) -> float:
        """Return the goodput of one phase."""
        # Not so small that a cluster cannot serve the rate of a test.
        return self.bound(phase, engine) * Random(f"{self.seed} {phase} {engine}").uniform(0.2, 1.0)

    def both(self, prefill: Parallelism, decode: Parallelism) -> float:
        """Return the goodput of one engine of each phase."""
        factor = Random(f"{self.seed} {prefill} {decode}").uniform(0.2, 1.0)
        return factor * min(self.phase("prefill", prefill), self.phase("decode", decode))

    def __call__(self, task: GoodputTask) -> float:
        """Return the goodput of a task."""
        self.num_calls += 1
        if task.phase:
            return self.phase(task.phase, task.system.prefill)
        assert task.system.decode is not None
        return self.both(task.system.prefill, task.system.decode)

    def judge(self, task: RunTask, slo: Slo) -> JudgedPlan:
        """Judge that engines attain the SLO up to the sum of their goodputs."""
        system = task.system
        assert system.decode is not None
        rates = [
            system.num_prefill * self.phase("prefill", system.prefill),
            system.num_decode * self.phase("decode", system.decode),
        ]
        is_met = task.rate <= min(rates)
        verdict = AttainmentVerdict.MET if is_met else AttainmentVerdict.MISSED
        share = 0.95 if is_met else 0.5
        return JudgedPlan(Attainment(verdict, share, share, share, 1000), Outcome((0.1,), (0.1,)))


SMALL_DEVICES = EngineCosts("roofline", "A100-40G")


def make_planner(
    seed: int, cluster: DeviceCluster, model: str
) -> tuple[GoodputPlanner, FakeMeasurement]:
    """Return a planner whose simulations are replaced."""
    problem = make_problem(cluster=cluster, limits=make_limits(10.0, 10.0), model=model)
    measure = FakeMeasurement(seed, problem, SMALL_DEVICES)
    planner = GoodputPlanner(problem, SMALL_DEVICES, SearchBudget(), measure, judge=measure.judge)
    return planner, measure


SMALL = st.sampled_from([equal_nodes(*sizes) for sizes in ((1, 8), (2, 4), (4, 2), (1, 3))])


SIZES = st.sampled_from(("opt-13b", "opt-66b"))
"""Models of which the first fits everywhere, the second on four GPUs of SMALL_DEVICES."""


@cache
def fits(model: str, engine: Parallelism) -> bool:
    """Return True if an engine holds a model and a prompt."""
    try:
        make_engine(SMALL_DEVICES, model, engine, "distserve")
    except ModelFitError:
        return False
    return True


@given(st.integers(0, 10**6), SMALL, SIZES)
@example(0, equal_nodes(1, 8), "opt-66b")
@example(118, equal_nodes(4, 2), "opt-66b")
@settings(max_examples=num_examples(3, 60), deadline=None)
def test_units_are_those_of_a_brute_force(seed: int, cluster: DeviceCluster, model: str) -> None:
    """No unit is returned that memory cannot hold (D6)."""
    planner, measure = make_planner(seed, cluster, model)
    shape = MODELS[model]
    units = [
        unit
        for unit in unit_choices(cluster, shape.heads, shape.layers)
        if fits(model, unit.prefill) and fits(model, unit.decode)
    ]
    if not units:
        with pytest.raises(UnservableError, match="memory"):
            planner.place_together(None)
        return
    best = max(measure.both(unit.prefill, unit.decode) / unit.num_gpus for unit in units)
    plan = planner.place_together(None)
    assert plan.unit in units
    assert plan.per_gpu == pytest.approx(best)
    assert plan.bound >= plan.rate


@given(st.integers(0, 10**6), SMALL, SIZES)
@example(0, equal_nodes(1, 8), "opt-66b")
@settings(max_examples=num_examples(3, 60), deadline=None)
def test_phases_are_those_of_a_brute_force(seed: int, cluster: DeviceCluster, model: str) -> None:
    """No engine is returned that memory cannot hold (D6)."""
    planner, measure = make_planner(seed, cluster, model)
    shape = MODELS[model]
    every = engine_choices(cluster, shape.heads, shape.layers)
    choices = [each for each in every if fits(model, each)]
    assume(choices)
    values = {
        phase: {each: measure.phase(phase, each) / each.num_gpus for each in choices}
        for phase in PHASES
    }
    engines = [max(values[phase], key=values[phase].__getitem__) for phase in PHASES]
    assume(sum(engine.num_gpus for engine in engines) <= cluster.num_devices)
    plan = planner.place_apart(None)
    assert [plan.system.prefill, plan.system.decode] == engines
    assert plan.bound >= plan.rate


@pytest.mark.parametrize("num_gpus", [2, 7])
def test_the_bound_is_that_of_whole_engines(num_gpus: int) -> None:
    """The GPUs are divided among both phases, those of a phase among engines of any kinds."""
    planner, measure = make_planner(1, equal_nodes(1, num_gpus), "opt-13b")
    shape = MODELS["opt-13b"]
    engines = list(engine_choices(planner.problem.cluster, shape.heads, shape.layers))
    rates = {
        phase: [(each.num_gpus, measure.bound(phase, each)) for each in engines] for phase in PHASES
    }

    @cache
    def most(phase: str, left: int) -> float:
        filled = [rate + most(phase, left - size) for size, rate in rates[phase] if size <= left]
        return max(filled, default=0.0)

    counts = range(num_gpus + 1)
    best = max(min(most("prefill", each), most("decode", num_gpus - each)) for each in counts)
    assert planner.place_apart(None).bound == pytest.approx(best)
    rate = 0.5 * planner.place_apart(None).rate
    least = [next(each for each in counts if most(phase, each) >= rate) for phase in PHASES]
    assert planner.place_apart(rate).bound == sum(least)


@given(st.integers(0, 10**6), SMALL, st.floats(0.05, 1.0))
@settings(max_examples=num_examples(3, 60), deadline=None)
def test_plans_for_a_rate_have_the_fewest_gpus(
    seed: int, cluster: DeviceCluster, share: float
) -> None:
    planner, measure = make_planner(seed, cluster, "opt-13b")
    shape = MODELS["opt-13b"]
    rate = share * planner.place_apart(None).rate
    engines = list(engine_choices(cluster, shape.heads, shape.layers))
    least = {
        phase: [(count_engines(rate, measure.phase(phase, engine)), engine) for engine in engines]
        for phase in PHASES
    }
    plan = planner.place_apart(rate)
    assert plan.attainment.is_met
    assert plan.system.num_gpus == min(
        num_prefill * prefill.num_gpus + num_decode * decode.num_gpus
        for num_prefill, prefill in least["prefill"]
        for num_decode, decode in least["decode"]
    )
    assert 2 <= plan.bound <= plan.system.num_gpus
    # Every plan found has a place on the nodes.
    planner.lay_out(plan)


def test_one_gpu_of_each_phase_is_found_where_larger_engines_are_better() -> None:
    problem = make_problem(cluster=equal_nodes(1, 2))

    def measure(task: GoodputTask) -> float:
        return task.system.prefill.num_gpus**2 / 100

    fake = FakeMeasurement(0, problem, DISTSERVE_COSTS)
    planner = GoodputPlanner(problem, DISTSERVE_COSTS, SearchBudget(), measure, judge=fake.judge)
    plan = planner.place_apart(None)
    assert [plan.system.prefill, plan.system.decode] == [Parallelism(1)] * 2


def test_a_rate_is_lowered_until_it_is_judged_to_attain_the_limits() -> None:
    planner, measure = make_planner(3, EIGHT, "opt-13b")
    plan = planner.place_apart(None)
    rates: list[float] = []

    def judge(task: RunTask, slo: Slo) -> JudgedPlan:
        rates.append(task.rate)
        return measure.judge(task._replace(rate=task.rate * 1.7), slo)

    strict = GoodputPlanner(planner.problem, SMALL_DEVICES, SearchBudget(), measure, judge=judge)
    lower = strict.place_apart(None)
    assert plan.rate / 1.7 / RATE_STEP <= lower.rate <= plan.rate / 1.7 * (1 + 1e-9)
    assert lower.num_judged == len(rates) < 12

    def spend(task: RunTask, slo: Slo) -> JudgedPlan:
        if len(rates) > lower.num_judged + 5:
            raise SearchEndedError("the budget is spent")
        return judge(task, slo)

    # At the end of the budget the highest rate so far counts, if there is one.
    cut = GoodputPlanner(planner.problem, SMALL_DEVICES, SearchBudget(), measure, judge=spend)
    short = cut.place_apart(None)
    assert short.attainment.is_met
    assert short.rate <= lower.rate
    with pytest.raises(UnservableError, match="the budget is spent"):
        cut.place_apart(None)

    def refuse(task: RunTask, slo: Slo) -> JudgedPlan:
        return measure.judge(task._replace(rate=1e9), slo)

    never = GoodputPlanner(planner.problem, SMALL_DEVICES, SearchBudget(), measure, judge=refuse)
    for rate in (None, 1.0):
        with pytest.raises(UnservableError, match="loosen --slo"):
            never.place_apart(rate)


def test_links_between_nodes_take_time() -> None:
    slow = {"crossings": frozenset({0}), "network": "network"}
    engines = [
        make_engine(costs, "opt-13b", Parallelism(1, 2), "distserve", **options)  # type: ignore[arg-type]
        for costs in (DISTSERVE_COSTS, EngineCosts("roofline"))
        for options in ({}, slow)
    ]
    work = prefill_work([512])
    seconds = [engine.cost.activation_transfer(0, work).total_seconds for engine in engines]
    size = 512 * 2 * MODELS["opt-13b"].hidden
    expected = size / LINKS["network"].bandwidth + LINKS["network"].latency
    assert seconds[1] == seconds[3] == pytest.approx(expected)
    assert seconds[0] == 0 < seconds[2] < expected / 10
    # Two nodes of one GPU hold a unit of no pair, but an engine of two stages and others apart.
    problem = make_problem(cluster=equal_nodes(4, 2))
    placer = SystemPlacer(problem, DISTSERVE_COSTS, "network")
    unit = PlacementUnit(Parallelism(1, 4), Parallelism(1, 4), 4)
    assert placer.unit_system(unit, 1).prefill_crossings == {0, 1, 2}
    apart = placer.apart_system(Parallelism(2, 2), Parallelism(1, 2), 1, 1)
    assert apart.prefill_crossings == {0}
    assert apart.decode_crossings == frozenset()
    assert apart.node_link == apart.network == "network"


def test_several_units_keep_their_routes() -> None:
    problem = make_problem(cluster=equal_nodes(1, 4))
    planner = GoodputPlanner(problem, DISTSERVE_COSTS, SearchBudget())
    unit = PlacementUnit(Parallelism(1), Parallelism(1), 1)
    system = SystemPlacer(problem, DISTSERVE_COSTS, "nvlink").unit_system(unit, 2)
    outcome = run_system(system, "fixed:512,8", 20.0, 8)
    # Units take turns, and each keeps its requests.
    assert len(outcome.transfers) == 8
    attainment = Attainment(AttainmentVerdict.MET, 1.0, 0.9, 1.0, 8)
    plan = planner.lay_out(GoodputPlan(system, unit, 2.0, 0.5, outcome, attainment, {}, 2))
    check_configurations(plan)
    (router, *_) = commands_for(plan, "node-0")
    assert "prefill-0:decode-0=1,prefill-1:decode-1=1" in " ".join(router.arguments)
    # Judged engines are those that start: same batches, same context.
    config = make_engine(DISTSERVE_COSTS, "opt-13b", Parallelism(1), "distserve").scheduler
    for engine in plan.engines.values():
        assert engine.scheduler["max-num-seqs"] == config.max_num_seqs
        # The model's context, which has no flag.
        assert engine.flags == {}
    assert config.max_model_len == 2048


def test_a_device_without_coefficients_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", "--device", "RTX4090"]) == 2
    assert "measured on A100-80G, not on --device RTX4090" in capsys.readouterr().err
    # 26 GB of weights fit no card of 24 GB, nor two with the KV cache of a prompt.
    flags = ["--costs", "roofline", "--device", "RTX4090", "--gpus-per-node", "2", "--rate", "1"]
    assert main(["goodput", *flags]) == 1
    assert "memory binds" in capsys.readouterr().err


@given(st.floats(0.1, 9), st.floats(0.1, 9), st.integers(1, 4), st.integers(1, 4))
def test_counts_of_engines(
    prefill_rate: float, decode_rate: float, prefill_gpus: int, decode_gpus: int
) -> None:
    prefill = PhaseGoodput(Parallelism(prefill_gpus), prefill_rate)
    decode = PhaseGoodput(Parallelism(decode_gpus), decode_rate)
    counts = count_for_cluster(16, prefill, decode)

    def served(num_prefill: int, num_decode: int) -> float:
        return min(num_prefill * prefill_rate, num_decode * decode_rate)

    exhaustive = [
        served(n, m)
        for n in range(1, 17)
        for m in range(1, 17)
        if n * prefill_gpus + m * decode_gpus <= 16
    ]
    assert counts[0] * prefill_gpus + counts[1] * decode_gpus <= 16
    assert served(*counts) == pytest.approx(max(exhaustive))
    assert count_engines(3 * decode_rate, decode_rate) == 3
    with pytest.raises(ValueError, match="do not hold"):
        count_for_cluster(1, prefill, decode)


def test_engines_for_the_cluster_fit_its_nodes() -> None:
    placer = SystemPlacer(make_problem(cluster=equal_nodes(3, 4)), DISTSERVE_COSTS, "network")
    engine = PhaseGoodput(Parallelism(3), 1.0)
    # Each node has one free GPU beside an engine of three.
    assert count_for_cluster(12, engine, engine) == (2, 2)
    fits = partial(placer.fits_apart, engine.parallelism, engine.parallelism)
    assert count_for_cluster(12, engine, engine, fits) == (1, 1)
    assert fits(1, 2)
    assert not fits(2, 2)


L20 = EngineCosts("roofline", "L20")
LONG = EngineCosts("distserve", max_model_len=2_000_000)


@pytest.mark.parametrize(
    ("fields", "costs", "constraint"),
    [
        ({"model": "opt-66b", "cluster": equal_nodes(1, 2)}, L20, "GPU memory"),
        ({"limits": make_limits(ttft=0.01)}, DISTSERVE_COSTS, "TTFT"),
        ({"limits": make_limits(tpot=0.005)}, DISTSERVE_COSTS, "TPOT"),
        ({"workload": "fixed:1000000,64"}, LONG, "KV cache"),
    ],
)
@pytest.mark.parametrize("name", ["place_together", "place_apart"])
def test_the_constraint_that_binds_is_named(
    fields: dict[str, object], costs: EngineCosts, constraint: str, name: str
) -> None:
    problem = make_problem(**{"cluster": equal_nodes(1, 4), **fields})
    planner = GoodputPlanner(problem, costs, SearchBudget())
    place: Callable[[float | None], object] = getattr(planner, name)
    with pytest.raises(UnservableError, match=f"{constraint} binds"):
        place(1.0)


@pytest.mark.parametrize("name", ["place_together", "place_apart"])
@pytest.mark.parametrize("rate", [None, 1.0])
def test_a_running_simulation_is_cut_off_at_the_budget(name: str, rate: float | None) -> None:
    clock = TickingClock(1.0)
    planner = GoodputPlanner(make_problem(), DISTSERVE_COSTS, SearchBudget(20.0, clock=clock))
    place: Callable[[float | None], object] = getattr(planner, name)
    with pytest.raises(UnservableError, match=r"the budget of 20 s is spent.*raise --budget"):
        place(rate)
    assert clock.now <= 20.0 + 5


def test_a_spent_budget_and_too_high_a_rate_are_refused() -> None:
    planner = GoodputPlanner(make_problem(), DISTSERVE_COSTS, SearchBudget(max_evaluations=0))
    with pytest.raises(UnservableError, match="raise --budget"):
        planner.place_together(1.0)
    planner, _ = make_planner(1, EIGHT, "opt-13b")
    for place in (planner.place_together, planner.place_apart):
        with pytest.raises(UnservableError, match="add nodes"):
            place(1e4)


def test_the_command_writes_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    lengths = "fixed:512,4"
    flags = ["--gpus-per-node", "2", "--workload", lengths, "--requests", "8", "--rate", "2"]
    assert main(["goodput", *flags, "--output", str(path)]) == 0
    plan = read_plan(path)
    assert {engine.role for engine in plan.engines.values()} == {"prefill", "decode"}
    assert plan.routes == {"prefill-0": {"decode-0": 1.0}}
    assert plan.router is not None
    assert plan.router.preset == "distserve"
    assert plan.expected is not None
    assert plan.expected.attainment is not None
    assert plan.expected.attainment >= 0.9
    text = capsys.readouterr().out
    assert "requests/s per GPU" in text
    assert "no plan has fewer than 2 GPUs (gap 0 %)" in text
    assert not plan.simulated_only
    # Stages and ranks within a node were predicted with NVLink.
    assert [node.link for node in plan.nodes.values()] == [LinkPlan(2000, 0.005)]
    assert main(["goodput", *flags, "--slo", "ttft=0.01,tpot=0.1"]) == 1
    assert "TTFT binds" in capsys.readouterr().err
    assert main(["goodput", *flags, "--slo", "ttft:p99=1"]) == 2
    assert main(["goodput", *flags, "--costs", "batches"]) == 2
    assert main(["goodput", *flags, "--workload", "fixed:4000,64"]) == 2


def batches_text(tp: int) -> str:
    """Return a file of batches that take DistServe's times."""
    known = read_coefficients("distserve", "opt-13b", tp)
    lines = ["tp,phase,requests,tokens,milliseconds"]
    for requests in (1, 4, 16, 64, 96, 160):
        for tokens in (16, 128, 512, 1024):
            total = requests * tokens
            prefill, decode = known.prefill, known.small_decode
            if requests >= known.batch_threshold:
                decode = known.large_decode
            prefill_ms = prefill.constant + prefill.per_token * total
            prefill_ms += prefill.third * requests * tokens**2
            decode_ms = decode.constant + decode.per_token * total + decode.third * requests
            lines.append(f"{tp},prefill,{requests},{tokens},{prefill_ms!r}")
            lines.append(f"{tp},decode,{requests},{tokens},{decode_ms!r}")
    return "\n".join(lines)


def test_measured_batches_are_engines(tmp_path: Path) -> None:
    file = tmp_path / "batches.csv"
    file.write_text(batches_text(1))
    fitted, known = fit_batches(str(file), 1), read_coefficients("distserve", "opt-13b", 1)
    for name in ("prefill", "small_decode", "large_decode"):
        assert getattr(fitted, name) == pytest.approx(getattr(known, name), rel=0.01)
    costs = EngineCosts("batches", "A100-80G", str(file))
    engine = make_engine(costs, "opt-13b", Parallelism(1), "distserve")
    assert engine.scheduler.num_blocks > 1000
    with pytest.raises(ValueError, match="no batches of tp 2, only of 1"):
        make_engine(costs, "opt-13b", Parallelism(2), "distserve")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp,phase\n1,prefill", "no column milliseconds"),
        ("tp,phase,requests,tokens,milliseconds\n1,mixed,1,1,1.0", "line 2"),
        ("tp,phase,requests,tokens,milliseconds\n1,decode,0,1,1.0", "line 2"),
    ],
)
def test_invalid_batches_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_batches(text, "file")


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "text"),
    [(1, 1, "TP 2 PP 1, TP 4 PP 1"), (11, 21, "11 x TP 2 PP 1, 21 x TP 4 PP 1")],
)
def test_a_placement_names_all_its_engines(num_prefill: int, num_decode: int, text: str) -> None:
    pair = Parallelism(2), Parallelism(4)
    system = System("", "opt-13b", DISTSERVE_COSTS, *pair, num_prefill, num_decode)
    assert system.placement == text

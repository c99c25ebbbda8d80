"""Goodput planner: DistServe's algorithms against brute force, constraints, layout, command."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gllm.commands.plan.command import main
from gllm.options.slo import Slo
from gllm.plan.best_first import SearchBudget
from gllm.plan.goodput import systems
from gllm.plan.goodput.engines import (
    DISTSERVE_COSTS,
    EngineCosts,
    fit_batches,
    make_engine,
    parse_batches,
)
from gllm.plan.goodput.placement import (
    PhaseGoodput,
    count_engines,
    count_for_cluster,
    engine_choices,
    place_units,
    unit_choices,
)
from gllm.plan.goodput.planner import NUM_BOUND_REQUESTS, PHASES, GoodputPlanner, bound_phase
from gllm.plan.goodput.systems import NUM_STEPS, GoodputTask, Outcome, System, measure_goodput
from gllm.plan.layout import Parallelism, PlannedEngine, Stages, lay_out, place_engines
from gllm.plan.nodes import DeviceCluster, equal_nodes
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import ExpectedFigures, LinkPlan, RouterPlan, check_plan, read_plan
from gllm.plan.strategies import UnservableError
from gllm.sim.costs.distserve import read_coefficients
from gllm.sim.deployment import ModelFitError
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
    assert measure_goodput(task._replace(slo=Slo(0.5, 0.1), most_rate=threshold)) <= threshold
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

    def phase(self, phase: str, engine: Parallelism) -> float:
        """Return the goodput of one phase."""
        bound = bound_phase(self.problem, self.costs, self.jobs, phase, engine)
        # Not so small that a cluster cannot serve the rate of a test.
        return bound.score * Random(f"{self.seed} {phase} {engine}").uniform(0.2, 1.0)

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


SMALL_DEVICES = EngineCosts("roofline", "A100-40G")


def make_planner(
    seed: int, cluster: DeviceCluster, model: str
) -> tuple[GoodputPlanner, FakeMeasurement]:
    """Return a planner whose simulations are replaced."""
    problem = make_problem(cluster=cluster, limits=make_limits(10.0, 10.0), model=model)
    measure = FakeMeasurement(seed, problem, SMALL_DEVICES)
    return GoodputPlanner(problem, SMALL_DEVICES, SearchBudget(), measure), measure


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
            planner.place_together(rate=1e-3)
        return
    best = max(measure.both(unit.prefill, unit.decode) / unit.num_gpus for unit in units)
    plan = planner.place_together(rate=1e-3)
    assert plan.unit in units
    assert plan.per_gpu == pytest.approx(best)


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
    plan = planner.place_apart(rate=1e-3)
    assert [plan.system.prefill, plan.system.decode] == engines


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
def test_a_running_simulation_is_cut_off_at_the_budget(name: str) -> None:
    clock = TickingClock(1.0)
    planner = GoodputPlanner(make_problem(), DISTSERVE_COSTS, SearchBudget(20.0, clock=clock))
    place: Callable[[float | None], object] = getattr(planner, name)
    with pytest.raises(UnservableError, match=r"the budget of 20 s is spent.*raise --budget"):
        place(1.0)
    assert clock.now <= 20.0 + 5


def test_a_spent_budget_and_too_high_a_rate_are_refused() -> None:
    planner = GoodputPlanner(make_problem(), DISTSERVE_COSTS, SearchBudget(max_evaluations=0))
    with pytest.raises(UnservableError, match="raise --budget"):
        planner.place_together(1.0)
    planner, _ = make_planner(1, EIGHT, "opt-13b")
    for place in (planner.place_together, planner.place_apart):
        with pytest.raises(ValueError, match="add nodes"):
            place(1e4)


def test_the_command_writes_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    flags = ["--gpus-per-node", "2", "--workload", FIXED, "--requests", "8", "--rate", "2"]
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
    assert "simulated only: prefill-0, decode-0: no KV blocks are passed on" in text
    assert "the stages are on GPUs" in plan.simulated_only
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

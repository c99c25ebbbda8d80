"""Goodput planner: DistServe's algorithms against brute force, constraints, layout, command."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gllm.commands.plan.command import main
from gllm.plan.budget import SearchBudget
from gllm.plan.goodput.engines import DISTSERVE_COSTS, EngineCosts, Parallelism, make_engine
from gllm.plan.goodput.layout import place_engines, place_units
from gllm.plan.goodput.measured_batches import fit_batches, parse_batches
from gllm.plan.goodput.measurement import GoodputTask
from gllm.plan.goodput.placement import (
    GpuCluster,
    PhaseGoodput,
    count_engines,
    count_for_cluster,
    engine_choices,
    unit_choices,
)
from gllm.plan.goodput.planner import PHASES, GoodputPlanner, UnservableError, bound_phase
from gllm.plan.goodput.problem import GoodputProblem
from gllm.plan.serving_plan import StagePlan, read_plan
from gllm.sim.costs.distserve import read_coefficients
from gllm.sim.deployment import ModelFitError
from gllm.sim.hardware.shapes import MODELS
from tests.support.examples import num_examples

CLUSTERS = st.builds(GpuCluster, st.integers(1, 4), st.sampled_from((1, 2, 3, 4, 8)))
SHAPES = st.sampled_from([(40, 40), (72, 64), (96, 96), (12, 24)])
"""Heads and layers."""
FIXED = "fixed:512,64"
EIGHT = GpuCluster(1, 8)


def make_problem(**fields: object) -> GoodputProblem:
    """Return a problem on eight GPUs with short simulations, with some fields replaced."""
    given_fields = {
        "model": "opt-13b",
        "costs": DISTSERVE_COSTS,
        "cluster": EIGHT,
        "lengths": FIXED,
        "ttft": 0.2,
        "tpot": 0.1,
        "target": 0.9,
        "num_requests": 8,
        **fields,
    }
    return GoodputProblem(**given_fields)  # type: ignore[arg-type]


def layer_nodes(stages: list[StagePlan]) -> list[str]:
    """Return the node of each layer."""
    return [stage.node for stage in stages for _ in range(stage.layers)]


@given(CLUSTERS, SHAPES)
@settings(max_examples=num_examples(25, 200))
def test_units_keep_both_phases_of_a_layer_on_one_node(
    cluster: GpuCluster, shape: tuple[int, int]
) -> None:
    heads, layers = shape
    for unit in unit_choices(cluster, heads, layers):
        assert unit.num_gpus <= unit.num_nodes * cluster.gpus_per_node
        count = (cluster.num_nodes // unit.num_nodes) * (
            cluster.gpus_per_node // unit.gpus_per_node
        )
        used: set[tuple[str, int]] = set()
        for prefill, decode in place_units(cluster, unit, count, layers):
            assert layer_nodes(prefill) == layer_nodes(decode)
            for stage in (*prefill, *decode):
                devices = {(stage.node, device) for device in stage.devices}
                assert not devices & used
                used |= devices
        with pytest.raises(ValueError, match="add nodes"):
            place_units(cluster, unit, count + 1, layers)


@given(CLUSTERS, SHAPES)
@settings(max_examples=num_examples(25, 200))
def test_engine_choices_are_all_that_a_cluster_holds(
    cluster: GpuCluster, shape: tuple[int, int]
) -> None:
    heads, layers = shape
    expected = {
        Parallelism(tp, pp)
        for tp in range(1, cluster.gpus_per_node + 1)
        for pp in range(1, cluster.num_gpus + 1)
        if heads % tp == 0
        and layers % pp == 0
        and pp <= cluster.num_nodes * (cluster.gpus_per_node // tp)
    }
    choices = list(engine_choices(cluster, heads, layers))
    assert len(choices) == len(set(choices))
    assert set(choices) == expected
    for engine in choices:
        (stages,) = place_engines(cluster, [engine], layers)
        assert len(stages) == engine.pp
        assert all(len(stage.devices) == engine.tp for stage in stages)


class FakeMeasurement:
    """Goodputs below the planner's bounds by random factors; both phases attain less than one."""

    def __init__(self, seed: int, problem: GoodputProblem) -> None:
        self.seed = seed
        self.problem = problem
        self.limits = problem.limits
        self.num_calls = 0

    def phase(self, phase: str, engine: Parallelism) -> float:
        """Return the goodput of one phase."""
        bound = bound_phase(self.problem, self.limits, phase, engine)
        # Not so small that a cluster cannot serve the rate of a test.
        return bound.score * Random(f"{self.seed} {phase} {engine}").uniform(0.2, 1.0)

    def both(self, prefill: Parallelism, decode: Parallelism) -> float:
        """Return the goodput of one engine of each phase."""
        factor = Random(f"{self.seed} {prefill} {decode}").random()
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
    seed: int, cluster: GpuCluster, model: str
) -> tuple[GoodputPlanner, FakeMeasurement]:
    """Return a planner whose simulations are replaced."""
    problem = make_problem(cluster=cluster, ttft=10.0, tpot=10.0, model=model, costs=SMALL_DEVICES)
    measure = FakeMeasurement(seed, problem)
    return GoodputPlanner(problem, SearchBudget(), measure), measure


SMALL = st.sampled_from([GpuCluster(1, 8), GpuCluster(2, 4), GpuCluster(4, 2), GpuCluster(1, 3)])


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
@example(0, GpuCluster(1, 8), "opt-66b")
@settings(max_examples=num_examples(3, 60), deadline=None)
def test_units_are_those_of_a_brute_force(seed: int, cluster: GpuCluster, model: str) -> None:
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
@example(0, GpuCluster(1, 8), "opt-66b")
@settings(max_examples=num_examples(3, 60), deadline=None)
def test_phases_are_those_of_a_brute_force(seed: int, cluster: GpuCluster, model: str) -> None:
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
    assume(sum(engine.num_gpus for engine in engines) <= cluster.num_gpus)
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
    ("fields", "constraint"),
    [
        ({"model": "opt-66b", "costs": L20, "cluster": GpuCluster(1, 2)}, "GPU memory"),
        ({"model": "opt-13b", "ttft": 0.01}, "TTFT"),
        ({"model": "opt-13b", "tpot": 0.005}, "TPOT"),
        ({"costs": LONG, "lengths": "fixed:1000000,64"}, "KV cache"),
    ],
)
@pytest.mark.parametrize("name", ["place_together", "place_apart"])
def test_the_constraint_that_binds_is_named(
    fields: dict[str, object], constraint: str, name: str
) -> None:
    problem = make_problem(**{"cluster": GpuCluster(1, 4), **fields})
    place: Callable[[float | None], object] = getattr(GoodputPlanner(problem, SearchBudget()), name)
    with pytest.raises(UnservableError, match=f"{constraint} binds"):
        place(1.0)


def test_a_spent_budget_and_too_high_a_rate_are_refused() -> None:
    planner = GoodputPlanner(make_problem(), SearchBudget(max_evaluations=0))
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
    assert "requests/s per GPU" in capsys.readouterr().out
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

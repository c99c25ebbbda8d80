"""Which engines measure, how measurements become layers, and what follows from step times."""

import logging
from pathlib import Path
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.messages.lifecycle import StageLoaded
from gllm.messages.nodes import NodeFacts
from gllm.messages.reports import StageMeasured
from gllm.recovery.balance import BalanceLimits
from gllm.recovery.node_layout import NodeShape
from gllm.recovery.partition import StageCosts
from gllm.runtime.head.layer_planner import LayerPlanner, Machine
from gllm.runtime.worker.probe_cache import ProbeCache

COSTS = StageCosts((1.0,) * 12)
LIMITS = BalanceLimits(window_seconds=1.0, num_windows=1, min_steps=1)


def plan(
    stages: int = 2, gpu_models: tuple[str, ...] = ("Model: H100",), **options: Any
) -> LayerPlanner:
    config = EngineConfig.from_options(
        "demo", pipeline_parallel_size=stages, max_model_len=64, **options
    )
    size = 12 // stages
    layers = [range(stage * size, (stage + 1) * size) for stage in range(stages)]
    return LayerPlanner(config, layers, COSTS, LIMITS, lambda: set(gpu_models))


def measured(stage: int, seconds: float, rank: int = 0, **fields: Any) -> StageMeasured:
    return StageMeasured(
        stage, rank, [seconds] * 12, 2 * seconds * stage, 0.0, [100] * 12, 10, 20, **fields
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"debug_slowdown": (1, 2)}, True),
        ({"debug_slowdown": (2, 2)}, False),
        ({"debug_slowdown": (1, 2), "layers": "even"}, False),
        ({"debug_slowdown": (1, 2), "layers": (4, 8)}, False),
        ({"tensor_parallel_size": (2, 1)}, True),
        ({"tensor_parallel_size": (2, 2)}, False),
        ({"stages": 1, "debug_slowdown": (2,)}, False),
    ],
    ids=str,
)
def test_speeds_are_measured_where_they_may_differ(options: dict[str, Any], expected: bool) -> None:
    assert plan(**options).should_measure == expected


@pytest.mark.parametrize(("device", "expected"), [("auto", True), ("cpu", False)])
def test_different_gpus_are_measured(device: str, expected: bool) -> None:
    models = ("Model: H100", "Model: L4")
    assert plan(gpu_models=models, device=device).should_measure == expected


def machine(
    devices: tuple[str, ...] = (),
    num_cores: int = 8,
    threads: int | None = None,
    memory_bytes: int = 10**9,
) -> Machine:
    facts = NodeFacts(
        "host", "system", "1.0", "127.0.0.1", 0, "", b"", list(devices), num_cores, memory_bytes
    )
    return Machine(facts, threads)


@pytest.mark.parametrize(
    ("local", "other", "device", "expected"),
    [
        (machine(), machine(), "auto", False),
        (machine(), machine(num_cores=4), "auto", True),
        (machine(threads=2), machine(threads=2), "cpu", False),
        (machine(), machine(threads=2), "cpu", True),
        (machine(("H100",)), machine(("H100",) * 2), "auto", False),
        (machine(("H100",)), machine(("L4",)), "auto", True),
        (machine(("H100",)), machine(("L4",)), "cpu", False),
        (machine(("H100",)), machine(), "auto", True),
    ],
)
def test_different_machines_are_measured(
    local: Machine, other: Machine, device: str, expected: bool
) -> None:
    planner = plan(device=device)
    planner.set_nodes(["local", "b"], {"local": local, "b": other, "spare": machine(num_cores=1)})
    assert planner.should_measure == expected
    planner = plan(device=device, layers="even")
    planner.set_nodes(["local", "b"], {"local": local, "b": other})
    assert not planner.should_measure


@pytest.mark.parametrize("threads", [None, 2])
def test_machines_that_share_their_cores_unequally_are_measured(threads: int | None) -> None:
    machines = {"local": machine(threads=threads), "b": machine(threads=threads)}
    planner = plan(3, device="cpu")
    planner.set_nodes(["local", "local", "b"], machines)
    assert planner.should_measure == (threads is None)


def test_measured_layers_fit_the_memory_of_their_machine() -> None:
    """Each layer has 100 bytes; the fast machine has place for three of them."""
    planner = plan(device="cpu")
    planner.set_nodes(["local", "b"], {"local": machine(), "b": machine(memory_bytes=400)})
    planner.on_measured(measured(0, 0.004))
    planner.on_measured(measured(1, 0.001))
    assert planner.choose_layers() == [(0, 9), (9, 12)]


def test_layers_follow_the_slowest_rank_of_each_stage() -> None:
    planner = plan(debug_slowdown=(1, 2))
    planner.on_measured(measured(0, 0.001, rank=1))
    planner.on_measured(measured(0, 0.002))
    planner.on_measured(measured(1, 0.001))
    # A head as long as two layers: 2 x 4.67 against 7.33 + 2.
    assert planner.choose_layers() == [(0, 5), (5, 12)]
    assert planner.layers == [range(5), range(5, 12)]


def test_layers_fit_the_memory_of_the_rank_with_the_least() -> None:
    planner = plan()
    planner.on_measured(measured(0, 0.001, available_bytes=5000))
    planner.on_measured(measured(0, 0.001, rank=1, available_bytes=310))
    planner.on_measured(measured(1, 0.001, available_bytes=5000))
    assert planner.choose_layers() == [(0, 3), (3, 12)]


def test_without_a_cut_that_fits_the_layers_stay(caplog: pytest.LogCaptureFixture) -> None:
    planner = plan()
    for stage in (0, 1):
        planner.on_measured(measured(stage, 0.001, available_bytes=200))
    with caplog.at_level(logging.WARNING):
        assert planner.choose_layers() == [(0, 6), (6, 12)]
    assert "fits the stages' memory" in caplog.text


def feed(planner: LayerPlanner, slowness: float) -> Any:
    """Report steps of which the second stage takes longer."""
    better = None
    for second in range(4):
        for stage, factor in enumerate((1.0, slowness)):
            steps = 20 * (second + 1)
            busy = 0.01 * steps * factor
            better = better or planner.on_totals(stage, steps, busy, 100.0 + second)
    return better


def test_a_measurement_that_steps_contradict_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = ProbeCache()
    planner = plan(debug_slowdown=(1, 2))
    for stage in (0, 1):
        cache.store(f"key {stage}", measured(stage, 0.001))
        planner.on_measured(measured(stage, 0.001, cache_key=f"key {stage}"))
    planner.choose_layers()
    planner.begin_epoch([])
    feed(planner, 1.0)
    assert cache.load("key 0") is not None
    planner.begin_epoch([])
    feed(planner, 5.0)
    assert [cache.load(f"key {stage}") for stage in (0, 1)] == [None, None]


@pytest.mark.parametrize("rebalance", [False, True])
def test_better_layers_are_logged_and_used_with_rebalance(
    rebalance: bool, caplog: pytest.LogCaptureFixture
) -> None:
    planner = plan(rebalance=rebalance, layers="even")
    planner.begin_epoch([])
    with caplog.at_level(logging.WARNING):
        better = feed(planner, 3.0)
    assert "layers 9,3 instead of 6,6 would be faster by 100 %" in caplog.text
    assert ("--rebalance" in caplog.text) == (not rebalance)
    assert (better is not None) == rebalance
    assert planner.bounds == [(0, 6), (6, 12)], "until they are prepared"
    if better is not None:
        assert list(better.layers) == [range(9), range(9, 12)]
        planner.change_shape(NodeShape([(0, 9), (9, 12)], [1, 1], ["local"] * 2))
        assert planner.bounds == [(0, 9), (9, 12)]


def test_equal_stages_are_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    planner = plan()
    planner.begin_epoch([])
    with caplog.at_level(logging.INFO):
        assert feed(planner, 1.0) is None
    assert caplog.text == ""


def test_one_stage_has_nothing_to_balance() -> None:
    planner = plan(1, rebalance=True)
    planner.begin_epoch([])
    assert planner.on_totals(0, 1000, 1.0, 500.0) is None


def test_devices_with_their_own_memory_get_no_more_than_fits() -> None:
    """7,200 bytes of weights and blocks on 12 layers; the first device has place for 9 of them."""
    planner = plan(rebalance=True, layers="even")
    loaded = [StageLoaded(0, 2000, 400, 3600), StageLoaded(1, 2000, 400, 3600)]
    planner.begin_epoch(loaded)
    better = feed(planner, 11.0)
    assert better is not None
    assert better.layers == (range(9), range(9, 12))


SHAPE = NodeShape([(0, 4), (4, 8), (8, 12)], [1, 1, 1], ["local", "b", "c"])


def plan_on_nodes(
    available_bytes: int | None, own_bytes: int | None = None, device: str = "auto"
) -> LayerPlanner:
    """A planner of three stages with 12 layers of 300 bytes and 64 tokens of 16 bytes a layer."""
    planner = plan(3, block_size=16, device=device)
    planner.set_nodes(SHAPE.nodes, {})
    planner.begin_epoch(
        [
            StageLoaded(stage, 1200, 16, own_bytes, host_available_bytes=available_bytes)
            for stage in range(3)
        ]
    )
    return planner


@pytest.mark.parametrize(
    ("available_bytes", "own_bytes", "fits"),
    # A stage with half of the layers: 1,800 bytes of weights, and 6 x 16 of keys and values.
    [(1000, None, True), (900, None, False), (None, 700, True), (None, 600, False)],
)
def test_layers_move_to_the_nodes_left_if_their_memory_suffices(
    available_bytes: int | None, own_bytes: int | None, fits: bool
) -> None:
    planner = plan_on_nodes(available_bytes, own_bytes)
    shape = planner.repartition(SHAPE, ["local", "c"])
    if not fits:
        assert shape is None
        return
    assert shape == NodeShape([(0, 6), (6, 12)], [1, 1], ["local", "c"])
    planner.change_shape(shape)
    assert planner.layers == [range(6), range(6, 12)]
    # With the other stages everything goes on: totals, and another loss.
    planner.begin_epoch([StageLoaded(0, 1800, 24), StageLoaded(1, 1800, 24)])
    assert planner.on_totals(1, 100, 1.0, 10.0) is None
    assert planner.repartition(shape, ["local"]) == NodeShape([(0, 12)], [1], ["local"])


@pytest.mark.parametrize(
    ("memory_bytes", "should_gain", "layers"),
    [
        (10**6, True, [(0, 3), (3, 6), (6, 9), (9, 12)]),
        # One layer of 316 bytes fits into the share of the memory that layers may take.
        (400, False, [(0, 3), (3, 7), (7, 11), (11, 12)]),
        (400, True, None),
        (300, False, None),
    ],
)
def test_a_machine_that_joins_gets_layers_if_its_memory_suffices(
    memory_bytes: int, should_gain: bool, layers: list[tuple[int, int]] | None
) -> None:
    planner = plan_on_nodes(10**6)
    planner.add_machine("d", machine(memory_bytes=memory_bytes))
    shape = planner.extend(SHAPE, ["d"], [1], should_gain)
    if layers is None:
        assert shape is None
    else:
        assert shape == NodeShape(layers, [1] * 4, [*SHAPE.nodes, "d"])
        planner.change_shape(shape)
        assert planner.bounds == layers
    assert plan(3).extend(SHAPE, ["d"], [1], should_gain) is None, "nothing is known yet"


def test_emulated_layers_are_not_in_the_memory_of_a_host_that_joins() -> None:
    planner = plan_on_nodes(None, 10**6, device="emulated:L20")
    planner.add_machine("d", machine(memory_bytes=1))
    shape = planner.extend(SHAPE, ["d"], [1], True)
    assert shape is not None
    assert shape.nodes[-1] == "d"


@pytest.mark.parametrize(
    ("memory_bytes", "layers", "reason"),
    [
        (10**6, [(0, 2), (2, 7), (7, 12)], ""),
        # Two layers of 316 bytes fit.
        (800, [(0, 5), (5, 10), (10, 12)], "do not fit into the memory"),
    ],
)
def test_configured_layers_are_kept_where_they_fit(
    memory_bytes: int,
    layers: list[tuple[int, int]],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A machine is lost for long, and returns."""
    planner = plan(3, block_size=16, layers=(2, 5, 5))
    planner.set_nodes(SHAPE.nodes, {})
    loaded = [StageLoaded(stage, 1200, 16, host_available_bytes=10**6) for stage in range(3)]
    planner.begin_epoch(loaded)
    left = planner.repartition(SHAPE, ["local", "b"])
    assert left is not None
    planner.change_shape(left)
    assert "--layers 2,5,5 is not kept: it is for 3 stages, and there are 2" in caplog.text
    caplog.clear()
    planner.begin_epoch(
        [StageLoaded(stage, 1800, 24, host_available_bytes=10**6) for stage in range(2)]
    )
    planner.add_machine("c", machine(memory_bytes=memory_bytes))
    shape = planner.extend(left, ["c"], [1], False)
    assert shape is not None
    assert shape.layers == layers
    planner.change_shape(shape)
    assert reason in caplog.text
    assert bool(reason) == bool(caplog.text)


def test_before_the_first_epoch_nobody_knows_what_fits() -> None:
    planner = plan(3)
    planner.set_nodes(SHAPE.nodes, {})
    assert planner.repartition(SHAPE, ["local", "c"]) is None


def test_measured_speeds_stay_with_the_stages_that_are_left() -> None:
    planner = plan(3, debug_slowdown=(1, 1, 2))
    planner.set_nodes(SHAPE.nodes, {})
    for stage in range(3):
        planner.on_measured(
            StageMeasured(stage, 0, [0.001 * (1 + (stage == 2))] * 12, 0.0, 0.0, [1] * 12, 0, 0)
        )
    planner.choose_layers()
    planner.begin_epoch([StageLoaded(stage, 1200, 16) for stage in range(3)])
    shape = planner.repartition(SHAPE, ["local", "c"])
    assert shape is not None
    assert shape.layers == [(0, 8), (8, 12)], "the slow stage is the one on c"
    planner.change_shape(shape)
    planner.begin_epoch([StageLoaded(0, 2400, 32), StageLoaded(1, 1200, 16)])
    # As fast as expected: nothing is proposed although the stages have different sizes.
    for step in range(1, 40):
        for stage in (0, 1):
            assert planner.on_totals(stage, 100 * step, 0.8 * step, 500.0 + step) is None


def test_the_nodes_of_stages_change_without_their_layers() -> None:
    planner = plan_on_nodes(1000)
    planner.change_shape(NodeShape(SHAPE.layers, SHAPE.degrees, ["local", "spare", "c"]))
    assert planner.bounds == SHAPE.layers
    reports = [(1000, 0), (100, 1), (1000, 2)]
    planner.begin_epoch(
        [StageLoaded(stage, 1200, 16, host_available_bytes=free) for free, stage in reports]
    )
    shape = NodeShape(SHAPE.layers, SHAPE.degrees, ["local", "spare", "c"])
    assert planner.repartition(shape, ["local", "spare"]) is None, "the spare has little memory"
    assert planner.repartition(shape, ["local", "c"]) is not None

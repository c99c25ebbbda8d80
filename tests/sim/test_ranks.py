"""Tensor parallelism in simulations: shards, collectives, cache, and `--tp` from its flag on."""

from dataclasses import replace
from math import ceil, hypot, log2
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.commands.simulate import main
from gllm.observability.step_log import StartEvent, read_step_log
from gllm.options.degrees import expand_degrees
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork
from gllm.sim.compare import compare_runs
from gllm.sim.costs.profile import build_profile, write_profile
from gllm.sim.costs.roofline import (
    DeviceEfficiency,
    RooflineCostModel,
    all_reduce_seconds,
    gather_seconds,
)
from gllm.sim.deployment import roofline_deployment, simulate, simulate_scheduler_requests
from gllm.sim.hardware.devices import DeviceSpec, NetworkLink
from gllm.sim.hardware.shapes import MODELS, ModelShape
from gllm.sim.hardware.stages import PipelineSpec, StageSpec
from gllm.sim.options import SimulationConfig
from gllm.sim.workloads.requests import make_workload
from tests.support.exit_status import exit_status
from tests.support.sim.requests import to_scheduler_requests

PEAK = DeviceEfficiency(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
TINY = ModelShape(layers=4, hidden=8, heads=4, kv_heads=2, mlp=16, vocabulary=10, head_dim=4)
SLOW = DeviceSpec(flops=1000.0, bandwidth=100.0, memory=1e6)
LINK = NetworkLink(50.0, 0.25)
FAST = NetworkLink(500.0, 0.125)


def decode(count: int, context: int) -> StageWork:
    return StageWork(0, count, (), count, count * context, count)


# Shards.


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_ranks_hold_the_model_together(model: str, ranks: int) -> None:
    """Weights divide, but for KV heads that several ranks have and rows that fill the last rank."""
    whole = MODELS[model]
    if whole.heads % ranks:
        with pytest.raises(ValueError, match=f"{whole.heads} heads, .*into {ranks} ranks.*--tp"):
            whole.shard(ranks)
        return
    shard = whole.shard(ranks)
    repeated = max(1, ranks // whole.kv_heads)
    assert shard.kv_heads * ranks == whole.kv_heads * repeated
    extra = 2 * whole.hidden * whole.head_dim * whole.kv_heads * (repeated - 1)
    if whole.latent:
        # Every rank compresses keys, values and queries, and has the whole cache.
        compressed = whole.latent.cached_elements + whole.latent.query_rank
        extra, repeated = (ranks - 1) * whole.hidden * compressed, ranks
    assert shard.layer_weights * ranks == whole.layer_weights + extra
    assert shard.expert_weights * ranks == whole.expert_weights
    assert shard.kv_bytes * ranks == whole.kv_bytes * repeated
    assert 0 <= shard.head_weights * ranks - whole.head_weights < whole.hidden * ranks
    assert (shard.layers, shard.hidden) == (whole.layers, whole.hidden)
    assert whole.shard(1) == whole


@pytest.mark.parametrize(
    "change", [{"heads": 6}, {"kv_heads": 3}, {"mlp": 18}], ids=["heads", "KV heads", "MLP"]
)
def test_sizes_that_do_not_divide_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="do not divide into 4 ranks"):
        replace(TINY, **change).shard(4)


def test_degrees_are_of_all_stages_or_of_each() -> None:
    assert expand_degrees((2,), 3) == [2, 2, 2]
    assert expand_degrees((2, 1, 4), 3) == [2, 1, 4]
    with pytest.raises(ValueError, match=r"tensor_parallel_size \(2, 1\) has to be one number"):
        expand_degrees((2, 1), 3)


# Collectives.


def test_collectives_by_hand() -> None:
    assert all_reduce_seconds(1000, 1, LINK) == gather_seconds(1000, 1, LINK) == 0
    # Two ranks swap the tensor; small ones of four take two steps, large ones six of a quarter.
    assert all_reduce_seconds(100, 2, LINK) == pytest.approx(0.25 + 2)
    assert all_reduce_seconds(1, 4, LINK) == pytest.approx(2 * (0.25 + 1 / 50))
    assert all_reduce_seconds(1000, 4, LINK) == pytest.approx(6 * (0.25 + 5))
    assert gather_seconds(100, 4, LINK) == pytest.approx(2 * 0.25 + 75 / 50)


@given(
    size=st.floats(1, 1e9),
    ranks=st.integers(2, 64),
    more=st.floats(1, 1e9),
    latency=st.floats(0, 1),
)
def test_no_sum_is_faster_than_its_bounds(
    size: float, ranks: int, more: float, latency: float
) -> None:
    """Each rank sends and receives all but its own share twice, or waits for all steps."""
    link = NetworkLink(1e6, latency)
    seconds = all_reduce_seconds(size, ranks, link)
    assert seconds >= 2 * (ranks - 1) / ranks * size / 1e6 * (1 - 1e-9)
    assert seconds >= size / 1e6
    assert seconds >= ceil(log2(ranks)) * latency * (1 - 1e-9)
    assert all_reduce_seconds(size + more, ranks, link) >= seconds


# Stages.


def tiny(*degrees: int, rank_link: NetworkLink = FAST) -> RooflineCostModel:
    first, last = degrees
    stages = StageSpec(3, SLOW, first, rank_link), StageSpec(1, SLOW, last, rank_link)
    return RooflineCostModel(PipelineSpec(TINY, stages, (LINK,)), PEAK)


def test_a_stage_of_two_ranks_by_hand() -> None:
    """Two decodes with ten tokens each: half of the heads, the MLP and the vocabulary."""
    work, cost = decode(2, 10), tiny(2, 2)
    weights = 8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 8
    matrices = hypot(2 * 2 * weights / 1000, 2 * weights / 100)
    attention = hypot(20 * 4 * 2 * 4 / 1000, 20 * 2 * 4 * 2 / 100)
    # Norms, additions, gate and up, RoPE of two heads and one key, one written key and value.
    elementwise = 2 * (2 * (10 * 8 + 3 * 8 + 2 * 3 * 4) + 2 * 2 * 4 * 2) / 100
    layer = matrices + attention + elementwise
    one_sum = 0.125 + 2 * 8 * 2 / 500
    # The first stage sums the embedding too; the last gathers half of float32 logits.
    first = 3 * layer + 7 * one_sum
    head = hypot(2 * 2 * 40 / 1000, 2 * 40 / 100) + 0.125 + 2 * 10 * 4 / 2 / 500
    assert cost.stage_seconds(0, work) == pytest.approx(first)
    assert cost.stage_seconds(1, work) == pytest.approx(layer + 2 * one_sum + head)
    assert cost.operator_seconds(0, work)["collectives"] == pytest.approx(7 * one_sum)
    # Activations between stages do not shrink with the ranks.
    assert cost.activation_transfer(0, work) == tiny(1, 1).activation_transfer(0, work)


def test_stages_may_have_different_degrees() -> None:
    work, single, double = decode(2, 10), tiny(1, 1), tiny(2, 2)
    mixed = tiny(2, 1)
    assert mixed.stage_seconds(0, work) == double.stage_seconds(0, work)
    assert mixed.stage_seconds(1, work) == single.stage_seconds(1, work)
    assert [single.operator_seconds(stage, work)["collectives"] for stage in (0, 1)] == [0, 0]
    slow = tiny(2, 2, rank_link=LINK).operator_seconds(0, work)["collectives"]
    assert slow == pytest.approx(7 * (0.25 + 2 * 8 * 2 / 50))


def deployment(**options: Any) -> Any:
    # Its micro-batches do not depend on step times, so that predicted ones are as measured.
    config = SchedulerConfig(policy="throttle-paper")
    return roofline_deployment("qwen2.5-32b", "L20", 2, 4096, scheduler=config, **options)


def test_more_ranks_leave_more_cache_and_take_less_time_where_links_are_fast() -> None:
    jobs = make_workload("fixed:200,20", 30, 100.0, "static", 0)
    one, fast, slow = (
        simulate(deployment(**options), jobs)
        for options in (
            {},
            {"degrees": (2,), "rank_link": "nvlink"},
            {"degrees": (2,), "rank_link": "network"},
        )
    )
    assert one.end_time() > fast.end_time()
    assert slow.end_time() > fast.end_time()
    starts = [one.start, fast.start]
    assert (starts[0].degrees, starts[1].degrees) == ([], [2, 2])
    assert starts[1].scheduler.num_blocks > 2 * starts[0].scheduler.num_blocks
    for options, message in (
        ({"degrees": (2, 1, 1)}, r"tensor_parallel_size \(2, 1, 1\) has to be one number"),
        ({"degrees": (3,)}, "do not divide into 3 ranks"),
        ({"rank_link": "rope"}, "link 'rope' is none of"),
    ):
        with pytest.raises(ValueError, match=message):
            deployment(**options)


# The flag.

SMALL = ["--model", "qwen2.5-14b", "--device", "A100-40G", "--requests", "20", "--pp", "2"]
TABLE = ["--model", SimulationConfig.model, "--device", SimulationConfig.device]
"""The defaults, as --profile needs them."""


def test_the_flag_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    for flags, degrees in (
        (["--tp", "2,1", "--tp-link", "nvlink"], [2, 1]),
        (["-tp", "2"], [2, 2]),
        (["--tensor-parallel-size", "1"], []),
        ([], []),
    ):
        assert main([*SMALL, *flags, "--step-log", str(log)]) == 0
        start = next(iter(read_step_log(log)))
        assert isinstance(start, StartEvent)
        assert (start.layers, start.degrees) == ([24, 24], degrees)
    assert SimulationConfig(tensor_parallel_size=2).tensor_parallel_size == (2,)  # type: ignore[arg-type]


def test_a_profile_knows_its_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = deployment(degrees=(2, 1))
    jobs = make_workload("uniform:1,900,1,90", 60, 4.0)
    run, events = simulate_scheduler_requests(made, to_scheduler_requests(jobs))
    profile = build_profile([run], {})
    assert profile.degrees == [2, 1]
    path = tmp_path / "profile.json"
    write_profile(profile, path)
    flags = ["--profile", str(path), "--workload", "fixed:100,20", "--requests", "5"]
    log = tmp_path / "log.jsonl"
    for right in ([], ["--tp", "2,1"]):
        assert main([*flags, *right, "--step-log", str(log)]) == 0
        start = next(iter(read_step_log(log)))
        assert isinstance(start, StartEvent)
        assert start.degrees == [2, 1]
    capsys.readouterr()
    assert main([*flags, "--tp", "2"]) == 2
    assert "was measured at --tp 2,1" in capsys.readouterr().err
    assert compare_runs(events, profile).predicted.start.degrees == [2, 1]
    other = simulate(deployment(), make_workload("uniform:1,900,1,90", 60, 4.0))
    with pytest.raises(ValueError, match="measure the profile at the same --tp"):
        compare_runs(events, build_profile([other], {}))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", "0"], "--tp"),
        (["--tp", "two"], "--tp"),
        (["--tp", "2,1,1"], "tensor_parallel_size (2, 1, 1) has to be one number"),
        (["--tp", "3"], "do not divide into 3 ranks"),
        (["--tp-link", "rope"], "tensor_parallel_link 'rope' is none of pcie"),
        ([*TABLE, "--profile", "vidur", "--tp", "4"], "of --tp 2"),
    ],
)
def test_invalid_flags_are_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(main, [*SMALL, *flags]) == 2
    assert words in capsys.readouterr().err

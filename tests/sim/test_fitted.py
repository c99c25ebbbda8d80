"""Fits of profiles: other cuts into stages, and the range in which they hold."""

import os
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostRangeError
from gllm.sim.costs.fitted import FittedCostModel
from gllm.sim.costs.profile import (
    CostProfile,
    HostSamples,
    RequestTransferSample,
    SpanSample,
    StepSample,
    read_profile,
    write_profile,
)
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.profiled import ProfileOptions, profiled_deployment

LAYERS = 8


def prefill(start: int, tokens: int) -> StageWork:
    return StageWork(0, tokens, ((start, tokens),), 0, 0, 1)


def decode(count: int, context: int) -> StageWork:
    return StageWork(0, count, (), count, count * context, count)


WORKS = [
    *(decode(count, context) for count in (1, 2, 4, 8, 16, 32) for context in (10, 300, 1000)),
    *(prefill(0, tokens) for tokens in (8, 16, 32, 64, 128, 256, 512, 1000)),
    StageWork(0, 110, ((0, 40), (300, 60)), 10, 5000, 11),
]
HOST, LAYER, ROW, PAIR, CONTEXT, EMBED, HEAD, LOGITS = (
    4e-4,
    2e-4,
    5e-6,
    4e-9,
    8e-8,
    1e-6,
    1e-3,
    2e-5,
)


def seconds(layers: int, is_first: bool, is_last: bool, work: StageWork) -> float:
    """Return the time of a made-up machine."""
    layer = LAYER + ROW * work.num_tokens
    layer += PAIR * work.num_query_key_pairs + CONTEXT * work.num_decode_context_tokens
    head = HEAD + LOGITS * work.num_sampled_rows
    return HOST + layers * layer + is_first * EMBED * work.num_tokens + is_last * head


def profile(cut: list[int], slowdown: float = 1.0) -> CostProfile:
    """Return what a machine shows at one cut; the pipeline is slower than parts of the model."""
    last = len(cut) - 1
    steps = [
        StepSample.of(
            work,
            [
                slowdown * seconds(layers, stage == 0, stage == last, work)
                for stage, layers in enumerate(cut)
            ],
        )
        for work in WORKS
    ]
    ends = [(True, True), (True, False), (False, True), (False, False)]
    spans = [
        SpanSample(layers, *end, StepSample.of(work, [seconds(layers, *end, work)]))
        for end in ends
        for layers in (1, 3, LAYERS)
        for work in WORKS
    ]
    config = SchedulerConfig().resolve(len(cut), 1000, 1024)
    return CostProfile("made-up", cut, config, {}, steps, [], [], [], [], spans=spans,
                       activation_bytes=1000)  # fmt: skip


STEP: list[Any] = [1, 0, 0, 1, 9, 1, 9.0, [0.1]]
"""A step of one token on one stage, as in a file."""
SHORT_HOST: dict[str, Any] = {
    "steps": [[*STEP[:-1], [0.1, 0.1]]],
    "requests": [[0, True, 0.1]],
    **dict.fromkeys(("links", "plans", "sampling", "returns", "deliveries"), ()),
}
"""Host of a pipeline with a stage more than the profile."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": []}, r"length >= 1 - at `\$\.layers`"),
        ({"layers": [LAYERS, 0]}, r">= 1 - at `\$\.layers"),
        ({"layers": [4, 4]}, "layers has 2 stages, but stages in steps 1: measure it again"),
        ({"degrees": [1, 1]}, "layers has 1 stages, but degrees 2"),
        ({"degrees": [-1]}, r"at `\$\.degrees"),
        ({"steps": [[*STEP[:-1], []]]}, r"at `\$\.steps"),
        ({"steps": [[*STEP[:-1], [-0.1]]]}, r"at `\$\.steps"),
        ({"steps": [[-1, *STEP[1:]]]}, r"at `\$\.steps"),
        ({"steps": [[*STEP, [1, 2]]]}, "but arrivals in steps 2"),
        ({"steps": [["1", *STEP[1:]]]}, r"at `\$\.steps"),
        ({"spans": [[-1, True, True, STEP]]}, r"at `\$\.spans"),
        ({"activation_bytes": -8}, r"at `\$\.activation_bytes"),
        ({"host": {"steps": []}}, r"at `\$\.host\.steps"),
        ({"host": SHORT_HOST}, "but stages in steps of host 2"),
    ],
)
def test_a_damaged_profile_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    whole = profile([LAYERS])
    write_profile(whole, path)
    assert read_profile(path) == whole
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(whole) | change))
    with pytest.raises(ValueError, match=rf"profile\.json is not a profile.*{message}"):
        read_profile(path)
    path.write_bytes(msgspec.json.encode(whole)[:-9])
    with pytest.raises(ValueError, match=r"profile\.json is not a profile.*truncated"):
        read_profile(path)


@pytest.mark.parametrize("measured", [[LAYERS], [5, 3]])
@pytest.mark.parametrize("cut", [[LAYERS], [4, 4], [1, 7], [2, 2, 2, 2]])
def test_one_profile_prices_every_cut(measured: list[int], cut: list[int]) -> None:
    cost = FittedCostModel(profile(measured), cut)
    for work in WORKS:
        for stage, layers in enumerate(cut):
            expected = seconds(layers, stage == 0, stage == len(cut) - 1, work)
            assert cost.stage_seconds(stage, work) == pytest.approx(expected, rel=0.04)


def test_arrivals_prolong_the_first_stage_in_every_cut() -> None:
    measured = profile([3, 5])
    steps = [
        msgspec.structs.replace(
            step, stages=[step.stages[0] + 2e-3 * count, *step.stages[1:]], arrivals=[count, 0]
        )
        for count in range(3)
        for step in measured.steps
    ]
    measured = msgspec.structs.replace(measured, steps=steps)
    for cut in ([3, 5], [2, 2, 4], [8]):
        cost = FittedCostModel(measured, cut)
        found = [cost.arrival_seconds(stage) for stage in range(len(cut))]
        assert found == pytest.approx([2e-3] + [0.0] * (len(cut) - 1), rel=0.02, abs=1e-5)


def test_a_slow_pipeline_is_slow_in_every_cut() -> None:
    """Parts are measured outside of the pipeline: they give shares, the pipeline the level."""
    fast, slow = (FittedCostModel(profile([LAYERS], factor), [4, 4]) for factor in (1, 1.5))
    for work in WORKS:
        ratio = slow.stage_seconds(1, work) / fast.stage_seconds(1, work)
        assert ratio == pytest.approx(1.5, rel=0.02)


def test_time_between_steps_of_one_stage_is_part_of_several() -> None:
    """It is what a step waits beside the sampler's own time."""
    single = profile([LAYERS])
    waits = msgspec.structs.replace(
        single,
        sampling=[(4, 9e-4), (4, 1e-3), (4, 1.1e-3), (4, 5e-2)],
        samplers=[(rows, 1e-4 + 1e-5 * rows) for rows in (1, 9)],
    )
    rows = median(step.samples for step in single.steps if step.decodes)
    work = decode(4, 300)
    for cut, expected in (([4, 4], 1e-3 - 1e-4 - 1e-5 * rows), ([LAYERS], 0.0)):
        plain, cost = (FittedCostModel(each, cut) for each in (single, waits))
        added = cost.stage_seconds(0, work) - plain.stage_seconds(0, work)
        assert added == pytest.approx(expected, rel=0.02)


STRETCH, HOST_STEP, HOST_TOKEN, HOST_ARRIVAL = 1.1, 3e-4, 4e-5, 2e-3


def add_host(measured: CostProfile) -> CostProfile:
    """Return a profile whose host stretches steps and takes time per step, token and arrival."""
    steps = [
        msgspec.structs.replace(
            step,
            stages=[
                STRETCH * alone + HOST_STEP + HOST_TOKEN * step.samples + HOST_ARRIVAL * count
                for alone in step.stages
            ],
            arrivals=[count] * len(step.stages),
        )
        for count in range(2)
        for step in measured.steps
    ]
    ways = [RequestTransferSample(0, False, 2e-3), RequestTransferSample(1, False, 3e-3)]
    ways += [RequestTransferSample(0, True, 4e-3), RequestTransferSample(1, True, 5e-3)]
    deliveries = [(1, 6e-4), (3, 8e-4)]
    host = HostSamples(steps, [(1, 3e-3)], [(1, 4e-3)], [], [(1, 5e-3)], ways, deliveries)
    return msgspec.structs.replace(measured, host=host)


@pytest.mark.parametrize("measured", [[LAYERS], [5, 3]])
@pytest.mark.parametrize("cut", [[LAYERS], [4, 4]])
def test_a_server_under_load_is_slower_than_its_engine(measured: list[int], cut: list[int]) -> None:
    served = add_host(profile(measured))
    cost, alone = (FittedCostModel(served, cut, includes_host=each) for each in (True, False))
    for work in WORKS:
        for stage in range(len(cut)):
            expected = STRETCH * alone.stage_seconds(stage, work)
            expected += HOST_STEP + HOST_TOKEN * work.num_sampled_rows
            assert cost.stage_seconds(stage, work) == pytest.approx(expected, rel=0.03)
    assert cost.arrival_seconds(0) == pytest.approx(HOST_ARRIVAL, rel=0.05)
    idle, busy = cost.request_transfer(False), cost.request_transfer(True)
    assert (*idle[:2], *busy[:2]) == pytest.approx((1e-3, 1e-3, 1e-3, 3e-3), rel=0.02)
    assert [cost.delivery_seconds(count) for count in (1, 5)] == pytest.approx([6e-4, 1e-3])
    work = decode(1, 1)
    times = cost.plan_seconds(work), cost.return_seconds(work)
    assert times == pytest.approx((4e-3, 5e-3), rel=0.02)
    assert cost.activation_transfer(0, work).total_seconds == pytest.approx(3e-3, rel=0.02)
    assert alone.request_transfer(True).is_free
    without = [alone.delivery_seconds(1), alone.plan_seconds(work), alone.arrival_seconds(0)]
    assert without == [0.0, 0.0, 0.0]


def test_the_host_of_a_profile_is_read_and_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(add_host(profile([LAYERS])), path)
    assert read_profile(path) == add_host(profile([LAYERS]))
    options = ProfileOptions(SchedulerConfig(), longest=32)
    costs = [
        profiled_deployment(str(path), replace(options, includes_host=each)).cost
        for each in (True, False)
    ]
    assert [cost.request_transfer(is_busy=False).is_free for cost in costs] == [False, True]


def test_a_link_that_was_not_measured_is_a_given_one() -> None:
    cost = FittedCostModel(profile([LAYERS]), [4, 4], NetworkLink(1e6, 0.25))
    assert cost.activation_transfer(0, prefill(0, 500)) == (0.5, 0.25, 500_000)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (prefill(0, 1001), "tokens is 1001, but was measured from 1 to 1000"),
        (decode(33, 10), "decodes is 33, but was measured from 1 to 32"),
        (decode(2, 1001), "context is 1001, but was measured from 0 to 1000"),
        (prefill(7900, 100), "context is 8000"),
        (StageWork(0, 9, ((0, 3),) * 3, 0, 0, 3), "prefill chunks is 3"),
    ],
)
@pytest.mark.parametrize("cut", [[LAYERS], [4, 4]])
def test_work_above_the_range_is_refused(cut: list[int], work: StageWork, message: str) -> None:
    with pytest.raises(CostRangeError, match=f"the profile: {message}"):
        FittedCostModel(profile([LAYERS]), cut).stage_seconds(0, work)


def test_work_below_the_range_costs_the_least_and_is_counted() -> None:
    steps = profile([LAYERS])
    steps.steps[:] = [step for step in steps.steps if step.tokens >= 8]
    cost = FittedCostModel(steps)
    assert list(cost.ranges["tokens"]) == [8, 1000]
    least = cost.stage_seconds(0, decode(8, 3))
    assert cost.stage_seconds(0, decode(2, 12)) == pytest.approx(least, rel=1e-3)
    assert cost.num_below_range == {"tokens": 1, "decodes": 1}


def test_layers_of_another_number_of_stages_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile([LAYERS]), path)
    options = ProfileOptions(SchedulerConfig(), longest=32, stages=2)
    assert profiled_deployment(str(path), options).layers == [LAYERS // 2, LAYERS // 2]
    with pytest.raises(ValueError, match="--layers names 3 stages, but --pp is 2"):
        profiled_deployment(str(path), replace(options, layers=(1, 2, LAYERS - 3)))


def test_another_cut_needs_parts_of_the_model() -> None:
    plain = profile([LAYERS])
    plain.spans.clear()
    with pytest.raises(ValueError, match="measure it again with `gllm profile`"):
        FittedCostModel(plain, [4, 4])
    for layers in ((4, 3), (8, 0), ()):
        with pytest.raises(ValueError, match="have to add up to the model's 8"):
            FittedCostModel(profile([LAYERS]), layers)


def test_links_of_a_profile_are_known_and_equal(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile([LAYERS]), path)
    options = ProfileOptions(SchedulerConfig(), longest=32, stages=4)
    for link, message in (
        ("pcie,rope,pcie", "link 'rope' is none of pcie"),
        ("pcie,network,pcie", "equal links between stages: name one"),
    ):
        with pytest.raises(ValueError, match=message):
            profiled_deployment(str(path), replace(options, link=link))
    write_profile(msgspec.structs.replace(profile([4, 4]), links=[(1, 1e-3)]), path)
    measured = profiled_deployment(str(path), replace(options, stages=2, link="pcie,network"))
    assert measured.cost.activation_transfer(0, decode(1, 1)).num_bytes == 0


def test_a_profile_is_fitted_again_when_its_file_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    options = ProfileOptions(SchedulerConfig(), longest=32)
    work = decode(4, 100)

    def deployed(slowdown: float, modified: int) -> FittedCostModel:
        write_profile(profile([LAYERS], slowdown), path)
        os.utime(path, ns=(modified, modified))
        cost = profiled_deployment(str(path), options).cost
        assert isinstance(cost, FittedCostModel)
        return cost

    first, same = deployed(1, 1), deployed(1, 1)
    assert same.stage_seconds(0, work) == first.stage_seconds(0, work)
    first.stage_seconds(0, StageWork(0, 0, (), 0, 0, 0))
    assert first.num_below_range
    assert not same.num_below_range, "each deployment counts for itself"
    slow = deployed(2, 2).stage_seconds(0, work)
    assert slow == pytest.approx(2 * first.stage_seconds(0, work), rel=0.02)

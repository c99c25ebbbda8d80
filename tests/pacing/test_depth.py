"""Depth of a pipeline: the formula, its optimum by brute force, and hysteresis."""

import math
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.pacing.depth import (
    CHANGE_INTERVAL_SECONDS,
    MIN_GAIN,
    DepthController,
    LinkSeconds,
    Pace,
    PipelineSeconds,
    StageSeconds,
    cap_prefill,
    choose_depth,
    solve_depth,
)
from tests.support.examples import num_examples
from tests.support.scheduler.linear_pipeline import (
    MAX_DEPTH,
    control,
    make_case,
    measure_throughput,
)

NUM_CASES, NUM_QUICK_CASES = 30, 5
"""Pipelines that are compared with the best depth of all; those that `make test` compares."""

seconds = st.floats(1e-4, 0.5)


@st.composite
def pipelines(draw: st.DrawFn) -> PipelineSeconds:
    num_stages = draw(st.integers(1, 6))
    stages = [
        StageSeconds(draw(seconds), draw(seconds) / 100, draw(seconds) / 1000)
        for _ in range(num_stages)
    ]
    links = [
        LinkSeconds(draw(st.just(0.0) | seconds), draw(st.just(0.0) | seconds) / 10)
        for _ in stages[1:]
    ]
    latencies = [0.0, *(draw(st.just(0.0) | seconds) for _ in links)]
    return PipelineSeconds(stages, links, latencies, draw(st.just(0.0) | seconds))


def equal_stages(
    count: int, latency: float = 0.0, base: float = 0.01, per_token: float = 0.0
) -> PipelineSeconds:
    links = [LinkSeconds(latency, per_token)] * (count - 1)
    return PipelineSeconds(
        [StageSeconds(base)] * count, links, [0.0, *[latency] * (count - 1)], latency
    )


def test_without_latency_the_depth_is_the_number_of_stages() -> None:
    for count in range(1, 9):
        assert choose_depth(equal_stages(count), 64, 64) == count


def test_three_stages_of_11_ms_and_30_ms_of_delay_need_12_micro_batches() -> None:
    """Two links and the way back: (3 * 11 + 3 * 30) / 11 = 11.2, where 2 N would be 6."""
    times = equal_stages(3, latency=0.030, base=0.011)
    assert solve_depth(times, 200, 64) == 12
    # Eleven keep the slowest resource busy for all but 2 % of the time.
    assert choose_depth(times, 200, 64) == 11


def test_a_slow_link_is_the_slowest_resource() -> None:
    """n tokens keep each link for n ms, a stage for 10 ms: the links decide from n = 10 on."""
    times = equal_stages(3, per_token=0.001)
    assert times.slowest_seconds(5) == pytest.approx(0.010)
    assert times.slowest_seconds(40) == pytest.approx(0.040)
    # 2 links of 40 ms and 3 stages of 10 ms: 110 / 40.
    assert solve_depth(times, 120, 64) == 3


def test_ways_to_and_from_the_driver_count() -> None:
    stages, links = [StageSeconds(0.01)] * 2, [LinkSeconds(0.0, 0.0)]

    def cycle_seconds(plan_latency: float, return_latency: float) -> float:
        times = PipelineSeconds(stages, links, [0.0, plan_latency], return_latency)
        return times.cycle_seconds(1)

    assert cycle_seconds(0.0, 0.0) == pytest.approx(0.020)
    assert cycle_seconds(0.0, 0.05) == pytest.approx(0.070)
    # A plan travels beside the activations, which need 10 ms to get there.
    assert cycle_seconds(0.008, 0.0) == pytest.approx(0.020)
    assert cycle_seconds(0.050, 0.0) == pytest.approx(0.060)


@given(pipelines(), st.integers(1, 300), st.integers(1, 64))
@settings(max_examples=num_examples(30, 1000))
def test_the_solution_is_the_formula(times: PipelineSeconds, decoding: int, most: int) -> None:
    """B* is the ceiling of cycle / slowest at its own n, and the smallest such number."""
    depth = solve_depth(times, decoding, most)

    def formula(depth: int) -> float:
        num_decodes = max(1.0, decoding / depth)
        cycle = times.cycle_seconds(math.ceil(num_decodes))
        return cycle / times.slowest_seconds(num_decodes)

    assert 1 <= depth <= most
    if depth < most:
        assert depth >= formula(depth)
    assert all(smaller < formula(smaller) for smaller in range(1, depth))


@given(pipelines(), st.floats(0, 300), st.integers(1, 64))
@settings(max_examples=num_examples(30, 1000))
def test_no_depth_is_predicted_to_be_better(
    times: PipelineSeconds, decoding: float, most: int
) -> None:
    depth = choose_depth(times, decoding, most)
    assert 1 <= depth <= solve_depth(times, decoding, most)
    if decoding > 0:
        best = min(times.round_seconds(decoding, other) for other in range(1, most + 1))
        assert times.round_seconds(decoding, depth) <= 1.01 * best * (1 + 1e-9)


@given(pipelines(), st.integers(1, 256), st.integers(1, 4096))
@settings(max_examples=num_examples(30, 1000))
def test_the_prefill_cap_is_what_a_link_carries_in_a_stages_time(
    times: PipelineSeconds, fewest: int, more: int
) -> None:
    most = fewest + more
    cap = cap_prefill(times, fewest, most)
    assert fewest <= cap <= most

    def exceeds(tokens: int) -> bool:
        stage = max(
            each.base_seconds + tokens * each.seconds_per_prefill_token for each in times.stages
        )
        link = max((each.seconds_per_token for each in times.links), default=0.0)
        return tokens * link > stage * (1 + 1e-9)

    if cap > fewest:
        assert not exceeds(cap)
    if cap < most:
        assert exceeds(cap + 1)


@pytest.mark.parametrize(
    "seed",
    [
        *range(NUM_QUICK_CASES),
        *(pytest.param(i, marks=pytest.mark.full) for i in range(NUM_QUICK_CASES, NUM_CASES)),
    ],
)
def test_the_controller_finds_the_best_depth(seed: int) -> None:
    """Within 5 % of the throughput of the best of all depths, each simulated."""
    case = make_case(seed)
    depth, changes = control(case, until=25.0)
    assert all(b - a >= CHANGE_INTERVAL_SECONDS for a, b in pairwise(changes))
    throughput = measure_throughput(case, depth)
    # With more micro-batches than sequences some stay empty: those depths are equal.
    most = min(MAX_DEPTH, case.num_decoding)
    best = max(measure_throughput(case, other) for other in range(1, most + 1) if other != depth)
    assert throughput >= 0.95 * best, (depth, case)


@given(pipelines(), st.integers(1, 200), st.integers(0, 2**32))
@settings(max_examples=num_examples(25, 1000))
def test_noise_changes_the_depth_at_most_once_per_interval(
    times: PipelineSeconds, decoding: int, seed: int
) -> None:
    """Bandwidths of +-10 %: S17."""
    random = Random(seed)
    controller = DepthController(Pace(len(times.stages), 2048), 64, 32)
    changes = []
    for tick in range(600):
        now = 0.2 * tick
        links = [
            LinkSeconds(link.latency_seconds, link.seconds_per_token / random.uniform(0.9, 1.1))
            for link in times.links
        ]
        noisy = PipelineSeconds(times.stages, links, times.plan_latencies, times.return_latency)
        before = controller.pace
        if controller.update(noisy, decoding, now) is not None:
            assert controller.pace != before
            changes.append(now)
        else:
            assert controller.pace == before
    assert all(later - earlier >= CHANGE_INTERVAL_SECONDS for earlier, later in pairwise(changes))


@given(pipelines(), st.integers(1, 200), st.integers(1, 64))
@settings(max_examples=num_examples(30, 1000))
def test_steady_times_change_the_pace_once(
    times: PipelineSeconds, decoding: int, depth: int
) -> None:
    controller = DepthController(Pace(depth, 2048), 64, 32)
    changes = [controller.update(times, decoding, float(now)) for now in range(0, 60, 6)]
    assert all(change is None for change in changes[1:])
    pace = controller.pace
    chosen = choose_depth(times, decoding, 64)
    gain = times.round_seconds(decoding, pace.depth) / times.round_seconds(decoding, chosen)
    assert gain <= 1 + MIN_GAIN + 1e-9


def test_a_gain_below_the_threshold_changes_nothing() -> None:
    times = equal_stages(4, latency=0.0001)
    better = choose_depth(times, 64, 64)
    present = times.round_seconds(64, better + 1)
    assert present / times.round_seconds(64, better) > 1 + MIN_GAIN
    # One of many micro-batches more or less is not worth a change.
    times = equal_stages(4, latency=0.1)
    best = choose_depth(times, 400, 64)
    assert best > 40
    controller = DepthController(Pace(best - 1, 2048), 64, 32)
    assert controller.update(times, 400, 0.0) is None
    controller = DepthController(Pace(best - 4, 2048), 64, 32)
    assert controller.update(times, 400, 0.0) == Pace(best, 2048)


def test_the_controller_follows_its_sequences() -> None:
    """With few sequences, and with none, the depth serves prefill: no stage waits for long."""
    times = equal_stages(3, latency=0.030, base=0.011)
    controller = DepthController(Pace(3, 2048), 64, 32)
    assert controller.update(times, 0, 0.0) == Pace(12, 2048)
    assert controller.update(times, 1, 10.0) is None
    assert math.isclose(times.round_seconds(1, 12), times.round_seconds(1, 3))


def test_prefill_keeps_all_stages_busy() -> None:
    """One stage is 15 % slower than the others: three micro-batches suffice for decodes alone."""
    stages = [*[StageSeconds(0.010, 1e-4, 8e-5)] * 3, StageSeconds(0.0115, 1e-4, 8e-5)]
    times = PipelineSeconds(stages, [LinkSeconds(5e-5, 4e-6)] * 3, [0.0] * 4, 0.0005)
    assert choose_depth(times, 64, 16) == 3
    mixed = times._replace(prefill_tokens=200)
    assert choose_depth(mixed, 64, 16) == 4
    # An idle stage would compute prefill: a pipeline that is full has the best throughput.
    assert mixed.seconds_per_token(64, 4) < 0.85 * mixed.seconds_per_token(64, 3)
    assert math.isclose(times.seconds_per_token(64, 3), times.round_seconds(64, 3) / 64)


def test_prefill_counts_on_links() -> None:
    """100 tokens of prefill keep a link busy for longer than a stage: it is the slowest."""
    times = equal_stages(3, per_token=0.001)._replace(prefill_tokens=100)
    assert times.slowest_seconds(5) == pytest.approx(0.105)
    # 2 links of about 125 ms and 3 stages of 10 ms.
    assert solve_depth(times, 60, 64) == 3
    assert times.cycle_seconds(5) == pytest.approx(3 * 0.010 + 2 * 0.105)

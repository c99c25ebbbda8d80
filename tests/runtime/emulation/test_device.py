"""The timeline of an emulated device: when its steps begin and end."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.runtime.emulation.device import MAX_CLOCK_SECONDS, EmulatedDevice, SenderClock
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import ConstantCostModel, CostModel, TransferCost

STAGE = 2
LATENCY = 0.003


class TokensCost(CostModel):
    """Times that grow with the tokens; the link into each stage is another one."""

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        return 0.001 * (stage + 1) * work.num_tokens

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        return TransferCost(0.0005 * (stage + 1) * work.num_tokens, LATENCY)

    def return_transfer(self, work: StageWork) -> TransferCost:
        return TransferCost(0.0001 * work.num_sampled_rows, LATENCY)


def work_of(num_tokens: int) -> StageWork:
    return StageWork(0, num_tokens, (), num_tokens, num_tokens, num_tokens)


seconds = st.floats(0.0, 0.2)
steps = st.lists(
    st.tuples(st.integers(1, 100), seconds, seconds, seconds, st.booleans()),
    min_size=1,
    max_size=20,
)
"""Tokens; seconds from one plan to the next, until the step before has sent, and until the host has
the activations; whether these crossed a real link."""


@given(steps, st.sampled_from([1.0, 0.5, 7.0]))
def test_steps_follow_each_other_and_wait_for_plan_and_activations(
    steps: list[tuple[int, float, float, float, bool]], speed: float
) -> None:
    device, cost = EmulatedDevice(TokensCost(), STAGE, speed), TokensCost()
    planned_at = 1000.0
    free_at = link_free_at = -math.inf
    busy = predicted = 0.0
    for tokens, gap, sent_after, received_after, is_remote in steps:
        work = work_of(tokens)
        planned_at += gap
        sent_at = planned_at + sent_after
        now = sent_at + received_after
        arrived = device.receive(sent_at, now, work, is_remote)
        if is_remote:
            assert arrived == now
        else:
            transfer = cost.activation_transfer(STAGE - 1, work)
            expected = max(sent_at, link_free_at) + transfer.occupancy_seconds / speed
            assert arrived - transfer.propagation_seconds / speed == pytest.approx(
                expected, abs=1e-9
            )
            link_free_at = expected
        begin, end = device.run(work, max(planned_at, arrived))
        assert begin >= max(planned_at, arrived, free_at)
        # It does not idle either.
        assert begin in (planned_at, arrived, free_at)
        busy += end - begin
        predicted += cost.stage_seconds(STAGE, work) / speed
        free_at = end
    assert busy == pytest.approx(predicted, abs=1e-9)


@pytest.mark.parametrize(
    "stamp",
    [
        math.nan,
        math.inf,
        -math.inf,
        0.0,
        1e300,
        1000.0 + 1.01 * MAX_CLOCK_SECONDS,
        1000.0 - 1.01 * MAX_CLOCK_SECONDS,
    ],
)
def test_a_stamp_of_another_clock_is_not_used(stamp: float) -> None:
    device = EmulatedDevice(ConstantCostModel(stage=0.01, link=0.02), STAGE)
    assert device.receive(stamp, 1000.0, work_of(1), is_remote=False) == 1000.0
    # Nor has it occupied the link.
    assert device.receive(1000.0, 1000.5, work_of(1), is_remote=False) == pytest.approx(
        1000.02, abs=1e-9
    )


@pytest.mark.parametrize("difference", [-5e4, -0.4, 0.0, 0.3, 7e5])
def test_a_link_between_machines_takes_its_time_whatever_their_clocks_show(
    difference: float,
) -> None:
    """The first header travels for a millisecond, later ones longer or wait for the step before."""
    cost = ConstantCostModel(stage=0.01, link=0.02)
    device = EmulatedDevice(cost, STAGE, sender_clock=SenderClock())
    arrivals = [
        device.receive(sent_at + difference, sent_at + travel, work_of(1), is_remote=False)
        for sent_at, travel in ((1000.0, 0.001), (1001.0, 0.004), (1002.0, 0.9), (1003.0, 0.001))
    ]
    assert arrivals == pytest.approx([1000.021, 1001.021, 1002.021, 1003.021], abs=5e-4)


def test_the_clock_of_a_sender_drifts_and_jumps() -> None:
    clock = SenderClock()
    assert clock.to_own(50.0, 1000.0) == 1000.0
    # It is slow by 50 ppm, and no message says so at once.
    assert clock.to_own(3649.82, 4600.0) == pytest.approx(4600.0)
    assert clock.to_own(3650.0, 4600.5) == pytest.approx(4600.18)
    # The machine was suspended.
    assert clock.to_own(3700.0, 5000.0) == 5000.0
    assert clock.to_own(3701.0, 5001.5) == pytest.approx(5001.0, abs=1e-3)
    assert clock.to_own(math.nan, 5002.0) == 5002.0
    assert clock.to_own(3702.0, 5002.1) == pytest.approx(5002.0, abs=1e-3)


def test_a_step_is_ready_before_the_host_has_seen_it() -> None:
    """The host's lateness is hidden, as behind the queue of a GPU."""
    device = EmulatedDevice(ConstantCostModel(stage=0.01, link=0.002), STAGE)
    arrived = device.receive(5.0, 5.9, work_of(1), is_remote=False)
    assert device.run(work_of(1), arrived) == pytest.approx((5.002, 5.012), abs=1e-9)


def test_speed_divides_all_times() -> None:
    cost = TokensCost()
    ends = []
    for speed in (1.0, 4.0):
        device, now, end = EmulatedDevice(cost, STAGE, speed), 100.0, 100.0
        for tokens in (10, 3, 50):
            arrived = device.receive(now, now, work_of(tokens), is_remote=False)
            _, end = device.run(work_of(tokens), arrived)
        ends.append(end - now)
    assert ends[0] == pytest.approx(4 * ends[1])


def test_results_reach_the_driver_one_after_another() -> None:
    for speed in (1.0, 4.0):
        device, end = EmulatedDevice(TokensCost(), STAGE, speed), 100.0
        first, second = (device.returned_at(end, work_of(tokens)) for tokens in (50, 10))
        assert first == pytest.approx(end + (0.005 + LATENCY) / speed)
        assert second == pytest.approx(end + (0.006 + LATENCY) / speed)
        assert device.returned_at(end + 9, work_of(0)) == pytest.approx(end + 9 + LATENCY / speed)

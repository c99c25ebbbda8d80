"""Scaling in the router: what it wants, who leads, and requests that wait for the first engine."""

import time
from typing import Any

import msgspec
import pytest

from gllm.config.router import RouterConfig
from gllm.engine.interface import EngineUnavailableError
from gllm.messages.fleet import DrainEngine, EngineReport
from gllm.routing.scaling.engine_rate import RecentLengths, sustained_rate
from gllm.routing.scaling.scale_config import ScaleConfig
from gllm.routing.state import EngineSnapshot
from gllm.scheduler.plan import SchedulerStats
from gllm.scheduler.step_cost import StepCostCoefficients
from tests.router.test_fleet import Rig, read
from tests.support.routing.scripted_links import ANNOUNCE, ScriptedLink
from tests.support.routing.snapshots import engine

COSTS = StepCostCoefficients(step=0.01, token=1e-4)
CONDITIONS = ScaleConfig("0:3", scale_idle_seconds=10.0, scale_startup_seconds=5.0)


class ScaledRig(Rig):
    """A fleet that scales, on a clock of the test."""

    def __init__(self, conditions: ScaleConfig = CONDITIONS, **options: Any) -> None:
        self.now = time.monotonic()
        super().__init__(scale_conditions=conditions, clock=lambda: self.now, **options)

    def arrive(self, count: int = 1) -> Any:
        """Let requests arrive as the frontend does."""
        if not self.fleet.accepts_requests:
            self.fleet.check_ready()
        self.fleet.check_admission([[1, 2, 3]] * count, 8, 0, "", None)
        return [self.submit() for _ in range(count)]

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.fleet.scaling.on_tick()

    @property
    def status(self) -> Any:
        return self.fleet.scaling.status()


def leading(link: ScriptedLink, leader: int = 77) -> ScriptedLink:
    """Let an engine name a router, by its run, as the leader."""
    link.report = EngineReport("ready", "", SchedulerStats(), COSTS, leader=leader)
    link.links.on_message(link, link.report)
    return link


def test_a_router_without_scaling_wants_nothing() -> None:
    rig = Rig()
    assert rig.fleet.scaling.status() is None
    with pytest.raises(EngineUnavailableError):
        rig.fleet.check_ready()


def test_first_request_wakes_a_service_without_engines_and_waits() -> None:
    rig = ScaledRig()
    rig.pass_time(20)
    assert (rig.fleet.state, rig.status.num_wanted, rig.status.is_leader) == ("ready", 0, True)
    (stream,) = rig.arrive()
    assert rig.status.num_wanted == 1
    assert rig.fleet.totals().num_parked == 1
    rig.fleet.on_tick()
    assert stream.alive
    a = leading(rig.attach("a"))
    a.answer(a.requests[0], 10, reason="length")
    assert read(stream) == [10]
    rig.pass_time(9)
    assert rig.status.num_wanted == 1
    rig.pass_time(5)
    assert (rig.status.num_wanted, rig.status.drain) == (0, ["a"])
    rig.fleet.drain_engine("a", migrates=False)
    rig.pass_time(1)
    assert (rig.status.drain, rig.status.removable) == ([], ["a"])


def test_an_operators_drain_lasts_until_undrain() -> None:
    rig = ScaledRig()
    a = leading(rig.attach("a"))
    rig.fleet.drain_engine("a", migrates=False)
    assert a.sent[-1] == DrainEngine(True, is_held=True)
    for state in ("ready", "draining", "draining"):
        a.links.on_message(a, EngineReport(state, "", SchedulerStats(), COSTS, leader=77))
        rig.pass_time(10)
        assert (rig.status.removable, rig.status.undrain) == ([], [])
    (row,) = rig.fleet.engines()
    assert (row.state, "operator" in row.cause) == ("draining", True)
    rig.fleet.undrain_engine("a")
    leading(a)
    rig.arrive()
    assert a.requests


def test_an_engine_that_autoscaling_drains_is_removable() -> None:
    rig = ScaledRig()
    a = leading(rig.attach("a"))
    rig.fleet.drain_engine("a", migrates=False, is_scaling=True)
    assert a.sent[-1] == DrainEngine(True)
    rig.pass_time(1)
    assert rig.status.removable == ["a"]


def test_requests_end_with_503_if_no_engine_ever_comes() -> None:
    rig = ScaledRig(park_timeout=1.0)
    rig.arrive()
    rig.pass_time(9)
    assert rig.fleet.state == "ready"
    rig.pass_time(2)
    assert rig.fleet.state == "recovering"
    assert rig.status.num_wanted >= 1


def test_engines_follow_the_rate_that_one_is_predicted_to_sustain() -> None:
    rig = ScaledRig()
    a = leading(rig.attach("a"))
    for _ in range(40):
        rig.arrive(4)
        for request in a.requests[-4:]:
            a.answer(request, *range(8), reason="length")
        rig.pass_time(1)
    expected = sustained_rate(engine("a"), COSTS, RecentLengths(3.0, 8.0))
    snapshot = EngineSnapshot("a", num_blocks=ANNOUNCE.num_blocks, block_size=ANNOUNCE.block_size)
    assert rig.status.engine_rate == sustained_rate(snapshot, COSTS, RecentLengths(3.0, 8.0))
    assert rig.status.engine_rate < expected, "its KV cache holds fewer requests"
    assert rig.status.rate == pytest.approx(4, rel=0.1)
    assert rig.status.num_wanted == 1
    for _ in range(40):
        rig.arrive(200)
        rig.pass_time(1)
    assert rig.status.num_wanted == 3


def test_the_rule_of_a_plan_has_a_slope_and_an_offset() -> None:
    for offset, expected in ((0.6, 3), (0.0, 2)):
        rule = ScaleConfig("0:5", scale_engine_rate=2.5, scale_engine_offset=offset)
        rig = ScaledRig(rule)
        leading(rig.attach("a"))
        for _ in range(60):
            rig.arrive(4)
            rig.pass_time(1)
        assert rig.status.engine_rate == 2.5
        assert rig.status.num_wanted == expected


def test_decision_of_the_leading_router_counts() -> None:
    rig = ScaledRig()
    leading(rig.attach("a"), leader=5)
    rig.pass_time(1)
    assert not rig.status.is_leader
    leading(rig.links.links["a"])
    assert rig.status.is_leader


def test_configured_rate_outranks_the_predicted_one() -> None:
    conditions = ScaleConfig("1:9", scale_engine_rate=0.5)
    config = RouterConfig(scale_conditions=conditions)
    assert config.scale_conditions.limits() == (1, 9)
    rig = ScaledRig(conditions)
    rig.pass_time(1)
    assert rig.status.engine_rate == 0.5
    assert msgspec.to_builtins(rig.status)["num_wanted"] == rig.status.num_wanted


def test_faster_engines_and_looser_limits_sustain_more() -> None:
    snapshot, small = (EngineSnapshot("a", num_blocks=num_blocks) for num_blocks in (10_000, 50))
    lengths = RecentLengths(100.0, 100.0)
    costs = StepCostCoefficients(0.01, 1e-4, 0.0, 1e-4, 1e-7)
    free = sustained_rate(snapshot, costs, lengths)
    tight = sustained_rate(snapshot, costs, lengths, tpot_seconds=0.012)
    one = sustained_rate(snapshot, costs, lengths, tpot_seconds=0.001)
    assert free > tight > one
    # One request at a time: 100 steps, and its prompt.
    assert one == pytest.approx(0.8 / (100 * (0.01 + 2e-4 + 1.5e-5) + 0.01))
    assert sustained_rate(snapshot, costs, RecentLengths(100.0, 200.0)) < free
    assert sustained_rate(small, costs, lengths) < free

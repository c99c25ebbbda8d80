"""Ejection of slow engines, slow start, and the budget of retries, on a simulated clock."""

from collections.abc import Mapping

import pytest

from gllm.routing.health import MAX_RETRIES, MIN_WEIGHT, FleetHealth, HealthConfig, RetryBudget
from gllm.routing.policies.predict import predict_latency
from gllm.routing.state import EngineSnapshot
from gllm.scheduler.plan import SchedulerStats
from tests.support.routing.snapshots import COSTS, REQUEST
from tests.support.work import held_bytes

REPORT_SECONDS = 1.0
RUNNING = 16


class BusyEngine:
    """An engine that decodes without pause; its step time can be changed."""

    def __init__(self, name: str, health: FleetHealth, offset: float = 0.0) -> None:
        self.name = name
        self.step_seconds = 0.02
        self.is_hung = False
        self.has_fit = True
        self.role = "mixed"
        self.num_read_at_once = 1
        """Outputs that the router reads at a time."""
        self._unread = 0
        self._health = health
        self._next_step = self._next_report = offset
        self.num_steps = 0

    def run(self, until: float) -> None:
        """Report outputs and statistics up to a time."""
        while (now := min(self._next_step, self._next_report)) <= until:
            if now == self._next_report:
                self._next_report += REPORT_SECONDS
                self._health.on_report(self.snapshot(), now)
            else:
                self._next_step += self.step_seconds
                if not self.is_hung:
                    self.num_steps += 1
                    self._on_output(now)

    def _on_output(self, now: float) -> None:
        self._unread += 1
        if self._unread >= self.num_read_at_once:
            for _ in range(self._unread):
                self._health.on_outputs(self.name, range(RUNNING), now)
            self._unread = 0

    def snapshot(self) -> EngineSnapshot:
        stats = SchedulerStats(
            running=RUNNING,
            steps=self.num_steps,
            decode_tokens=RUNNING * self.num_steps,
            decode_context_tokens=100 * RUNNING,
        )
        return EngineSnapshot(
            self.name,
            self.role,
            stats=stats,
            coefficients=COSTS if self.has_fit else None,
            num_blocks=999,
        )


class Fleet:
    """Engines that run side by side."""

    def __init__(self, count: int, config: HealthConfig | None = None) -> None:
        self.health = FleetHealth(config)
        self.now = 0.0
        self.engines = [BusyEngine(f"e{number}", self.health, 0.01) for number in range(count)]
        for each in self.engines:
            self.health.on_attached(each.name, 0.0)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            for each in self.engines:
                each.run(self.now)

    @property
    def weights(self) -> list[float]:
        """Weights of the engines."""
        return [self.health.weight(each.name, self.now) for each in self.engines]

    @property
    def ejected(self) -> Mapping[str, str]:
        """Causes of the ejections."""
        return self.health.ejected(self.now)


def test_healthy_fleet_has_full_weight() -> None:
    fleet = Fleet(3)
    fleet.run(30)
    assert fleet.weights == [1, 1, 1]
    assert not fleet.ejected


def test_slow_engine_is_ejected_and_returns_by_slow_start() -> None:
    fleet = Fleet(3)
    fleet.run(20)
    fleet.engines[1].step_seconds *= 4
    fleet.run(8)
    assert fleet.weights == [1, 0, 1]
    assert "4.0 times as long" in fleet.ejected["e1"]
    fleet.engines[1].step_seconds /= 4
    fleet.run(30)
    assert 0 < fleet.weights[1] < 1
    fleet.run(11)
    assert fleet.weights == [1, 1, 1]
    assert not fleet.ejected


def test_the_only_engine_of_a_role_is_not_ejected() -> None:
    fleet = Fleet(4)
    decode = fleet.engines[3]
    for each in fleet.engines:
        each.role = "prefill"
    decode.role = "decode"
    fleet.run(20)
    decode.step_seconds *= 4
    fleet.run(20)
    assert fleet.weights == [1, 1, 1, 1]
    fleet.engines[0].step_seconds *= 4
    fleet.run(20)
    assert fleet.weights == [0, 1, 1, 1]
    # After a flip there are two.
    fleet.engines[1].role = "decode"
    fleet.run(2)
    assert fleet.weights[3] == 0


def test_engine_that_stays_slow_stays_ejected() -> None:
    fleet = Fleet(3)
    fleet.run(20)
    fleet.engines[0].step_seconds *= 5
    fleet.run(10)
    for _ in range(100):
        fleet.run(1)
        assert fleet.weights == [0, 1, 1]


def test_each_further_ejection_takes_longer() -> None:
    fleet = Fleet(3)
    fleet.run(20)
    engine = fleet.engines[0]
    seconds = []
    for _ in range(3):
        engine.step_seconds *= 5
        while fleet.weights[0]:
            fleet.run(1)
        engine.step_seconds /= 5
        begin = fleet.now
        while not fleet.weights[0]:
            fleet.run(1)
        seconds.append(fleet.now - begin)
    assert seconds == [pytest.approx(each, abs=2) for each in (30, 60, 90)]


@pytest.mark.parametrize("factor", [0.5, 2.5])
def test_engine_a_bit_slower_or_faster_stays(factor: float) -> None:
    fleet = Fleet(3)
    fleet.run(20)
    fleet.engines[0].step_seconds *= factor
    fleet.run(60)
    assert fleet.weights == [1, 1, 1]


def test_outputs_that_the_router_reads_late_and_together_are_not_slowness() -> None:
    fleet = Fleet(2)
    fleet.engines[0].num_read_at_once = 4
    fleet.run(20)
    fleet.engines[0].num_read_at_once = 1
    fleet.run(30)
    assert fleet.weights == [1, 1]


def test_reports_and_outputs_that_are_read_at_one_time_say_nothing() -> None:
    fleet = Fleet(1)
    engine = fleet.engines[0]
    for step in range(1, 400):
        fleet.health.on_outputs(engine.name, range(RUNNING), 1.0)
        engine.num_steps = step
        if step % 10 == 0:
            fleet.health.on_report(engine.snapshot(), 1.0)
    assert fleet.weights == [1]
    assert not fleet.ejected


def test_one_odd_sample_at_the_start_is_not_the_normal_speed() -> None:
    fleet = Fleet(2)
    fleet.engines[0].step_seconds /= 10
    fleet.run(2 * REPORT_SECONDS)
    fleet.engines[0].step_seconds *= 10
    fleet.run(60)
    assert fleet.weights == [1, 1]


def test_whole_fleet_that_slows_down_stays() -> None:
    fleet = Fleet(4)
    fleet.run(20)
    for each in fleet.engines:
        each.step_seconds *= 6
    fleet.run(60)
    assert fleet.weights == [1, 1, 1, 1]


@pytest.mark.parametrize(("count", "num_slow", "num_ejected"), [(1, 1, 0), (2, 1, 1), (5, 2, 2)])
def test_at_most_half_of_the_fleet_is_ejected(count: int, num_slow: int, num_ejected: int) -> None:
    fleet = Fleet(count)
    fleet.run(20)
    for each in fleet.engines[:num_slow]:
        each.step_seconds *= 10
    fleet.run(10)
    assert fleet.weights.count(0) == num_ejected


def test_hung_engine_is_ejected() -> None:
    fleet = Fleet(2)
    fleet.run(20)
    fleet.engines[0].is_hung = True
    fleet.run(12)
    assert fleet.weights == [0, 1]


def test_engine_without_a_fit_is_not_judged_by_its_speed() -> None:
    fleet = Fleet(2)
    fleet.engines[0].has_fit = False
    fleet.engines[0].step_seconds *= 10
    fleet.run(40)
    assert fleet.weights == [1, 1]


def test_idle_time_between_requests_is_not_slowness() -> None:
    health = FleetHealth()
    for name in ("a", "b"):
        health.on_attached(name, 0.0)
    steps, now = 0, 0.0
    for second in range(120):
        # One short request each second, which runs when the report is made.
        for token in range(12):
            steps += 1
            health.on_outputs("a", [second], second + 0.9 + 0.0128 * token - 0.06)
        now = second + 1.0
        for name in ("a", "b"):
            stats = SchedulerStats(running=1, steps=steps, decode_tokens=steps)
            snapshot = EngineSnapshot(name, stats=stats, coefficients=COSTS, num_blocks=99)
            health.on_report(snapshot, now)
        if second > 20:
            assert health.weight("a", now) == 1


def test_first_engines_start_at_once_and_later_ones_slowly() -> None:
    health = FleetHealth(HealthConfig(slow_start_seconds=10))
    health.on_attached("a", 100.0)
    health.on_attached("b", 103.0)
    assert health.weight("a", 103.0) == health.weight("b", 103.0) == 1
    health.on_attached("c", 120.0)
    assert health.weight("c", 120.0) == MIN_WEIGHT
    assert health.weight("c", 125.0) == 0.5
    assert health.weight("c", 130.0) == health.weight("a", 130.0) == 1


def test_returning_engine_starts_slowly() -> None:
    health = FleetHealth()
    health.on_attached("a", 0.0)
    health.on_lost("a", 1.0, is_planned=True)
    health.on_attached("a", 2.0)
    assert health.weight("a", 2.0) == MIN_WEIGHT
    assert health.weight("unknown", 2.0) == 1


def test_engine_that_is_lost_again_and_again_waits_longer() -> None:
    health = FleetHealth()
    health.on_attached("a", 0.0)
    health.on_attached("b", 0.0)
    now, waits = 0.0, []
    for _ in range(4):
        health.on_lost("b", now + 1, is_planned=False)
        now += 2
        health.on_attached("b", now)
        begin = now
        while not health.weight("b", now):
            now += 1
        waits.append(now - begin)
    assert waits == [0, 30, 60, 90]
    # An operator restarts it: whatever was wrong is mended.
    health.on_lost("b", now, is_planned=True)
    health.on_attached("b", now + 1)
    assert health.weight("b", now + 1) == MIN_WEIGHT


def test_outlier_factor_zero_never_ejects() -> None:
    fleet = Fleet(3, HealthConfig(outlier_factor=0))
    fleet.run(20)
    fleet.engines[1].step_seconds *= 50
    fleet.run(60)
    assert fleet.weights == [1, 1, 1]


def test_engines_that_do_not_return_are_forgotten() -> None:
    health = FleetHealth()
    sizes = []
    for number in range(100):
        health.on_attached(f"e{number}", 20.0 * number)
        health.on_lost(f"e{number}", 20.0 * number + 1, is_planned=number % 2 == 0)
        sizes.append(held_bytes(health))
    assert sizes[99] < 1.1 * sizes[39] < 2 * sizes[19]


def test_retry_budget_is_a_share_of_the_requests() -> None:
    budget = RetryBudget(0.1)
    while budget.may_retry(0.0):
        pass
    for _ in range(200):
        budget.on_request(0.0)
    assert sum(budget.may_retry(0.0) for _ in range(100)) == 20
    assert sum(budget.may_retry(3.0) for _ in range(100)) == 3
    assert sum(budget.may_retry(1e6) for _ in range(1000)) == MAX_RETRIES


def test_requests_of_a_fleet_fill_its_retry_budget() -> None:
    health = FleetHealth(HealthConfig(retry_budget=1.0))
    while health.retry_budget.may_retry(0.0):
        pass
    health.retry_budget.on_request(0.0)
    assert [health.retry_budget.may_retry(0.0) for _ in range(2)] == [True, False]


def test_busy_engine_of_these_tests_is_as_fast_as_predicted() -> None:
    """Otherwise the factors above would mean something else."""
    engine = BusyEngine("e", FleetHealth())
    assert predict_latency(REQUEST, engine.snapshot(), 0).tpot_seconds == pytest.approx(
        engine.step_seconds, rel=0.5
    )

"""Autoscaling: rate, change points, and a fleet whose machines come late, never, or die."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, pairwise, repeat
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gllm.routing.scaling.arrival_rate import ArrivalRate, least_stable_rate
from gllm.routing.scaling.autoscaler import (
    Autoscaler,
    EngineLoad,
    EnginePhase,
    FleetLoad,
    ScaleDecision,
    ScaleRule,
    fit_scale_rule,
)
from gllm.routing.scaling.scale_config import ScaleConfig
from gllm.sim.workloads.requests import sample_arrival_times
from tests.support.examples import num_examples

TICK = 0.5
STARTUP = 20.0
ENGINE_RATE = 2.0
"""Requests per second that an engine sustains within its SLO."""
HIGHEST_RATE = 2.5
"""Requests per second that an engine of the fake fleet finishes at most."""
NEVER = float("inf")


class FakeFleet:
    """Engines that finish HIGHEST_RATE requests per second, and an actuator that obeys at once.

    startups: time until each further engine is ready; None: it dies after STARTUP / 2.
    """

    def __init__(self, config: ScaleConfig, startups: Iterator[float | None]) -> None:
        self.scaler = Autoscaler(config, 0.0)
        self.startups = startups
        self.now = 0.0
        self.phases: dict[str, EnginePhase] = {}
        self.queues: dict[str, deque[float]] = {}
        self.due: dict[str, tuple[float, bool]] = {}
        """Time at which a starting engine is ready, or dead."""
        self.parked: deque[float] = deque()
        self.waits: list[float] = []
        """Time from arrival to dispatch of each request."""
        self.num_started = self.num_served = self.num_arrived = 0
        self.history: list[int] = []
        self.credit: dict[str, float] = {}
        self.max_active = 0

    def run(self, rate: Callable[[float], float], seconds: float, seed: int = 0) -> None:
        rng = Random(seed)
        end = self.now + seconds
        while self.now < end:
            mean = rate(self.now) * TICK
            count = sum(rng.random() < mean / 20 for _ in range(20))
            self.step(count)

    def step(self, num_arrivals: int) -> ScaleDecision:
        self.now += TICK
        self.parked.extend([self.now] * num_arrivals)
        self.num_arrived += num_arrivals
        self._finish_starts()
        self._dispatch()
        self._serve()
        ready = [name for name, phase in self.phases.items() if phase is EnginePhase.READY]
        queue = min((len(self.queues[name]) for name in ready), default=0) / HIGHEST_RATE
        if self.parked:
            queue = max(queue, self.now - self.parked[0])
        load = FleetLoad(
            num_arrivals,
            len(self.parked),
            queue,
            [
                EngineLoad(name, phase, len(self.queues[name]))
                for name, phase in self.phases.items()
            ],
            ENGINE_RATE,
        )
        decision = self.scaler.observe(load, self.now)
        self.history.append(decision.num_wanted)
        self._obey(decision)
        return decision

    def count(self, *phases: EnginePhase) -> int:
        return sum(phase in phases for phase in self.phases.values())

    def _finish_starts(self) -> None:
        for name, (time, lives) in list(self.due.items()):
            if self.now >= time:
                del self.due[name]
                if lives and self.phases[name] is EnginePhase.STARTING:
                    self.phases[name] = EnginePhase.READY
                elif not lives:
                    del self.phases[name], self.queues[name]

    def _dispatch(self) -> None:
        ready = [name for name, phase in self.phases.items() if phase is EnginePhase.READY]
        while self.parked and ready:
            name = min(ready, key=lambda each: len(self.queues[each]))
            arrival = self.parked.popleft()
            self.waits.append(self.now - arrival)
            self.queues[name].append(self.now)

    def _serve(self) -> None:
        for name, queue in self.queues.items():
            self.credit[name] = self.credit.get(name, 0.0) + HIGHEST_RATE * TICK if queue else 0.0
            while queue and self.credit[name] >= 1:
                self.credit[name] -= 1
                queue.popleft()
                self.num_served += 1

    def _obey(self, decision: ScaleDecision) -> None:
        for name in decision.removable:
            assert self.phases[name] is EnginePhase.DRAINING, "removed before it was drained"
            assert not self.queues[name], "removed with requests"
            del self.phases[name], self.queues[name]
            self.due.pop(name, None)
        for name in decision.drain:
            assert self.phases[name] is not EnginePhase.DRAINING
            self.phases[name] = EnginePhase.DRAINING
        for name in decision.undrain:
            assert self.phases[name] is EnginePhase.DRAINING
            self.phases[name] = EnginePhase.READY
        active = (EnginePhase.STARTING, EnginePhase.READY)
        while self.count(*active) < decision.num_wanted:
            name = f"e{self.num_started}"
            self.num_started += 1
            seconds = next(self.startups)
            self.phases[name], self.queues[name] = EnginePhase.STARTING, deque()
            if seconds is None:
                self.due[name] = self.now + STARTUP / 2, False
            elif seconds < NEVER:
                self.due[name] = self.now + seconds, True
        self.max_active = max(self.max_active, self.count(*active))


def config(scale: str = "0:6", **fields: float) -> ScaleConfig:
    times = {"scale_idle_seconds": 60.0, "scale_down_seconds": 60.0, **fields}
    return ScaleConfig(scale, scale_startup_seconds=STARTUP, **times)


def steady(rate: float) -> Callable[[float], float]:
    return lambda now: rate


def test_engines_follow_half_more_none_and_half_of_one_engines_capacity() -> None:
    fleet = FakeFleet(config(), repeat(STARTUP))
    counts = []
    for share in (0.5, 1.6, 0.0, 0.5):
        fleet.run(steady(share * ENGINE_RATE), 200)
        counts.append(fleet.count(EnginePhase.READY))
    assert counts == [1, 2, 0, 1]
    assert not fleet.parked
    # Only those that wake the service wait, as long as an engine takes to start.
    assert max(fleet.waits) <= STARTUP + 2


def test_first_request_after_an_idle_time_wakes_the_service_at_once() -> None:
    fleet = FakeFleet(config(), repeat(STARTUP))
    for _ in range(300):
        assert fleet.step(0).num_wanted == 0
    assert fleet.step(1).num_wanted == 1
    fleet.run(steady(0.0), 55)
    assert fleet.count(EnginePhase.READY) == 1
    fleet.run(steady(0.0), 60)
    assert fleet.phases == {}
    assert fleet.num_served == 1


def test_service_with_a_minimum_keeps_it() -> None:
    fleet = FakeFleet(config("2:3"), repeat(STARTUP))
    fleet.run(steady(0.0), 500)
    assert fleet.count(EnginePhase.READY) == 2
    fleet.run(steady(20.0), 100)
    assert fleet.count(EnginePhase.READY) == 3


@pytest.mark.parametrize(
    "share", [1.0, *(pytest.param(share, marks=pytest.mark.full) for share in (0.4, 0.9, 2.05))]
)
def test_wanted_engines_do_not_oscillate_at_a_stationary_rate(share: float) -> None:
    seed = round(100 * share)
    fleet = FakeFleet(config(scale_down_seconds=120.0), repeat(STARTUP))
    fleet.run(steady(share * ENGINE_RATE), 400, seed)
    settled = len(fleet.history)
    fleet.run(steady(share * ENGINE_RATE), 1800, seed + 1)
    wanted = fleet.history[settled - 1 :]
    assert sum(a != b for a, b in pairwise(wanted)) <= 2
    assert max(wanted) - min(wanted) <= 1


OUTCOMES = st.sampled_from([STARTUP, 3 * STARTUP, NEVER, None])


@settings(max_examples=num_examples(4, 300), deadline=None)
@given(
    st.lists(OUTCOMES, max_size=12),
    st.lists(st.floats(0, 3), min_size=1, max_size=4),
    st.integers(0, 10**6),
    st.sampled_from(["0:4", "1:4", "2:5"]),
)
@example([NEVER] * 4, [1.0], 0, "0:4")
@example([NEVER] * 12, [3.0], 0, "0:4")
def test_every_request_is_served_whatever_the_first_machines_do(
    outcomes: list[float | None], shares: list[float], seed: int, scale: str
) -> None:
    fleet = FakeFleet(config(scale), chain(outcomes, repeat(STARTUP)))
    for index, share in enumerate(shares):
        fleet.run(steady(share * ENGINE_RATE), 150, seed + index)
    # The last of twelve machines comes after ten minutes, and serves all requests by itself.
    latest = fleet.now + 600 + fleet.num_arrived / HIGHEST_RATE
    while fleet.parked and fleet.now < latest:
        fleet.run(steady(0.0), 10)
    fleet.run(steady(0.0), 800)
    assert not fleet.parked
    assert not any(fleet.queues.values())
    least, most = config(scale).limits()
    assert fleet.max_active <= most
    assert all(least <= wanted <= most for wanted in fleet.history)
    assert fleet.history[-1] >= least
    if least == 0:
        assert fleet.count(EnginePhase.READY) == 0


def test_engines_that_serve_are_kept_while_others_never_come() -> None:
    fleet = FakeFleet(config("0:4"), chain([STARTUP], repeat(NEVER)))
    fleet.run(steady(0.5 * ENGINE_RATE), 100)
    fleet.run(steady(1.5 * ENGINE_RATE), 400)
    # A replacement is wanted for the one that is overdue, but not more than the limit.
    assert fleet.history[-1] > 2
    assert fleet.phases["e0"] is EnginePhase.READY
    fleet.run(steady(0.4 * ENGINE_RATE), 400)
    assert fleet.phases["e0"] is EnginePhase.READY


def test_engines_that_start_for_longer_than_expected_are_not_replaced_for_ever() -> None:
    """All machines of the limit take much longer than the configured start-up time."""
    fleet = FakeFleet(config("0:2"), repeat(15 * STARTUP))
    fleet.run(steady(1.5 * ENGINE_RATE), 1200)
    assert fleet.count(EnginePhase.READY) == 2
    assert fleet.num_started <= 2 * 3


def test_startup_time_is_measured() -> None:
    fleet = FakeFleet(config(), repeat(35.0))
    assert fleet.scaler.startup_seconds == STARTUP
    fleet.run(steady(1.0), 60)
    assert fleet.scaler.startup_seconds == pytest.approx(35.0, abs=2 * TICK)


def test_startup_time_is_the_longest_of_the_latest() -> None:
    fleet = FakeFleet(config("2:2"), chain([35.0], repeat(20.0)))
    fleet.run(steady(1.0), 60)
    assert fleet.count(EnginePhase.READY) == 2
    assert fleet.scaler.startup_seconds == pytest.approx(35.0, abs=2 * TICK)


@pytest.mark.parametrize("startups", [[600.0], [20.0, 600.0], [20.0, 20.0, 600.0, 600.0, 20.0]])
def test_the_startup_of_a_frozen_engine_does_not_count(startups: list[float]) -> None:
    """Also of the first one, and of two that were frozen together."""
    scaler = measure_startups(startups)
    assert scaler.startup_seconds <= 2 * STARTUP


def test_a_startup_time_that_is_longer_than_configured_is_learned() -> None:
    assert measure_startups([300.0, 310.0]).startup_seconds == 310.0


def measure_startups(startups: list[float]) -> Autoscaler:
    """Return an autoscaler that has seen an engine start and die after each of these times."""
    scaler, now = Autoscaler(config("1:1"), 0.0, num_engines=1), 0.0
    for number, seconds in enumerate(startups):
        scaler.observe(FleetLoad(0, 0, 0.0, [], 1.0), now)
        now += seconds
        ready = EngineLoad(f"e{number}", EnginePhase.READY)
        scaler.observe(FleetLoad(0, 0, 0.0, [ready], 1.0), now)
        now += 1.0
    return scaler


def test_longer_startups_look_further_ahead() -> None:
    wanted = []
    for startup in (30.0, 300.0):
        scaler = Autoscaler(ScaleConfig("0:50", scale_startup_seconds=startup), 0.0)
        for second in range(1, 60):
            load = FleetLoad(second // 4, 0, 0.0, [], 1.0)
            decision = scaler.observe(load, float(second))
        wanted.append(decision.num_wanted)
    assert wanted[1] > wanted[0] + 3


def test_long_queues_want_one_engine_more_per_startup() -> None:
    scaler = Autoscaler(config("1:5"), 0.0, num_engines=1)
    wanted: list[int] = []
    for second in range(1, 61):
        num_ready = wanted[-20] if second > 20 else 1
        ready = [EngineLoad(f"e{i}", EnginePhase.READY, 9) for i in range(num_ready)]
        wanted.append(scaler.observe(FleetLoad(0, 0, 9.0, ready), float(second)).num_wanted)
    grown = [index for index, (a, b) in enumerate(pairwise([1, *wanted])) if a != b]
    assert wanted[-1] == 4
    assert min(b - a for a, b in pairwise(grown)) >= 20


def test_draining_engines_are_used_again_before_others_start() -> None:
    scaler = Autoscaler(config("0:4"), 0.0, num_engines=1)
    ready = EngineLoad("a", EnginePhase.READY)
    for second in range(1, 70):
        decision = scaler.observe(FleetLoad(0, 0, 0.0, [ready], 1.0), float(second))
        if decision.drain:
            break
    assert decision.drain == ("a",)
    draining = EngineLoad("a", EnginePhase.DRAINING)
    busy = scaler.observe(FleetLoad(1, 1, 0.0, [draining], 1.0), second + 1.0)
    assert (busy.num_wanted, busy.undrain, busy.removable) == (1, ("a",), ())
    # One that an operator drains is not taken back.
    other = EngineLoad("b", EnginePhase.DRAINING, 3)
    assert scaler.observe(FleetLoad(1, 1, 0.0, [other], 1.0), second + 2.0).undrain == ()


@pytest.mark.parametrize("phase", [EnginePhase.READY, EnginePhase.DRAINING])
def test_an_engine_that_an_operator_drains_is_left_alone(phase: EnginePhase) -> None:
    """Whether autoscaling had drained it before or not."""
    scaler = Autoscaler(config("0:4"), 0.0, num_engines=1)
    ready = EngineLoad("a", phase)
    for second in range(1, 70):
        scaler.observe(FleetLoad(0, 0, 0.0, [ready], 1.0), float(second))
    held = EngineLoad("a", EnginePhase.DRAINING, is_held=True)
    for second in range(70, 140):
        waiting = int(second > 100)
        decision = scaler.observe(FleetLoad(waiting, waiting, 0.0, [held], 1.0), float(second))
        assert (decision.removable, decision.undrain, decision.drain) == ((), (), ())
    assert decision.num_wanted == 1, "others take its place"


@pytest.mark.parametrize("text", ["3", "a:b", "2:1", "0:0", "-1:2", ":"])
def test_limits_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="MIN:MAX"):
        ScaleConfig(text)


def observe_arrivals(
    rate: ArrivalRate, times: list[float], begin: float, end: float
) -> list[float]:
    """Feed arrivals once per second; return the times of change points."""
    changes, index = [], 0
    for second in range(int(begin) + 1, int(end) + 1):
        count = 0
        while index < len(times) and times[index] <= second:
            index, count = index + 1, count + 1
        if rate.observe(count, float(second)):
            changes.append(float(second))
    return changes


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4))]
)
def test_rate_step_is_detected_within_half_a_minute(seed: int) -> None:
    before = [each for each in sample_arrival_times("poisson", 1000, 2.0, seed) if each < 200]
    after = [200 + each for each in sample_arrival_times("poisson", 1000, 6.0, seed) if each < 100]
    rate = ArrivalRate(0.0)
    changes = observe_arrivals(rate, before + after, 0, 300)
    assert next(each for each in changes if each > 200) <= 230
    assert rate.rate == pytest.approx(6, rel=0.2)


@pytest.mark.parametrize("level", [0.3, 2.0, pytest.param(20.0, marks=pytest.mark.full)])
def test_stationary_arrivals_have_one_false_change_point_per_hour_at_most(level: float) -> None:
    hours = 4
    times = sample_arrival_times("poisson", int(level * 3600 * hours), level, 1)
    rate = ArrivalRate(0.0)
    changes = observe_arrivals(rate, times, 0, int(times[-1]))
    assert len(changes) <= hours
    assert rate.rate == pytest.approx(level, rel=0.25)


def test_fall_of_the_rate_is_a_change_point() -> None:
    rate = ArrivalRate(0.0)
    observe_arrivals(rate, [0.2 * i for i in range(1000)], 0, 200)
    changes = observe_arrivals(rate, [], 200, 300)
    assert changes[0] <= 215
    assert rate.rate < 0.2


def test_rule_is_fitted_and_rounded_up() -> None:
    assert ScaleRule(0.5, 0.2).num_engines(1.6) == 1
    assert ScaleRule(0.5, 0.2).num_engines(1.7) == 2
    points = [(float(rate), ScaleRule(0.62, 0.4).num_engines(rate)) for rate in range(4, 17)]
    fitted = fit_scale_rule(points)
    assert fitted.k5 == pytest.approx(0.62, rel=0.1)
    assert all(abs(fitted.num_engines(rate) - count) <= 1 for rate, count in points)
    with pytest.raises(ValueError, match="two rates"):
        fit_scale_rule([(1.0, 2), (1.0, 3)])


@given(
    st.lists(st.integers(1, 100), min_size=2, max_size=5, unique=True).map(sorted),
    st.floats(0, 3),
    st.floats(-2, 3),
    st.lists(st.integers(0, 9), min_size=5, max_size=5),
)
@example([4, 6, 8], 0.0, 0.7, [0] * 5)
@example([2, 3, 4], 0.0, 1.0, [1, 0, 0, 0, 0])
def test_a_fitted_rule_gives_the_number_at_every_rate_that_a_line_meets(
    rates: list[int], k5: float, c5: float, extra: list[int]
) -> None:
    rule = ScaleRule(k5, c5)
    on_a_line = [(float(rate), rule.num_engines(rate)) for rate in rates]
    lowest = max(count - 1 - k5 * rate for rate, count in on_a_line)
    if min(count - k5 * rate for rate, count in on_a_line) - lowest > 0.02:
        fitted = fit_scale_rule(on_a_line)
        assert [fitted.num_engines(rate) for rate, _ in on_a_line] == [n for _, n in on_a_line]
    beside = [(rate, count + more) for (rate, count), more in zip(on_a_line, extra, strict=False)]
    fitted = fit_scale_rule(beside)
    assert all(fitted.num_engines(rate) >= count for rate, count in beside)


def test_the_offset_of_a_rule_is_kept() -> None:
    """At 4 requests per second, 0.25 rate + 0.667 are two engines."""
    for offset, expected in ((0.667, 2), (-0.4, 1), (1.5, 3)):
        config = ScaleConfig("1:8", scale_engine_offset=offset, scale_down_seconds=60.0)
        scaler = Autoscaler(config, 0.0, num_engines=8)
        arrivals = iter(sample_arrival_times("poisson", 2000, 4.0, 0))
        now, following = 0.0, next(arrivals)
        wanted = set()
        while now < 400:
            now += 1.0
            count = 0
            while following < now:
                count, following = count + 1, next(arrivals)
            engines = [EngineLoad(str(index), EnginePhase.READY) for index in range(8)]
            decision = scaler.observe(FleetLoad(count, 0, 0.0, engines, 4.0), now)
            if now > 300:
                wanted.add(decision.num_wanted)
        assert wanted == {expected}


def test_least_stable_rate_is_that_of_the_paper() -> None:
    assert least_stable_rate(100.0) == pytest.approx(4.0)

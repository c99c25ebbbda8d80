"""Flips by load: idle for a minute, demand on the other side, never the last of a role."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.routing.scaling.role_changes import FlipConfig, FlipPolicy, phase_load
from gllm.routing.state import EngineSnapshot
from tests.support.examples import num_examples
from tests.support.routing.pair_engines import engine

BUSY_PREFILL: dict[str, Any] = {"waiting_tokens": 100, "running": 1}
BUSY_DECODE: dict[str, Any] = {"running": 200, "kv_usage": 0.8}


def watch(
    policy: FlipPolicy, engines: list[EngineSnapshot], seconds: int, start: int = 0
) -> list[tuple[int, str, str]]:
    """Observe the same loads each second; return the flips with their times."""
    flips = []
    for now in range(start, start + seconds):
        if change := policy.observe(engines, float(now)):
            flips.append((now, change.engine, change.role))
    return flips


def test_an_idle_prefill_engine_helps_loaded_decodes_after_a_minute() -> None:
    engines = [
        engine("p0", "prefill", **BUSY_PREFILL),
        engine("p1", "prefill"),
        engine("d0", "decode", **BUSY_DECODE),
    ]
    policy = FlipPolicy()
    assert watch(policy, engines, 60) == []
    assert watch(policy, engines, 1, start=60) == [(60, "p1", "decode")]
    engines[1] = engine("p1", "decode")
    # It stays, although it is idle and prefill is busy.
    assert watch(policy, engines, 50, start=61) == []


def test_an_idle_decode_engine_helps_loaded_prefills() -> None:
    engines = [
        engine("p0", "prefill", **BUSY_PREFILL),
        engine("d0", "decode", running=1),
        engine("d1", "decode", running=20),
    ]
    assert watch(FlipPolicy(), engines, 61) == [(60, "d0", "prefill")]


def test_an_idle_fleet_does_not_flip() -> None:
    engines = [engine(f"{role[0]}{i}", role) for role in ("prefill", "decode") for i in range(3)]
    assert watch(FlipPolicy(), engines, 600) == []


def test_a_load_above_a_tenth_keeps_the_role() -> None:
    policy, flips = FlipPolicy(), []
    for now in range(300):
        # Busy for 1 of 8 seconds.
        load: dict[str, Any] = BUSY_PREFILL if now % 8 == 0 else {}
        engines = [engine("p0", "prefill", **load), engine("p1", "prefill", **load)]
        flips.append(policy.observe([*engines, engine("d", "decode", **BUSY_DECODE)], float(now)))
    assert not any(flips)


@pytest.mark.parametrize("state", ["draining", "recovering"])
def test_engines_that_take_no_requests_do_not_count(state: str) -> None:
    engines = [
        engine("p0", "prefill"),
        engine("p1", "prefill", state=state),
        engine("d0", "decode", **BUSY_DECODE),
    ]
    assert watch(FlipPolicy(), engines, 200) == []


def test_requests_that_wait_make_a_decode_engine_fully_loaded() -> None:
    assert phase_load(engine("d", "decode", waiting=1, running=1)) == 1.0
    assert phase_load(engine("d", "decode", running=64)) == 0.25
    assert phase_load(engine("d", "decode", running=64, kv_usage=0.5)) == 0.5
    assert phase_load(engine("p", "prefill", kv_usage=0.5)) == 0.0


class Fleet:
    """Engines with random loads; flips are applied after a while, as announcements are."""

    def __init__(self, roles: list[str]) -> None:
        self.roles = {f"e{number}": role for number, role in enumerate(roles)}
        self.policy = FlipPolicy()
        self.flips: list[tuple[float, str]] = []

    def observe(self, loads: dict[str, float], now: float) -> None:
        engines = []
        for name, role in self.roles.items():
            load = loads[name]
            stats: dict[str, Any] = (
                {"waiting_tokens": int(load > 0.5)} if role == "prefill" else {"kv_usage": load}
            )
            engines.append(engine(name, role, **stats))
        if change := self.policy.observe(engines, now):
            self.apply(change.engine, change.role, now)

    def apply(self, name: str, role: str, now: float) -> None:
        before = self.roles[name]
        assert {before, role} == {"prefill", "decode"}
        self.roles[name] = role
        assert before in self.roles.values(), "the last engine of a role was flipped"
        if self.flips:
            assert now - self.flips[-1][0] >= 60
        self.flips.append((now, name))


@settings(max_examples=num_examples(15, 400), deadline=None)
@given(
    roles=st.lists(st.sampled_from(["prefill", "decode", "mixed"]), min_size=1, max_size=6),
    data=st.data(),
)
def test_flips_keep_a_role_its_last_engine_and_their_distance(
    roles: list[str], data: st.DataObject
) -> None:
    fleet, now = Fleet(roles), 0.0
    for _ in range(data.draw(st.integers(5, 40))):
        loads = {name: data.draw(st.sampled_from([0.0, 0.0, 0.05, 0.9])) for name in fleet.roles}
        for _ in range(data.draw(st.integers(1, 30))):
            now += 5.0
            fleet.observe(loads, now)


@pytest.mark.parametrize(
    "fields", [{"flip_low_load": 0.6}, {"flip_seconds": 0.0}, {"flip_high_load": 1.5}]
)
def test_impossible_conditions_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        FlipConfig(**fields)

"""Roles of engines: commands and announcements, the leading router, reports of changed loads."""

from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.config.router import RouterConfig
from gllm.engine.attachment.attachment import LOAD_REPORT_SECONDS, ReportPacer, RouterAttachment
from gllm.engine.fleet_control import UnknownEngineError
from gllm.messages.fleet import EngineReport, SetEngineRole
from gllm.messages.requests import AbortSequences
from gllm.routing.disaggregation.policy import RoleChange
from gllm.routing.scaling.role_changes import FlipConfig
from gllm.runtime.messaging.connection_pool import FleetLinkConfig
from gllm.scheduler.plan import SchedulerStats
from tests.router.test_fleet import Rig
from tests.support.engines.fake_driver import text_of
from tests.support.routing.links import (
    EngineSessions,
    FakeEngine,
    Links,
    TestRouter,
    announcement,
    request,
    until,
)
from tests.support.routing.scripted_links import ScriptedLink


async def two_routers(links: Links) -> tuple[TestRouter, TestRouter, FakeEngine, EngineSessions]:
    """Return two routers and an engine that has dialled both."""
    first = await links.router("first", hub="127.0.0.1:0")
    second = await links.router("second", hub="127.0.0.1:0")
    engine, attachment = await links.engine(dial=(first.address, second.address))
    await until(lambda: first.attached and second.attached)
    return first, second, engine, attachment


def has_role(router: TestRouter, role: str) -> bool:
    return router.link().announce.role == role


async def test_a_role_is_announced_to_all_routers_and_no_request_is_lost(links: Links) -> None:
    """T7: both ways, under load, without a tick, a drain or another session."""
    first, second, engine, attachment = await two_routers(links)
    attachment.is_silent = True
    for number in range(6):
        first.link().send(request(10 * number, [number, 7], 9))
    await until(lambda: engine.client.num_requests == 6)
    for role in ("prefill", "decode", "mixed"):
        engine.step(batch=2)
        second.link().send(SetEngineRole(role))
        for router in (first, second):
            await until(partial(has_role, router, role))
        assert attachment.role == role
    while engine.driver.sequences:
        engine.step()
    await until(lambda: len(first.ends()) == 6)
    assert first.tokens() == {10 * n: text_of([n, 7], 0, 9) for n in range(6)}
    assert (first.attached, first.lost) == (["one"], [])


async def test_an_operator_of_the_engine_changes_its_role(links: Links) -> None:
    router, _, attachment = await links.pair()
    assert attachment.set_role("decode") == "mixed"
    await until(lambda: router.link().announce.role == "decode")
    with pytest.raises(ValueError, match="role is 'both', but has to be one of mixed, prefill"):
        attachment.set_role("both")
    router.link().send(SetEngineRole("both"))
    router.link().send(SetEngineRole("prefill"))
    await until(lambda: router.link().announce.role == "prefill")


async def test_the_router_with_the_lowest_run_leads(links: Links) -> None:
    """C19: another router leads once it has gone."""
    first, second, _, _ = await two_routers(links)
    runs = {router.links.greeting.run: router for router in (first, second)}
    await until(lambda: {r.link().report.leader for r in (first, second)} == {min(runs)})
    await runs[min(runs)].links.stop()
    other = runs[max(runs)]
    await until(lambda: other.link().report.leader == max(runs))


async def test_changed_loads_are_reported_to_the_other_routers(links: Links) -> None:
    """T8: a router sees the load that another one causes, without waiting for a tick."""
    first, second, engine, attachment = await two_routers(links)
    attachment.is_silent = True
    first.link().send(request(1, [5, 6], 40))
    await until(lambda: engine.client.num_requests == 1)
    for _ in range(5):
        engine.step()
        await until(lambda: second.link().report.stats == engine.client.stats)
        assert second.outputs == []


@given(times=st.lists(st.integers(0, 3000), min_size=1, max_size=60))
def test_every_change_is_reported_within_a_tenth_of_a_second(times: list[int]) -> None:
    """T8: no view is older than the interval and the network's delay; times are milliseconds."""
    pacer, due, reports = ReportPacer(), None, []
    for time in sorted(times):
        now = time / 1000
        if due is not None and due <= now:
            pacer.on_reported(due)
            reports.append(due)
            due = None
        delay = pacer.on_change(now)
        assert (delay is None) == (due is not None)
        due = now + delay if delay is not None else due
    assert due is not None
    reports.append(due)
    for time in times:
        assert any(
            -1e-9 <= report - time / 1000 <= LOAD_REPORT_SECONDS + 1e-9 for report in reports
        )
    gaps = [later - earlier for earlier, later in pairwise(reports)]
    assert all(gap >= LOAD_REPORT_SECONDS - 1e-9 for gap in gaps)


def announce_role(rig: Rig, link: ScriptedLink, role: str) -> None:
    """Let an engine announce a role, as it does after a command."""
    link.announce = msgspec.structs.replace(link.announce, role=role)
    rig.links.on_message(link, link.announce)
    rig.links.on_message(link, link.report)


def test_an_operator_changes_the_role_of_an_engine_with_requests() -> None:
    rig = Rig()
    link = rig.attach("a", role="prefill")
    stream = rig.submit(1, 2, 3)
    assert rig.fleet.roles.set_role("a", "decode") == "prefill"
    assert link.sent[-1] == SetEngineRole("decode")
    announce_role(rig, link, "decode")
    assert [row.role for row in rig.fleet.engines()] == ["decode"]
    link.answer(link.requests[0], 10, 11, reason="length")
    assert [d.tokens for d in stream.pop_deltas().values()] == [[10, 11]]
    assert not any(isinstance(message, AbortSequences) for message in link.sent)
    assert rig.fleet.totals().role_changes == {"decode": 1}
    with pytest.raises(UnknownEngineError, match="no engine is named 'b'"):
        rig.fleet.roles.set_role("b", "decode")


def test_the_last_command_counts_although_no_announcement_came_between() -> None:
    rig = Rig()
    link = rig.attach("a", role="decode")
    rig.fleet.roles.set_role("a", "prefill")
    # It is the role that the engine has announced, but not the one that it has.
    rig.fleet.roles.set_role("a", "decode")
    commands = [each for each in link.sent if isinstance(each, SetEngineRole)]
    assert commands == [SetEngineRole("prefill"), SetEngineRole("decode")]


class ChangingPolicy:
    """A pair policy that wants every prefill engine to decode."""

    def role_changes(self, engines: Any, now: float) -> list[RoleChange]:
        return [RoleChange(each.name, "decode") for each in engines if each.role == "prefill"]


@pytest.mark.parametrize(("leader", "num_commands"), [(77, 1), (76, 0), (0, 0)])
def test_only_the_leading_router_changes_roles_by_policy(leader: int, num_commands: int) -> None:
    """C19; an engine of an older version names no leader."""
    rig = Rig(pair_policy=ChangingPolicy())
    link = rig.attach("a", role="prefill")
    report = EngineReport("ready", "", SchedulerStats(), leader=leader)
    rig.links.on_message(link, report)
    rig.fleet.on_tick()
    assert link.sent.count(SetEngineRole("decode")) == num_commands
    announce_role(rig, link, "decode")
    rig.fleet.on_tick()
    assert link.sent.count(SetEngineRole("decode")) == num_commands


def test_an_idle_engine_flips_by_load() -> None:
    now = [0.0]
    conditions = FlipConfig(flip_seconds=4.0)
    rig = Rig(preset="tetri", flip_conditions=conditions, clock=lambda: now[0])
    idle, busy = rig.attach("p0", role="prefill"), rig.attach("d0", role="decode")
    rig.attach("p1", role="prefill")
    full = SchedulerStats(running=256, kv_usage=0.9)
    rig.links.on_message(busy, EngineReport("ready", "", full, leader=77))
    rig.links.on_message(idle, EngineReport("ready", "", SchedulerStats(), leader=77))
    control = rig.fleet.roles
    for now[0] in (0.0, 2.0, 3.9):
        control.on_tick()
    assert not any(isinstance(message, SetEngineRole) for message in idle.sent)
    now[0] = 4.0
    control.on_tick()
    assert idle.sent[-1] == SetEngineRole("decode")


@pytest.mark.parametrize(
    ("preset", "flip", "expected"),
    [
        (None, None, ("", "", False)),
        ("distserve", None, ("distserve", "prefill_end", False)),
        ("splitwise", True, ("splitwise", "arrival", True)),
        ("tetri", None, ("tetri", "first_chunk", True)),
        ("tetri", False, ("tetri", "first_chunk", False)),
    ],
)
def test_presets_are_shown_as_resolved(
    preset: str | None, flip: bool | None, expected: tuple[str, str, bool]
) -> None:
    totals = Rig(preset=preset, flip=flip).fleet.totals()
    assert (totals.preset, totals.decode_choice, totals.flips) == expected


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ValueError, match="preset"):
        RouterConfig(preset="best")


def test_announcements_of_roles_keep_the_other_facts() -> None:
    attachment = RouterAttachment(
        FakeEngine(), lambda: announcement(num_blocks=9), FleetLinkConfig(hub="127.0.0.1:0")
    )
    attachment.set_role("prefill")
    assert attachment.announcement == announcement(num_blocks=9, role="prefill")

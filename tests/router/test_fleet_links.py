"""Sessions of routers and engines over real sockets: attachment, loss, and who is refused."""

import asyncio
import socket
import time
from pathlib import Path

import pytest

from gllm.config.attachment import AttachmentConfig
from gllm.config.engine import EngineConfig
from gllm.engine.attachment.attachment import RouterAttachment
from gllm.engine.engine import Engine
from gllm.messages.fleet import AnnounceEngine, DrainEngine, EngineReport, GreetEngine
from gllm.options.exit_status import UNAVAILABLE_STATUS, find_exit_status
from gllm.runtime.messaging.connection_pool import FleetLinkConfig
from gllm.runtime.messaging.security import create_secret_file
from tests.support.network.ports import free_port
from tests.support.routing.links import FakeEngine, Links, announcement, request, until

HUB = "127.0.0.1:0"


def reports(router: object) -> list[EngineReport]:
    return [each for each in router.messages if isinstance(each, EngineReport)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_engine_dialling", [True, False])
async def test_either_end_dials(links: Links, is_engine_dialling: bool) -> None:
    facts = announcement("east", 5, role="decode", num_blocks=99)
    if is_engine_dialling:
        router = await links.router(hub=HUB)
        engine, _ = await links.engine(facts, dial=(router.address,))
    else:
        engine, attachment = await links.engine(facts, hub=HUB)
        router = await links.router(dial=(attachment.hub_address.removeprefix("tcp://"),))
    await until(lambda: router.attached)
    link = router.link("east")
    assert (link.name, link.announce, link.report.state) == ("east", facts, "ready")
    assert link.address.startswith("127.0.0.1")
    link.send(request(1, [1], 3))
    await until(lambda: engine.driver.sequences)
    engine.step()
    await until(lambda: router.tokens())


async def test_members_with_the_secret(links: Links, tmp_path: Path) -> None:
    path = str(tmp_path / "secret")
    create_secret_file(Path(path))
    router = await links.router(hub=HUB, node_secret_file=path)
    await links.engine(dial=(router.address,), node_secret_file=path)
    await until(lambda: router.attached)
    await links.engine(announcement("two"), dial=(router.address,))
    await asyncio.sleep(0.2)
    assert router.attached == ["one"]


@pytest.mark.parametrize(
    "config",
    [
        FleetLinkConfig(hub="0.0.0.0:0"),
        FleetLinkConfig(dial=("10.0.0.1:29700",)),
        FleetLinkConfig(dial=("router.example:29700",)),
        FleetLinkConfig(dial=("127.0.0.1:1", "dns:routers.example:29700")),
    ],
    ids=str,
)
def test_nothing_leaves_this_machine_without_a_secret(config: FleetLinkConfig) -> None:
    with pytest.raises(ValueError, match="needs a node secret"):
        RouterAttachment(FakeEngine(), announcement, config)


async def test_several_engines_and_routers(links: Links) -> None:
    routers = [await links.router(f"router {i}", hub=HUB) for i in range(2)]
    dial = tuple(router.address for router in routers)
    engines = [await links.engine(announcement(f"e{i}", i), dial=dial) for i in range(3)]
    for router in routers:
        await until(lambda: sorted(router.attached) == ["e0", "e1", "e2"])  # noqa: B023
    for number, router in enumerate(routers):
        # Wire ids are a router's own.
        router.link("e1").send(request(7, [number], 3))
    engine = engines[1][0]
    await until(lambda: len(engine.driver.sequences) == 2)
    while engine.driver.sequences:
        engine.step()
    for router in routers:
        await until(lambda: 7 in router.ends())  # noqa: B023
    assert routers[0].tokens() != routers[1].tokens()
    assert [len(attachment.routers) for _, attachment in engines] == [2, 2, 2]


async def test_a_second_session_of_a_router_is_refused(
    links: Links, caplog: pytest.LogCaptureFixture
) -> None:
    router = await links.router(hub=HUB)
    _, attachment = await links.engine(hub=HUB, dial=(router.address,))
    await until(lambda: router.attached)
    # A router that an engine dials may dial the engine too.
    hub = attachment.hub_address.removeprefix("tcp://")
    again = await links.router(greeting=router.links.greeting, dial=(hub,))
    await until(lambda: "has a session with this router already" in caplog.text)
    assert (router.attached, router.lost, again.attached) == (["one"], [], [])
    assert len(attachment.routers) == 1


async def test_changes_of_state_are_reported_at_once(links: Links) -> None:
    router, engine, _ = await links.pair()
    router.messages.clear()
    engine.change("ready")
    engine.change("recovering", "stage 0 was killed")
    await until(lambda: reports(router))
    assert [(each.state, each.cause) for each in reports(router)][:1] == [
        ("recovering", "stage 0 was killed")
    ]
    assert router.link().report.state == "recovering"
    engine.change("ready")
    await until(lambda: router.link().report.state == "ready")


async def test_a_router_drains_an_engine_for_all_routers(links: Links) -> None:
    routers = [await links.router(hub=HUB) for _ in range(2)]
    await links.engine(dial=tuple(router.address for router in routers))
    for router in routers:
        await until(lambda: router.attached)  # noqa: B023
    for is_on, is_held in ((True, False), (True, True), (False, False)):
        routers[0].link().send(DrainEngine(is_on, is_held))
        expected = "draining" if is_on else "ready", is_held
        for router in routers:
            await until(
                lambda: (router.link().report.state, router.link().report.is_held) == expected  # noqa: B023
            )


async def test_changed_facts_are_announced_again(links: Links) -> None:
    router = await links.router(hub=HUB, peer_timeout=0.5)
    facts = [announcement(num_blocks=0)]
    attachment = RouterAttachment(
        FakeEngine(),
        lambda: facts[0],
        FleetLinkConfig(dial=(router.address,), peer_timeout=0.5),
    )
    await attachment.start()
    try:
        await until(lambda: router.attached)
        facts[0] = announcement(num_blocks=64)
        await until(lambda: router.link().announce.num_blocks == 64)
        assert [each for each in router.messages if isinstance(each, AnnounceEngine)] == facts
    finally:
        await attachment.stop()


async def test_an_engine_attaches_again_after_the_router_has_restarted(links: Links) -> None:
    router, engine, attachment = await links.pair()
    port = router.port
    router.link().send(request(1, [1], 400))
    await until(lambda: engine.driver.sequences)
    await router.links.stop()
    await until(lambda: not engine.driver.sequences)
    later = await links.router(hub=f"127.0.0.1:{port}")
    await until(lambda: later.attached)
    assert len(attachment.routers) == 1


async def test_an_engine_that_leaves_is_lost_at_once(links: Links) -> None:
    router, engine, attachment = await links.pair()
    await attachment.drain()
    await until(lambda: router.link().is_leaving)
    await attachment.stop()
    await until(lambda: router.lost)
    assert router.links.links == {}
    assert engine.client.num_requests == 0


@pytest.mark.parametrize("is_router_silent", [True, False])
async def test_a_silent_peer_is_lost(links: Links, is_router_silent: bool) -> None:
    router = await links.router(hub=HUB, peer_timeout=0.4)
    engine, attachment = await links.engine(dial=(router.address,), peer_timeout=0.4)
    await until(lambda: router.attached)
    router.link().send(request(1, [1], 400))
    await until(lambda: engine.driver.sequences)
    session = attachment.routers[0]
    silent = router.links if is_router_silent else attachment
    silent.is_silent = True
    if is_router_silent:
        await until(lambda: not engine.driver.sequences)
    else:
        await until(lambda: router.lost)
        assert "no message for" in router.lost[0][1]
    await until(lambda: not session.connection.is_open)
    silent.is_silent = False
    await until(lambda: len(router.attached) >= 2)


async def test_nobody_is_lost_because_this_process_was_stopped(links: Links) -> None:
    router = await links.router(hub=HUB, peer_timeout=0.5)
    await links.engine(dial=(router.address,), peer_timeout=0.5)
    await until(lambda: router.attached)
    # The event loop runs nothing for longer than a peer may be silent.
    time.sleep(0.8)
    router.messages.clear()
    await until(lambda: len(reports(router)) > 1)
    assert router.lost == []


async def test_two_living_engines_of_one_name(
    links: Links, caplog: pytest.LogCaptureFixture
) -> None:
    router = await links.router(hub=HUB)
    await links.engine(announcement("x", 1), dial=(router.address,), refused_seconds=0.05)
    await until(lambda: router.attached == ["x"])
    _, later = await links.engine(announcement("x", 2), dial=(router.address,))
    await until(lambda: router.attached == ["x", "x"])
    assert [name for name, _ in router.lost] == ["x"]
    # The earlier one tries again in vain, and both logs show it.
    await until(lambda: len(router.links.refusals) >= 2)
    await until(lambda: "another engine of the name x at 127.0.0.1" in caplog.text)
    assert "another engine of the name x is attached" in caplog.text
    assert router.link("x").announce.run == 2
    assert router.attached == ["x", "x"]
    await later.stop()
    await until(lambda: router.links.links and router.link("x").announce.run == 1)


async def test_versions_that_do_not_understand_each_other(
    links: Links, caplog: pytest.LogCaptureFixture
) -> None:
    router = await links.router(hub=HUB)
    await links.engine(announcement("new", protocol=9, oldest_protocol=8), dial=(router.address,))
    await until(lambda: router.links.refusals)
    assert "update the older one" in router.links.refusals[0].cause
    _, attachment = await links.engine(hub=HUB)
    hub = attachment.hub_address.removeprefix("tcp://")
    old = await links.router(greeting=GreetEngine(0, 0, "old", 3), dial=(hub,))
    await until(lambda: "the router speaks versions 0 to 0" in caplog.text)
    assert router.attached == old.attached == []
    assert attachment.routers == []


async def test_an_engine_that_the_router_refuses(
    links: Links, caplog: pytest.LogCaptureFixture
) -> None:
    router, engine, attachment = await links.pair()
    router.link().send(request(1, [1], 400))
    await until(lambda: engine.driver.sequences)
    router.link().refuse("it serves another model")
    await until(lambda: "it serves another model" in caplog.text)
    await until(lambda: not engine.driver.sequences)
    assert router.links.links == {}
    assert router.lost == []
    assert attachment.routers == []


async def test_a_hub_that_cannot_be_bound(links: Links) -> None:
    router = await links.router(hub=HUB)
    with pytest.raises(OSError, match="cannot listen"):
        await links.router(hub=router.address)


async def test_an_address_that_refuses_connections_tells_the_end_of_its_engine(
    links: Links,
) -> None:
    _, attachment = await links.engine(announcement(run=5), hub=HUB)
    router = await links.router(dial=(attachment.hub_address.removeprefix("tcp://"),))
    died: list[int] = []
    router.links.on_died = died.append
    await until(lambda: router.attached)
    await attachment.stop()
    await until(lambda: died)
    assert died == [5]


async def test_a_session_that_ends_is_no_death_while_the_address_accepts_connections(
    links: Links,
) -> None:
    _, attachment = await links.engine(hub=HUB)
    router = await links.router(dial=(attachment.hub_address.removeprefix("tcp://"),))
    died: list[int] = []
    router.links.on_died = died.append
    await until(lambda: router.attached)
    attachment.end_sessions()
    await until(lambda: len(router.attached) == 2)
    assert died == []


async def test_an_engine_knows_the_routers_that_have_attached_it(links: Links) -> None:
    router, _, attachment = await links.pair()
    await until(lambda: attachment.attached_routers == ["router"])
    assert attachment.describe() == {"attached": ["router"], "cause": ""}
    router.link().refuse("its maximum length is 64 tokens")
    await until(lambda: not attachment.attached_routers)
    await until(lambda: "its maximum length is 64 tokens" in attachment.unattached_cause)


async def test_a_session_that_a_router_refuses_is_no_attachment(links: Links) -> None:
    router = await links.router(hub=HUB)
    router.refusal = "it serves another model"
    _, attachment = await links.engine(dial=(router.address,))
    attached: set[str] = set()

    def is_refused() -> bool:
        attached.update(attachment.attached_routers)
        return "another model" in attachment.unattached_cause

    await until(is_refused)
    assert not attached


async def test_an_earlier_router_has_every_engine_that_it_has_a_session_with(links: Links) -> None:
    router = await links.router("earlier", GreetEngine(1, 1, "earlier", 3), hub=HUB)
    _, attachment = await links.engine(dial=(router.address,))
    await until(lambda: attachment.attached_routers == ["earlier"])
    await asyncio.sleep(0)
    assert attachment.attached_routers == ["earlier"]


async def test_why_no_router_has_an_engine(links: Links) -> None:
    address = f"127.0.0.1:{free_port()}"
    _, attachment = await links.engine(dial=(address,))
    await until(lambda: f"{address}: nothing accepts" in attachment.unattached_cause)


def test_an_engine_is_ready_without_a_router_only_by_the_flag() -> None:
    causes = []
    for is_ready in (False, True):
        attachment = AttachmentConfig(("127.0.0.1:1",), ready_without_router=is_ready)
        status = Engine(EngineConfig("demo"), attachment=attachment).status()
        assert status.num_routers == 0
        causes.append(status.unattached_cause)
    assert causes == ["no router has attached the engine", ""]
    hub_only = Engine(EngineConfig("demo"), attachment=AttachmentConfig(hub="0"))
    assert (hub_only.status().num_routers, hub_only.status().unattached_cause) == (None, "")


async def test_a_hub_whose_name_is_unknown_is_named(links: Links, tmp_path: Path) -> None:
    secret = str(tmp_path / "secret")
    create_secret_file(tmp_path / "secret")

    async def resolve(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(OSError, match=r"'unknown\.name' cannot be resolved: Name or") as caught:
        await links.engine(resolve=resolve, hub="unknown.name:29700", node_secret_file=secret)
    assert find_exit_status(caught.value) == UNAVAILABLE_STATUS


async def test_a_hub_may_have_a_name(links: Links) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        assert host == "localhost"
        return [f"127.0.0.1:{port}"]

    _, attachment = await links.engine(resolve=resolve, hub="localhost:0")
    router = await links.router(dial=(attachment.hub_address.removeprefix("tcp://"),))
    await until(lambda: router.attached)

"""Nodes join the head, are refused with the cause, fall silent, return, and break the rules."""

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gllm.config.nodes import NodesConfig
from gllm.messages.lifecycle import Hello
from gllm.messages.nodes import (
    EdgeOpened,
    EngineState,
    LeaveCluster,
    NodeHeartbeat,
    RefuseNode,
    StartWorker,
    WelcomeNode,
    WorkerFrame,
    WorkerSample,
)
from gllm.messages.requests import SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.recovery.join_check import PROBE_PROTOCOL, parse_facts
from gllm.recovery.membership import NodeStatus
from gllm.runtime.head.deaths import EngineError
from gllm.runtime.head.node_hub import NODE_RUN, NodeHub, NodeHubTimes, node_hub_address
from gllm.runtime.messaging.bus_socket import NEW_KEYS
from gllm.runtime.messaging.security import SecretFile, add_secret, create_secret_file, drop_secret
from gllm.runtime.messaging.session import HEADER
from tests.support.nodes.fake_agent import (
    CONFIG,
    HEAD_FACTS,
    NODE_FACTS,
    RUN,
    FakeAgent,
    HubUnderTest,
    RawPeer,
    RecordingListener,
    make_join,
    until,
)


@pytest.fixture
async def end() -> AsyncIterator[HubUnderTest]:
    """A hub of two nodes without encryption, which accepts agents."""
    under_test = HubUnderTest()
    under_test.hub.start()
    yield under_test
    await under_test.close()


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[HubUnderTest]:
    """A hub that needs a node secret."""
    path = tmp_path / "secret"
    create_secret_file(path)
    under_test = HubUnderTest(str(path), SecretFile(path).keys[0])
    under_test.hub.start()
    yield under_test
    await under_test.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_a_node_joins_and_its_heartbeats_are_answered(
    is_encrypted: bool, end: HubUnderTest, secured: HubUnderTest
) -> None:
    end = secured if is_encrypted else end
    listener = RecordingListener(end.hub)
    agent = end.dial(make_join("one"))
    agent.beat([WorkerSample(4, True, 1.5)], ahead=1000.0)
    await until(lambda: len(agent.of(NodeHeartbeat)) > 3)
    welcome = agent.of(WelcomeNode)[0]
    assert (welcome.run, welcome.model, welcome.config) == (RUN, "demo", CONFIG)
    session = end.hub.sessions["one"]
    assert listener.joined == ["one"]
    assert session.address == "127.0.0.1"
    sample = session.sample(4)
    assert sample is not None
    assert (sample.is_stopped, sample.cpu_seconds) == (True, 1.5)
    assert session.sample(5) is None
    assert session.clock_offset.seconds == pytest.approx(1000.0, abs=50.0)
    end.hub.broadcast(EngineState("ready", "", 3))
    await until(lambda: agent.of(EngineState))


async def test_messages_of_a_member_reach_the_listener_in_order(end: HubUnderTest) -> None:
    listener = RecordingListener(end.hub)
    agent = end.dial(make_join("one"))
    for number in range(50):
        agent.send(WorkerFrame(number, 1, bytes([number])))
    await until(lambda: len(listener.messages) == 50)
    assert [each for _, each in listener.messages] == [
        WorkerFrame(number, 1, bytes([number])) for number in range(50)
    ]


async def test_a_probe_learns_the_names_that_machines_have(end: HubUnderTest) -> None:
    agent = end.dial(make_join("one"))
    await until(lambda: agent.of(WelcomeNode))
    probe = end.dial(make_join("gllm-doctor", protocol=PROBE_PROTOCOL))
    await until(lambda: probe.of(RefuseNode))
    facts = parse_facts(probe.of(RefuseNode)[0].cause)
    assert facts is not None
    assert facts.nodes[-1] == "one"
    assert "gllm-doctor" not in facts.nodes


DIFFERENCES: list[tuple[dict[str, Any], str]] = [
    ({"protocol": 99}, "protocol"),
    ({"facts": msgspec.structs.replace(NODE_FACTS, version="0.9")}, "gllm 0.9"),
    ({"model_hash": "another"}, "hash"),
    ({"config": CONFIG.replace(b"2", b"4", 1)}, "pipeline_parallel_size is 4"),
    ({"config": b"{]"}, "cannot be read"),
    ({"rank": 7}, "no node rank 7"),
    ({"rank": 0}, "the head itself"),
    ({"name": "head"}, "--node-name"),
    ({"name": "local"}, "--node-name"),
    ({"name": "a\nb"}, "printable"),
]


async def test_nodes_that_differ_are_refused_for_good(end: HubUnderTest) -> None:
    agents = []
    for number, (fields, cause) in enumerate(DIFFERENCES, start=1):
        agent = end.dial(make_join(**({"name": "one"} | fields)))
        agents.append(agent)
        await until(lambda: agent.refusal)  # noqa: B023
        assert agent.refusal is not None
        assert cause in agent.refusal.cause
        assert agent.refusal.is_final
        assert not end.hub.sessions
        assert end.hub.refused_peers == {"127.0.0.1": number}
        assert cause in end.hub.membership.describe_missing()
    await until(lambda: all(agent.lost for agent in agents))


async def test_own_values_of_a_machine_are_no_difference(end: HubUnderTest) -> None:
    agent = end.dial(make_join("one", config=CONFIG.replace(b'"threads":3', b'"threads":9')))
    await until(lambda: agent.is_welcome)


async def test_a_second_living_node_of_a_rank_or_name_may_try_again(end: HubUnderTest) -> None:
    first = end.dial(make_join("one", 1))
    await until(lambda: first.is_welcome)
    for join, cause in [
        (make_join("two", 1), "rank 1 belongs to one"),
        (make_join("one", None), "a node named one is a member already"),
    ]:
        agent = end.dial(join)
        await until(lambda: agent.refusal)  # noqa: B023
        assert agent.refusal is not None
        assert cause in agent.refusal.cause
        assert not agent.refusal.is_final
    assert list(end.hub.sessions) == ["one"]
    assert not first.lost


async def test_a_node_returns_after_its_session_has_ended(end: HubUnderTest) -> None:
    listener = RecordingListener(end.hub)
    join = make_join("one")
    first = end.dial(join)
    await until(lambda: first.is_welcome)
    first.close()
    await until(lambda: listener.lost)
    assert listener.lost[0][0] == "one"
    assert listener.lost[0][2], "the connection was closed without a message"
    second = end.dial(join)
    await until(lambda: second.is_welcome)
    record = end.hub.membership.nodes["one"]
    assert (record.status, record.num_losses) == (NodeStatus.MEMBER, 1)


async def test_another_session_of_the_same_agent_replaces_the_first(end: HubUnderTest) -> None:
    listener = RecordingListener(end.hub)
    join = make_join("one")
    first = end.dial(join)
    await until(lambda: first.is_welcome)
    second = end.dial(join)
    await until(lambda: second.is_welcome and first.lost)
    assert [(name, is_death) for name, _, is_death, _ in listener.lost] == [("one", False)]
    assert not second.lost


@contextlib.asynccontextmanager
async def hub_of(*arguments: Any, **options: Any) -> AsyncIterator[HubUnderTest]:
    """A hub with other options, which accepts agents."""
    under_test = HubUnderTest(*arguments, **options)
    under_test.hub.start()
    try:
        yield under_test
    finally:
        await under_test.close()


async def test_a_silent_node_is_lost() -> None:
    async with hub_of(node_timeout=1.0) as end:
        await check_silence(end)


async def check_silence(end: HubUnderTest) -> None:
    """One of two nodes falls silent, and is lost."""
    listener = RecordingListener(end.hub)
    silent, beating = end.dial(make_join("one")), end.dial(make_join("two", None))
    silent.beat()
    beating.beat()
    await until(lambda: silent.is_welcome and beating.is_welcome)
    silent.stop_beating()
    await until(lambda: listener.lost)
    name, cause, is_death, has_left = listener.lost[0]
    assert (name, is_death, has_left) == ("one", False, False)
    assert "no message for" in cause
    await until(lambda: silent.lost)
    assert list(end.hub.sessions) == ["two"]


async def test_a_node_that_leaves_is_not_awaited(end: HubUnderTest) -> None:
    listener = RecordingListener(end.hub)
    agent = end.dial(make_join("one"))
    await until(lambda: agent.is_welcome)
    agent.send(LeaveCluster("SIGTERM"))
    await until(lambda: listener.lost)
    assert listener.lost == [("one", "SIGTERM", False, True)]
    assert end.hub.membership.nodes["one"].status is NodeStatus.LEFT


async def test_missing_nodes_are_named() -> None:
    end = HubUnderTest(nnodes=4, join_timeout=0.5)
    forming = asyncio.create_task(end.hub.form())
    try:
        await until(lambda: end.hub.address)
        agent = end.dial(make_join("two", 2))
        await until(lambda: agent.is_welcome)
        refused = end.dial(make_join("three", 3, model_hash="another"))
        await until(lambda: refused.refusal)
        with pytest.raises(EngineError, match=r"2 of 4 nodes; none from rank 1, 3") as error:
            await forming
        assert "refused: 127.0.0.1" in str(error.value)
        # Who has joined ends with an error too.
        await until(lambda: agent.of(LeaveCluster))
        assert agent.of(LeaveCluster)[0].is_failure
    finally:
        await end.close()


async def test_forming_ends_when_all_have_joined(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gllm.runtime.head.node_hub")
    end = HubUnderTest(times=NodeHubTimes(log_seconds=0.05), nnodes=3, max_spares=1)
    forming = asyncio.create_task(end.hub.form())
    try:
        await until(lambda: "waiting for nodes" in caplog.text)
        assert "1 of 3 nodes; none from rank 1, 2" in caplog.text
        end.dial(make_join("second", 2))
        end.dial(make_join("first", 1))
        assert await forming == ["first", "second"]
        # Nodes that come later are spares, up to a limit.
        spare = end.dial(make_join("spare", None))
        await until(lambda: spare.is_welcome)
        assert end.hub.membership.spares == ["spare"]
        many = end.dial(make_join("many", None))
        await until(lambda: many.refusal)
        assert many.refusal is not None
        assert "--max-spares" in many.refusal.cause
    finally:
        await end.close()


async def test_wrong_secret_is_counted_by_address(secured: HubUnderTest, tmp_path: Path) -> None:
    other = tmp_path / "other"
    create_secret_file(other)
    while "127.0.0.1" not in secured.hub.refused_peers:
        # A connection that ends before this event loop looks has no address any more.
        stranger = secured.dial(make_join("one"), SecretFile(other).keys[0])
        num_refused = sum(secured.hub.refused_peers.values())
        await until(lambda: stranger.lost)  # noqa: B023
        await until(lambda: sum(secured.hub.refused_peers.values()) > num_refused)  # noqa: B023
    assert "127.0.0.1" in secured.hub.membership.describe_missing()
    assert "secret" in secured.hub.membership.describe_missing()
    member = secured.dial(make_join("one"))
    await until(lambda: member.is_welcome)


async def test_a_new_secret_is_no_death(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    create_secret_file(path)
    times = NodeHubTimes(reload_seconds=0.05)
    async with hub_of(str(path), SecretFile(path).keys[0], times) as secured:
        await check_new_secret(secured, path)


async def check_new_secret(secured: HubUnderTest, path: Path) -> None:
    """A node that has joined with a secret that is replaced joins again with the new one."""
    listener = RecordingListener(secured.hub)
    join = make_join("one")
    agent = secured.dial(join)
    await until(lambda: agent.is_welcome)
    add_secret(path)
    drop_secret(path)
    await until(lambda: listener.lost)
    assert listener.lost == [("one", NEW_KEYS, False, False)]
    again = secured.dial(join, SecretFile(path).keys[0])
    await until(lambda: again.is_welcome or again.lost)
    while again.lost:
        # The hub needs a moment to bind its address anew.
        again = secured.dial(join, SecretFile(path).keys[0])
        await until(lambda: again.is_welcome or again.lost)  # noqa: B023
    # Who has the revoked secret stays out.
    revoked = secured.dial(make_join("two", None))
    await until(lambda: revoked.lost)
    assert list(secured.hub.sessions) == ["one"]


async def test_off_loopback_a_secret_is_required() -> None:
    with pytest.raises(ValueError, match="node secret"):
        NodeHub(NodesConfig(nnodes=2, node_listen="0.0.0.0:29600"), None, 1, HEAD_FACTS)
    with pytest.raises(ValueError, match="--master-addr"):
        NodeHub(NodesConfig(nnodes=2), None, 1, HEAD_FACTS)
    config = NodesConfig(nnodes=2, master_addr="203.0.113.7:29600", node_listen="127.0.0.1:29600")
    NodeHub(config, None, 1, HEAD_FACTS)
    assert node_hub_address(config) == "tcp://127.0.0.1:29600"


async def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        end = HubUnderTest(master_addr=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(OSError, match="cannot listen"):
            end.hub.start()
        await end.close()


def forbidden_messages() -> list[Any]:
    """Return messages that other roles send, and that an agent may not send."""
    return [
        StartWorker(1, "info", "text"),
        WelcomeNode(RUN, "demo", "hash", CONFIG, 5.0, 60.0),
        EngineState("ready", "", 1),
        SubmitRequest(1, [1, 2], SequenceSamplingParams(), 4, []),
    ]


@pytest.mark.parametrize("message", forbidden_messages(), ids=lambda each: type(each).__name__)
async def test_messages_of_other_roles_end_the_session(end: HubUnderTest, message: Any) -> None:
    listener = RecordingListener(end.hub)
    agent, other = end.dial(make_join("one")), end.dial(make_join("two", None))
    await until(lambda: agent.is_welcome and other.is_welcome)
    agent.send(message)
    await until(lambda: agent.lost)
    assert end.hub.num_malformed == 1
    assert [name for name, *_ in listener.lost] == ["one"]
    assert not listener.messages
    assert not other.lost


async def test_nothing_is_accepted_before_a_node_has_joined(end: HubUnderTest) -> None:
    listener = RecordingListener(end.hub)
    agent = end.dial()
    agent.send(EdgeOpened(1, 0))
    agent.send(make_join("one"))
    await until(lambda: agent.lost)
    assert end.hub.num_malformed == 1
    assert not listener.joined
    assert end.hub.refused_peers == {"127.0.0.1": 1}


async def test_a_session_without_join_is_closed() -> None:
    async with hub_of(times=NodeHubTimes(join_seconds=0.1)) as end:
        agent = end.dial()
        await until(lambda: agent.lost)
        assert end.hub.refused_peers == {"127.0.0.1": 1}
        assert end.hub.describe()["joining"] == 0


async def test_two_joins_or_an_error_of_the_handler_end_one_session(end: HubUnderTest) -> None:
    listener = RecordingListener(end.hub)
    join = make_join("one")
    agent, other = end.dial(join), end.dial(make_join("two", None))
    await until(lambda: agent.is_welcome and other.is_welcome)
    agent.send(join)
    await until(lambda: agent.lost)
    listener.error = RuntimeError("cannot be handled")
    other.send(EdgeOpened(1, 0))
    await until(lambda: other.lost)
    assert [name for name, *_ in listener.lost] == ["one", "two"]
    assert end.hub.num_malformed == 2


async def test_ten_thousand_malformed_frames_of_agents_harm_nobody(end: HubUnderTest) -> None:
    """Half of them before the node has joined, half of them from a member."""
    listener = RecordingListener(end.hub)
    rng = random.Random(5)
    member = end.dial(make_join("member"))
    member.beat()
    await until(lambda: member.is_welcome)
    num_sent = 0
    for round_number in range(20):
        peer = RawPeer(end.context, end.hub.address)
        if round_number % 2:
            name = f"agent {round_number}"
            peer.send(make_join(name, None))
            await until(lambda: name in end.hub.sessions)  # noqa: B023
        num_sent += send_garbage(peer, rng, 500)
        await until(lambda: end.hub.num_malformed == round_number + 1)  # noqa: B023
        await until(lambda: end.hub.describe()["connections"] == 1)
        peer.close()
    # The first frame ends a session, and those behind it are dropped.
    assert num_sent == 10_000
    assert end.hub.num_malformed == 20
    assert not listener.messages
    assert [name for name, *_ in listener.lost] == [f"agent {n}" for n in range(1, 20, 2)]
    assert not member.lost
    assert end.hub.membership.nodes["member"].is_alive


def send_garbage(peer: RawPeer, rng: random.Random, count: int) -> int:
    """Send frames that are no messages of an agent."""
    for number in range(count):
        if rng.random() < 0.5:
            frame = rng.randbytes(rng.randrange(200))
        else:
            header = HEADER.pack(NODE_RUN, 0, number + 10, 0)
            frame = header + rng.randbytes(rng.randrange(200))
        peer.send_frame(frame)
    return count


async def test_a_stranger_who_sends_no_hello_is_closed(end: HubUnderTest) -> None:
    agent = FakeAgent(end.context, end.hub.address)
    end.agents.append(agent)
    # A second Hello, of another sender.
    agent.spoke.send(Hello(9))
    await until(lambda: agent.lost)
    assert end.hub.num_malformed == 1


async def test_connections_are_released() -> None:
    async with hub_of(times=NodeHubTimes(join_seconds=600.0)) as end:
        for number in range(5):
            agent = end.dial(make_join("one", agent=number))
            await until(lambda: agent.is_welcome)  # noqa: B023
            agent.close()
            await until(lambda: not end.hub.sessions and not end.hub.describe()["connections"])
        stranger = end.dial()
        await until(lambda: end.hub.describe()["joining"] == 1)
        stranger.close()
        await until(lambda: not any(end.hub.describe().values()))

"""Random lives of engines at a router, without sockets: unique names, losses told once."""

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gllm.messages.base import WireMessage
from gllm.messages.fleet import EngineReport, GreetEngine, NoticeToEngine, RefuseEngine
from gllm.messages.requests import EngineOutputs
from gllm.runtime.messaging.connection_pool import ConnectionPool, FleetLinkConfig, PeerConnection
from gllm.runtime.messaging.fleet_links import EngineLink, FleetLinks
from gllm.scheduler.plan import SchedulerStats, StepOutput
from tests.support.examples import num_examples
from tests.support.routing.links import announcement

OUTPUTS = EngineOutputs(StepOutput([], [], [], []), SchedulerStats())


class FakePool(ConnectionPool):
    """A pool whose sessions a test begins and ends."""

    def close(self, connection: PeerConnection, cause: str, is_refused: bool = False) -> None:
        connection.is_open = False


class Peer:
    """One session of an engine."""

    def __init__(self, name: str, run: int, number: int) -> None:
        self.name, self.run = name, run
        self.sent: list[WireMessage] = []
        self.connection = PeerConnection(f"10.0.0.{number}", self.sent.append, 0.0)
        self.has_announced = False
        self.has_reported = False


class LinkMachine(RuleBasedStateMachine):
    """Engines of few names that connect, announce themselves, report, are lost or refused."""

    def __init__(self) -> None:
        super().__init__()
        self.attached: list[EngineLink] = []
        self.num_ends: Counter[EngineLink] = Counter()
        self.links = FleetLinks(
            FleetLinkConfig(),
            "r",
            self._on_attached,
            self._on_lost,
            self._on_message,
            create_pool=FakePool,
        )
        self.peers: list[Peer] = []
        self.replaced: dict[str, set[int]] = {}
        """Runs whose names others have now, by name."""
        self.num_peers = 0
        self.num_messages = 0

    def _on_attached(self, link: EngineLink) -> None:
        assert self.links.links[link.name] is link
        self.attached.append(link)

    def _on_lost(self, link: EngineLink, cause: str) -> None:
        assert cause
        assert self.links.links.get(link.name) is not link
        self.num_ends[link] += 1

    def _on_message(self, link: EngineLink, message: Any) -> None:
        assert self.links.links[link.name] is link
        self.num_messages += 1

    def _deliver(self, peer: Peer, message: Any) -> None:
        if peer.connection.is_open:
            self.links.on_message(peer.connection, message)

    @property
    def open_peers(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.connection.is_open]

    @rule(name=st.sampled_from("ab"), run=st.integers(1, 3), is_complete=st.booleans())
    def connect(self, name: str, run: int, is_complete: bool) -> None:
        """Begin a session; a complete one is announced and reports, unless it is refused."""
        peer = self.add_peer(name, run)
        if is_complete:
            self.announce_peer(peer, 1)
            if peer.connection.is_open:
                self.report_peer(peer, "ready")

    def add_peer(self, name: str, run: int) -> Peer:
        peer = Peer(name, run, self.num_peers)
        self.num_peers += 1
        self.peers.append(peer)
        self.links.on_connected(peer.connection)
        assert [type(each) for each in peer.sent] == [GreetEngine]
        return peer

    @precondition(lambda self: self.open_peers)
    @rule(data=st.data(), num_blocks=st.integers(0, 3))
    def announce(self, data: Any, num_blocks: int) -> None:
        self.announce_peer(data.draw(st.sampled_from(self.open_peers)), num_blocks)

    def announce_peer(self, peer: Peer, num_blocks: int) -> None:
        holder = self.links.links.get(peer.name)
        is_replaced = peer.run in self.replaced.get(peer.name, ()) and not peer.has_announced
        self._deliver(peer, announcement(peer.name, peer.run, num_blocks=num_blocks))
        peer.has_announced = True
        assert peer.connection.is_open != is_replaced
        if is_replaced:
            assert holder is not None
            assert holder.announce.run != peer.run
            assert isinstance(peer.sent[-1], RefuseEngine)

    @precondition(lambda self: any(peer.has_announced for peer in self.open_peers))
    @rule(data=st.data(), state=st.sampled_from(("ready", "draining")))
    def report(self, data: Any, state: str) -> None:
        peers = [peer for peer in self.open_peers if peer.has_announced]
        self.report_peer(data.draw(st.sampled_from(peers)), state)

    def report_peer(self, peer: Peer, state: str) -> None:
        before = self.links.links.get(peer.name)
        self._deliver(peer, EngineReport(state, "", SchedulerStats()))
        link = self.links.links[peer.name]
        assert link.connection is peer.connection
        assert link.report.state == state
        if before is not None and before is not link:
            assert not before.is_attached
            assert self.num_ends[before] == 1
            replaced = self.replaced.setdefault(peer.name, set())
            replaced.add(before.announce.run)
            replaced.discard(peer.run)
        peer.has_reported = True

    @precondition(lambda self: self.open_peers)
    @rule(data=st.data())
    def outputs(self, data: Any) -> None:
        peer = data.draw(st.sampled_from(self.open_peers))
        before = self.num_messages
        self._deliver(peer, OUTPUTS)
        assert self.num_messages == before + peer.has_reported

    @precondition(lambda self: self.open_peers)
    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        peer = data.draw(st.sampled_from(self.open_peers))
        peer.connection.is_open = False
        link = self.links.links.get(peer.name)
        if link is not None and link.connection is peer.connection:
            self.replaced.pop(peer.name, None)
        self.links.on_lost(peer.connection, "the connection was closed")

    @precondition(lambda self: self.links.links)
    @rule(data=st.data())
    def refuse(self, data: Any) -> None:
        link = self.links.links[data.draw(st.sampled_from(sorted(self.links.links)))]
        link.refuse("another model")
        self.replaced.pop(link.name, None)
        assert not link.is_attached
        assert self.num_ends[link] == 0
        self.attached.remove(link)

    @invariant()
    def the_links_are_those_that_were_told(self) -> None:
        current = [link for link in self.attached if not self.num_ends[link]]
        assert sorted(link.name for link in current) == sorted(self.links.links)
        assert all(self.links.links[link.name] is link for link in current)
        assert all(link.is_attached for link in current)
        assert max(self.num_ends.values(), default=0) <= 1

    @invariant()
    def nothing_is_kept_of_sessions_that_ended(self) -> None:
        assert self.links.num_sessions == len(self.open_peers)

    @invariant()
    def notices_go_to_those_who_hold_the_name(self) -> None:
        for peer in self.peers:
            if any(isinstance(each, NoticeToEngine) for each in peer.sent):
                assert peer.has_reported


TestLinks = LinkMachine.TestCase
TestLinks.settings = settings(
    max_examples=num_examples(25, 1000), stateful_step_count=40, deadline=None
)


def test_an_engine_that_got_its_name_back_may_begin_another_session() -> None:
    machine = LinkMachine()
    machine.connect("a", 1, True)
    late = machine.add_peer("a", 1)
    machine.announce_peer(late, 1)
    machine.connect("a", 2, True)
    machine.report_peer(late, "ready")
    machine.connect("a", 1, True)
    assert machine.links.links["a"].announce.run == 1
    assert machine.links.links["a"].connection is not late.connection

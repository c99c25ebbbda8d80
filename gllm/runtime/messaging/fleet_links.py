"""Sessions of a router with its engines: which engines are attached, and which are refused."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from gllm.messages.codec import AnyMessage, decode_for_router
from gllm.messages.fleet import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    AnnounceEngine,
    EngineReport,
    GreetEngine,
    NoticeToEngine,
    RefuseEngine,
    RefuseRouter,
    RouterHeartbeat,
    is_compatible,
)
from gllm.options.addresses import Resolve, resolve_host
from gllm.runtime.messaging.connection_pool import (
    ConnectionPool,
    FleetLinkConfig,
    PeerConnection,
    is_valid_name,
    new_run,
)

log = logging.getLogger(__name__)

MAX_REFUSALS = 32
"""Number of latest refusals that are shown."""


class Refusal(NamedTuple):
    """Address, name, cause and time of an engine that a router has refused to connect."""

    address: str
    name: str
    """Empty if the engine did not announce itself."""
    cause: str
    time: float
    """time.time() of the refusal."""


class EngineLink:
    """Session of a router with one engine, and the engine's last announcement and load report."""

    def __init__(
        self,
        connection: PeerConnection,
        announce: AnnounceEngine,
        report: EngineReport,
        refuse: Callable[["EngineLink", str], None],
    ) -> None:
        self.announce = announce
        """The latest announcement."""
        self.report = report
        """The latest report."""
        self.attached_at = time.monotonic()
        """Time of the monotonic clock."""
        self.connection = connection
        self.name = announce.name
        """Name of the engine, unique among the attached ones."""
        self.send = connection.send
        """Queues a message; it is dropped if the session has ended."""
        self._refuse = refuse

    @property
    def address(self) -> str:
        """Address of the engine."""
        return self.connection.address

    @property
    def last_heard(self) -> float:
        """Time of the latest message, of the monotonic clock."""
        return self.connection.last_heard

    @property
    def is_attached(self) -> bool:
        """True until the session ends."""
        return self.connection.is_open

    @property
    def is_leaving(self) -> bool:
        """True if the engine drains, so that the end of its session is planned."""
        return self.report.state == "draining"

    def refuse(self, cause: str) -> None:
        """End the session and send the engine the cause; `on_lost` is not called."""
        self._refuse(self, cause)


@dataclass(eq=False)
class _Peer:
    """Session with what may be an engine."""

    announce: AnnounceEngine | None = None
    link: EngineLink | None = None
    """Set with the first report."""


class FleetLinks:
    """Sessions of a router with its engines, by engine name.

    A new session of the same engine process replaces the old one. While a name is in use, another
    engine process that announces it is refused.
    """

    def __init__(
        self,
        config: FleetLinkConfig,
        router: str,
        on_attached: Callable[[EngineLink], None],
        on_lost: Callable[[EngineLink, str], None],
        on_message: Callable[[EngineLink, AnyMessage], None],
        resolve: Resolve = resolve_host,
        create_pool: Callable[..., ConnectionPool] = ConnectionPool,
    ) -> None:
        """Create the links of a router that has not started.

        Args:
            config: hub, engines to dial, limits.
            router: name of this router, for the logs of engines.
            on_attached: called with an engine that may be used from now on.
            on_lost: called with an attached engine whose session has ended, and the cause.
            on_message: called with every further message of an attached engine.
            resolve: resolution of host names.
            create_pool: creates the connections to the engines.

        Raises:
            ValueError: an address or the secret cannot be used.
        """
        self.links: dict[str, EngineLink] = {}
        """Attached engines by name."""
        self.refusals: deque[Refusal] = deque(maxlen=MAX_REFUSALS)
        """Latest engines that were refused."""
        self._on_attached = on_attached
        self._on_lost = on_lost
        self._on_message = on_message
        self.greeting = GreetEngine(
            PROTOCOL,
            OLDEST_PROTOCOL,
            router,
            new_run(),
            accepts_pushes=True,
            needs_first_chunks=config.needs_first_chunks,
            confirms_attachment=True,
        )
        """First message to every engine."""
        self._peers: dict[PeerConnection, _Peer] = {}
        self._superseded: dict[str, set[int]] = {}
        """Runs of engines whose names others have now, by name."""
        self._runs: dict[str, int] = {}
        """Runs of the engines that were attached last, by address that was dialled."""
        self.on_died: Callable[[int], None] = lambda run: None
        """Called with the run of a lost engine whose address refuses connections now."""
        self._pool = create_pool(config, decode_for_router, self, resolve)

    @property
    def hub_address(self) -> str:
        """Address that engines dial, with its port; empty without a hub."""
        return self._pool.hub_address

    @property
    def num_sessions(self) -> int:
        """Number of sessions with engines, including engines that are not attached yet."""
        return len(self._peers)

    @property
    def num_refused_peers(self) -> int:
        """Connections refused without the node secret, or above the limit of connections."""
        return self._pool.num_refused

    async def start(self) -> None:
        """Listen and dial. Raises OSError if the hub's address cannot be bound."""
        await self._pool.start()

    async def stop(self) -> None:
        """End all sessions; the callbacks are not called."""
        await self._pool.stop()
        self._peers.clear()
        self.links.clear()

    def on_connected(self, connection: PeerConnection) -> None:
        """Greet a peer that has connected."""
        self._peers[connection] = _Peer()
        connection.send(self.greeting)

    def on_message(self, connection: PeerConnection, message: AnyMessage) -> None:
        """Handle a message of an engine; an exception ends the session."""
        peer = self._peers[connection]
        match message:
            case AnnounceEngine():
                self._on_announce(connection, peer, message)
            case EngineReport():
                self._on_report(connection, peer, message)
            case RefuseRouter(cause):
                self._on_refused(connection, peer, cause)
            case _ if peer.link is not None:
                self._on_message(peer.link, message)

    def on_lost(self, connection: PeerConnection, cause: str) -> None:
        """Detach an engine whose session has ended."""
        peer = self._peers.pop(connection)
        if peer.link is not None:
            self._detach(peer.link)
            self._on_lost(peer.link, cause)

    def on_listener_gone(self, address: str) -> None:
        """Report that the process of an engine has ended."""
        if (run := self._runs.pop(address, None)) is not None:
            self.on_died(run)

    def on_tick(self) -> None:
        """Send a heartbeat to each engine."""
        for connection, peer in self._peers.items():
            connection.send(RouterHeartbeat(peer.link is not None))

    def _on_announce(
        self, connection: PeerConnection, peer: _Peer, announce: AnnounceEngine
    ) -> None:
        """Accept or refuse an engine that announces itself."""
        if peer.announce is not None:
            self._on_change(peer, peer.announce, announce)
        elif not is_compatible(announce.protocol, announce.oldest_protocol):
            self._refuse(
                connection,
                announce.name,
                f"the engine speaks versions {announce.oldest_protocol} to {announce.protocol} of "
                f"the protocol, the router {OLDEST_PROTOCOL} to {PROTOCOL}: update the older one",
            )
        elif not is_valid_name(announce.name):
            self._refuse(connection, "", "its name is not 1 to 200 printable characters")
        elif announce.run in self._superseded.get(announce.name, ()):
            self._refuse_superseded(connection, announce.name)
        else:
            peer.announce = announce

    def _refuse_superseded(self, connection: PeerConnection, name: str) -> None:
        """Refuse an engine whose name another one has now, and warn the other one."""
        current = self.links[name]
        self._refuse(
            connection,
            name,
            f"another engine of the name {name} is attached from {current.address}: give each "
            "engine a --name of its own",
        )
        current.send(
            NoticeToEngine(
                f"another engine of the name {name} at {connection.address} is refused: give each "
                "engine a --name of its own"
            )
        )

    def _on_change(self, peer: _Peer, before: AnnounceEngine, announce: AnnounceEngine) -> None:
        """Store changed facts of an engine."""
        if (announce.name, announce.run) != (before.name, before.run):
            raise ValueError("an engine changed its name")
        peer.announce = announce
        if peer.link is not None:
            peer.link.announce = announce
            self._on_message(peer.link, announce)

    def _on_report(self, connection: PeerConnection, peer: _Peer, report: EngineReport) -> None:
        """Store a report; attach the engine with its first one."""
        if peer.announce is None:
            raise ValueError("a report of an engine that has not announced itself")
        if peer.link is None:
            self._attach(connection, peer, peer.announce, report)
        else:
            peer.link.report = report
            self._on_message(peer.link, report)

    def _attach(
        self,
        connection: PeerConnection,
        peer: _Peer,
        announce: AnnounceEngine,
        report: EngineReport,
    ) -> None:
        """Attach an engine that has accepted this router; it replaces another one of its name."""
        if previous := self.links.get(announce.name):
            self._replace(previous, announce)
        connection.is_established = True
        if connection.is_dialed:
            self._runs[connection.address] = announce.run
        link = EngineLink(connection, announce, report, self._refuse_link)
        peer.link = self.links[announce.name] = link
        self._on_attached(link)
        # Dropped if the router has refused the engine.
        connection.send(RouterHeartbeat(True))

    def _replace(self, previous: EngineLink, announce: AnnounceEngine) -> None:
        """End the session of an engine whose name another session takes."""
        superseded = self._superseded.get(announce.name, set())
        cause = "the engine has begun another session"
        if previous.announce.run != announce.run:
            superseded.add(previous.announce.run)
            cause = f"a later engine has attached with the name {announce.name}"
        superseded.discard(announce.run)
        self._refuse_link(previous, cause)
        if superseded:
            self._superseded[announce.name] = superseded
        self._on_lost(previous, cause)

    def _refuse_link(self, link: EngineLink, cause: str) -> None:
        """End the session of an attached engine."""
        if link.is_attached:
            self._detach(link)
            self._refuse(link.connection, link.name, cause)

    def _refuse(self, connection: PeerConnection, name: str, cause: str) -> None:
        """End a session and tell the engine why."""
        is_known = any((refusal.name, refusal.cause) == (name, cause) for refusal in self.refusals)
        # The engine tries again every few seconds.
        level = logging.DEBUG if is_known else logging.WARNING
        log.log(level, "engine %s (%s) is refused: %s", name, connection.address, cause)
        self.refusals.append(Refusal(connection.address, name, cause, time.time()))
        connection.send(RefuseEngine(cause))
        self._peers.pop(connection, None)
        self._pool.close(connection, cause, is_refused=True)

    def _on_refused(self, connection: PeerConnection, peer: _Peer, cause: str) -> None:
        """Handle the refusal of this router by an engine."""
        log.warning("the engine at %s refuses this router: %s", connection.address, cause)
        del self._peers[connection]
        self._pool.close(connection, cause, is_refused=True)
        if peer.link is not None:
            self._detach(peer.link)
            self._on_lost(peer.link, cause)

    def _detach(self, link: EngineLink) -> None:
        """Forget an attached engine; its name is free."""
        if self.links.get(link.name) is link:
            del self.links[link.name]
            self._superseded.pop(link.name, None)

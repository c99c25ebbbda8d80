"""Sessions of an engine with routers, and the announcements that describe the engine to them."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec

from gllm.config.attachment import ROLES, AttachmentConfig
from gllm.config.engine import EngineConfig
from gllm.engine.attachment.router_session import AttachedEngine, RouterSession
from gllm.engine.interface import ModelInfo
from gllm.messages.codec import AnyMessage, decode_for_engine
from gllm.messages.fleet import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    AnnounceEngine,
    DrainEngine,
    EngineReport,
    GreetEngine,
    NoticeToEngine,
    RefuseEngine,
    RefuseRouter,
    RouterHeartbeat,
    SetEngineRole,
    is_compatible,
)
from gllm.messages.handoff import FirstChunkComputed, KvPushStarted
from gllm.messages.requests import SubmitRequest
from gllm.models.identity import hash_model, hash_numerics
from gllm.observability.overdue import OverdueWatch
from gllm.options.addresses import Resolve, resolve_host
from gllm.options.version import __version__
from gllm.runtime.head.supervisor import Supervisor
from gllm.runtime.messaging.connection_pool import (
    ConnectionPool,
    FleetLinkConfig,
    PeerConnection,
    default_engine_name,
    is_valid_name,
    new_run,
)

log = logging.getLogger(__name__)


LOAD_REPORT_SECONDS = 0.1
"""Least time between two reports because of changed loads, and most time from a change to its
report. With it a router's view of a decode engine is not older than 300 ms on networks whose
latency is below 200 ms. Source: TetriInfer's cluster monitor collects loads every 100 ms."""


class ReportPacer:
    """Limits an engine's load reports to its routers to one per LOAD_REPORT_SECONDS."""

    def __init__(self) -> None:
        self._reported_at: float | None = None
        self._is_scheduled = False

    def on_change(self, now: float) -> float | None:
        """Return the delay in seconds of the report of a change; None if one is scheduled."""
        if self._is_scheduled:
            return None
        self._is_scheduled = True
        if self._reported_at is None:
            return 0.0
        return max(0.0, self._reported_at + LOAD_REPORT_SECONDS - now)

    def on_reported(self, now: float) -> None:
        """Record that a report was sent."""
        self._is_scheduled = False
        self._reported_at = now


class RouterAttachment:
    """Connections of an engine to its routers: announcements, load reports and requests."""

    def __init__(
        self,
        engine: AttachedEngine,
        announce: Callable[[], AnnounceEngine],
        config: FleetLinkConfig,
        resolve: Resolve = resolve_host,
        is_ready_without: bool = False,
        max_num_queued_requests: int | None = None,
    ) -> None:
        """Create the attachment of an engine; nothing is bound or dialled yet.

        Args:
            engine: the engine.
            announce: returns its description, with the present figures.
            config: hub, routers to dial, limits.
            resolve: resolution of host names.
            is_ready_without: the engine is ready before a router has attached it.
            max_num_queued_requests: requests above which those of routers go elsewhere; None for no
                limit.

        Raises:
            ValueError: an address or the secret cannot be used.
        """
        self.is_draining = False
        """True if routers send their new requests elsewhere."""
        self._is_held = False
        """True if it drains by an operator's command at a router."""
        self._engine = engine
        self._announce = announce
        self._announced: AnnounceEngine | None = None
        self._role: str | None = None
        """Role by command of a router or an operator; None for that of the configuration."""
        self._reported = ("", "", 0, False)
        """State, cause, leader and hold of the latest report."""
        self._pacer = ReportPacer()
        self._sessions: dict[PeerConnection, RouterSession | None] = {}
        """None before the router has been accepted."""
        self._refusals: dict[str, str] = {}
        """Causes of the latest refusals by routers, by address."""
        self._pool = ConnectionPool(config, decode_for_engine, self, resolve)
        self._watch = OverdueWatch()
        self.needs_router = bool(config.dial)
        """True if the engine dials routers, so that it serves once one has attached it."""
        self._max_num_queued_requests = max_num_queued_requests
        self.is_ready_without = is_ready_without
        """True if the engine is ready before a router has attached it."""
        engine.add_change_listener(self._on_change)
        engine.client.set_stats_listener(self._on_stats)

    @property
    def hub_address(self) -> str:
        """Address with port to which routers connect; empty without a hub."""
        return self._pool.hub_address

    @property
    def routers(self) -> list[RouterSession]:
        """Sessions with the accepted routers."""
        return [session for session in self._sessions.values() if session is not None]

    @property
    def attached_routers(self) -> list[str]:
        """Names of the routers that send the engine requests, in order."""
        return sorted(session.greeting.router for session in self.routers if session.is_attached)

    @property
    def unattached_cause(self) -> str:
        """Text that says why no router has the engine; empty if one has."""
        if self.attached_routers:
            return ""
        causes = [f"{address}: {cause}" for address, cause in self._pool.failures.items() if cause]
        return "no router has attached the engine" + "".join(f"; {cause}" for cause in causes)

    def describe(self) -> dict[str, Any]:
        """Return the routers that have attached the engine, and the cause if there are none."""
        return {"attached": self.attached_routers, "cause": self.unattached_cause}

    @property
    def announcement(self) -> AnnounceEngine:
        """Current announcement of the engine."""
        announce = self._announce()
        if self._role is None:
            return announce
        return msgspec.structs.replace(announce, role=self._role)

    @property
    def role(self) -> str:
        """Role that the engine announces."""
        return self.announcement.role

    def set_role(self, role: str) -> str:
        """Announce a role to all routers and return the previous role; requests continue.

        Raises:
            ValueError: there is no such role.
        """
        if role not in ROLES:
            raise ValueError(f"role is {role!r}, but has to be one of {', '.join(ROLES)}")
        before = self.role
        if role != before:
            log.info("the role is %s from now on, and was %s", role, before)
            self._role = role
            self._announce_changes()
            self._report()
        return before

    async def start(self) -> None:
        """Listen and connect. Raises OSError if the address of the hub cannot be bound."""
        await self._pool.start()
        if self.hub_address:
            log.info("listening for routers on %s", self.hub_address)

    async def drain(self) -> None:
        """Make routers send new requests to other engines; running requests continue."""
        self._set_draining(True)

    async def stop(self) -> None:
        """End all sessions and their requests; routers continue the requests on other engines."""
        self._set_draining(True)
        await self._pool.stop()
        for session in self.routers:
            session.end()
        self._sessions.clear()

    def on_prefill(self, report: KvPushStarted | FirstChunkComputed) -> None:
        """Forward a report about a running prefill to the router that sent its request."""
        for session in self.routers:
            session.on_prefill(report)

    def on_connected(self, connection: PeerConnection) -> None:
        """Announce the engine on a new connection; implements PeerHandler."""
        self._sessions[connection] = None
        self._announced = self.announcement
        connection.send(self._announced)

    def on_message(self, connection: PeerConnection, message: AnyMessage) -> None:
        """Handle a message of a router; implements PeerHandler."""
        session = self._sessions[connection]
        match message:
            case GreetEngine() if session is None:
                self._on_greeting(connection, message)
            case RefuseEngine(cause):
                self._on_refused(connection, cause)
            case RouterHeartbeat(is_attached):
                if session is not None and session.greeting.confirms_attachment:
                    session.is_attached = is_attached
            case NoticeToEngine(text):
                log.warning("the router at %s: %s", connection.address, text)
            case DrainEngine(is_on, is_held) if session is not None:
                log.info("router %s %s", session.greeting.router, "drains" if is_on else "undrains")
                self._is_held = is_on and is_held
                self._set_draining(is_on)
            case SetEngineRole(role) if session is not None and role in ROLES:
                self.set_role(role)
            case _ if session is not None:
                session.on_message(message, self._refusal() or self._full_cause(message))

    def on_lost(self, connection: PeerConnection, cause: str) -> None:
        """End the session of a lost connection; implements PeerHandler."""
        if session := self._end(connection):
            log.warning(
                "the session with router %s (%s) has ended: %s",
                session.greeting.router,
                connection.address,
                cause,
            )

    def on_listener_gone(self, address: str) -> None:
        """Do nothing about a router that has ended; implements PeerHandler."""

    def on_tick(self) -> None:
        """Send changes and a load report; implements PeerHandler."""
        is_attached = bool(self.attached_routers) or not self.needs_router
        if self._watch.should_warn(is_attached, time.monotonic()):
            log.warning("%s", self.unattached_cause)
        if not self._sessions:
            return
        self._announce_changes()
        self._report()

    def _announce_changes(self) -> None:
        """Announce the engine again if one of the facts has changed."""
        announce = self.announcement
        if announce != self._announced:
            self._announced = announce
            for connection in self._sessions:
                connection.send(announce)

    def _on_refused(self, connection: PeerConnection, cause: str) -> None:
        """End a session because the router refuses this engine."""
        is_known = self._refusals.get(connection.address) == cause
        self._refusals[connection.address] = cause
        # This engine tries again every few seconds.
        level = logging.DEBUG if is_known else logging.ERROR
        log.log(level, "the router at %s refuses this engine: %s", connection.address, cause)
        self._pool.close(connection, cause, is_refused=True)
        self._end(connection)

    def _on_greeting(self, connection: PeerConnection, greeting: GreetEngine) -> None:
        """Accept or refuse a router."""
        if not is_compatible(greeting.protocol, greeting.oldest_protocol):
            cause = (
                f"the router speaks versions {greeting.oldest_protocol} to {greeting.protocol} of "
                f"the protocol, the engine {OLDEST_PROTOCOL} to {PROTOCOL}: update the older one"
            )
        elif not is_valid_name(greeting.router):
            cause = "the router's name is not 1 to 200 printable characters"
        elif any(router.greeting.run == greeting.run for router in self.routers):
            cause = "the engine has a session with this router already"
        else:
            log.info("attached to router %s (%s)", greeting.router, connection.address)
            connection.is_established = True
            self._sessions[connection] = RouterSession(connection, greeting, self._engine)
            # To all routers, because the new one may lead.
            self._report()
            return
        connection.send(RefuseRouter(cause))
        self._pool.close(connection, cause, is_refused=True)
        self._end(connection)

    def _end(self, connection: PeerConnection) -> RouterSession | None:
        """Forget a session and end its requests; return it if the router was accepted."""
        session = self._sessions.pop(connection, None)
        if session is not None:
            session.end()
            self._on_change()
        return session

    def _set_draining(self, is_on: bool) -> None:
        self.is_draining = is_on
        self._on_change()

    def _refusal(self) -> str:
        """Return why requests go elsewhere; empty if they run, or wait for a recovery."""
        if self.is_draining:
            return "the engine is draining"
        reason = self._engine.admission.reason_to_refuse
        return reason and (self._engine.state_cause or f"the engine is {reason}")

    def _full_cause(self, message: AnyMessage) -> str:
        """Return why a request goes elsewhere because of the limit of requests; empty if not."""
        limit, num_requests = self._max_num_queued_requests, self._engine.client.num_requests
        if limit is None or num_requests < limit or not isinstance(message, SubmitRequest):
            return ""
        return f"the engine is full: {num_requests} requests are queued"

    def _current_report(self) -> EngineReport:
        engine = self._engine
        state = engine.state
        if self.is_draining and state in ("ready", "recovering"):
            state = "draining"
        client = engine.client
        leader = min((session.greeting.run for session in self.routers), default=0)
        self._reported = state, engine.state_cause, leader, self._is_held
        return EngineReport(
            state,
            engine.state_cause,
            client.stats,
            client.coefficients,
            client.num_requests,
            leader,
            self._is_held,
        )

    def _report(self) -> None:
        """Send a report to all routers."""
        self._pacer.on_reported(time.monotonic())
        report = self._current_report()
        for session in self.routers:
            session.connection.send(report)

    def _on_change(self) -> None:
        """Announce and report at once what has changed: facts, the state, the leading router."""
        if self._sessions:
            self._announce_changes()
        reported = self._reported
        report = self._current_report()
        if self._reported != reported:
            for session in self.routers:
                session.connection.send(report)

    def _on_stats(self) -> None:
        """Report changed loads soon: other routers choose by them too."""
        delay = self._pacer.on_change(time.monotonic()) if self._sessions else None
        if delay is not None:
            asyncio.get_running_loop().call_later(delay, self._report)


class EngineAnnouncer:
    """Creates the message that describes an engine to routers: call the object for the present one.

    The message has name, role, model, limits, KV cache size and KV transfer endpoint.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        model: ModelInfo,
        folder: Path,
        config: EngineConfig,
        attachment: AttachmentConfig,
    ) -> None:
        """Create the announcer; reads parts of the model's files.

        Args:
            supervisor: runs the engine's workers.
            model: the served model.
            folder: folder of the model.
            config: configuration of the engine, with max_model_len resolved.
            attachment: role and name.

        Raises:
            ModelError: the model's files cannot be read.
        """
        self.name = attachment.name or default_engine_name()
        self._supervisor = supervisor
        self._model = model
        self._config = config
        self._role = attachment.role
        self._run = new_run()
        self._model_hash = hash_model(folder)
        self._resolve = lru_cache(maxsize=1)(config.scheduler.resolve)
        # Announcements are compared twice per second, and seldom change.
        self._hash_numerics = lru_cache(maxsize=1)(partial(hash_numerics, self._model_hash))

    def __call__(self) -> AnnounceEngine:
        """Return the announcement with the present state and sizes."""
        supervisor, model = self._supervisor, self._model
        num_blocks = supervisor.num_blocks
        block_size = self._config.scheduler.block_size
        num_stages = len(supervisor.planner.layers)
        # Only sizes that do not depend on the number of blocks are read.
        limits = self._resolve(
            num_stages,
            max(num_blocks, -(-model.max_model_len // block_size)),
            model.max_model_len,
            num_state_slots=supervisor.num_state_slots,
        )
        return AnnounceEngine(
            PROTOCOL,
            OLDEST_PROTOCOL,
            self.name,
            self._run,
            self._role,
            model.name,
            self._model_hash,
            self._hash_numerics(supervisor.numerics),
            __version__,
            model.max_model_len,
            model.vocab_size,
            block_size,
            num_blocks,
            num_stages,
            limits.max_num_seqs,
            limits.max_num_batched_tokens or 0,
            supervisor.kv_mover.endpoint,
            supervisor.kv_mover.bytes_per_token,
            policy=limits.policy,
            kv_digest=supervisor.kv_mover.digest,
            accepts_prefetches=True,
            accepts_moves=True,
            accepts_checkpoints=True,
        )


def attach_to_routers(
    supervisor: Supervisor,
    announcer: EngineAnnouncer,
    attachment: AttachmentConfig,
    max_num_queued_requests: int | None = None,
) -> RouterAttachment:
    """Create an engine's connections to routers; `start` opens them.

    Args:
        supervisor: runs the engine's workers.
        announcer: creates the engine's announcements.
        attachment: addresses to connect to or listen on, and the secret file.
        max_num_queued_requests: requests above which those of routers go elsewhere.

    Raises:
        ValueError: an address or the secret cannot be used.
    """
    links = FleetLinkConfig(
        attachment.hub, attachment.router, attachment.node_secret_file, attachment.router_timeout
    )
    routers = RouterAttachment(
        supervisor,
        announcer,
        links,
        is_ready_without=attachment.ready_without_router,
        max_num_queued_requests=max_num_queued_requests,
    )
    supervisor.kv_mover.on_prefill = routers.on_prefill
    return routers

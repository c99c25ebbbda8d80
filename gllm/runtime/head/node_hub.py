"""Hub of the nodes: the head's end of the sessions with the agents of other machines.

It accepts nodes with the node secret and the same version, model and configuration. It answers
heartbeats, detects silent nodes, and passes the messages of members to a listener.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
import zmq
from msgspec.structs import replace

from gllm.config.node_environment import parse_head_address
from gllm.config.nodes import NodesConfig
from gllm.messages import nodes
from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, decode_for_master, decode_for_node_hub
from gllm.messages.lifecycle import Hello
from gllm.messages.node_report import NodeReport
from gllm.options.addresses import format_host_port
from gllm.recovery.clock_offset import ClockOffset
from gllm.recovery.join_check import (
    PROBE_PROTOCOL,
    JoinFacts,
    apply_own_fields,
    encode_facts,
    find_differences,
)
from gllm.recovery.liveness import ProcessSample
from gllm.recovery.membership import Membership, NodeRecord
from gllm.recovery.placement import LOCAL_NODE
from gllm.runtime.head.deaths import EngineError
from gllm.runtime.messaging.bus import Hub
from gllm.runtime.messaging.bus_socket import CLOSED
from gllm.runtime.messaging.connection_pool import MAX_NAME_LENGTH, is_valid_name
from gllm.runtime.messaging.owned_context import create_context
from gllm.runtime.messaging.security import (
    RELOAD_SECONDS,
    Authenticator,
    SecretFile,
    check_hub_address,
)

log = logging.getLogger(__name__)

NODE_RUN = 0
"""Run in the headers of the frames: agents learn the head's run when they join."""
JOIN_SECONDS = 5.0
"""Time from the beginning of a session to its JoinCluster."""
TICK_SECONDS = 0.25
"""Interval of the checks for silence."""
LOG_SECONDS = 5.0
"""Interval at which the log names the missing nodes."""
LEAVE_SECONDS = 2.0
"""Time in which agents end their sessions after LeaveCluster."""
MAX_SOCKETS = 8192
"""Most sockets of ZeroMQ; each session has three."""
_EXTRA_GUESTS = 8
"""Sessions beyond the nodes, so that a node beyond the limit receives a refusal."""


class AgentSession:
    """Connection to the agent process of another machine, with the state in its last heartbeat."""

    def __init__(
        self,
        sender: int,
        join: nodes.JoinCluster,
        address: str,
        send: Callable[[WireMessage], None],
    ) -> None:
        """Create the session of an agent.

        Args:
            sender: number of the session, never used again.
            join: the agent's first message.
            address: the agent's IP address.
            send: queues a message to the agent.
        """
        self.sender = sender
        self.join = join
        self.address = address
        self.last_heard = time.monotonic()
        self.is_open = True
        self.clock_offset = ClockOffset()
        self.dismissed_at: float | None = None
        """Time at which the head has ended the membership; None if it has not."""
        self.heartbeat = nodes.NodeHeartbeat(0.0, 0.0, 0.0)
        """Latest one."""
        self._send = send

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.join.name

    def capacity(self, num_workers: int) -> int:
        """Return the largest number of workers on the node: one per GPU.

        num_workers: number of workers of the engine. A machine without a GPU can run all of them,
            with fewer threads each.
        """
        facts = self.join.facts
        return len(facts.devices) or max(facts.num_cores, num_workers)

    def send(self, message: WireMessage) -> None:
        """Queue a message; it is dropped if the session has ended."""
        if self.is_open:
            self._send(message)

    def dismiss(self, cause: str) -> None:
        """End the membership of the node; its agent ends the session.

        cause: cause, for the agent's log.
        """
        self.dismissed_at = time.monotonic()
        self.send(nodes.LeaveCluster(cause))

    def on_heartbeat(self, heartbeat: nodes.NodeHeartbeat, now: float) -> None:
        """Handle a heartbeat of the agent, and answer it."""
        self.heartbeat = heartbeat
        if heartbeat.echo:
            self.clock_offset.on_echo(heartbeat.echo, heartbeat.heard, heartbeat.sent, now)
        self.send(nodes.NodeHeartbeat(time.monotonic(), heartbeat.sent, now))

    def sample(self, sender: int) -> ProcessSample | None:
        """Return the state of a worker in the latest heartbeat; None if it has none."""
        samples = self.heartbeat.samples
        found = next((sample for sample in samples if sample.sender == sender), None)
        return None if found is None else ProcessSample(found.is_stopped, found.cpu_seconds)


class NodeListener(Protocol):
    """Callbacks for messages, joins and losses of the other machines of an engine."""

    def on_node_joined(self, session: AgentSession) -> None:
        """Handle a node that has joined; the listener has to call `NodeHub.welcome`."""

    def on_node_message(self, session: AgentSession, message: AnyMessage) -> None:
        """Handle a message of a member."""

    def on_node_lost(
        self, session: AgentSession, cause: str, is_death: bool, has_left: bool
    ) -> None:
        """Handle the end of a session.

        Args:
            session: session with the node's agent, which has ended.
            cause: description of the loss, for logs.
            is_death: True if the agent has closed the connection without a message, so that its
                process has probably died.
            has_left: True if the agent has ended its membership by itself.
        """


def report_head(
    name: str,
    facts: nodes.NodeFacts | None,
    load: nodes.NodeLoad,
    stages: Sequence[int],
    links: Sequence[nodes.LinkState],
) -> NodeReport:
    """Return the state of the head machine for GET /nodes: hardware, load, stages and connections.

    Args:
        name: name of the machine in the cluster.
        facts: its hardware and versions; None if they are not known yet.
        load: utilization, memory and power.
        stages: indices of the stages that it computes.
        links: state of its data connections.
    """
    return NodeReport(
        name,
        "member",
        rank=0,
        host_name="" if facts is None else facts.host_name,
        system="" if facts is None else facts.system,
        version="" if facts is None else facts.version,
        devices=[] if facts is None else facts.devices,
        load=load,
        stages=sorted(stages),
        links=list(links),
    )


def report_node(
    record: NodeRecord,
    session: AgentSession | None,
    stages: Mapping[str, list[int]],
    is_draining: bool = False,
) -> NodeReport:
    """Return the state of another machine for GET /nodes: membership, hardware, load and stages.

    Args:
        record: time and state of its membership in the cluster.
        session: its last connection to the head, which may have ended.
        stages: indices of the stages that each machine computes, by name.
        is_draining: True if its stages are being moved to other machines.
    """
    # One that is dismissed has not ended its session yet.
    is_draining = is_draining or (session is not None and session.dismissed_at is not None)
    state = "draining" if is_draining and record.is_alive else record.status.value
    report = NodeReport(
        record.name,
        state,
        rank=record.rank,
        last_cause=record.last_cause,
        num_losses=record.num_losses,
    )
    if session is None:
        return report
    facts = session.join.facts
    report = replace(
        report,
        host_name=facts.host_name,
        system=facts.system,
        version=facts.version,
        address=session.address,
        devices=facts.devices,
    )
    if not session.is_open:
        # Of a node that is lost nothing is known.
        return report
    return replace(
        report,
        load=session.heartbeat.load,
        stages=sorted(stages.get(record.name, [])),
        round_trip_seconds=session.clock_offset.round_trip_seconds,
        clock_offset_seconds=session.clock_offset.seconds,
        links=list(session.heartbeat.links),
    )


@dataclass(frozen=True)
class NodeHubTimes:
    """Timeouts and intervals of a `NodeHub`, in seconds."""

    join_seconds: float = JOIN_SECONDS
    log_seconds: float = LOG_SECONDS
    reload_seconds: float = RELOAD_SECONDS


class NodeHub:
    """Accepts other machines of an engine on the head machine, and tracks which are members.

    Each of them runs an agent process, which connects and sends heartbeats.
    """

    def __init__(
        self,
        config: NodesConfig,
        secret_file: str | None,
        run: int,
        facts: JoinFacts,
        name: str = LOCAL_NODE,
        recovery_timeout: float = 60.0,
        times: NodeHubTimes = NodeHubTimes(),
    ) -> None:
        """Create a hub that is not bound.

        Args:
            config: configuration of the nodes.
            secret_file: file of the node secret; None without encryption, on loopback only.
            run: number of this start of the head process.
            facts: facts about the head that the agents have to share; a master has an empty model.
            name: name of the head's own node, which no agent may have.
            recovery_timeout: time in seconds after which agents without a head end.
            times: intervals and limits.

        Raises:
            ValueError: the address or the secret cannot be used; the message says what to do.
        """
        self.config = config
        self.run = run
        self.facts = facts
        self.listener: NodeListener | None = None
        """None until the engine starts."""
        self.sessions: dict[str, AgentSession] = {}
        """Sessions of the living members and spares, by name."""
        self.sessions_by_name: dict[str, AgentSession] = {}
        """Last session of each node that has ever joined."""
        self.num_violations = 0
        """Messages of agents that they may not send at that moment."""
        self.address = ""
        """Address that is bound."""
        self._secret = None if secret_file is None else SecretFile(secret_file)
        self._bind_address = node_hub_address(config)
        check_hub_address(self._bind_address, self._secret is not None)
        self._recovery_timeout = recovery_timeout
        self._times = times
        self._name = name
        self._is_master = not facts.model
        """True for the master of a cluster, not the head of an engine."""
        self.membership = Membership(
            config.nnodes, config.node_timeout, config.join_timeout, config.max_spares
        )
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._hub: Hub | None = None
        self._waiting: dict[int, float] = {}
        """Time until which JoinCluster has to arrive, by sender."""
        self._by_sender: dict[int, AgentSession] = {}
        self._has_changed = asyncio.Event()
        self._is_stopping = False
        self._ticker: asyncio.Task[None] | None = None

    @property
    def num_malformed(self) -> int:
        """Frames that could not be read, and messages that their sender may not send."""
        return self.num_violations + (0 if self._hub is None else self._hub.num_malformed)

    @property
    def refused_peers(self) -> dict[str, int]:
        """Connections and nodes that were refused, by IP address."""
        return {} if self._hub is None else dict(self._hub.refused.by_address)

    def describe(self) -> dict[str, int]:
        """Return the number of connections, of sessions, and of peers that have not joined yet."""
        return {
            "connections": 0 if self._hub is None else self._hub.num_connections,
            "sessions": len(self._by_sender),
            "joining": len(self._waiting),
        }

    def start(self) -> None:
        """Bind the address and accept agents.

        Raises:
            OSError: the address cannot be bound.
        """
        self._context = create_context(self)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        authenticator = None
        if self._secret is not None:
            authenticator = Authenticator(self._context, self._secret, self._times.reload_seconds)
        max_guests = self.config.nnodes + self.config.max_spares + _EXTRA_GUESTS
        decode = decode_for_master if self._is_master else decode_for_node_hub
        hub = Hub(self._context, NODE_RUN, decode, authenticator, max_guests)
        self._hub = hub
        hub.refused.on_refused = self.membership.on_refused
        try:
            self.address = hub.bind(self._bind_address)
        except zmq.ZMQError as error:
            self._close()
            raise OSError(
                error.errno,
                f"the head cannot listen on {self._bind_address}: {error.strerror}; if this is no "
                "address of this machine, set --node-listen",
            ) from error
        hub.start(self._on_messages, self._on_session_lost)
        self._ticker = asyncio.create_task(self._tick())

    async def form(self) -> list[str]:
        """Start, and wait until all nodes have joined; return their names in order of their ranks.

        Raises:
            EngineError: nodes are missing after `join_timeout`; the message names them.
            OSError: the address cannot be bound.
        """
        self.start()
        now = time.monotonic()
        self.membership.begin(now)
        next_log = now + self._times.log_seconds
        while not self.membership.is_complete:
            now = time.monotonic()
            missing = self.membership.describe_missing()
            if self.membership.has_expired(now):
                seconds = self.config.join_timeout
                cause = (
                    f"nodes did not join within {seconds:g} seconds: {missing}; run `gllm doctor` "
                    "on the missing ones"
                )
                await self.stop(cause, is_failure=True)
                raise EngineError(cause)
            if now >= next_log:
                next_log = now + self._times.log_seconds
                log.info("waiting for nodes at %s: %s", self.address, missing)
            self._has_changed.clear()
            # Not past the deadline by much; refusals do not count as changes.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_changed.wait(), TICK_SECONDS)
        self.membership.finish_forming()
        members = self.membership.members
        log.info("all %d nodes have joined: %s", self.config.nnodes, ", ".join(members) or "head")
        return members

    def welcome(self, session: AgentSession, workers: list[int]) -> None:
        """Send an agent the answer that its node is a member.

        Args:
            session: session of the agent.
            workers: living workers of its earlier session that are still needed.
        """
        session.send(
            nodes.WelcomeNode(
                self.run,
                self.facts.model,
                self.facts.model_hash,
                self.facts.config,
                self.config.node_timeout,
                self._recovery_timeout,
                workers,
            )
        )

    def broadcast(self, message: WireMessage) -> None:
        """Queue a message to all members."""
        for session in self.sessions.values():
            session.send(message)

    async def stop(self, cause: str, is_failure: bool = False) -> None:
        """Let all agents leave, and close.

        Args:
            cause: reason for the agents' logs.
            is_failure: True if the agents have to exit with status 1.
        """
        self.listener, self._is_stopping = None, True
        self.broadcast(nodes.LeaveCluster(cause, is_failure))
        deadline = time.monotonic() + LEAVE_SECONDS
        while self.sessions and time.monotonic() < deadline:
            self._has_changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_changed.wait(), TICK_SECONDS)
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
            self._ticker = None
        self._close()

    def lose(self, session: AgentSession, cause: str, is_death: bool = False) -> None:
        """End the session of a lost node, and report the loss."""
        if not self._end(session):
            return
        if session.dismissed_at is not None:
            self._forget(session)
            return
        now = time.monotonic()
        self.membership.on_lost(session.name, cause, now)
        if self.listener is None:
            # While the hub stops, all sessions end.
            level = logging.DEBUG if self._is_stopping else logging.WARNING
            log.log(level, "node %s (%s) was lost: %s", session.name, session.address, cause)
        else:
            self.listener.on_node_lost(session, cause, is_death, has_left=False)

    def on_violation(self, session: AgentSession, cause: str) -> None:
        """End the session of a node that has sent a message which it may not send."""
        self.num_violations += 1
        self.lose(session, cause)

    def _close(self) -> None:
        for session in list(self._by_sender.values()):
            self._end(session)
        if self._hub is not None:
            self._hub.close()
            self._hub = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _on_messages(self, messages: list[tuple[int, AnyMessage]]) -> None:
        now = time.monotonic()
        for sender, message in messages:
            session = self._by_sender.get(sender)
            if session is not None:
                self._on_message(session, message, now)
            elif isinstance(message, Hello):
                self._waiting[sender] = now + self._times.join_seconds
            elif self._waiting.pop(sender, None) is not None:
                if isinstance(message, nodes.JoinCluster):
                    self._join(sender, message, now)
                else:
                    self.num_violations += 1
                    self._drop(sender, f"it sent {type(message).__name__} before JoinCluster")

    def _on_message(self, session: AgentSession, message: AnyMessage, now: float) -> None:
        """Handle a message of a member; nothing that it contains raises an error."""
        session.last_heard = now
        self.membership.record_message(session.name, now)
        match message:
            case nodes.NodeHeartbeat():
                session.on_heartbeat(message, now)
            case nodes.LeaveCluster(cause):
                self._leave(session, cause)
            case nodes.JoinCluster():
                self.on_violation(session, "it sent JoinCluster twice")
            case _ if self.listener is not None:
                try:
                    self.listener.on_node_message(session, message)
                except Exception as error:
                    log.exception("a message of node %s could not be handled", session.name)
                    self.on_violation(session, f"its message could not be handled: {error}")

    def _answer_of(self, join: nodes.JoinCluster) -> nodes.RefuseNode | None:
        """Return the answer to a join that only asks what is here; None for any other."""
        if join.protocol == PROBE_PROTOCOL:
            names = (self._name, LOCAL_NODE, *self.sessions)
            return nodes.RefuseNode(encode_facts(replace(self.facts, nodes=names)))
        if self._is_master and not join.runs_services:
            cause = "it is the master of a cluster, which runs services: use `gllm node --join`"
            return nodes.RefuseNode(cause, is_master=True)
        return None

    def _difference(self, join: nodes.JoinCluster) -> str:
        """Return the differences that forbid a node to join, with the fixes; empty for none."""
        name = join.name
        if not is_valid_name(name):
            return f"the name of a node has 1 to {MAX_NAME_LENGTH} printable characters"
        if name in (self._name, LOCAL_NODE):
            return f"{name} is the head's node: give each machine a --node-name of its own"
        if join.runs_services and not self._is_master:
            return "it is the head of an engine now, not the master of a cluster: join again"
        model = ""
        with suppress(msgspec.DecodeError):
            model = msgspec.json.decode(join.config, type=_ConfigFields).model
        version, config = join.facts.version, join.config
        node = JoinFacts(join.protocol, version, model, join.model_hash, config)
        return "; ".join(find_differences(self.facts, node))

    def _join(self, sender: int, join: nodes.JoinCluster, now: float) -> None:
        """Compare a node with the head, and accept or refuse it."""
        assert self._hub is not None
        if (answer := self._answer_of(join)) is not None:
            self._hub.send(sender, answer)
            self._hub.forget(sender)
            return
        send: Callable[[WireMessage], None] = partial(self._hub.send, sender)
        session = AgentSession(sender, join, self._hub.address_of(sender), send)
        cause = self._difference(join)
        cause = cause or self.membership.unsupported_reason(join.rank, join.name)
        is_final = bool(cause)
        earlier = self.sessions.get(join.name)
        if not cause and earlier is not None and earlier.join.agent == join.agent:
            self.lose(earlier, "its agent has begun another session")
        cause = cause or self.membership.on_joined(join.name, join.rank, join.is_spare, now)
        if cause:
            log.warning("node %s (%s) is refused: %s", join.name, session.address, cause)
            session.send(nodes.RefuseNode(cause, is_final))
            self._hub.refused.count(session.address, cause)
            self._hub.forget(sender)
            return
        self._by_sender[sender] = self.sessions[join.name] = session
        self.sessions_by_name[join.name] = session
        self.membership.on_accepted(session.address)
        log.info("node %s (%s) has joined", join.name, session.address)
        self._has_changed.set()
        if self.listener is None:
            self.welcome(session, [])
        else:
            self.listener.on_node_joined(session)

    def _leave(self, session: AgentSession, cause: str) -> None:
        """Handle a node that ends its membership by itself."""
        if session.dismissed_at is not None:
            self.lose(session, cause)
            return
        # The node reads until this has arrived.
        session.send(nodes.LeaveCluster(cause))
        if self._end(session):
            self.membership.on_left(session.name, cause)
            if self.listener is None:
                log.warning("node %s (%s) has left: %s", session.name, session.address, cause)
            else:
                self.listener.on_node_lost(session, cause, is_death=False, has_left=True)

    def _forget(self, session: AgentSession) -> None:
        """Forget a node whose membership the head has ended."""
        self.membership.forget(session.name)
        self.sessions_by_name.pop(session.name, None)

    def _end(self, session: AgentSession) -> bool:
        """End a session; return False if it has ended before."""
        if not session.is_open:
            return False
        session.is_open = False
        del self._by_sender[session.sender]
        del self.sessions[session.name]
        if self._hub is not None:
            self._hub.forget(session.sender)
        self._has_changed.set()
        return True

    def _drop(self, sender: int, cause: str) -> None:
        """End a session that has not joined."""
        assert self._hub is not None
        self._hub.refused.add(self._hub.address_of(sender), cause)
        self._hub.forget(sender)

    def _on_session_lost(self, sender: int, cause: str) -> None:
        self._waiting.pop(sender, None)
        if session := self._by_sender.get(sender):
            self.lose(session, cause, is_death=cause == CLOSED)

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            try:
                self._check(before, time.monotonic())
            except Exception:
                # The checks go on, because nothing else notices a silent node.
                log.exception("the nodes could not be checked")

    def _check(self, before: float, now: float) -> None:
        """Notice nodes that are silent, and sessions without JoinCluster.

        Args:
            before: time of the last check.
            now: time in seconds.
        """
        if now - before > self.config.node_timeout / 2:
            # This process was stopped or busy, and messages of the agents may wait.
            for name in self.sessions:
                self.membership.record_message(name, now)
        for session in list(self.sessions.values()):
            since = session.dismissed_at
            if since is not None and now - since > LEAVE_SECONDS:
                self.lose(session, "it did not end its session")
        for name in self.membership.silent_nodes(now):
            if silent := self.sessions.get(name):
                seconds = now - silent.last_heard
                self.lose(silent, f"no message for {seconds:.1f} seconds")
        for sender, until in list(self._waiting.items()):
            if until <= now:
                del self._waiting[sender]
                self._drop(sender, f"no JoinCluster within {self._times.join_seconds:g} seconds")


def resolve_hub(config: NodesConfig, text: str | None = None) -> tuple[str, int]:
    """Return the IP address and port on which the head listens for the agents of other machines.

    Args:
        config: options of the multi-node engine.
        text: HOST or HOST:PORT; None for the address in `config`.

    Raises:
        ValueError: there is no address, or its host name is unknown.
    """
    text = text or config.node_listen or config.master_addr
    if text is None:
        raise ValueError("an engine on several machines needs --master-addr, the head's address")
    host, port = parse_head_address(text)
    try:
        # ZeroMQ binds numeric addresses only.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"the host name of {text!r} is unknown: {error}") from error
    return str(found[0][4][0]), port


def node_hub_address(config: NodesConfig) -> str:
    """Return the ZeroMQ address on which the head listens for the agents of other machines.

    Raises:
        ValueError: there is no address, or its host name is unknown.
    """
    return f"tcp://{format_host_port(*resolve_hub(config))}"


class _ConfigFields(msgspec.Struct):
    """Fields of an engine configuration; a node's may lack any."""

    model: str = ""
    threads: int | None = None


def configured_threads(head_config: bytes, own_config: bytes = b"") -> int | None:
    """Return the configured compute threads per worker of a machine; None for a share of its cores.

    Args:
        head_config: engine configuration of the head as JSON.
        own_config: engine configuration of the machine as JSON, which may lack fields; empty for
            none.
    """
    try:
        config = apply_own_fields(head_config, own_config)
        return msgspec.json.decode(config, type=_ConfigFields).threads
    except (msgspec.DecodeError, AttributeError):
        # Without a rank a node's configuration is not compared, and may be anything.
        return None

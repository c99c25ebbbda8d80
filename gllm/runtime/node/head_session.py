"""Session of an agent with the head, the attempts to open one, and the agent's configuration."""

import asyncio
import logging
import secrets
import shlex
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import zmq

from gllm.messages import nodes
from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, decode_for_agent
from gllm.options.addresses import Resolve, parse_host_port
from gllm.recovery.backoff import Backoff, FailureLog
from gllm.recovery.clock_offset import ClockOffset
from gllm.recovery.departure import SETTLE_SECONDS
from gllm.runtime.messaging.bus import Spoke
from gllm.runtime.messaging.bus_socket import Decode
from gllm.runtime.messaging.security import KeyPair, SecretFile, check_dialed_address
from gllm.runtime.worker.stage_sessions import LOST_SECONDS

log = logging.getLogger(__name__)

RUN = 0
"""Run in the headers of the frames: an agent learns the head's run from its answer."""
WELCOME_SECONDS = 30.0
"""Time in which the head has to answer JoinCluster."""
MAX_BEAT_SECONDS = 1.0
"""Longest time between two heartbeats."""
BEATS_PER_TIMEOUT = 5
"""Fewest heartbeats in the time after which a silent head is lost."""
NUM_FIRST_BEATS = 5
"""Heartbeats at the beginning of a session that come sooner, to learn the clock's offset."""
FIRST_BEAT_SECONDS = 0.1
"""Time between two of them."""
LEAVE_SECONDS = 1.0
"""Time in which the head has to answer LeaveCluster."""

FindModel = Callable[[str, str], Path]
"""Returns the folder of a model on this machine, given its name and its hash; blocks. Raises
ValueError or OSError with the cause."""


@dataclass(frozen=True)
class AgentConfig:
    """Options of an agent, the process that runs workers of a multi-node engine on a machine."""

    head: str
    """HOST:PORT of the head's hub."""
    name: str
    """Name of this machine, unique in the cluster."""
    rank: int | None = None
    """Node rank; None for a machine that joins without one."""
    is_spare: bool = False
    """True if the machine gets stages only when another one is lost."""
    model_hash: str = ""
    """Digest of the model; empty if the machine learns the model from the head."""
    engine_config: bytes = b""
    """Own engine configuration as JSON. The head compares it if there is a rank; the values of
    `gllm.recovery.join_check.OWN_FIELDS` apply on this machine."""
    node_secret_file: str | None = None
    """File of the node secret; None without encryption, on loopback only."""
    join_timeout: float = 300.0
    """Seconds for which the agent tries to become a member."""
    close_seconds: float = 10.0
    """Seconds in which a worker closes its stage before it is killed."""
    settle_seconds: float = SETTLE_SECONDS
    """Seconds after a signal in which the head may begin to drain because it got one too."""
    lost_seconds: float = LOST_SECONDS
    """Seconds after the end of a stage's session with the driver in which the head may close the
    stage; then the end is reported."""


@dataclass(frozen=True)
class AgentStatus:
    """State of an agent for its HTTP server and logs: membership, engine state, workers, load.

    An agent is the process that runs workers of a multi-node engine on a machine other than the
    head.
    """

    name: str
    """Name of this machine."""
    head: str
    """HOST:PORT of the head's hub."""
    state: str
    """joining, member, spare, disconnected or ended."""
    cause: str = ""
    """Reason for which the agent is no member; that of the engine's state while it is one."""
    engine_state: str = ""
    """State of the engine as the head has reported it last; empty before it did."""
    is_healthy: bool = True
    """True unless the agent is about to end its workers, or has ended them."""
    is_ready: bool = False
    """True if the agent has a session and the head has reported that the engine is ready."""
    load: nodes.NodeLoad = field(default_factory=nodes.NodeLoad)
    num_workers: int = 0
    """Worker processes that run."""
    num_sessions: int = 0
    """Times that the agent has become a member."""
    num_stale_frames: int = 0
    """Messages of earlier epochs, runs and sessions that were dropped."""
    links: Sequence[nodes.LinkState] = ()
    """Data connections of this machine."""
    clock_offset_seconds: float | None = None
    """Clock of the head minus the clock of this machine."""
    round_trip_seconds: float | None = None
    """Least round trip of the last heartbeats."""


class NodeReading(NamedTuple):
    """Contents of a heartbeat to the head: state of the workers, machine and connections."""

    samples: list[nodes.WorkerSample]
    load: nodes.NodeLoad
    links: list[nodes.LinkState]


class HeadSession:
    """Connection of an agent to the head machine: joins the cluster and sends heartbeats.

    It ends itself if the head is silent for too long.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: KeyPair | None,
        join: nodes.JoinCluster,
        on_message: Callable[[AnyMessage], None],
        read_node: Callable[[], NodeReading],
        decode: Decode = decode_for_agent,
    ) -> None:
        """Dial the head and ask to join, on the running event loop.

        Args:
            context: ZeroMQ context of this process.
            address: HOST:PORT of the head's hub, with a numeric host.
            keys: keys derived from the node secret; None without encryption.
            join: first message.
            on_message: called with `WelcomeNode` and all messages after it but heartbeats.
            read_node: returns the state of this machine.
            decode: decoder of the messages that the head may send.

        Raises:
            zmq.ZMQError: there is no socket for it.
        """
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        """Cause of the end, once the session has ended."""
        self.answered = asyncio.Event()
        """Set when the head has answered, or the session has ended."""
        self.welcome: nodes.WelcomeNode | None = None
        """Answer of the head; None until it has accepted this machine."""
        self.refusal: nodes.RefuseNode | None = None
        """Answer of the head that has refused this machine."""
        self._dismissed: asyncio.Future[None] = loop.create_future()
        """Done once the head has sent LeaveCluster."""
        self.clock = ClockOffset()
        """Offset of the head's clock."""
        self._on_message = on_message
        self._read_node = read_node
        self._last_heard = time.monotonic()
        self._echo = (0.0, 0.0)
        """`sent` of the last heartbeat, and the time at which it arrived."""
        self._spoke = Spoke(context, RUN, secrets.randbits(62), f"tcp://{address}", decode, keys)
        self._spoke.start(self._on_messages, self._end)
        self._spoke.send(join)
        self._watch = loop.create_task(self._keep_alive())
        self._watch.add_done_callback(self._on_watch_done)

    @property
    def is_member(self) -> bool:
        """True from the head's welcome until the end of the session."""
        return self.welcome is not None and not self.ended.done()

    def send(self, message: WireMessage) -> None:
        """Queue a message; it is dropped if the session has ended."""
        self._spoke.send(message)

    async def leave(self, message: nodes.LeaveCluster) -> None:
        """Send the last message and wait until the head has answered it, or is late.

        A socket that is closed with unread data resets its connection, and what it has sent before
        may be lost: the head would wait for this node to return.
        """
        self.send(message)
        waited: list[asyncio.Future[Any]] = [self._dismissed, self.ended]
        await asyncio.wait(waited, timeout=LEAVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    def close(self, cause: str) -> None:
        """End the session after the messages that are queued."""
        if not self.ended.done():
            self._spoke.close()
            self._end(cause)

    def _end(self, cause: str) -> None:
        if not self.ended.done():
            self.ended.set_result(cause)
            self.answered.set()
            self._watch.cancel()

    def _on_watch_done(self, watch: "asyncio.Task[None]") -> None:
        """End the session if its heartbeats have failed."""
        if not watch.cancelled() and (error := watch.exception()) is not None:
            log.error("the heartbeats have failed", exc_info=error)
            self.close(f"the heartbeats have failed: {error}")

    def _on_messages(self, messages: list[AnyMessage]) -> None:
        self._last_heard = time.monotonic()
        for message in messages:
            if self.ended.done():
                return
            try:
                self._handle(message)
            except Exception as error:
                log.exception("a message of the head could not be handled")
                self.close(f"a message of the head could not be handled: {error}")

    def _handle(self, message: AnyMessage) -> None:
        match message:
            case nodes.NodeHeartbeat():
                self._on_heartbeat(message)
            case nodes.RefuseNode(cause):
                self.refusal = message
                self.close(f"the head refuses this node: {cause}")
            case nodes.WelcomeNode() if self.welcome is None:
                self.welcome = message
                self.answered.set()
                self._on_message(message)
            case _ if self.welcome is None or isinstance(message, nodes.WelcomeNode):
                raise ValueError(f"{type(message).__name__} does not belong here")
            case nodes.LeaveCluster() if not self._dismissed.done():
                self._dismissed.set_result(None)
                self._on_message(message)
            case _:
                self._on_message(message)

    def _on_heartbeat(self, message: nodes.NodeHeartbeat) -> None:
        now = time.monotonic()
        self._echo = message.sent, now
        if message.echo:
            self.clock.on_echo(message.echo, message.heard, message.sent, now)

    async def _keep_alive(self) -> None:
        """Send heartbeats, and end the session of a silent head."""
        num_beats = 0
        begin = time.monotonic()
        while True:
            welcome = self.welcome
            interval = FIRST_BEAT_SECONDS
            if welcome is not None and num_beats > NUM_FIRST_BEATS:
                interval = min(MAX_BEAT_SECONDS, welcome.node_timeout / BEATS_PER_TIMEOUT)
            before = time.monotonic()
            await asyncio.sleep(interval)
            now = time.monotonic()
            late = now - before - interval
            if late > interval:
                # This process was stopped or busy, and messages of the head may wait.
                self._last_heard += late
            if welcome is None:
                if now - begin > WELCOME_SECONDS:
                    self.close(f"the head has not answered for {now - begin:.0f} seconds")
                continue
            num_beats += 1
            samples, load, links = self._read_node()
            self.send(nodes.NodeHeartbeat(time.monotonic(), *self._echo, samples, load, links))
            if now - self._last_heard > welcome.node_timeout:
                silent = now - self._last_heard
                self.close(f"the head was silent for {silent:.1f} seconds")


LOG_SECONDS = 30.0
"""Time between two log lines about a head that cannot be reached."""


class HeadDialer:
    """Keeps an agent connected to the head machine; gives up if reconnecting fails for too long."""

    def __init__(
        self,
        config: AgentConfig,
        resolve: Resolve,
        make_join: Callable[[], nodes.JoinCluster],
        on_message: Callable[[AnyMessage], None],
        read_node: Callable[[], NodeReading],
        decode: Decode = decode_for_agent,
    ) -> None:
        """Create a dialer that has not started.

        Args:
            config: configuration of the agent.
            resolve: resolution of host names.
            make_join: returns the first message of a session.
            on_message: called with `WelcomeNode` and all messages after it but heartbeats.
            read_node: returns the state of this machine for a heartbeat.
            decode: decoder of the messages that the head may send.

        Raises:
            ValueError: the head's address or the secret file cannot be used.
        """
        self.session: HeadSession | None = None
        """Latest session."""
        self.cause = ""
        """Reason for which there is no session."""
        self._config = config
        self._host, self._port = parse_host_port(config.head)
        path = config.node_secret_file
        self._secret = None if path is None else SecretFile(path)
        self._resolve = resolve
        self._make_join = make_join
        self._on_message = on_message
        self._read_node = read_node
        self._decode = decode
        self._failures = FailureLog(LOG_SECONDS)

    @property
    def is_member(self) -> bool:
        """True while the head has accepted this machine."""
        return self.session is not None and self.session.is_member

    @property
    def is_refused_by_master(self) -> bool:
        """True if the peer is no head but the master of a cluster."""
        refusal = None if self.session is None else self.session.refusal
        return refusal is not None and refusal.is_master

    def send(self, message: WireMessage) -> None:
        """Queue a message to the head; it is dropped unless this machine is a member."""
        if self.session is not None and self.session.is_member:
            self.session.send(message)

    async def leave(self, message: nodes.LeaveCluster) -> None:
        """Notify the head that this machine leaves, if it is a member; `close` is to follow."""
        if self.session is not None and self.session.is_member:
            await self.session.leave(message)

    def close(self, cause: str) -> None:
        """End the session after the messages that are queued."""
        if self.session is not None:
            self.session.close(cause)

    async def run(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        on_lost: Callable[[], Awaitable[None]],
    ) -> tuple[int, str]:
        """Maintain a session until the head refuses it, or until no session existed for too long.

        Args:
            context: ZeroMQ context of this process.
            on_lost: called when a session that the head had accepted has ended; dialling goes on
                after it.

        Returns:
            Exit status of the agent, and the cause.
        """
        loop = asyncio.get_running_loop()
        backoff = Backoff(Random(secrets.randbits(64)))
        limit, num_failures = self._config.join_timeout, 0
        deadline = loop.time() + limit
        while True:
            try:
                self.cause = await self._attempt(context, num_failures, deadline)
            except ValueError as error:
                # Nothing goes to another machine without a secret.
                return 2, str(error)
            session = self.session
            if session is not None and session.refusal is not None and session.refusal.is_final:
                return 2, self.cause
            if session is not None and session.welcome is not None:
                limit, num_failures = session.welcome.recovery_timeout, 0
                deadline = loop.time() + limit
                backoff.reset()
                self._failures.reset()
                log.warning("the head at %s is lost: %s", self._config.head, self.cause)
                await on_lost()
            else:
                self._log_failure()
                num_failures += 1
            delay = min(backoff.next_delay(), deadline - loop.time())
            if delay <= 0:
                head = self._config.head
                secret = self._config.node_secret_file
                flags = f" --node-secret-file {shlex.quote(secret)}" if secret else ""
                advice = f"`gllm doctor --master-addr {head}{flags}` looks for the reason"
                cause = f"no session with the head at {head} for {limit:g} seconds: {self.cause}"
                return 1, f"{cause}; {advice}"
            await asyncio.sleep(delay)

    async def _attempt(
        self, context: zmq.Context[zmq.Socket[bytes]], num_failures: int, deadline: float
    ) -> str:
        """Dial once; return the cause when the session has ended.

        Args:
            context: ZeroMQ context of this process.
            num_failures: attempts since the last session.
            deadline: time of the event loop until which the head has to accept this machine.

        Raises:
            ValueError: the head's address needs a node secret.
        """
        self.session = None
        try:
            async with asyncio.timeout_at(deadline):
                addresses = await self._resolve(self._host, self._port)
                # A host with several addresses may listen on one of them only.
                address = addresses[num_failures % len(addresses)]
                check_dialed_address(f"tcp://{address}", self._secret is not None)
                keys = None
                if self._secret is not None:
                    keys = self._secret.dial_keys(num_failures // len(addresses))
                join = self._make_join()
                session = self.session = HeadSession(
                    context, address, keys, join, self._on_message, self._read_node, self._decode
                )
                await session.answered.wait()
        except TimeoutError:
            # An earlier attempt may have learned more than that this one was the last.
            self.close(self.cause or "the head has not answered")
        except OSError as error:
            return error.strerror or str(error)
        except zmq.ZMQError as error:
            return str(error)
        if self.session is None:
            return self.cause or f"the name {self._host} could not be resolved in time"
        return await asyncio.shield(self.session.ended)

    def _log_failure(self) -> None:
        """Log that there is no session: another cause at once, the same one now and then."""
        is_due = self._failures.is_due(self.cause, time.monotonic())
        level = logging.WARNING if is_due else logging.DEBUG
        head = self._config.head
        log.log(level, "no session with the head at %s: %s; trying again", head, self.cause)

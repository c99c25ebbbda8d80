"""Attempts of an agent to keep one session with the head."""

import asyncio
import logging
import secrets
import shlex
import time
from collections.abc import Awaitable, Callable
from random import Random

import zmq

from gllm.messages.codec import AnyMessage, decode_for_agent
from gllm.messages.nodes import JoinCluster, LeaveCluster
from gllm.options.addresses import parse_host_port
from gllm.runtime.messaging.backoff import Backoff
from gllm.runtime.messaging.bus_socket import Decode
from gllm.runtime.messaging.host_names import Resolve
from gllm.runtime.messaging.security import SecretFile, check_dialed_address
from gllm.runtime.node.agent_state import AgentConfig
from gllm.runtime.node.head_session import HeadSession, NodeReading

log = logging.getLogger(__name__)

LOG_SECONDS = 30.0
"""Time between two log lines about a head that cannot be reached."""


class HeadDialer:
    """Dials the head again and again while there is no session, for a limited time."""

    def __init__(
        self,
        config: AgentConfig,
        resolve: Resolve,
        make_join: Callable[[], JoinCluster],
        on_message: Callable[[AnyMessage], None],
        read_node: Callable[[], NodeReading],
        decode: Decode = decode_for_agent,
    ) -> None:
        """Create a dialer that has not started.

        Args:
            config: of the agent.
            resolve: resolution of host names.
            make_join: returns the first message of a session.
            on_message: see HeadSession.
            read_node: see HeadSession.
            decode: see HeadSession.

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
        self._last_log = float("-inf")
        self._logged_cause = ""

    @property
    def is_member(self) -> bool:
        """True while the head has accepted this machine."""
        return self.session is not None and self.session.is_member

    @property
    def is_refused_by_master(self) -> bool:
        """True if the peer is no head but the master of a cluster."""
        refusal = None if self.session is None else self.session.refusal
        return refusal is not None and refusal.is_master

    async def leave(self, message: LeaveCluster) -> None:
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
        """Keep a session until the head refuses it or the time without any has been too long.

        Args:
            context: of this process.
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
            context: of this process.
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
        now = time.monotonic()
        level = logging.DEBUG
        if now - self._last_log >= LOG_SECONDS or self.cause != self._logged_cause:
            self._last_log, self._logged_cause = now, self.cause
            level = logging.WARNING
        head = self._config.head
        log.log(level, "no session with the head at %s: %s; trying again", head, self.cause)

"""A `gllm-link` process as a child of this one: its start, its channel, its end.

If it exits it is started again; its owner then sends it anew what it needs. This module imports no
torch.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from random import Random
from typing import Protocol

import msgspec

from gllm.observability.child_process import ChildProcess
from gllm.recovery.backoff import Backoff
from gllm.runtime.messaging.certificates import NodeCertificate
from gllm.transport.descriptors import DescriptorChannel, DescriptorError, create_channels
from gllm.transport.link.commands import (
    LinkCommand,
    LinkIdentity,
    LinkListening,
    LinkMessage,
    decode_link_message,
    encode_link_message,
)

log = logging.getLogger(__name__)

STEADY_SECONDS = 30.0
"""Time after which a process that exits is started again without a long delay."""


class LinkOwner(Protocol):
    """Receiver of what happens to a LinkChild."""

    def on_started(self) -> None:
        """Send the process what it needs, because it has started; it has its identity."""

    def on_message(self, message: LinkMessage) -> None:
        """Handle a message of the process."""

    def on_exited(self) -> None:
        """Handle the end of the process: it has been reaped, and is started again later."""


class LinkChild:
    """Owner of one `gllm-link` process at a time."""

    def __init__(
        self, identity: LinkIdentity, certificate: NodeCertificate | None, owner: LinkOwner
    ) -> None:
        """Create the owner of a process that has not started.

        Args:
            identity: first message to each process.
            certificate: of this machine; None without encryption. It belongs to the caller.
            owner: gets the starts, messages and ends.
        """
        self.num_restarts = 0
        self._identity = identity
        self._certificate = certificate
        self._owner = owner
        self._process: ChildProcess | None = None
        self._channel: DescriptorChannel | None = None
        self._started_at = 0.0
        self._backoff = Backoff(Random())
        self._restart: asyncio.TimerHandle | None = None
        self._listening: asyncio.Future[int] | None = None
        """Port of the process, once it is ready."""
        self._is_closed = False

    @property
    def process(self) -> ChildProcess | None:
        """The process, if it runs."""
        return self._process

    @property
    def run(self) -> int:
        """Number of the head's start."""
        return self._identity.run

    @property
    def is_running(self) -> bool:
        """True if there is a process that commands can be sent to."""
        return self._process is not None

    def begin_run(self, run: int) -> None:
        """Serve another start of the head from now on."""
        self._identity = msgspec.structs.replace(self._identity, run=run)
        if self._process is not None:
            self._send_identity()

    async def listen(self) -> int:
        """Start the process if it has to listen; return the port that it has bound, 0 for none.

        Raises:
            OSError: it cannot be started or cannot bind.
        """
        if not self._identity.listen:
            return 0
        if self._process is None:
            self._start()
        assert self._listening is not None
        return await asyncio.shield(self._listening)

    def ensure_started(self) -> None:
        """Start the process, unless it runs or is started again soon. Raises OSError."""
        if self._process is None and self._restart is None:
            self._start()

    def send(self, command: LinkCommand, descriptors: Sequence[int] = ()) -> None:
        """Send a command; a process that does not receive it is killed, and started again."""
        assert self._channel is not None
        try:
            self._channel.send(encode_link_message(command), descriptors)
        except DescriptorError as error:
            log.debug("gllm-link cannot be reached: %s", error)
            self.kill()

    def close(self) -> None:
        """End the process, at once; nothing is reported any more."""
        self._is_closed = True
        if self._restart is not None:
            self._restart.cancel()
        if self._process is not None:
            self.kill()
            self._reap()

    def _start(self) -> None:
        """Start a process. Raises OSError."""
        loop = asyncio.get_running_loop()
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        self._started_at = loop.time()
        own, inherited = create_channels()
        try:
            self._process = ChildProcess(
                [sys.executable, "-m", "gllm.transport.link", str(inherited.fileno())],
                pass_fds=[inherited.fileno()],
            )
        except BaseException:
            own.close()
            raise
        finally:
            inherited.close()
        self._channel = own
        self._listening = loop.create_future()
        # An error that nobody waits for is logged by `_on_exit`.
        self._listening.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._process.watch(self._on_exit)
        loop.add_reader(own.fileno(), self._read)
        self._send_identity()
        self._owner.on_started()

    def _send_identity(self) -> None:
        certificate = self._certificate
        self.send(self._identity, [] if certificate is None else [certificate.descriptor])

    def kill(self) -> None:
        """End the process, if there is one; `LinkOwner.on_exited` follows, and another start."""
        if self._process is not None:
            self._process.kill()

    def _read(self) -> None:
        """Handle one message of the process."""
        assert self._channel is not None
        try:
            payload, descriptors = self._channel.receive()
            for descriptor in descriptors:
                os.close(descriptor)
            message = decode_link_message(payload)
        except (DescriptorError, OSError, msgspec.DecodeError) as error:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            log.debug("gllm-link is lost: %s", error)
            self.kill()
            return
        if isinstance(message, LinkListening):
            self._on_listening(message.port, message.cause)
        else:
            self._owner.on_message(message)

    def _on_listening(self, port: int, cause: str) -> None:
        assert self._listening is not None
        if self._listening.done():
            return
        if cause:
            text = f"the data port {self._identity.listen} cannot be bound: {cause}"
            self._listening.set_exception(OSError(text))
            # Another process tries again later: nobody can connect to this one.
            self.kill()
            return
        self._listening.set_result(port)
        if port:
            # Another process after this one has to be where the other machines expect it.
            host, _, _ = self._identity.listen.rpartition(":")
            self._identity = msgspec.structs.replace(self._identity, listen=f"{host}:{port}")

    def _on_exit(self) -> None:
        """Start another process after one that has exited."""
        loop = asyncio.get_running_loop()
        cause, listening = self._reap(), self._listening
        if self._is_closed:
            return
        if listening is not None and not listening.done():
            listening.set_exception(OSError(f"{cause} at its start"))
        if loop.time() - self._started_at > STEADY_SECONDS:
            self._backoff.reset()
        delay = self._backoff.next_delay()
        error = None if listening is None or listening.cancelled() else listening.exception()
        log.warning(
            "%s%s; it is started again in %.1f seconds",
            cause,
            "" if error is None else f" ({error})",
            delay,
        )
        self._restart = loop.call_later(delay, self._start_again)
        self._owner.on_exited()

    def _start_again(self) -> None:
        self._restart = None
        self.num_restarts += 1
        try:
            self._start()
        except OSError as error:
            log.warning("gllm-link cannot be started: %s", error)
            loop = asyncio.get_running_loop()
            self._restart = loop.call_later(self._backoff.next_delay(), self._start_again)

    def _reap(self) -> str:
        """Reap the process, which has exited or was killed; return the exit in words."""
        assert self._process is not None
        assert self._channel is not None
        self._process.unwatch()
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()
        cause = self._process.describe_exit("gllm-link")
        self._process = self._channel = None
        return cause

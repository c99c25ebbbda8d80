"""A simulated network: hubs and spokes with the real sessions over connections with delays.

A connection keeps the order of its frames and loses none while it lives. It ends when a process
dies or a fault cuts it; frames of a process that was killed may be lost from some frame on. Between
two processes that a partition separates nothing arrives, not even the end of a connection, until
the partition has ended.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Protocol

from gllm.messages.base import WireMessage
from gllm.messages.codec import encode
from gllm.messages.lifecycle import Hello
from gllm.runtime.messaging.bus_socket import CLOSED, RefusedPeers
from gllm.runtime.messaging.session import (
    ANY_EPOCH,
    SessionError,
    SessionReceiver,
    SessionSender,
)
from tests.support.simulation.process import Process


class End(Protocol):
    """An end of a connection."""

    process: Process

    def on_frame(self, connection: "Connection", frame: bytes) -> None:
        """Handle a frame."""

    def on_cut(self, connection: "Connection") -> None:
        """Handle the end of the connection, after its last frame."""


class Network:
    """Addresses and delays."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rng: Random) -> None:
        self.loop = loop
        self.rng = rng
        self.bound: dict[str, Hub] = {}
        self.num_frames = 0
        self.late_share = 0.0
        """Share of frames that take up to several seconds."""
        self._partitions: set[frozenset[Process]] = set()
        """Pairs of processes that do not reach each other."""
        self._held: list[Connection] = []
        """Connections with frames, or an end, that a partition holds up."""

    def separate(self, first: Process, second: Process) -> None:
        """Let nothing arrive between two processes."""
        self._partitions.add(frozenset((first, second)))

    def unite(self, first: Process, second: Process) -> None:
        """End the partition of two processes; what it held up arrives."""
        self._partitions.discard(frozenset((first, second)))
        held, self._held = self._held, []
        for connection in held:
            connection.release()

    def is_separated(self, first: Process, second: Process) -> bool:
        """Return True if a partition separates two processes."""
        return frozenset((first, second)) in self._partitions

    def hold(self, connection: "Connection") -> bool:
        """Return True, and note the connection, if a partition separates its ends."""
        hub, spoke = connection.ends
        if not self.is_separated(hub.process, spoke.process):
            return False
        if connection not in self._held:
            self._held.append(connection)
        return True

    def unbind(self, process: Process) -> None:
        """Free the addresses of a process that has died."""
        for address in [a for a, hub in self.bound.items() if hub.process is process]:
            del self.bound[address]

    def delay(self) -> float:
        if self.rng.random() < self.late_share:
            return self.rng.uniform(0.0, 4.0)
        return self.rng.uniform(0.00002, 0.002)


class Connection:
    """A connection between a spoke and a hub."""

    def __init__(self, hub: "Hub", spoke: "Spoke") -> None:
        self.network = hub.network
        self.ends: tuple[End, End] = (hub, spoke)
        self.is_open = True
        self._flying: tuple[deque[bytes], deque[bytes]] = (deque(), deque())
        """Frames to the hub and to the spoke."""
        self._arrivals = [0.0, 0.0]
        self._num_held = [0, 0]
        """Frames that a partition holds up."""
        self._held_ends: list[int] = []
        """Targets that have not heard of the connection's end because of a partition."""
        for end in self.ends:
            end.process.connections.append(self)

    def send(self, target: int, frames: Iterable[bytes]) -> None:
        """Send frames to the hub (0) or the spoke (1)."""
        if not self.is_open:
            return
        loop = self.network.loop
        for frame in frames:
            self.network.num_frames += 1
            self._flying[target].append(frame)
            self._arrivals[target] = max(self._arrivals[target], loop.time() + self.network.delay())
            loop.call_at(self._arrivals[target], self._arrive, target)

    def cut(self, killed: Process | None = None) -> None:
        """End the connection; `killed`: the process whose death ends it."""
        if not self.is_open:
            return
        self.is_open = False
        for target, end in enumerate(self.ends):
            end.process.connections.remove(self)
            if self.ends[1 - target].process is killed:
                flying = self._flying[target]
                for _ in range(self.network.rng.randint(0, len(flying))):
                    flying.pop()
            delay = self.network.delay()
            when = max(self._arrivals[target], self.network.loop.time() + delay)
            # After all frames, even those at the same time.
            self.network.loop.call_at(when + 1e-6, self._report_end, target)

    def release(self) -> None:
        """Let arrive what a partition has held up."""
        for target in (0, 1):
            count, self._num_held[target] = self._num_held[target], 0
            for _ in range(count):
                self._arrive(target)
        ends, self._held_ends = self._held_ends, []
        for target in ends:
            self._report_end(target)

    def _report_end(self, target: int) -> None:
        if self.network.hold(self):
            self._held_ends.append(target)
            return
        end = self.ends[target]
        end.process.run(end.on_cut, self)

    def _arrive(self, target: int) -> None:
        if self.network.hold(self):
            self._num_held[target] += 1
        elif self._flying[target]:
            end = self.ends[target]
            end.process.run(end.on_frame, self, self._flying[target].popleft())


class Context:
    """Place of a ZeroMQ context: the network and the process."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.process = process

    def destroy(self, linger: int) -> None:
        """Nothing is left to do."""

    def set(self, option: int, value: int) -> None:
        """Accept an option of ZeroMQ's, of which the network has none."""

    def term(self) -> None:
        """Nothing is left to do."""


class Hub:
    """A hub with the interface of gllm.runtime.messaging.bus.Hub."""

    def __init__(
        self,
        context: Context,
        run: int,
        decode: Callable[[bytes], Any],
        authenticator: None = None,
        max_guests: int = 0,
    ) -> None:
        self.network, self.process = context.network, context.process
        self._max_guests = max_guests
        self._guests: set[int] = set()
        self.num_malformed = self.num_refused = 0
        self.refused = RefusedPeers()
        self._num_stale = 0
        self._run, self._decode = run, decode
        self._epoch = ANY_EPOCH
        self._expected: dict[int, list[tuple[bytes, int]]] = {}
        self._sessions: dict[int, tuple[Connection, SessionReceiver, SessionSender]] = {}
        self._senders: dict[Connection, int] = {}
        self._is_open = True

    @property
    def num_stale(self) -> int:
        receivers = (receiver for _, receiver, _ in self._sessions.values())
        return self._num_stale + sum(receiver.num_dropped for receiver in receivers)

    def bind(self, address: str) -> str:
        self.network.bound[address] = self
        return address

    def expect(self, sender: int) -> None:
        if sender not in self._sessions:
            self._expected.setdefault(sender, [])

    def forget(self, sender: int) -> None:
        self._expected.pop(sender, None)
        if sender in self._guests and sender in self._sessions:
            connection = self._sessions[sender][0]
            self.network.loop.call_later(0.5, connection.cut)
        self._end(sender)

    def address_of(self, sender: int) -> str:
        return f"address of {sender}"

    def start(self, on_messages: Callable[..., object], on_lost: Callable[..., object]) -> None:
        self._on_messages, self._on_lost = on_messages, on_lost

    def send(self, sender: int, message: WireMessage) -> None:
        epoch = self._epoch if message.is_fenced else ANY_EPOCH
        self._send(sender, encode(message), epoch)

    def send_encoded(
        self, senders: Iterable[int], payload: bytes, epoch: int | None = None
    ) -> None:
        for sender in senders:
            self._send(sender, payload, self._epoch if epoch is None else epoch)

    def advance(self, epoch: int) -> None:
        self._epoch = epoch
        for sender, (_, receiver, _) in list(self._sessions.items()):
            for message in receiver.advance(epoch):
                self.network.loop.call_soon(self._deliver, sender, message)

    def close(self) -> None:
        self._is_open = False
        for connection in list(self._senders):
            connection.cut()
        for address in [a for a, hub in self.network.bound.items() if hub is self]:
            del self.network.bound[address]

    def on_frame(self, connection: Connection, frame: bytes) -> None:
        if not self._is_open:
            return
        sender = self._senders.get(connection)
        if sender is None:
            self._begin(connection, frame)
            return
        if sender not in self._sessions or self._sessions[sender][0] is not connection:
            self._num_stale += 1
            return
        try:
            message = self._sessions[sender][1].receive(frame)
        except SessionError as error:
            self.num_malformed += 1
            self._lose(sender, str(error))
            return
        if message is not None:
            self._deliver(sender, message)

    def on_cut(self, connection: Connection) -> None:
        sender = self._senders.pop(connection, None)
        if sender is not None and self._sessions.get(sender, (None,))[0] is connection:
            self._lose(sender, CLOSED)

    def _begin(self, connection: Connection, frame: bytes) -> None:
        receiver = SessionReceiver(self._run, self._decode, self._epoch)
        try:
            hello = receiver.receive(frame)
        except SessionError:
            hello = None
        if not isinstance(hello, Hello):
            # The rest of a session that was refused.
            self.num_malformed += 1
        elif hello.sender not in self._expected and len(self._guests) >= self._max_guests:
            self.num_refused += 1
        else:
            if hello.sender not in self._expected:
                self._guests.add(hello.sender)
            self._senders[connection] = hello.sender
            self._sessions[hello.sender] = connection, receiver, SessionSender(self._run)
            for payload, epoch in self._expected.pop(hello.sender, ()):
                self._send(hello.sender, payload, epoch)
            self._deliver(hello.sender, hello)

    def _deliver(self, sender: int, message: Any) -> None:
        if self._is_open:
            self._on_messages([(sender, message)])

    def _send(self, sender: int, payload: bytes, epoch: int) -> None:
        if sender in self._expected:
            self._expected[sender].append((payload, epoch))
        elif sender in self._sessions:
            connection, _, outgoing = self._sessions[sender]
            connection.send(1, outgoing.frames(payload, epoch))

    def _lose(self, sender: int, cause: str) -> None:
        if self._is_open:
            self._end(sender)
            self._on_lost(sender, cause)

    def _end(self, sender: int) -> None:
        self._guests.discard(sender)
        if session := self._sessions.pop(sender, None):
            self._num_stale += session[1].num_dropped


class Spoke:
    """A spoke with the interface of gllm.runtime.messaging.bus.Spoke."""

    def __init__(
        self,
        context: Context,
        run: int,
        sender: int,
        address: str,
        decode: Callable[[bytes], Any],
        keys: None = None,
    ) -> None:
        self.network, self.process = context.network, context.process
        self._receiver = SessionReceiver(run, decode)
        self._outgoing = SessionSender(run)
        self._epoch = ANY_EPOCH
        self._is_open = True
        hub = self.network.bound.get(address)
        self.connection: Connection | None = None
        if hub is None:
            self.network.loop.call_later(0.001, self.process.run, self.on_cut, None)
        else:
            self.connection = Connection(hub, self)
        self.send(Hello(sender))

    def start(self, on_messages: Callable[..., object], on_lost: Callable[..., object]) -> None:
        self._on_messages, self._on_lost = on_messages, on_lost

    def send(self, message: WireMessage) -> None:
        epoch = self._epoch if message.is_fenced else ANY_EPOCH
        self._send(encode(message), epoch)

    def send_encoded(self, payload: bytes) -> None:
        self._send(payload, self._epoch)

    def advance(self, epoch: int) -> None:
        self._epoch = epoch
        for message in self._receiver.advance(epoch):
            self.network.loop.call_soon(self.process.run, self._deliver, message)

    def close(self) -> None:
        self._is_open = False
        if self.connection is not None:
            self.connection.cut()

    def on_frame(self, connection: Connection, frame: bytes) -> None:
        if not self._is_open:
            return
        message = self._receiver.receive(frame)
        if message is not None:
            self._deliver(message)

    def on_cut(self, connection: Connection | None) -> None:
        if self._is_open:
            self._is_open = False
            self._on_lost(CLOSED)

    def _deliver(self, message: Any) -> None:
        if self._is_open:
            self._on_messages([message])

    def _send(self, payload: bytes, epoch: int) -> None:
        if self._is_open and self.connection is not None:
            self.connection.send(0, self._outgoing.frames(payload, epoch))

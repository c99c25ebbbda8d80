"""Random lives of the KV mover's owner: every command is answered, within its generation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.messages.kv_transfer import (
    CancelKvFetch,
    FetchKv,
    KvFetched,
    KvFetchStarted,
    KvRevoked,
    RevokeKv,
    ServeKv,
)
from gllm.runtime.head.kv_mover import EngineKvMover
from gllm.runtime.head.link_child import LinkOwner
from gllm.transport.kv.endpoint import KvMachine
from gllm.transport.link.commands import (
    CloseKvCaches,
    KvCachesOpened,
    KvMoved,
    LinkCommand,
    LinkIdentity,
    MoveKv,
    OpenKvCaches,
)
from tests.support.engines.kv_layouts import cut_layouts

(LAYOUT,) = cut_layouts(1, 1)
MACHINE = KvMachine("here", "socket", "", b"", [LAYOUT])


class FakeChild:
    """A gllm-link whose answers come when the test lets them."""

    def __init__(self, owner: LinkOwner) -> None:
        self.is_running = False
        self.process = None
        self.commands: list[LinkCommand] = []
        """Not answered; an exit forgets them."""
        self._owner = owner

    def ensure_started(self) -> None:
        if not self.is_running:
            self.start()

    def start(self) -> None:
        self.is_running = True
        self._owner.on_started()

    def send(self, command: LinkCommand, descriptors: Sequence[int] = ()) -> None:
        assert self.is_running
        self.commands.append(command)

    def exit(self) -> None:
        self.is_running = False
        self.commands.clear()
        self._owner.on_exited()

    def answer(self, rng: Random) -> None:
        """Answer the oldest command, some of them after the caches of their generation ended."""
        match self.commands.pop(0) if self.commands else None:
            case OpenKvCaches(generation):
                is_ok = rng.random() < 0.8
                machine = msgspec.msgpack.encode(MACHINE) if is_ok else b""
                cause = "" if is_ok else "it does not fit"
                self._owner.on_message(KvCachesOpened(generation, machine, cause))
            case MoveKv(generation, RevokeKv(ticket)):
                self._owner.on_message(KvMoved(generation, KvRevoked(ticket)))
            case MoveKv(generation, FetchKv(number)):
                self._owner.on_message(KvMoved(generation, KvFetchStarted(number)))
                is_ok = rng.random() < 0.5
                self._owner.on_message(KvMoved(generation, KvFetched(number, is_ok, 8, 0.1)))
            case MoveKv(_, ServeKv() | CancelKvFetch()) | CloseKvCaches() | None:
                pass
            case other:
                raise AssertionError(other)

    def close(self) -> None:
        self.is_running = False


@dataclass
class Driver:
    """Driver of the present generation: what it has asked and not been answered."""

    fetches: set[int] = field(default_factory=set)
    served: set[int] = field(default_factory=set)
    revoked: set[int] = field(default_factory=set)
    """Tickets whose revocation it waits for."""
    next_number: int = 0

    def receive(self, message: Any) -> None:
        match message:
            case KvFetchStarted(number):
                assert number in self.fetches
            case KvFetched(number):
                self.fetches.remove(number)
            case KvRevoked(ticket):
                self.served.discard(ticket)
                self.revoked.discard(ticket)
            case _:
                raise AssertionError(message)

    def act(self, mover: EngineKvMover, rng: Random) -> None:
        """Send a command. Numbers and tickets are those of earlier generations again."""
        self.next_number += 1
        match rng.randrange(4):
            case 0:
                self.fetches.add(self.next_number)
                mover.handle(FetchKv(self.next_number, 1, b"", 0, 1, [0]))
            case 1 if self.fetches:
                mover.handle(CancelKvFetch(rng.choice(sorted(self.fetches))))
            case 2:
                self.served.add(self.next_number)
                mover.handle(ServeKv(self.next_number, 1, [0]))
            case 3 if self.served:
                ticket = rng.choice(sorted(self.served))
                self.revoked.add(ticket)
                mover.handle(RevokeKv(ticket))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 120))
def test_every_command_is_answered_once_and_by_its_generation(seed: int, num_events: int) -> None:
    rng, driver, generation = Random(seed), Driver(), 0
    children: list[FakeChild] = []

    def create_child(identity: LinkIdentity, certificate: object, owner: LinkOwner) -> Any:
        children.append(FakeChild(owner))
        return children[-1]

    mover = EngineKvMover(
        lambda message: driver.receive(message), "auto", create_child=create_child
    )
    (child,) = children
    for _ in range(num_events):
        match rng.choices(["act", "answer", "exit", "start", "end"], [8, 8, 1, 2, 1])[0]:
            case "act" if generation:
                driver.act(mover, rng)
            case "answer":
                child.answer(rng)
            case "exit" if child.is_running:
                child.exit()
                assert not driver.fetches
                assert not driver.served
            case "start" if generation and not child.is_running:
                child.start()
            case "end":
                mover.end_generation()
                assert not mover.endpoint
                driver, generation = Driver(), generation + 1
                mover.add_layout(0, LAYOUT)
                mover.open(generation, [0], {0: 0})
        assert bool(mover.endpoint) <= child.is_running
    while child.commands:
        child.answer(rng)
    assert not driver.fetches
    assert not driver.revoked
    assert mover.num_holds == len(driver.served)
    mover.close()

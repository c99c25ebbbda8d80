"""Faults of transfers by any KV backend: a silent owner, a cancellation, a hanging transfer."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.config.kv_backends import AUTO, BACKENDS
from gllm.messages.kv_transfer import CancelKvFetch, FetchKv, KvFetched, RevokeKv
from gllm.transport.kv.backends.base import FetchTarget, KvBackend, ServedRead, TargetPart
from gllm.transport.kv.backends.bounded import MAX_LATE_CHECKS, FetchSupervisor, FetchWatch
from gllm.transport.kv.backends.mock import MockBackend
from gllm.transport.kv.backends.nixl import NixlBackend, NixlDetails, find_extents
from gllm.transport.kv.frames import KvConnection, KvTransferError, ReadPart, ReadRequest
from gllm.transport.kv.mover import make_backend
from gllm.transport.kv.pages import KvPages, find_slots
from tests.support.engines.fake_nixl import FakeNixlAgent
from tests.support.engines.kv_caches import NUM_LAYERS, CachedEngine, dial_plain, make_contents
from tests.support.engines.kv_layouts import cut_layouts
from tests.support.examples import num_examples

BLOCKS = [2, 0, 3]
NAMES = [*BACKENDS, "mock"]
SILENT = [
    *((name, number) for name in ("shm", "tcp", "mock") for number in range(3)),
    ("nixl", 0),
]
"""Backends with the first uses of a connection by an owner, at each of which it falls silent."""


class FreezingConnection:
    """Connection of an owner that falls silent at one of its uses, until the test ends."""

    def __init__(self, connection: KvConnection, num_left: int, reached: threading.Event) -> None:
        self._connection, self._num_left, self._reached = connection, num_left, reached
        self._never = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if not self._num_left:
            self._reached.set()
            # Longer than any test: its thread is a daemon.
            self._never.wait(60)
            raise ConnectionError
        self._num_left -= 1
        return getattr(self._connection, name)


class FreezingBackend:
    """Backend of an owner that serves `num_left` uses of its connection."""

    def __init__(self, inner: KvBackend, num_left: int | None, reached: threading.Event) -> None:
        self._inner, self._num_left, self._reached = inner, num_left, reached

    def fetch(self, connection: KvConnection, target: FetchTarget) -> None:
        raise AssertionError("an owner fetches nothing")

    def serve(self, connection: KvConnection, read: ServedRead) -> None:
        if self._num_left is not None:
            freezing = FreezingConnection(connection, self._num_left, self._reached)
            connection = cast(KvConnection, freezing)
        self._inner.serve(connection, read)


class NotifyingBackend:
    """Backend of a receiver that calls a function once all bytes have arrived."""

    def __init__(self, inner: KvBackend, after_fetch: Callable[[], None]) -> None:
        self.serve = inner.serve
        self._inner, self._after_fetch = inner, after_fetch

    def fetch(self, connection: KvConnection, target: FetchTarget) -> None:
        self._inner.fetch(connection, target)
        self._after_fetch()


class Pair:
    """An engine with blocks under ticket 7 and one that fetches them, by one backend."""

    def __init__(self, name: str, num_left: int | None = None, check_seconds: float = 20.0) -> None:
        self.now = 0.0
        self.reached = threading.Event()
        """Set once the owner is silent."""
        self.owner_agent, self.agent = FakeNixlAgent(), FakeNixlAgent()
        self.stuck: list[str] = []
        self.is_stuck = threading.Event()
        self.after_fetch: Callable[[], None] = lambda: None
        self.contents = make_contents(10, seed=3)
        self.owner = CachedEngine(
            cut_layouts(1, 1),
            create_backend=lambda each: FreezingBackend(
                self.make(each, self.owner_agent), num_left, self.reached
            ),
        )
        self.owner.listen()
        self.owner.serve(self.contents, BLOCKS, 7)
        self.receiver = CachedEngine(
            cut_layouts(1, 1),
            "mock:1" if name == "mock" else name,
            dial=dial_plain,
            clock=lambda: self.now,
            create_backend=lambda each: NotifyingBackend(
                self.make(each, self.agent), lambda: self.after_fetch()
            ),
            supervisor=FetchSupervisor(self.on_stuck, check_seconds),
        )
        self.is_remote = name == "tcp"

    def make(self, name: str, agent: FakeNixlAgent) -> KvBackend:
        if name == "nixl":
            return NixlBackend(agent)
        if name.startswith("mock"):
            return MockBackend(make_backend("shm"), 1e9)
        return make_backend(name)

    def on_stuck(self, cause: str) -> None:
        self.stuck.append(cause)
        self.is_stuck.set()

    def fetch(self) -> None:
        endpoint = self.owner.endpoint(self.is_remote)
        self.receiver.mover.handle(FetchKv(5, 7, endpoint, 0, 10, BLOCKS))

    def ended(self) -> KvFetched:
        return self.receiver.wait(KvFetched)

    def close(self) -> None:
        self.agent.goes_on.set()
        self.agent.can_cancel = True
        for engine in (self.receiver, self.owner):
            engine.mover.close()


@pytest.fixture
def create_pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pair]]:
    # A silent owner keeps its thread: the end of the test does not wait for it.
    monkeypatch.setattr("gllm.transport.kv.source._CLOSE_SECONDS", 0.0)
    pairs: list[Pair] = []

    def create(*arguments: Any) -> Pair:
        pairs.append(Pair(*arguments))
        return pairs[-1]

    yield create
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize("name", [AUTO, *NAMES])
def test_every_backend_moves_the_same_bytes(name: str, create_pair: Callable[..., Pair]) -> None:
    pair = create_pair(name)
    pair.fetch()
    fetched = pair.ended()
    assert fetched.is_ok, fetched.cause
    assert not pair.receiver.differs(pair.contents, BLOCKS, 0)
    assert not pair.stuck


@pytest.mark.parametrize(("name", "num_left"), SILENT)
def test_a_fetch_from_a_silent_owner_ends(
    name: str, num_left: int, create_pair: Callable[..., Pair]
) -> None:
    """A cancellation or the deadline ends it, at whatever point the owner has stopped."""
    pair = create_pair(name, num_left)
    pair.fetch()
    assert pair.reached.wait(20)
    if num_left:
        pair.receiver.mover.handle(CancelKvFetch(5))
    else:
        pair.now += 1000.0
    fetched = pair.ended()
    assert not fetched.is_ok
    assert fetched.cause == ("the fetch was cancelled" if num_left else "the fetch is late")
    assert not pair.stuck


@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_are_revoked_before_the_last_byte_are_discarded(
    name: str, create_pair: Callable[..., Pair]
) -> None:
    """The owner may reuse blocks at once: what was read since does not count (C6)."""
    pair = create_pair(name)
    pair.after_fetch = lambda: pair.owner.mover.handle(RevokeKv(7))
    pair.fetch()
    fetched = pair.ended()
    assert not fetched.is_ok
    assert "did not keep the blocks until the end" in fetched.cause


def start_hanging_transfer(pair: Pair) -> None:
    """Let a NIXL transfer hang after half of its pieces."""
    pair.agent.goes_on.clear()
    pair.fetch()
    while not pair.agent.num_extents:
        time.sleep(1e-3)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_hanging_nixl_transfer_is_cancelled(
    is_cancelled: bool, create_pair: Callable[..., Pair]
) -> None:
    pair = create_pair("nixl")
    start_hanging_transfer(pair)
    if is_cancelled:
        pair.receiver.mover.handle(CancelKvFetch(5))
    else:
        pair.now += 1000.0
    fetched = pair.ended()
    assert not fetched.is_ok
    assert fetched.cause == ("the fetch was cancelled" if is_cancelled else "the fetch is late")
    assert pair.agent.num_released == 1
    assert not pair.stuck


def test_a_transfer_that_cannot_be_cancelled_ends_the_process(
    create_pair: Callable[..., Pair],
) -> None:
    pair = create_pair("nixl", None, 1e-3)
    pair.agent.can_cancel = False
    start_hanging_transfer(pair)
    pair.receiver.mover.handle(CancelKvFetch(5))
    assert pair.is_stuck.wait(20)
    assert pair.stuck == ["the fetch was cancelled"]
    # Its blocks are not given back while it writes.
    assert pair.receiver.mover.num_fetches == 1


def test_only_fetches_that_had_to_end_long_ago_are_stuck() -> None:
    watch = FetchWatch()
    has_to_end = False

    def check() -> None:
        if has_to_end:
            raise KvTransferError("it is late")

    first, second = watch.add(check), watch.add(lambda: None)
    for _ in range(3 * MAX_LATE_CHECKS):
        assert not watch.find_stuck()
    has_to_end = True
    for _ in range(MAX_LATE_CHECKS):
        assert not watch.find_stuck()
    watch.remove(first)
    assert not watch.find_stuck()
    watch.add(check)
    assert [watch.find_stuck() for _ in range(MAX_LATE_CHECKS + 1)][-2:] == ["", "it is late"]
    watch.remove(second)
    assert len(watch) == 1


def test_fetches_that_begin_do_not_count_as_checks_of_the_others() -> None:
    stuck: list[str] = []
    is_checked = threading.Event()
    supervisor = FetchSupervisor(stuck.append, check_seconds=60.0)

    def check() -> None:
        is_checked.set()
        raise KvTransferError("it was cancelled just now")

    with supervisor.watching(check):
        for _ in range(2 * MAX_LATE_CHECKS):
            is_checked.clear()
            with supervisor.watching(lambda: None):
                is_checked.wait(1e-3)
    supervisor.close()
    assert not stuck


@settings(max_examples=num_examples(few=25, many=1000))
@given(st.data())
def test_pieces_of_nixl_are_joined_and_cover_the_same_bytes(data: st.DataObject) -> None:
    """As large as both sides are contiguous, whatever the block sizes, blocks and heads."""
    draw = data.draw
    own_size, their_size = draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from([1, 4, 16]))
    first, num_tokens = draw(st.integers(0, 20)), draw(st.integers(1, 60))
    heads = draw(st.sampled_from([range(2), range(1), range(1, 2)]))
    own_layout, their_layout = (
        cut_layouts(1, 1, block_size=size, num_blocks=96)[0] for size in (own_size, their_size)
    )
    own_blocks = draw(st.permutations(range(96)))
    their_blocks = draw(st.one_of(st.permutations(range(96)), st.just(list(range(96)))))
    slots = find_slots(own_blocks, own_size, first % own_size, num_tokens)
    part = ReadPart(0, 1, heads.start, len(heads))
    pages = SimpleNamespace(address=1 << 20, layout=own_layout)
    target = FetchTarget(
        ReadRequest(first, num_tokens, "nixl", "plain", [part]),
        [TargetPart(part, cast(KvPages, pages), slots)],
        lambda num_bytes: None,
    )
    details = NixlDetails(b"", [1 << 30], [their_layout])
    own, remote = find_extents(target, details, their_blocks)
    theirs = find_slots(their_blocks, their_size, first, num_tokens)
    expected = [
        (own_begin + int(mine) * own_stride + byte, their_begin + int(other) * their_stride + byte)
        for (own_begin, own_stride, size), (their_begin, their_stride, _) in zip(
            own_layout.find_strides(1, heads), their_layout.find_strides(1, heads), strict=True
        )
        for mine, other in zip(slots, theirs, strict=True)
        for byte in range(size)
    ]
    covered = [
        (mine - (1 << 20) + byte, other - (1 << 30) + byte)
        for (mine, size, _), (other, _, _) in zip(own, remote, strict=True)
        for byte in range(size)
    ]
    assert covered == expected
    for (mine, size, _), (other, _, _), following, beyond in zip(
        own, remote, own[1:], remote[1:], strict=False
    ):
        assert (mine + size, other + size) != (following[0], beyond[0])


def test_a_prompt_in_one_run_of_blocks_takes_few_pieces(create_pair: Callable[..., Pair]) -> None:
    """One per layer for keys and one for values, in place of one per token."""
    pair = create_pair("nixl")
    blocks = [4, 5, 6]
    pair.owner.serve(pair.contents, blocks, 8)
    pair.receiver.mover.handle(FetchKv(5, 8, pair.owner.endpoint(), 0, 10, blocks))
    assert pair.ended().is_ok
    assert not pair.receiver.differs(pair.contents, blocks, 0)
    assert pair.agent.num_extents == [2 * NUM_LAYERS]


class Caches:
    """Mapped caches: their address and layout."""

    address, layout = 4096, cut_layouts(1, 1)[0]


def test_caches_at_the_address_of_earlier_ones_are_registered_anew() -> None:
    agent = FakeNixlAgent()
    backend = NixlBackend(agent)
    earlier, later = Caches(), Caches()
    for pages in (earlier, earlier, later):
        backend.register(cast(KvPages, pages))
    assert agent.num_registrations == 2
    assert list(agent.registered) == [4096]
    other = Caches()
    other.address = 8192
    del later, pages
    backend.register(cast(KvPages, other))
    assert list(agent.registered) == [8192], "caches that are gone are not registered any more"

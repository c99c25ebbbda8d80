"""Fetches that fail, tickets that are revoked meanwhile, and the other ways of transfer."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count

import numpy as np
import pytest

from gllm.config.kv_backends import check_backend_name
from gllm.messages.kv_transfer import (
    CancelKvFetch,
    FetchKv,
    KvFetched,
    KvFetchStarted,
    KvRevoked,
    RevokeKv,
    ServeKv,
)
from gllm.transport.kv.backends.mock import MockBackend
from gllm.transport.kv.backends.nixl import NixlBackend
from gllm.transport.kv.endpoint import KvEndpoint, KvMachine, encode_endpoint
from gllm.transport.kv.fetch_queue import OPEN_SECONDS
from gllm.transport.kv.frames import KvConnection, KvFrameKind, ReadPart, ReadRequest, ReadTicket
from gllm.transport.kv.mover import MAX_WAITING_FETCHES, NUM_FETCH_THREADS, make_backend
from gllm.transport.kv.pages import KvPagesError, find_slots
from tests.support.engines.fake_nixl import FakeNixlAgent
from tests.support.engines.kv_caches import CachedEngine, dial_plain, make_contents
from tests.support.engines.kv_layouts import cut_layouts

BLOCKS = [2, 0, 3]


@pytest.fixture
def owner() -> Iterator[CachedEngine]:
    # Its clock runs while it waits for a ticket.
    engine = CachedEngine(cut_layouts(1, 1), clock=count(step=2).__next__)
    engine.listen()
    engine.serve(make_contents(10, seed=3), BLOCKS, 7)
    yield engine
    engine.mover.close()


@pytest.fixture
def receiver() -> Iterator[CachedEngine]:
    engine = CachedEngine(cut_layouts(1, 1), dial=dial_plain)
    yield engine
    engine.mover.close()


def test_ticket_is_used_by_one_fetch_only(owner: CachedEngine, receiver: CachedEngine) -> None:
    endpoint = owner.endpoint()
    started, fetched = [], []
    for number in (1, 2):
        receiver.mover.handle(FetchKv(number, 7, endpoint, 0, 10, BLOCKS))
        if number == 1:
            started.append(receiver.wait(KvFetchStarted).fetch)
        fetched.append(receiver.wait(KvFetched))
        if number == 1:
            # Its blocks are of no more use, before the router or a lease says so.
            assert owner.wait(KvRevoked).ticket == 7
    assert started == [1]
    assert [each.is_ok for each in fetched] == [True, False]
    assert "the ticket is not held here" in fetched[1].cause


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ({"ticket": 8}, "not held here"),
        ({"num_tokens": 11}, "tokens 0 to 10 of 10"),
        ({"endpoint": b"\x00"}, "endpoint is invalid"),
        ({"block_ids": [2, 16, 3]}, "block 16 of 16"),
        ({"block_ids": [2]}, "are not in 1 blocks"),
    ],
)
def test_wrong_fetch_fails_with_a_cause(
    owner: CachedEngine, receiver: CachedEngine, command: dict[str, object], cause: str
) -> None:
    fields = {
        "fetch": 1,
        "ticket": 7,
        "endpoint": owner.endpoint(),
        "first_token": 0,
        "num_tokens": 10,
        "block_ids": BLOCKS,
    }
    fetched = receiver.fetch(FetchKv(**(fields | command)))  # type: ignore[arg-type]
    assert not fetched.is_ok
    assert cause in fetched.cause
    assert receiver.count_written_slots() == 0


def test_other_dtype_is_refused(owner: CachedEngine) -> None:
    receiver = CachedEngine(cut_layouts(1, 1, dtype="bfloat16"))
    fetched = receiver.fetch(FetchKv(1, 7, owner.endpoint(), 0, 10, BLOCKS))
    assert fetched.cause == "the KV caches differ in dtype: 'float32' there, 'bfloat16' here"
    receiver.mover.close()


def test_ticket_that_is_revoked_meanwhile_ends_a_tcp_fetch() -> None:
    """The owner stops at the next chunk."""
    reached, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        reached.set()
        assert go_on.wait(20)

    owner = CachedEngine(cut_layouts(1, 1), yield_to_activations=pause)
    owner.listen()
    owner.serve(make_contents(10, seed=3), BLOCKS, 7)
    receiver = CachedEngine(cut_layouts(1, 1), dial=dial_plain)
    receiver.mover.handle(FetchKv(1, 7, owner.endpoint(is_remote=True), 0, 10, BLOCKS))
    assert reached.wait(20)
    owner.mover.handle(RevokeKv(7))
    assert owner.wait(KvRevoked).ticket == 7
    go_on.set()
    assert "not held any more" in receiver.wait(KvFetched).cause
    for engine in (owner, receiver):
        engine.mover.close()


def test_cancelled_fetch_ends_while_the_owner_sends_nothing() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        reached.set()
        go_on.wait(20)

    owner = CachedEngine(cut_layouts(1, 1), yield_to_activations=pause)
    owner.listen()
    owner.serve(make_contents(10, seed=3), BLOCKS, 7)
    receiver = CachedEngine(cut_layouts(1, 1), dial=dial_plain)
    receiver.mover.handle(FetchKv(5, 7, owner.endpoint(is_remote=True), 0, 10, BLOCKS))
    assert reached.wait(20)
    receiver.mover.handle(CancelKvFetch(5))
    fetched = receiver.wait(KvFetched)
    assert (fetched.is_ok, fetched.cause) == (False, "the fetch was cancelled")
    go_on.set()
    for engine in (owner, receiver):
        engine.mover.close()


def test_owner_that_is_gone_fails_the_fetch(receiver: CachedEngine) -> None:
    owner = CachedEngine(cut_layouts(1, 1))
    endpoint = owner.endpoint()
    owner.mover.close()
    fetched = receiver.fetch(FetchKv(1, 7, endpoint, 0, 10, BLOCKS))
    assert not fetched.is_ok
    assert "refused" in fetched.cause


def test_a_read_that_overtakes_its_ticket_waits_for_it(receiver: CachedEngine) -> None:
    contents = make_contents(10, seed=3)

    def serve(_: float) -> None:
        slow.serve(contents, BLOCKS, 7)

    slow = CachedEngine(cut_layouts(1, 1), sleep=serve)
    fetched = receiver.fetch(FetchKv(1, 7, slow.endpoint(), 0, 10, BLOCKS))
    slow.mover.close()
    assert fetched.is_ok, fetched.cause
    assert not receiver.differs(contents, BLOCKS, 0)


def test_end_of_an_epoch_drops_its_tickets_at_once(receiver: CachedEngine) -> None:
    naps: list[float] = []
    owner = CachedEngine(cut_layouts(1, 1), sleep=naps.append)
    owner.serve(make_contents(10, seed=3), BLOCKS, 7)
    endpoint = owner.endpoint()
    owner.mover.close_caches()
    fetched = receiver.fetch(FetchKv(1, 7, endpoint, 0, 10, BLOCKS))
    owner.mover.close()
    assert "not held here" in fetched.cause
    assert not naps


def test_int8_on_the_wire_is_near_and_smaller() -> None:
    layouts = cut_layouts(1, 1, key_bytes=64, value_bytes=64)
    owner = CachedEngine(layouts)
    owner.listen()
    receiver = CachedEngine(layouts, encoding="int8", dial=dial_plain)
    rng, (source,), (target,) = np.random.default_rng(5), owner.pages, receiver.pages
    values = rng.standard_normal((4, 2 * 10 * 2 * 16)).astype(np.float32)
    slots = source.find_slots(BLOCKS, 0, 10)
    for layer in range(4):
        source.write(layer, range(2), slots, values[layer].view(np.uint8))
    owner.mover.handle(ServeKv(7, 10, BLOCKS))
    fetched = receiver.fetch(FetchKv(1, 7, owner.endpoint(is_remote=True), 0, 10, BLOCKS))
    assert fetched.is_ok, fetched.cause
    assert fetched.num_bytes < 0.3 * values.nbytes
    for layer in range(4):
        arrived = target.read(layer, range(2), slots).view(np.float32)
        rows, expected = arrived.reshape(-1, 16), values[layer].reshape(-1, 16)
        largest = np.abs(expected).max(axis=1, keepdims=True)
        assert np.all(np.abs(rows - expected) <= 0.51 * 1.01 * largest / 127)
    for engine in (owner, receiver):
        engine.mover.close()


@pytest.mark.parametrize("gigabytes_per_second", [0.5, 25.0, 300.0])
def test_mock_delay_is_kappa_times_length_over_bandwidth(
    owner: CachedEngine, gigabytes_per_second: float
) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    rate = gigabytes_per_second * 1e3
    backend = MockBackend(make_backend("shm"), rate, clock=lambda: now[0], sleep=sleep)
    receiver = CachedEngine(cut_layouts(1, 1), create_backend=lambda name: backend)
    fetched = receiver.fetch(FetchKv(1, 7, owner.endpoint(), 0, 10, BLOCKS))
    assert fetched.is_ok, fetched.cause
    kappa = receiver.pages[0].layout.bytes_per_token
    assert now[0] == pytest.approx(kappa * 10 / rate, rel=0.1)
    receiver.mover.close()


@pytest.mark.parametrize("name", ["infiniband", "mock:", "mock:-1", "mock:inf"])
def test_unknown_backends_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"none of auto, shm, tcp|expected a positive number"):
        check_backend_name(name)


def test_missing_library_is_named(owner: CachedEngine) -> None:
    """Such an engine is not opened, and another one that asks it is refused."""
    with pytest.raises(ImportError, match="pip install nixl"):
        CachedEngine(cut_layouts(1, 1), backend="nixl")
    receiver = CachedEngine(
        cut_layouts(1, 1), backend="nixl", create_backend=lambda name: NixlBackend(FakeNixlAgent())
    )
    fetched = receiver.fetch(FetchKv(1, 7, owner.endpoint(), 0, 10, BLOCKS))
    assert not fetched.is_ok
    assert "on the owner's machine" in fetched.cause
    assert "pip install nixl" in fetched.cause
    receiver.mover.close()


def test_slots_of_a_run_over_blocks() -> None:
    assert find_slots([5, 2, 9], 4, 3, 6).tolist() == [23, 8, 9, 10, 11, 36]
    with pytest.raises(KvPagesError):
        find_slots([5, 2, 9], 4, 3, 10)


def find_endpoint(listening: socket.socket) -> bytes:
    """Return the endpoint of an engine on another machine that listens at a socket."""
    address = f"127.0.0.1:{listening.getsockname()[1]}"
    machine = KvMachine("elsewhere", "", address, b"", cut_layouts(1, 1))
    return encode_endpoint(KvEndpoint([machine]))


def test_fetches_that_wait_for_others_are_not_late() -> None:
    """The last one waits for a thread while the clock goes on, and is in time afterwards."""
    now = [100.0]
    receiver = CachedEngine(cut_layouts(1, 1), dial=dial_plain, clock=lambda: now[0])
    with ExitStack() as stack:
        stack.callback(receiver.mover.close)
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        endpoint = find_endpoint(silent)
        for number in range(NUM_FETCH_THREADS + 1):
            receiver.mover.handle(FetchKv(number, 7, endpoint, 0, 10, BLOCKS))
        accepted = [silent.accept()[0] for _ in range(NUM_FETCH_THREADS)]
        for connection in accepted:
            stack.enter_context(connection)
        now[0] += 1.5
        # An answer, so that the engine is not taken for frozen.
        KvConnection(accepted[0]).refuse("test")
        assert "test" in receiver.wait(KvFetched).cause
        stack.enter_context(silent.accept()[0])
        now[0] += 1.0
        late = [receiver.wait(KvFetched) for _ in range(NUM_FETCH_THREADS - 1)]
        assert all("late" in each.cause for each in late)
        assert receiver.mover.num_fetches == 1
        now[0] += 1.5
        assert "late" in receiver.wait(KvFetched).cause


def test_a_frozen_engine_delays_few_fetches_and_none_of_other_engines(
    owner: CachedEngine,
) -> None:
    """40 requests with KV at an engine that accepts connections and never answers."""
    now = [100.0]
    receiver = CachedEngine(cut_layouts(1, 1), dial=dial_plain, clock=lambda: now[0])
    with ExitStack() as stack:
        stack.callback(receiver.mover.close)
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def fetch(number: int, endpoint: bytes) -> None:
            receiver.mover.handle(FetchKv(number, 7, endpoint, 0, 10, BLOCKS))

        for number in range(40):
            fetch(number, find_endpoint(silent))
        for _ in range(NUM_FETCH_THREADS):
            stack.enter_context(silent.accept()[0])
        fetch(40, owner.endpoint())
        assert receiver.wait(KvFetched).is_ok, "others do not wait"
        now[0] += 10.0
        causes = [receiver.wait(KvFetched).cause for _ in range(40)]
        assert sum("late" in cause for cause in causes) == NUM_FETCH_THREADS
        # Meanwhile prompts are computed at once, and nothing is sent.
        for number in range(3):
            fetch(number, find_endpoint(silent))
            assert "has not answered" in receiver.wait(KvFetched).cause
        silent.settimeout(0)
        with pytest.raises(BlockingIOError):
            silent.accept()
        # Afterwards one fetch at a time tries again.
        now[0] += OPEN_SECONDS
        silent.settimeout(10)
        for number in range(3):
            fetch(number, find_endpoint(silent))
        probe = stack.enter_context(silent.accept()[0])
        assert [receiver.wait(KvFetched).fetch for _ in range(2)] == [1, 2]
        KvConnection(probe).refuse("test")
        assert "test" in receiver.wait(KvFetched).cause
        fetch(4, find_endpoint(silent))
        stack.enter_context(silent.accept()[0])


def test_the_queue_of_fetches_from_an_engine_is_bounded() -> None:
    receiver = CachedEngine(cut_layouts(1, 1), dial=dial_plain, clock=lambda: 100.0)
    with ExitStack() as stack:
        stack.callback(receiver.mover.close)
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for number in range(NUM_FETCH_THREADS):
            receiver.mover.handle(FetchKv(number, 7, find_endpoint(silent), 0, 10, BLOCKS))
            stack.enter_context(silent.accept()[0])
        for number in range(NUM_FETCH_THREADS, NUM_FETCH_THREADS + MAX_WAITING_FETCHES + 1):
            receiver.mover.handle(FetchKv(number, 7, find_endpoint(silent), 0, 10, BLOCKS))
        refused = receiver.wait(KvFetched)
        assert refused.fetch == NUM_FETCH_THREADS + MAX_WAITING_FETCHES
        assert f"{MAX_WAITING_FETCHES} fetches from the other engine wait" in refused.cause
        receiver.mover.close_caches()


def _begin_read(connection: socket.socket, ticket: int) -> KvFrameKind:
    """Send a READ and return the kind of the answer's first frame."""
    request = ReadRequest(0, 10, "tcp", "plain", [ReadPart(0, 0, 0, 2)])
    frames = KvConnection(connection)
    frames.send_struct(KvFrameKind.TICKET, ReadTicket(ticket, 5))
    frames.send_struct(KvFrameKind.READ, request)
    connection.settimeout(10)
    # A frame begins with two bytes of magic, the version and the kind.
    return KvFrameKind(connection.recv(2**16)[3])


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(2**16):
            pass
    except BlockingIOError:
        return True
    return False


def test_strangers_keep_no_reader_out() -> None:
    owner = CachedEngine(cut_layouts(1, 1), max_connections=3)
    with ExitStack() as stack:
        stack.callback(owner.mover.close)

        def connect(address: str) -> socket.socket:
            own, other = socket.socketpair()
            stack.enter_context(own)
            owner.mover.adopt(other, address)
            own.settimeout(10)
            return own

        def connect_reader(ticket: int) -> socket.socket:
            connection = connect(f"10.0.0.{ticket}")
            owner.serve(make_contents(10, seed=3), BLOCKS, ticket)
            assert _begin_read(connection, ticket) is KvFrameKind.RUN
            return connection

        readers = [connect_reader(11)]
        strangers = [connect("10.0.0.9") for _ in range(10)]
        readers += [connect_reader(ticket) for ticket in (12, 13)]
        assert [stranger.recv(1) for stranger in strangers] == [b""] * 10
        late = connect("10.0.0.3")
        assert late.recv(1) == b""
        assert all(_is_open(reader) for reader in readers)

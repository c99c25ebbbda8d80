"""The head's owner of KV transfers: real gllm-link processes that end, epochs that change."""

import gc
import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest
import pytest_asyncio

from gllm.config.kv_backends import parse_mock_rate
from gllm.messages.kv_transfer import KvFetched, KvRevoked, RevokeKv
from gllm.recovery.placement import LOCAL_NODE
from gllm.runtime.head.kv_mover import EngineKvMover
from gllm.runtime.messaging.security import create_certificate
from gllm.transport.descriptors import DescriptorError
from gllm.transport.kv.endpoint import KvEndpoint, KvMachine, decode_endpoint, encode_endpoint
from gllm.transport.kv.mover import read_host_id
from tests.support.engines.kv_layouts import cut_layouts
from tests.support.engines.kv_workers import KvWorkers, until
from tests.support.stopped_process import stop_process


class Engines(NamedTuple):
    """Two engines that the tests of this file share.

    Each test begins new epochs and has tickets of its own: a mover serves none twice.
    """

    owner: KvWorkers
    """With two workers and an address for other machines."""
    receiver: KvWorkers

    async def begin(self) -> None:
        """Begin an epoch of both engines, and wait for their endpoints."""
        for workers in self:
            workers.begin()
        await until(lambda: all(workers.mover.endpoint for workers in self))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[Engines]:
    """Both engines; nothing of them is left at the end."""
    gc.collect()  # Descriptors of earlier tests.
    num_descriptors = len(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    both = Engines(KvWorkers(pp=2, address=address), KvWorkers(pp=1))
    try:
        yield both
    finally:
        for workers in both:
            workers.close()
    assert len(os.listdir("/proc/self/fd")) == num_descriptors
    assert not [each for each in psutil.Process().children() if "gllm-link" in each.name()]


@contextmanager
def silent_endpoint(workers: KvWorkers) -> Iterator[bytes]:
    """An endpoint of this machine at which nobody answers, so that fetches stay."""
    name = f"gllm-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        machine = KvMachine(read_host_id(), name, "", b"", workers.layouts)
        yield encode_endpoint(KvEndpoint([machine]))


@pytest.mark.asyncio(loop_scope="module")
async def test_blocks_get_from_one_engine_to_the_other(engines: Engines) -> None:
    owner, receiver = engines
    num_changes = owner.num_changes, receiver.num_changes
    await engines.begin()
    assert (owner.num_changes, receiver.num_changes) == tuple(each + 1 for each in num_changes)
    # Four layers with two heads of 8 + 8 bytes.
    assert owner.mover.bytes_per_token == receiver.mover.bytes_per_token == 4 * 2 * 16
    owner.serve(7)
    owner.send(RevokeKv(7))
    await until(lambda: owner.reports == [KvRevoked(7)])
    owner.serve(5)
    owner.serve(6)
    receiver.fetch(0, 6, owner.mover.endpoint)
    receiver.fetch(1, 7, owner.mover.endpoint)
    fetched, refused = await receiver.ended(0), await receiver.ended(1)
    assert fetched.is_ok, fetched.cause
    assert not refused.is_ok
    assert "not held" in refused.cause
    # One worker has what two have there.
    assert receiver.read() == owner.read()
    assert len(receiver.pages) == 1
    assert len(owner.pages) == 2
    owner.send(RevokeKv(6))
    await until(lambda: owner.reports == [KvRevoked(7), KvRevoked(6)])


@pytest.mark.asyncio(loop_scope="module")
async def test_a_process_that_ends_revokes_and_fails_everything_and_the_next_one_serves(
    engines: Engines,
) -> None:
    owner, receiver = engines
    await engines.begin()
    before, num_restarts = owner.mover.endpoint, receiver.mover.num_restarts
    owner.serve(11)
    owner.serve(12)
    with silent_endpoint(owner) as silent:
        receiver.fetch(0, 5, silent)
        receiver.fetch(1, 5, silent)
        channels = owner.channel, receiver.channel
        owner.kill()
        receiver.kill()
        await until(lambda: owner.channel is not channels[0])
        await until(lambda: receiver.channel is not channels[1])
    # The end of its channel tells the driver that nobody reads or writes any more.
    assert not owner.reports
    assert not receiver.reports
    await until(lambda: owner.mover.endpoint != before and receiver.mover.num_restarts)
    await until(lambda: owner.mover.endpoint and receiver.mover.endpoint)
    assert owner.mover.endpoint != before
    assert receiver.mover.num_restarts == num_restarts + 1
    owner.serve(15)
    receiver.fetch(2, 15, before)
    receiver.fetch(3, 15, owner.mover.endpoint)
    assert not (await receiver.ended(2)).is_ok, "the former endpoint is nobody's"
    assert (await receiver.ended(3)).is_ok
    assert receiver.read() == owner.read()
    # The next process has the same port and certificate for other machines.
    owner.serve(16)
    receiver.fetch(4, 16, remote(before))
    assert (await receiver.ended(4)).is_ok
    assert receiver.read() == owner.read()


def remote(endpoint: bytes, **changes: Any) -> bytes:
    """The endpoint of an engine, as if it were on another machine."""
    (machine,) = decode_endpoint(endpoint).machines
    changed = msgspec.structs.replace(machine, host="elsewhere", socket="", **changes)
    return encode_endpoint(KvEndpoint([changed]))


@pytest.mark.asyncio(loop_scope="module")
async def test_engines_of_other_machines_fetch_over_tls(engines: Engines) -> None:
    owner, receiver = engines
    await engines.begin()
    owner.serve(21)
    here = owner.mover.endpoint
    wrong = create_certificate()
    wrong.close()
    refused = {
        0: remote(here, certificate=wrong.certificate),
        1: remote(here, certificate=b""),
        2: remote(receiver.mover.endpoint),
    }
    for number, endpoint in refused.items():
        receiver.fetch(number, 21, endpoint)
        assert not (await receiver.ended(number)).is_ok
    assert "--kv-transfer-address" in (await receiver.ended(2)).cause
    # Never served, so that the owner waits for it.
    receiver.fetch(3, 22, remote(here))
    receiver.fetch(4, 21, remote(here))
    assert (await receiver.ended(4)).is_ok
    assert receiver.read() == owner.read()
    assert "not held" in (await receiver.ended(3)).cause


@pytest.mark.asyncio(loop_scope="module")
async def test_nothing_of_an_epoch_reaches_the_next_driver(engines: Engines) -> None:
    owner, receiver = engines
    await engines.begin()
    owner.serve(31)
    with silent_endpoint(owner) as silent:
        receiver.fetch(0, 5, silent)
        receiver.begin()
        await until(lambda: receiver.mover.endpoint)
        receiver.fetch(1, 5, silent)
        # The process closes the channel of a driver that has ended.
        receiver.mover.end_epoch()
        await until(lambda: receiver.channel is None)
        assert not receiver.mover.endpoint
        receiver.begin()
        await until(lambda: receiver.mover.endpoint)
    receiver.fetch(0, 31, owner.mover.endpoint)
    assert (await receiver.ended(0)).is_ok
    assert receiver.read() == owner.read()
    assert [each.fetch for each in receiver.reports if isinstance(each, KvFetched)] == [0]
    owner.serve(32)
    owner.begin()
    await until(lambda: owner.mover.endpoint)
    receiver.fetch(1, 32, owner.mover.endpoint)
    assert not (await receiver.ended(1)).is_ok, "the ticket was of the epoch before"


@pytest.mark.parametrize("num_shared", [0, 1])
async def test_workers_without_a_shared_cache_take_no_part(num_shared: int) -> None:
    workers = KvWorkers(pp=2)
    try:
        workers.begin(num_shared)
        assert workers.channel is None
        assert not workers.mover.endpoint
        assert workers.mover.process_id is None
    finally:
        workers.close()


async def test_caches_that_cannot_be_opened_end_the_channel() -> None:
    workers = KvWorkers(backend="tcp")
    wrong = msgspec.structs.replace(workers.layouts[0], num_blocks=10**6)
    try:
        workers.mover.add_layout(0, wrong)
        memory = os.memfd_create("cache")
        workers.mover.open(workers.epoch, {LOCAL_NODE: [0]}, {0: memory})
        os.close(memory)
        assert workers.channel is not None
        await until(lambda: workers.channel is None)
        assert not workers.mover.endpoint
    finally:
        workers.close()


class RecordingChild:
    """A gllm-link process that runs and only records its commands."""

    is_running = True

    def __init__(self, *_: object) -> None:
        self.commands: list[Any] = []

    def ensure_started(self) -> None:
        """Do nothing, because it runs."""

    def send(self, command: Any, descriptors: Sequence[int] = ()) -> None:
        """Record a command."""
        self.commands.append(command)


def test_an_imitated_link_takes_the_time_of_the_bytes_on_the_device() -> None:
    """Entries of an emulated device may be smaller here, and its clock faster."""
    layout = cut_layouts(1, 1)[0]
    block_bytes = 4 * layout.block_size * layout.bytes_per_token
    child = RecordingChild()

    def create(*_: object) -> Any:
        return child

    mover = EngineKvMover(lambda *_: None, "mock:3", create_child=create, speed=2.0)
    for size, rate in ((None, 6.0), (block_bytes, 1.5)):
        mover.add_layout(0, layout)
        memory = os.memfd_create("cache")
        mover.open(1, {LOCAL_NODE: [0]}, {0: memory}, size)
        os.close(memory)
        command = child.commands.pop()
        assert parse_mock_rate(command.backend) == rate * 1e9
        assert mover.bytes_per_token == layout.bytes_per_token * (4 if size else 1)
        mover.end_epoch()
        child.commands.clear()


def send_many(workers: KvWorkers) -> None:
    """Send more commands than a channel keeps."""
    for ticket in range(1, 10**5):
        workers.send(RevokeKv(ticket))


async def test_a_process_that_does_not_read_is_replaced() -> None:
    workers = KvWorkers()
    try:
        workers.begin()
        await until(lambda: workers.mover.endpoint)
        channel, process_id = workers.channel, workers.mover.process_id
        assert process_id is not None
        await stop_process(process_id)
        with pytest.raises(DescriptorError) as stuck:
            send_many(workers)
        assert isinstance(stuck.value.__cause__, BlockingIOError)
        workers.mover.restart(0)
        await until(lambda: workers.channel not in (channel, None))
        await until(lambda: workers.mover.endpoint)
        assert workers.mover.process_id != process_id
    finally:
        workers.close()


def test_an_engine_without_transfers_starts_no_process() -> None:
    workers = KvWorkers(backend=None)
    workers.begin()
    assert not workers.mover.is_enabled
    assert workers.mover.process_id is None
    workers.close()

"""Two gllm-link processes move KV blocks by the commands of their parents."""

import os
import signal
import subprocess
import sys

import msgspec
import numpy as np

from gllm.messages.codec import decode_from_kv_mover, encode
from gllm.messages.kv_layout import KvLayout
from gllm.messages.kv_transfer import (
    FetchKv,
    KvCommand,
    KvFetched,
    KvFetchStarted,
    KvReport,
    KvRevoked,
    RevokeKv,
    ServeKv,
)
from gllm.transport.descriptors import DescriptorError, create_channels
from gllm.transport.kv.endpoint import KvEndpoint, KvMachine, encode_endpoint
from gllm.transport.kv.pages import KvPages
from gllm.transport.link.commands import (
    CloseKvCaches,
    ConfigureLink,
    KvCachesOpened,
    LinkCommand,
    LinkListening,
    LinkMessage,
    LinkReport,
    OpenKvCaches,
    decode_link_message,
    encode_link_message,
)
from tests.support.engines.kv_layouts import cut_layouts

EPOCH = 3
BLOCKS = [2, 0, 3]


class LinkParent:
    """Parent of a gllm-link process with the cache of one worker."""

    def __init__(self, layout: KvLayout) -> None:
        self._channel, inherited = create_channels()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gllm.transport.link", str(inherited.fileno())],
            pass_fds=[inherited.fileno()],
        )
        inherited.close()
        self.send(ConfigureLink(1, "here", "127.0.0.1:0", has_tls=False))
        listening = self.receive()
        assert isinstance(listening, LinkListening)
        assert not listening.cause
        memory = os.memfd_create("cache")
        os.ftruncate(memory, layout.num_bytes)
        self.pages = KvPages(layout, memory)
        self.driver, mover_end = create_channels()
        self.send(OpenKvCaches(EPOCH, [[layout]], 0, "auto"), memory, mover_end.fileno())
        os.close(memory)
        mover_end.close()
        opened = self.receive()
        assert isinstance(opened, KvCachesOpened)
        assert (opened.epoch, opened.cause) == (EPOCH, "")
        machine = msgspec.msgpack.decode(opened.machine, type=KvMachine)
        assert machine.layouts == [layout]
        self.local = encode_endpoint(KvEndpoint([machine]))
        address = f"127.0.0.1:{listening.port}"
        remote = msgspec.structs.replace(machine, host="elsewhere", address=address)
        self.remote = encode_endpoint(KvEndpoint([remote]))

    def send(self, command: LinkCommand, *descriptors: int) -> None:
        self._channel.send(encode_link_message(command), descriptors)

    def command(self, command: KvCommand) -> None:
        """Send a command as the driver does."""
        self.driver.send(encode(command))

    def report(self) -> KvReport:
        """Wait for a report to the driver."""
        return decode_from_kv_mover(self.driver.receive()[0])

    def report_or_end(self) -> KvReport | None:
        """Wait for a report to the driver; None if the channel has ended."""
        try:
            return self.report()
        except DescriptorError:
            return None

    def receive(self) -> LinkMessage:
        while True:
            message = decode_link_message(self._channel.receive()[0])
            if not isinstance(message, LinkReport):
                return message

    def close(self) -> None:
        self._channel.close()
        self.driver.close()
        self.process.wait(10)


def test_blocks_get_from_one_process_to_the_other() -> None:
    (layout,) = cut_layouts(1, 1)
    owner, receiver = LinkParent(layout), LinkParent(layout)
    # They are for its parent, which may drain.
    owner.process.send_signal(signal.SIGTERM)
    owner.process.send_signal(signal.SIGINT)
    owner.driver.send(b"no command")
    receiver.command(FetchKv(0, 9, owner.local, 0, 10, BLOCKS))
    (refused,) = receive_reports(receiver)
    assert isinstance(refused, KvFetched)
    assert "not held here" in refused.cause
    slots = owner.pages.find_slots(BLOCKS, 0, 10)
    for number, endpoint in ((1, owner.local), (2, owner.remote)):
        for layer in range(4):
            run = owner.pages.read(layer, range(2), slots)
            run[:] = np.arange(len(run)) % 251 + layer + number
            owner.pages.write(layer, range(2), slots, run)
        owner.command(ServeKv(number, 10, BLOCKS))
        receiver.command(FetchKv(number, number, endpoint, 0, 10, BLOCKS))
        started, fetched = receive_reports(receiver)
        assert isinstance(started, KvFetchStarted)
        assert isinstance(fetched, KvFetched)
        assert fetched.is_ok, fetched.cause
        for layer in range(4):
            expected = owner.pages.read(layer, range(2), slots)
            assert (receiver.pages.read(layer, range(2), slots) == expected).all()
        owner.command(RevokeKv(number))
        # A ticket that a reader has used ends by itself too.
        while (report := owner.report()) != KvRevoked(number):
            assert report == KvRevoked(1)
    owner.send(CloseKvCaches())
    while (answer := owner.report_or_end()) is not None:
        assert answer == KvRevoked(2)
    owner.close()
    receiver.close()


def receive_reports(parent: LinkParent) -> list[KvReport]:
    """Return the reports on a fetch, until its end."""
    reports: list[KvReport] = []
    while not reports or not isinstance(reports[-1], KvFetched):
        reports.append(parent.report())
    return reports

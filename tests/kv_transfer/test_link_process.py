"""Two gllm-link processes move KV blocks by the commands of their parents."""

import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from gllm.kv_transfer.endpoint import KvEndpoint, KvMachine, encode_endpoint
from gllm.kv_transfer.layout import KvLayout
from gllm.kv_transfer.pages import KvPages
from gllm.link.commands import (
    CloseKvCaches,
    KvCachesOpened,
    KvMoved,
    LinkCommand,
    LinkIdentity,
    LinkListening,
    LinkMessage,
    LinkReport,
    MoveKv,
    OpenKvCaches,
    decode_link_message,
    encode_link_message,
)
from gllm.messages.kv_transfer import (
    FetchKv,
    KvFetched,
    KvFetchStarted,
    KvRevoked,
    RevokeKv,
    ServeKv,
)
from gllm.transport.descriptors import create_channels
from tests.kv_transfer.layouts import cut_layouts

GENERATION = 3
BLOCKS = [2, 0, 3]


class LinkParent:
    """Parent of a gllm-link process with the cache of one worker."""

    def __init__(self, layout: KvLayout) -> None:
        self._channel, inherited = create_channels()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gllm.link", str(inherited.fileno())],
            pass_fds=[inherited.fileno()],
        )
        inherited.close()
        self.send(LinkIdentity(1, "here", "127.0.0.1:0", has_tls=False))
        listening = self.receive()
        assert isinstance(listening, LinkListening)
        assert not listening.cause
        memory = os.memfd_create("cache")
        os.ftruncate(memory, layout.num_bytes)
        self.pages = KvPages(layout, memory)
        self.send(OpenKvCaches(GENERATION, [layout], "auto"), memory)
        os.close(memory)
        opened = self.receive()
        assert isinstance(opened, KvCachesOpened)
        assert (opened.generation, opened.cause) == (GENERATION, "")
        machine = msgspec.msgpack.decode(opened.machine, type=KvMachine)
        assert machine.layouts == [layout]
        self.local = encode_endpoint(KvEndpoint([machine]))
        address = f"127.0.0.1:{listening.port}"
        remote = msgspec.structs.replace(machine, host="elsewhere", address=address)
        self.remote = encode_endpoint(KvEndpoint([remote]))

    def send(self, command: LinkCommand, *descriptors: int) -> None:
        self._channel.send(encode_link_message(command), descriptors)

    def receive(self) -> LinkMessage:
        while True:
            message = decode_link_message(self._channel.receive()[0])
            if not isinstance(message, LinkReport):
                return message

    def close(self) -> None:
        self._channel.close()
        self.process.wait(10)


@pytest.mark.parametrize("is_remote", [False, True])
def test_blocks_get_from_one_process_to_the_other(is_remote: bool) -> None:
    (layout,) = cut_layouts(1, 1)
    owner, receiver = LinkParent(layout), LinkParent(layout)
    slots = owner.pages.find_slots(BLOCKS, 0, 10)
    for layer in range(4):
        run = owner.pages.read(layer, range(2), slots)
        run[:] = np.arange(len(run)) % 251 + layer
        owner.pages.write(layer, range(2), slots, run)
    owner.send(MoveKv(GENERATION - 1, ServeKv(9, 10, BLOCKS)))
    owner.send(MoveKv(GENERATION, ServeKv(8, 10, BLOCKS)))
    endpoint = owner.remote if is_remote else owner.local
    reports = []
    for number, ticket in enumerate((9, 8)):
        command = FetchKv(number, ticket, endpoint, 0, 10, BLOCKS)
        receiver.send(MoveKv(GENERATION, command))
        while True:
            message = receiver.receive()
            assert isinstance(message, KvMoved)
            reports.append(message.report)
            if isinstance(message.report, KvFetched):
                break
    kinds = [type(report) for report in reports]
    assert kinds == [KvFetched, KvFetchStarted, KvFetched]
    refused, fetched = reports[0], reports[2]
    assert isinstance(refused, KvFetched)
    assert isinstance(fetched, KvFetched)
    # The ticket of another generation is not known.
    assert "not held here" in refused.cause
    assert fetched.is_ok, fetched.cause
    for layer in range(4):
        expected = owner.pages.read(layer, range(2), slots)
        assert expected.any()
        assert (receiver.pages.read(layer, range(2), slots) == expected).all()
    owner.send(MoveKv(GENERATION, RevokeKv(8)))
    assert owner.receive() == KvMoved(GENERATION, KvRevoked(8))
    owner.send(CloseKvCaches())
    owner.close()
    receiver.close()

"""Connections and frames that do not belong to an edge: refused, named, counted, and cheap."""

import os
import socket
import threading
import time
from contextlib import suppress

import pytest

from gllm.runtime.messaging.security import create_certificate
from gllm.transport.link.commands import (
    ConfigureLink,
    LinkEdgeLost,
    LinkPeer,
    LinkReport,
    OpenLinkEdge,
)
from gllm.transport.link.connection import HANDSHAKE_SECONDS, FrameConnection, receive_answer
from gllm.transport.link.frames import (
    FRAME,
    EdgeAnswer,
    EdgeHello,
    EdgeName,
    EdgeResume,
    FrameClass,
    FrameHeader,
    RingLayout,
    decode_payload,
    encode_payload,
    unpack_frame,
)
from gllm.transport.ring import PAGE_BYTES, SLOT_HEADER
from tests.support.network.mover_processes import (
    LAYOUT,
    RUN,
    Files,
    Mover,
    connect,
    read_step,
    write_step,
)
from tests.support.network.records import replaced

NAME = EdgeName(RUN, 1, 3)
HELLO_BYTES = NAME.header(FrameClass.HELLO, b"")[:4]
"""Magic, version and class of a first frame."""
MIB = 2**20
LONG = pytest.mark.long


def open_receiver(mover: Mover) -> Files:
    """Let a data mover receive edge NAME from a node `head` without a certificate."""
    files = Files()
    command = OpenLinkEdge(1, 3, False, False, LinkPeer("head", "", b""))
    mover.open(command, files)
    return files


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = connection.recv(size - len(data))
        if not received:
            raise ConnectionError
        data += received
    return data


def receive_frame(connection: socket.socket) -> tuple[FrameHeader, bytes]:
    header = unpack_frame(receive(connection, FRAME.size))
    return header, receive(connection, header.length)


def say_hello(
    mover: Mover, name: EdgeName = NAME, hello: EdgeHello | None = None
) -> tuple[socket.socket, EdgeAnswer]:
    """Connect as the sending end of an edge; return the connection and the answer."""
    connection = socket.create_connection(("127.0.0.1", mover.port))
    connection.settimeout(60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    payload = encode_payload(hello or EdgeHello("head", mover.node, True))
    connection.sendall(name.header(FrameClass.HELLO, payload))
    header, answer = receive_frame(connection)
    assert header.frame_class == FrameClass.ANSWER
    return connection, decode_payload(answer, EdgeAnswer)


def open_edge(mover: Mover) -> socket.socket:
    """Connect as the sending end until the edge is open and its layout is known."""
    end = time.monotonic() + 60
    while True:
        with suppress(ConnectionError):
            connection, answer = say_hello(mover)
            if not answer.cause:
                break
            connection.close()
        assert time.monotonic() < end
    assert receive_frame(connection)[0].frame_class == FrameClass.RESUME
    # RESUME of a sending end: no steps.
    connection.sendall(NAME.header(FrameClass.RESUME, b"\x92\x90\x00"))
    layout = encode_payload(RingLayout(LAYOUT.slots, LAYOUT.hidden_size, LAYOUT.itemsize))
    connection.sendall(NAME.header(FrameClass.LAYOUT, layout))
    return connection


OTHER_EDGES = [
    (replaced(NAME, run=5), None, "its run is 5, here is run 77"),
    (replaced(NAME, epoch=0), None, "edge 3 of epoch 0 is not open here"),
    (replaced(NAME, epoch=2), None, "edge 3 of epoch 2 is not open here"),
    (replaced(NAME, edge=4), None, "edge 4 of epoch 1 is not open here"),
    (NAME, EdgeHello("stranger", "other", True), "stranger expects other, but this is other"),
    (NAME, EdgeHello("head", "third", True), "head expects third, but this is other"),
    (NAME, EdgeHello("head", "other", False), "both ends have the same part"),
]


def test_a_connection_for_another_edge_is_refused_with_the_cause(plain_mover: Mover) -> None:
    open_receiver(plain_mover).ring()
    open_edge(plain_mover).close()
    for name, hello, cause in OTHER_EDGES:
        connection, answer = say_hello(plain_mover, name, hello)
        with connection:
            assert answer.cause.startswith(cause)
            assert connection.recv(1) == b""
    # Edges that are not open yet are no refusals.
    num_refused = len(OTHER_EDGES) - 2
    plain_mover.wait_for(LinkReport, lambda report: report.refused == {"127.0.0.1": num_refused})


@pytest.fixture
def plain_mover():
    with Mover("other", has_tls=False) as mover:
        yield mover


def refused_frames() -> list[bytes]:
    """Frames on an open edge that are refused; in all of them the first fault counts."""
    size = 96 * 4
    head = SLOT_HEADER.pack(0, 1, 96, 4, 0, size)

    def frame(payload: bytes = head, **fields: int) -> bytes:
        values = {"lane": 0, "slot": 0, "step": 0, "offset": 0, "length": len(payload), **fields}
        names = ("run", "epoch", "edge")
        name = replaced(NAME, **{key: values.pop(key) for key in names if key in values})
        return FrameHeader(FrameClass.ACTIVATIONS, *name, **values).pack() + payload

    return [
        frame(run=RUN + 1),
        frame(epoch=2),
        frame(edge=2),
        frame(lane=1),
        frame(slot=4, step=4),
        frame(slot=1),
        frame(step=2**63),
        frame(offset=2**32 - 1),
        frame(length=2**32 - 1),
        frame(offset=PAGE_BYTES),
        frame(offset=8),
        frame(b"", length=0),
        frame(head[:-1]),
        frame(head + b"x"),
        frame(SLOT_HEADER.pack(4, 1, 96, 4, 0, size)),
        frame(SLOT_HEADER.pack(0, 65, 96, 4, 0, 65 * size)),
        frame(SLOT_HEADER.pack(0, 1, 97, 4, 0, 97 * 4)),
        frame(SLOT_HEADER.pack(0, 1, 96, 4, 0, size - 1)),
        frame(SLOT_HEADER.pack(0, 0, 96, 4, PAGE_BYTES, 0)),
        frame() + frame(b"x" * 8, offset=PAGE_BYTES + 8),
        frame() + frame(b"x" * (size + 1), offset=PAGE_BYTES),
        frame() + frame(),
        frame() + frame(step=4),
        NAME.header(FrameClass.HELLO, b""),
        NAME.header(FrameClass.LAYOUT, b"\xc1"),
        NAME.header(FrameClass.RENDEZVOUS, b"abc", offset=1),
        NAME.header(FrameClass.RESUME, b"\x92\x90\x00"),
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
        bytes(FRAME.size),
    ]


def test_each_invalid_frame_ends_its_connection_and_writes_nothing(plain_mover: Mover) -> None:
    files = open_receiver(plain_mover)
    ring = files.ring()
    frames = refused_frames()
    for data in frames:
        connection = open_edge(plain_mover)
        connection.sendall(data)
        with suppress(ConnectionError):
            assert connection.recv(1) == b""
        connection.close()
        assert ring.signalled_steps == [None] * 4, data
    report = plain_mover.wait_for(LinkReport, lambda report: report.num_malformed >= len(frames))
    assert report.num_malformed == len(frames)
    # Activations are written only where a header that fits came first.
    for step in range(4):
        begin = ring.payload(step)
        assert not any(ring.memory[begin : begin + ring.stride - PAGE_BYTES])
    assert os.fstat(files.peer_log).st_size == 0


def send_malformed(port: int, count: int, source: str) -> None:
    order = os.urandom
    for number in range(count):
        with socket.socket() as connection:
            connection.bind((source, 0))
            connection.connect(("127.0.0.1", port))
            data = bytearray(order(FRAME.size))
            if number % 3:
                data[:4] = HELLO_BYTES
            with suppress(ConnectionError):
                connection.sendall(data + bytes(number % 64))
                connection.recv(1)


@pytest.mark.parametrize("count", [400, pytest.param(100_000, marks=LONG)])
def test_malformed_first_frames_are_all_counted(plain_mover: Mover, count: int) -> None:
    files, sources = open_receiver(plain_mover), [f"127.0.0.{number}" for number in range(2, 6)]
    share = count // len(sources)
    threads = [
        threading.Thread(target=send_malformed, args=(plain_mover.port, share, source))
        for source in sources
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = plain_mover.wait_for(LinkReport, lambda report: report.num_malformed >= count)
    assert report.num_malformed == count
    assert report.refused == dict.fromkeys(sources, share)
    assert set(report.refusal_causes) == set(sources)
    # Members go on.
    open_edge(plain_mover).close()
    assert files.ring().signalled_steps == [None] * 4


@pytest.mark.parametrize(
    ("has_tls", "begin"),
    [
        (True, b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb\x03\x03"),
        pytest.param(False, HELLO_BYTES, marks=pytest.mark.full),
        pytest.param(True, b"", marks=LONG),
        pytest.param(False, b"", marks=LONG),
    ],
)
def test_a_stranger_who_sends_before_the_handshake_costs_little(
    has_tls: bool, begin: bytes
) -> None:
    with Mover("other", has_tls) as mover, Mover("head", has_tls) as peer:
        connect(peer, mover)
        before = mover.rss_bytes()
        block, sent, opened = bytes(MIB), 0, []
        while sent < 100 * MIB:
            connection = socket.create_connection(("127.0.0.1", mover.port))
            connection.settimeout(0.2)
            opened.append(connection)
            with suppress(OSError):
                connection.sendall(begin)
                for _ in range(10):
                    sent += connection.send(block)
            sent += MIB
        assert mover.rss_bytes() - before <= 8 * MIB
        for connection in opened:
            connection.close()


@pytest.mark.full
def test_many_silent_strangers_are_closed_and_members_get_through() -> None:
    with Mover("other") as mover, Mover("head") as peer:
        files = connect(peer, mover, edge=0)
        before = mover.rss_bytes()
        strangers = [socket.create_connection(("127.0.0.1", mover.port)) for _ in range(200)]
        more = connect(peer, mover, edge=1)
        report = mover.wait_for(LinkReport, lambda report: sum(report.refused.values()) >= 100)
        assert "more than 64 connections" in report.refusal_causes["127.0.0.1"]
        assert mover.rss_bytes() - before <= 8 * MIB
        for pair in (files, more):
            write_step(pair[0].ring(), 0, 1, 9)
            read_step(pair[1].ring(), 0, 1)
        for stranger in strangers:
            stranger.close()


def test_silent_strangers_push_out_nobody_of_another_address(plain_mover: Mover) -> None:
    open_receiver(plain_mover)
    open_edge(plain_mover).close()
    with socket.create_connection(("127.0.0.1", plain_mover.port)) as member:
        strangers = [
            socket.create_connection(
                ("127.0.0.1", plain_mover.port), source_address=("127.0.0.9", 0)
            )
            for _ in range(100)
        ]
        plain_mover.wait_for(LinkReport, lambda report: report.refused.get("127.0.0.9", 0) >= 30)
        payload = encode_payload(EdgeHello("head", "other", True))
        member.sendall(NAME.header(FrameClass.HELLO, payload))
        assert receive_frame(member)[0].frame_class == FrameClass.ANSWER
        for stranger in strangers:
            stranger.close()


@pytest.mark.full
def test_a_member_with_an_invalid_certificate_keeps_nobody_out() -> None:
    with Mover("head") as source, Mover("other") as target:
        broken = LinkPeer("broken", "", b"no certificate")
        target.open(OpenLinkEdge(1, 2, False, False, broken), Files())
        connect(source, target)


def serve_answers(listening: socket.socket, resume: bytes, count: list[int]) -> None:
    """Accept each connection, as a member that is wrong, and send a frame in place of RESUME."""
    with suppress(OSError):
        while True:
            with listening.accept()[0] as connection:
                header, _ = receive_frame(connection)
                count[0] += 1
                name = EdgeName(header.run, header.epoch, header.edge)
                answer = name.header(FrameClass.ANSWER, encode_payload(EdgeAnswer()))
                connection.sendall(answer + name.header(FrameClass.RESUME, resume))
                with suppress(ConnectionError):
                    while connection.recv(4096):
                        pass


@pytest.mark.parametrize(
    "resume",
    [
        pytest.param(b"\xc1", marks=pytest.mark.full, id="no message"),
        pytest.param(encode_payload(EdgeResume([], -1)), id="no step"),
    ],
)
def test_a_member_whose_first_frames_are_invalid_is_dialed_with_pauses(resume: bytes) -> None:
    count = [0]
    with (
        Mover("head", has_tls=False, listen="", node_timeout=0.25) as mover,
        socket.create_server(("127.0.0.1", 0)) as listening,
    ):
        arguments = listening, resume, count
        threading.Thread(target=serve_answers, args=arguments, daemon=True).start()
        peer = LinkPeer("other", f"127.0.0.1:{listening.getsockname()[1]}", b"")
        mover.open(OpenLinkEdge(1, 3, True, True, peer), Files())
        expect_loss(mover, "no connection for")
        # Without pauses there are hundreds of connections.
        assert 2 <= count[0] <= 20
        listening.shutdown(socket.SHUT_RDWR)


def test_the_rest_of_a_first_frame_is_not_awaited_forever() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as own,
        listening.accept()[0] as other,
    ):
        other.sendall(NAME.header(FrameClass.ANSWER, b"answer")[:-1])
        connection = FrameConnection(own)
        assert connection.payload_timeout == HANDSHAKE_SECONDS
        connection.payload_timeout = 0.05
        with pytest.raises(TimeoutError):
            receive_answer(connection)


def expect_loss(mover: Mover, text: str) -> None:
    lost = mover.wait_for(LinkEdgeLost)
    assert text in lost.cause


@pytest.mark.parametrize("wrong", ["source", pytest.param("target", marks=LONG)])
def test_a_machine_with_another_certificate_is_refused_on_both_sides(wrong: str) -> None:
    with (
        Mover("head", node_timeout=0.2) as source,
        Mover("other", node_timeout=0.2) as target,
        Mover("third") as third,
    ):
        other = create_certificate()
        # The end that is wrong is not the one that its peer was told.
        known_source = LinkPeer("head", "", other.certificate if wrong == "source" else source.der)
        der = other.certificate if wrong == "target" else target.der
        known_target = LinkPeer("other", f"127.0.0.1:{target.port}", der)
        target.open(OpenLinkEdge(1, 3, False, False, known_source), Files())
        source.open(OpenLinkEdge(1, 3, True, True, known_target), Files())
        expect_loss(source, "the certificate is not that of an expected machine")
        expect_loss(target, "no connection for")
        if wrong == "source":
            report = target.wait_for(LinkReport, lambda report: bool(report.refused))
            assert "certificate" in report.refusal_causes["127.0.0.1"]
        # A member's certificate does not open the edge of another member.
        connect(third, target, edge=7)
        stolen = LinkPeer("other", f"127.0.0.1:{target.port}", target.der)
        third.open(OpenLinkEdge(1, 3, True, True, stolen), Files())
        text = "the certificate is not that of head"
        third.wait_for(LinkReport, lambda report: any(text in link.cause for link in report.links))


@pytest.mark.long
@pytest.mark.parametrize(
    ("knows_certificate", "cause"),
    [
        (False, "the connection does not use TLS"),
        (True, "TLS failed: PEER_DID_NOT_RETURN_A_CERTIFICATE"),
    ],
)
def test_a_machine_without_tls_is_refused_where_tls_is_used(
    knows_certificate: bool, cause: str
) -> None:
    with Mover("head", has_tls=False, node_timeout=0.25) as source, Mover("other") as target:
        target.open(OpenLinkEdge(1, 3, False, False, source.peer()), Files())
        peer = LinkPeer("other", target.peer().address, target.der if knows_certificate else b"")
        source.open(OpenLinkEdge(1, 3, True, True, peer), Files())
        expect_loss(source, "no connection for")
        # On a busy machine a connection may end before it is read; more follow.
        target.wait_for(LinkReport, lambda report: cause in report.refusal_causes.values())


def test_another_run_closes_the_edges_and_keeps_the_port() -> None:
    with Mover("head") as source, Mover("other") as target:
        connect(source, target)
        for mover in (source, target):
            mover.wait_for(LinkReport, lambda report: len(report.links) == 1)
        for mover in (source, target):
            mover.send(ConfigureLink(RUN + 1, mover.node, mover.listen, False))
            mover.wait_for(LinkReport, lambda report: report.links == [])
        files = connect(source, target)
        write_step(files[0].ring(), 0, 3, 1)
        read_step(files[1].ring(), 0, 3)


@pytest.mark.long
def test_a_port_in_use_is_reported() -> None:
    with Mover("head", has_tls=False) as first, pytest.raises(OSError, match="in use"):
        Mover("other", has_tls=False, listen=f"127.0.0.1:{first.port}")

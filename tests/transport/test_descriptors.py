"""Messages with descriptors: what arrives, and that no descriptor is left anywhere."""

import os
import resource
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.transport.descriptors import (
    MAX_DESCRIPTORS,
    MAX_PART_BYTES,
    DescriptorChannel,
    DescriptorError,
    create_channels,
)
from gllm.transport.edge import Edge, create_edge
from gllm.transport.region import Region, create_region

Ends = tuple[DescriptorChannel, DescriptorChannel]


def num_open() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = create_channels()
    yield made
    for end in made:
        end.close()


def test_the_receiver_has_the_same_file(ends: Ends) -> None:
    file = os.memfd_create("test-file")
    ends[0].send(b"a file", [file])
    os.write(file, b"written later")
    os.close(file)
    payload, (received,) = ends[1].receive()
    assert payload == b"a file"
    assert os.pread(received, 99, 0) == b"written later"
    assert not os.get_inheritable(received)
    os.close(received)


@given(st.lists(st.tuples(st.integers(0, 3 * MAX_PART_BYTES), st.integers(0, 5)), max_size=5))
def test_messages_arrive_in_order_as_they_were_sent(
    messages: list[tuple[int, int]],
) -> None:
    before = num_open()
    ends = create_channels()
    for number, (size, count) in enumerate(messages):
        events = [os.eventfd(10 * number + each) for each in range(count)]
        payload = os.urandom(size)
        ends[number % 2].send(payload, events)
        for event in events:
            os.close(event)
        received, descriptors = ends[1 - number % 2].receive()
        assert received == payload
        for each, descriptor in enumerate(descriptors):
            assert 10 * number + each == 0 or os.eventfd_read(descriptor) == 10 * number + each
            os.close(descriptor)
        assert len(descriptors) == count
    for end in ends:
        end.close()
    assert num_open() == before


def test_many_messages_leave_no_descriptor(ends: Ends) -> None:
    """Far more than a process may have open."""
    before = num_open()
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for _ in range(min(limit, 2000)):
        file = os.memfd_create("test-file")
        ends[0].send(b"", [file, file])
        os.close(file)
        payload, descriptors = ends[1].receive()
        assert payload == b""
        for descriptor in descriptors:
            os.close(descriptor)
    assert num_open() == before


def test_a_closed_end_is_noticed_by_both(ends: Ends) -> None:
    ends[0].close()
    readable, _, _ = select.select([ends[1]], [], [], 0)
    assert readable == [ends[1]]
    with pytest.raises(DescriptorError, match="closed"):
        ends[1].receive()
    with pytest.raises(DescriptorError, match="Broken pipe"):
        ends[1].send(b"")


def test_a_reader_that_stands_still_does_not_stop_the_sender(ends: Ends) -> None:
    def fill() -> None:
        for _ in range(100_000):
            ends[0].send(b"x" * 1000)

    with pytest.raises(DescriptorError, match="unavailable"):
        fill()


def test_too_many_descriptors_are_refused(ends: Ends) -> None:
    ends[0].send(b"", [0] * MAX_DESCRIPTORS)
    _, descriptors = ends[1].receive()
    assert len(descriptors) == MAX_DESCRIPTORS
    for descriptor in descriptors:
        os.close(descriptor)
    with pytest.raises(DescriptorError, match="too many"):
        ends[0].send(b"", [0] * (MAX_DESCRIPTORS + 1))


CHILD = """
import os, sys
from gllm.transport.descriptors import DescriptorChannel
channel = DescriptorChannel.from_descriptor(int(sys.argv[1]))
payload, (descriptor,) = channel.receive()
assert not os.get_inheritable(channel.fileno())
channel.send(payload[::-1] + os.read(descriptor, 99), [])
"""


def test_a_process_has_inherited_its_end_and_nothing_else(ends: Ends) -> None:
    reader, writer = os.pipe()
    descriptor = ends[1].fileno()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(descriptor)], pass_fds=[descriptor]
    )
    ends[1].close()
    os.write(writer, b"hello")
    ends[0].send(b"abc", [reader])
    assert ends[0].receive() == (b"cbahello", [])
    assert process.wait(60) == 0
    for each in (reader, writer):
        os.close(each)


@contextmanager
def few_descriptors(count: int) -> Iterator[None]:
    """Let this process open so many further descriptors."""
    opened = [os.dup(0) for _ in range(count + 1)]
    for descriptor in opened:
        os.close(descriptor)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[-1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(("create", "num_descriptors"), [(create_edge, 3), (create_region, 2)])
def test_files_that_lack_a_descriptor_leave_none_open(
    create: Callable[[str], Edge | Region], num_descriptors: int
) -> None:
    before = os.listdir("/proc/self/fd")
    for count in range(num_descriptors):
        with few_descriptors(count), pytest.raises(OSError, match="Too many open files"):
            create("edge")
    assert os.listdir("/proc/self/fd") == before
    create("edge").close()
    assert os.listdir("/proc/self/fd") == before

"""Counters of computed layers, and frames that announce parts."""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.transport.kv.frames import KvConnection, KvFrameError, KvFrameKind
from gllm.transport.kv.part_gate import OwnerGate, ReceiverGate
from gllm.transport.kv.progress import LayerProgress, open_progress
from tests.support.engines.kv_layouts import cut_layouts

(LAYOUT,) = cut_layouts(1, 1)
NUM_TOKENS = 20
POSITIONS = st.tuples(st.integers(1, 2**47 - 1), st.integers(0, 2**16 - 1))


@given(recorded=POSITIONS, asked=POSITIONS, lane=st.integers(0, 1))
def test_counter_of_a_lane_orders_by_step_and_layer(
    recorded: tuple[int, int], asked: tuple[int, int], lane: int
) -> None:
    descriptor = os.memfd_create("cache")
    writer = LayerProgress(descriptor, LAYOUT, is_writable=True)
    reader = LayerProgress(descriptor, LAYOUT)
    os.close(descriptor)
    assert not reader.has_computed(lane, *asked)
    writer.record(lane, *recorded)
    assert reader.has_computed(lane, *recorded)
    assert reader.has_computed(lane, *asked) == (asked <= recorded)
    assert not reader.has_computed(1 - lane, *asked)


def test_counter_is_behind_the_cache() -> None:
    descriptor = os.memfd_create("cache")
    os.ftruncate(descriptor, LAYOUT.num_bytes)
    assert open_progress(descriptor, LAYOUT) is None
    LayerProgress(descriptor, LAYOUT, is_writable=True).record(1, 1, 2)
    assert os.pread(descriptor, LAYOUT.num_bytes, 0) == bytes(LAYOUT.num_bytes)
    reader = open_progress(descriptor, LAYOUT)
    assert reader is not None
    assert reader.has_computed(1, 1, 2)
    os.close(descriptor)


@contextmanager
def make_gate(num_parts: int) -> Iterator[tuple[KvConnection, ReceiverGate]]:
    """Yield the owner's connection and the receiver's gate."""
    own, other = socket.socketpair()
    with own, other:
        gate = ReceiverGate(KvConnection(own), NUM_TOKENS, num_parts, lambda: None)
        yield KvConnection(other), gate


@pytest.mark.parametrize(
    ("announcements", "error"),
    [
        ([(20, 5)], "5 of 4 parts are ready"),
        ([(20, 2), (20, 1)], "1 of 4 parts are ready"),
        ([(20, 2**32 - 1)], "of 4 parts are ready"),
        ([(0, 1)], "1 of 4 parts are ready"),
        ([(21, 0)], "21 of 20 tokens are announced"),
        ([(10, 0), (20, 0)], "20 of 20 tokens are announced"),
        ([(10, 0), (0, 0)], "0 of 20 tokens are announced"),
    ],
)
def test_impossible_announcements_are_refused(
    announcements: list[tuple[int, int]], error: str
) -> None:
    with make_gate(4) as (owner, gate):
        for announcement in announcements:
            owner.send(KvFrameKind.READY, struct.pack("!II", *announcement))
        with pytest.raises(KvFrameError, match=error):
            gate.wait_for_part(3)


def test_announcement_of_another_size_is_refused() -> None:
    with make_gate(4) as (owner, gate):
        owner.send(KvFrameKind.READY, b"\0")
        with pytest.raises(KvFrameError, match="READY has 1 bytes"):
            gate.wait_for_part(0)


@given(batches=st.lists(st.integers(1, 3), min_size=1, max_size=8))
def test_gates_agree_on_what_is_ready(batches: list[int]) -> None:
    """Parts that are computed together are announced together; both sides count the same."""
    num_parts, num_computed, pending = sum(batches), 0, list(batches)

    def compute(seconds: float) -> None:
        nonlocal num_computed
        num_computed += pending.pop()

    with make_gate(num_parts) as (owner, receiver):
        gate = OwnerGate(lambda: True, owner, lambda: 0.0, compute)
        gate.announce(12)
        assert receiver.wait_for_tokens() == 12
        gate.watch(num_parts, lambda index: index < num_computed)
        for index in range(num_parts):
            gate.wait_for_part(index)
            receiver.wait_for_part(index)
            assert index < num_computed
            assert gate.num_ready == receiver.num_ready == num_computed

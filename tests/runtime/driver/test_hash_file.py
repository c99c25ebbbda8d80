"""The file with the hashes of the KV blocks, which outlives the driver."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.runtime.driver.hash_file import HashFile

NUM_BLOCKS = 12
OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, NUM_BLOCKS - 1),
        st.none() | st.binary(min_size=16, max_size=16),
        st.booleans(),
    )
)


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("test-hashes")
    yield descriptor
    os.close(descriptor)


@given(lives=st.lists(OPERATIONS, min_size=1, max_size=3))
@settings(max_examples=50, deadline=None)
def test_a_driver_finds_what_the_one_before_had_published(
    lives: list[list[tuple[int, bytes | None, bool]]],
) -> None:
    """At any moment, because the file is not closed; and nothing of the driver before that one."""
    descriptor = os.memfd_create("test-hashes")
    try:
        full: dict[int, bytes] = {}
        tails: dict[int, bytes] = {}
        for operations in [*lives, []]:
            file = HashFile(descriptor, NUM_BLOCKS)
            assert (file.earlier, file.earlier_tails) == (full, tails)
            full, tails = {}, {}
            for block, digest, is_tail in operations:
                if digest is None and block in tails:
                    file.on_tail_removed(block)
                elif digest is None:
                    file.on_removed(block, full.get(block, b""))
                elif not any(digest) or digest in {*full.values(), *tails.values()}:
                    continue
                elif is_tail:
                    file.on_tail(block, digest)
                else:
                    file.on_added(block, digest)
                for kind in (full, tails):
                    kind.pop(block, None)
                if digest is not None:
                    (tails if is_tail else full)[block] = digest
    finally:
        os.close(descriptor)


def test_a_hash_is_found_once(descriptor: int) -> None:
    """Two blocks cannot have one hash: a driver that wrote that was no longer sane."""
    file = HashFile(descriptor, NUM_BLOCKS)
    file.on_added(3, b"a" * 16)
    file.on_added(5, b"a" * 16)
    file.close()
    assert HashFile(descriptor, NUM_BLOCKS).earlier == {3: b"a" * 16}


def test_a_reset_removes_all(descriptor: int) -> None:
    file = HashFile(descriptor, NUM_BLOCKS)
    file.on_added(3, b"a" * 16)
    file.on_cleared()
    assert HashFile(descriptor, NUM_BLOCKS).earlier == {}


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS - 1, NUM_BLOCKS + 1, 1])
def test_another_number_of_blocks_begins_empty(descriptor: int, num_blocks: int) -> None:
    HashFile(descriptor, NUM_BLOCKS).on_added(0, b"a" * 16)
    file = HashFile(descriptor, num_blocks)
    assert file.earlier == {}
    file.on_added(0, b"b" * 16)
    assert HashFile(descriptor, num_blocks).earlier == {0: b"b" * 16}


@pytest.mark.parametrize("content", [b"", b"x", bytes(8), b"\xff" * 4000])
def test_any_file_can_be_given(descriptor: int, content: bytes) -> None:
    os.write(descriptor, content)
    assert HashFile(descriptor, NUM_BLOCKS).earlier == {}

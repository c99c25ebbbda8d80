"""Tests of large pages for weights."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gllm.models import large_pages
from gllm.models.large_pages import find_large_pages, use_large_pages
from gllm.models.ranks import Ranks
from gllm.models.weight_cache.part_codec import MemorySpan

PAGE = 4096


@dataclass
class Part:
    """Module with weights, as the classes of gllm.models have them."""

    weights: Tensor


Part.__module__ = "gllm.models.part"


@given(
    st.lists(st.tuples(st.integers(0, 40 * PAGE), st.integers(1, 5 * PAGE)), max_size=8),
)
def test_pages_are_those_that_weights_take_half_of(ranges: list[tuple[int, int]]) -> None:
    """A page is chosen if the spans in it have at least half of its bytes."""
    taken = torch.zeros(64 * PAGE, dtype=torch.int32)
    for begin, size in ranges:
        taken[begin : begin + size] += 1
    expected = taken.view(64, PAGE).sum(dim=1) >= PAGE / 2
    spans = [MemorySpan(begin, size, 0) for begin, size in ranges]
    assert find_large_pages(spans, PAGE) == expected.nonzero().flatten().tolist()


def _large_bytes(begin: int, end: int) -> int:
    """Return the bytes in large pages of all mappings with some of these addresses."""
    num_bytes, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name:
            first, last = (int(bound, 16) for bound in name.split("-"))
            is_inside = first < end and begin < last
        elif is_inside and name == "AnonHugePages:":
            num_bytes += int(values[0]) * 1024
    return num_bytes


def test_pages_that_are_not_mapped_are_left_out() -> None:
    """Weights may be freed before a thread has moved them."""
    assert large_pages.move_pages([]) == 0
    assert large_pages.move_pages([1, 2**35]) == 0


def test_weights_are_moved_in_place() -> None:
    """The weights keep their addresses and values and are in large pages afterwards."""
    weights = torch.arange(8 << 20, dtype=torch.int32)
    address = weights.data_ptr()
    moved = use_large_pages([Part(weights)], Ranks(0, 1))
    if not moved:
        pytest.skip("this system has no large pages, or none that are free")
    assert moved >= 8 << 20
    # Where others have divided the mapping, the page on the border stays as it is.
    assert _large_bytes(address, address + weights.nbytes) >= moved / 2
    assert weights.data_ptr() == address
    assert torch.equal(weights, torch.arange(8 << 20, dtype=torch.int32))


def test_parts_that_have_other_objects_stay() -> None:
    """A part that cannot be encoded stays where it is."""
    assert use_large_pages([object()], Ranks(0, 1)) == 0


@pytest.mark.parametrize("setting", ["always madvise [never]\n", None])
def test_system_without_large_pages(
    setting: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that has no large pages, or whose administrator permits none, is left alone."""
    if setting is not None:
        (tmp_path / "enabled").write_text(setting)
        (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(large_pages, "SETTINGS", tmp_path)
    assert use_large_pages([Part(torch.zeros(4 << 20))], Ranks(0, 1)) == 0

"""Sums over ranks in shared memory: the same bits from torch and from every kernel build."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from gllm.kernels.all_reduce import GroupClosedError, RankGroup
from gllm.kernels.attention_plan import AttentionPlan, PagedBatch
from gllm.kernels.linear import linear, prepare
from gllm.kernels.native.library import DTYPES, current_library
from gllm.kernels.native.program import RecordedProgram, record_kernels
from gllm.kernels.threads import set_num_threads
from gllm.transport.groups import open_groups
from gllm.transport.region import RegionLayout, create_region
from tests.support.models.kernel_builds import covers_builds
from tests.support.models.thread_group import run_ranks

LAYOUT = RegionLayout(max_tokens=300, hidden_size=900, vocab_rows=50)
SHAPES = [(1, 1), (1, 896), (3, 7), (5, 130), (130, 900)]


def open_ranks(size: int, layout: RegionLayout = LAYOUT) -> list[RankGroup]:
    """Return the ends of a new region's first group, by rank."""
    region = create_region("test-sums")
    groups = [open_groups(region, rank, size, layout).layers for rank in range(size)]
    region.close()
    return groups


@contextmanager
def opened(size: int) -> Iterator[list[RankGroup]]:
    groups = open_ranks(size)
    yield groups
    for group in groups:
        group.close()


@pytest.fixture(params=[2, 4])
def groups(way: str, request: pytest.FixtureRequest) -> Iterator[list[RankGroup]]:
    with opened(request.param) as groups:
        yield groups


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def expected_sum(parts: list[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    total = parts[0].to(torch.float32)
    for part in parts[1:]:
        total = total + part.to(torch.float32)
    return (total if bias is None else total + bias.to(torch.float32)).to(dtype)


@covers_builds(
    size=[2, 4],
    dtype=[*DTYPES, torch.float64],
    bias_dtype=[None, "same", torch.float32],
    is_float=[True, False],
)
def test_sums_in_the_order_of_the_ranks(
    way: str,
    size: int,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | str | None,
    is_float: bool,
) -> None:
    """Sums of parts in the group's memory and elsewhere are rounded once, after the bias."""
    with opened(size) as groups:
        for shape in SHAPES:
            check_sums(groups, shape, dtype, bias_dtype, is_float)


def check_sums(
    groups: list[RankGroup],
    shape: tuple[int, int],
    dtype: torch.dtype,
    bias_dtype: torch.dtype | str | None,
    is_float: bool,
) -> None:
    parts = list(random(len(groups), *shape).to(torch.float32 if is_float else dtype))
    bias = None
    if bias_dtype is not None:
        bias = random(shape[1]).to(dtype if isinstance(bias_dtype, str) else bias_dtype)

    def total(group: RankGroup) -> list[Tensor]:
        memory = group.partial(*parts[0].shape)
        assert memory is not None
        inside = group.sum(memory.copy_(parts[group.rank]), bias, dtype)
        return [inside, group.sum(parts[group.rank], bias, dtype)]

    expected = expected_sum(parts, bias, dtype)
    for results in run_ranks(groups, total):
        assert all(torch.equal(result, expected) for result in results)


def test_sums_of_rows_that_are_not_contiguous(groups: list[RankGroup]) -> None:
    parts = random(len(groups), 40, 30)
    sums = run_ranks(groups, lambda group: group.sum(parts[group.rank].t(), None, torch.float32))
    expected = expected_sum([part.t() for part in parts], None, torch.float32)
    assert all(torch.equal(result, expected) for result in sums)


def test_threads_do_not_change_a_sum(groups: list[RankGroup]) -> None:
    parts, bias = random(len(groups), 256, 900), random(900)

    def total(group: RankGroup, threads: int) -> Tensor:
        set_num_threads(threads)
        return group.sum(parts[group.rank], bias, torch.bfloat16)

    try:
        sums = [run_ranks(groups, partial(total, threads=threads)) for threads in (1, 3)]
    finally:
        set_num_threads(1)
    expected = expected_sum(list(parts), bias, torch.bfloat16)
    assert all(torch.equal(result, expected) for results in sums for result in results)


def maximum(group: RankGroup, values: Tensor) -> Tensor:
    return group.maximum(values[group.rank])


def test_maximum_keeps_what_is_not_a_number(groups: list[RankGroup]) -> None:
    for rows in (1, 37, 300):
        values = random(len(groups), rows)
        values[1, 0] = torch.nan
        values[0, rows // 2] = torch.inf
        maxima = run_ranks(groups, partial(maximum, values=values))
        for result in maxima:
            torch.testing.assert_close(result, values.amax(0), rtol=0, atol=0, equal_nan=True)


def test_a_larger_part_than_the_region_is_refused(groups: list[RankGroup]) -> None:
    for call in (
        lambda: groups[0].partial(513, 900),
        lambda: groups[0].sum(torch.zeros(513, 900), None, torch.float32),
        lambda: groups[0].broadcast(torch.zeros(10_000, dtype=torch.int64), 10_000),
    ):
        with pytest.raises(ValueError, match="exceed the group's"):
            call()


class _Program:
    """A rank's recorded program: `num_sums` times x = the ranks' sum of x W^T, + bias."""

    def __init__(self, group: RankGroup, num_sums: int, has_maximum: bool) -> None:
        self.rank, self.size = group.rank, group.size
        self.weight = random(num_sums, group.size, WIDTH, WIDTH) / WIDTH
        self.x, self.values, self.bias = (
            torch.zeros(TOKENS, WIDTH),
            torch.zeros(TOKENS),
            random(WIDTH),
        )
        # The calls refer to them by address.
        self._matrices = [prepare(weight[group.rank].clone()) for weight in self.weight]
        self._memory = torch.empty(1 << 22, dtype=torch.uint8)
        self.maxima: list[Tensor] = []
        library, x = current_library(), self.x
        assert library is not None
        with record_kernels(library, TOKENS, self._memory) as recorded:
            for matrix in self._matrices:
                if has_maximum:
                    self.maxima.append(group.maximum(self.values))
                part = group.partial(TOKENS, WIDTH)
                x = group.sum(linear(x, matrix, None, part), self.bias, torch.float32)
        self.y = x
        self._program = RecordedProgram(recorded, {})

    def run(self, rows: int, seed: int) -> bool:
        """Run for so many rows; return whether the results are those of all ranks' parts."""
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
        values = random(self.size, rows)
        self.x[:rows], self.values[:rows] = x, values[self.rank]
        ones = np.ones((1, 1), dtype=np.int64)
        batch = PagedBatch(ones, ones, ones, rows, 1, 1)
        plan = AttentionPlan(batch, torch.zeros(rows, dtype=torch.int64), None, "native")
        self._program.run(rows, {None: plan}, {})
        for weights in self.weight:
            x = (x @ weights.transpose(1, 2)).sum(0) + self.bias
        is_right = torch.allclose(self.y[:rows], x, atol=1e-4)
        return is_right and all(torch.equal(one[:rows], values.amax(0)) for one in self.maxima)


TOKENS, WIDTH = 128, 96


@pytest.mark.parametrize(("num_sums", "has_maximum"), [(1, True), (2, False), (3, True)])
def test_a_recorded_program_sums(groups: list[RankGroup], num_sums: int, has_maximum: bool) -> None:
    """Programs of an odd number of sums use the same place twice in a row."""
    if current_library() is None:
        pytest.skip("programs are of compiled kernels")

    def run(group: RankGroup) -> list[bool]:
        program = _Program(group, num_sums, has_maximum)
        rows = [1, 128, 5, 1, 64] * 3
        return [program.run(count, seed) for seed, count in enumerate(rows)]

    assert all(all(results) for results in run_ranks(groups, run))


def test_a_recorded_program_of_a_cancelled_group_raises(groups: list[RankGroup]) -> None:
    if current_library() is None:
        pytest.skip("programs are of compiled kernels")
    programs = run_ranks(groups, lambda group: _Program(group, 3, False))
    groups[-1].cancel()
    for program in programs:
        with pytest.raises(GroupClosedError):
            program.run(4, 0)

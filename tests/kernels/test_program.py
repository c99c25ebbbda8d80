"""Recorded programs: host functions between compiled kernels, on the rows of each step."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gllm.kernels.attention_plan import AttentionPlan, PagedBatch
from gllm.kernels.attention_window import AttentionWindow
from gllm.kernels.native.library import KernelLibrary, load_library
from gllm.kernels.native.program import (
    NotRecordableError,
    RecordedProgram,
    launch_host_function,
    record_kernels,
)
from gllm.kernels.rms_norm import rms_norm

TOKENS, SIZE = 6, 5
ONES = torch.ones(2 * SIZE)


@pytest.fixture
def kernels() -> KernelLibrary:
    library = load_library()
    if library is None:
        pytest.skip("programs are of compiled kernels")
    return library


def widen(x: Tensor) -> Tensor:
    """[rows, 2 * n]."""
    return torch.cat((x, 1 - x), dim=1)


def halve(context: list[int], x: Tensor) -> Tensor:
    """In place; the context is told the number of rows."""
    context.append(len(x))
    return x.mul_(0.5)


def compute(x: Tensor, context: list[int]) -> Tensor:
    """Kernel, host functions, kernel."""
    normed = rms_norm(x, ONES[:SIZE], 1e-5)
    wide = launch_host_function(widen, normed, shape=(len(x), 2 * SIZE))
    launch_host_function(halve, wide[:, 1:], context=context, is_in_place=True)
    return rms_norm(wide, ONES, 1e-5)


def test_host_functions_compute_the_rows_of_a_step(kernels: KernelLibrary) -> None:
    x, memory = torch.zeros(TOKENS, SIZE), torch.empty(4096, dtype=torch.uint8)
    recorded_with: list[int] = []
    with record_kernels(kernels, TOKENS, memory) as recorder:
        y = compute(x, recorded_with)
        recorder.end_segment()
        launch_host_function(halve, y, context=recorded_with, is_in_place=True)
        recorder.end_segment()
    program = RecordedProgram(recorder, {})
    ones = np.ones((1, 1), dtype=np.int64)
    for rows, has_segments in [(3, False), (6, True), (1, False), (1, True)]:
        x[:rows] = torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(rows))
        slots = torch.zeros(rows, dtype=torch.int64)
        batch = PagedBatch(ones, ones, ones, rows, 1, 1)
        plans: dict[AttentionWindow, AttentionPlan] = {
            None: AttentionPlan(batch, slots, None, "native")
        }
        context: list[int] = []
        seen: list[tuple[int, int]] = []
        on_segment = (lambda n, c=context, s=seen: s.append((n, len(c)))) if has_segments else None
        program.run(rows, plans, {}, on_segment=on_segment, context=context)
        assert context == [rows, rows]
        assert seen == ([(1, 1), (2, 2)] if has_segments else [])
        assert torch.equal(y[:rows], compute(x[:rows], []) * 0.5)
    assert not recorded_with


def test_what_cannot_be_recorded(kernels: KernelLibrary) -> None:
    x, memory = torch.zeros(TOKENS, SIZE), torch.empty(4096, dtype=torch.uint8)
    with record_kernels(kernels, TOKENS, memory):
        with pytest.raises(NotRecordableError, match="other rows than tokens"):
            launch_host_function(widen, x[1:], is_in_place=True)
        with pytest.raises(NotRecordableError, match="a buffer of shape"):
            launch_host_function(widen, x, shape=(1, SIZE))
        with pytest.raises(NotRecordableError, match="add"):
            x + 1

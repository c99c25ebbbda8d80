"""The table of builds: every build has its limits, every product its cell."""

import pytest
import torch

from benchmarks.cpu import builds
from gllm.kernels.native.builds import BUILDS

pytestmark = pytest.mark.full


def test_every_build_has_limits() -> None:
    assert set(builds.LIMITS) == set(BUILDS)


def test_cells_become_lines_of_builds_and_rows() -> None:
    cells = builds.measure("avx2", torch.get_num_threads(), 0.0, size=32, counts=(1, 3))
    assert [(cell.dtype, cell.rows) for cell in cells] == [
        (dtype, rows) for dtype in builds.DTYPES for rows in (1, 3)
    ]
    assert all(min(cell.kernels_seconds, cell.torch_seconds) > 0 for cell in cells)
    known = [
        builds.Cell(cell.build, cell.dtype, cell.rows, 0.002 * cell.rows, 0.004) for cell in cells
    ]
    lines = builds.format_cells(known).splitlines()
    assert len(lines) == 4
    assert lines[2] == "| avx2 | 1 |" + " 2 | 4 | 0.50 |" * 3
    assert lines[3] == "| avx2 | 3 |" + " 6 | 4 | 1.50 |" * 3

"""The table of builds: every build has its limits, every product its cell."""

import pytest
import torch

from benchmarks.cpu import builds
from gllm.kernels.native.builds import BUILDS


def test_every_build_has_limits() -> None:
    assert set(builds.LIMITS) == set(BUILDS)


def test_cells_become_lines_of_builds_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "SIZE", 32)
    monkeypatch.setattr(builds, "ROWS", (1, 3))
    cells = builds.measure("avx2", torch.get_num_threads(), 0.0)
    assert [(cell.dtype, cell.rows) for cell in cells] == [
        (dtype, rows) for dtype in builds.DTYPES for rows in (1, 3)
    ]
    assert all(min(cell.kernels_seconds, cell.torch_seconds) > 0 for cell in cells)
    known = [
        cell._replace(kernels_seconds=0.002 * cell.rows, torch_seconds=0.004) for cell in cells
    ]
    lines = builds.format_cells(known).splitlines()
    assert len(lines) == 4
    assert lines[2] == "| avx2 | 1 |" + " 2 | 4 | 0.50 |" * 3
    assert lines[3] == "| avx2 | 3 |" + " 6 | 4 | 1.50 |" * 3

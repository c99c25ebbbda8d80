"""Compare linear layers of every build of the compiled kernels with torch.

torch is limited to the instruction set of the build. Each build runs in its own process because
torch and its libraries read their limits once, at start. Within the process both sides alternate,
so that a busy machine slows both. Run as `python -m benchmarks.cpu.builds`; it takes about a
minute.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.cpu.limits import measured
from benchmarks.cpu.page import ForeignCpu, origin, write_results
from benchmarks.cpu.workplace import ROOT
from gllm.kernels.native.builds import (
    BUILD_VARIABLE,
    BUILDS,
    find_compiled_builds,
    processor_features,
)
from gllm.kernels.threads import set_num_threads
from gllm.runtime.worker.device import count_cores
from gllm.sim.metrics.report import format_table, show_value

if TYPE_CHECKING:
    import torch


def _limit(aten: str, onednn: str, mkl: str, openblas: str) -> dict[str, str]:
    return {
        "ATEN_CPU_CAPABILITY": aten,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "OPENBLAS_CORETYPE": openblas,
    }


LIMITS = MappingProxyType(
    {
        "amx_bf16": dict[str, str](),
        "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
        "avx512": _limit("avx512", "AVX512_CORE", "AVX512", "SkylakeX"),
        "avx2": _limit("avx2", "AVX2", "AVX2", "Haswell"),
        "portable": _limit("default", "SSE41", "SSE4_2", "Nehalem"),
    }
)
"""Environment variables that limit torch to the instruction set of a build."""
SIZE = 2048
"""Number of input and of output features."""
ROWS = (1, 8, 64, 256)
DTYPES = ("float32", "bfloat16", "float16")
MIN_RUNS = 5
"""Minimum number of runs per cell, however long they take."""
PAGE = Path("docs/benchmarks/builds.md")


class Cell(NamedTuple):
    """Median times of one matrix product."""

    build: str
    dtype: str
    rows: int
    kernels_seconds: float
    torch_seconds: float


def measure(
    build: str, threads: int, seconds: float, size: int = SIZE, counts: Sequence[int] = ROWS
) -> list[Cell]:
    """Measure all products with the build of this process, each for `seconds`.

    Args:
        build: Name of the build.
        threads: Threads of each product.
        seconds: Least seconds per product.
        size: Number of input and of output features.
        counts: Numbers of rows.
    """
    import torch

    set_num_threads(threads)
    return [
        Cell(build, name, rows, *_medians(getattr(torch, name), size, rows, seconds))
        for name in DTYPES
        for rows in counts
    ]


def _medians(dtype: "torch.dtype", size: int, rows: int, seconds: float) -> tuple[float, float]:
    """Return the median seconds of one product: compiled kernels and torch, alternating."""
    import torch
    from torch.nn import functional

    from gllm.kernels.linear import linear, prepare

    weight, x = torch.randn(size, size).to(dtype), torch.randn(rows, size).to(dtype)
    matrix = prepare(weight)
    products = (lambda: linear(x, matrix, None), lambda: functional.linear(x, weight))
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(times[0]) < MIN_RUNS or time.perf_counter() < end:
        for multiply, seconds_of_product in zip(products, times, strict=True):
            begin = time.perf_counter()
            multiply()
            seconds_of_product.append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


def measure_in_process(build: str, threads: int, seconds: float) -> list[Cell]:
    """Measure the cells of a build in a new process."""
    arguments = ["--build", build, "--threads", str(threads), "--seconds", str(seconds)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cpu.builds", *arguments],
        cwd=ROOT,
        env={**os.environ, **LIMITS[build], BUILD_VARIABLE: build},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [Cell(*cell) for cell in json.loads(done.stdout)]


def format_cells(cells: list[Cell]) -> str:
    """Format the table: one line per build and number of rows."""
    header = ["build", "rows", *(f"{dtype}, ms | torch, ms | ratio" for dtype in DTYPES)]
    by_key = {(cell.build, cell.rows, cell.dtype): cell for cell in cells}
    rows = []
    for build in dict.fromkeys(cell.build for cell in cells):
        for count in dict.fromkeys(cell.rows for cell in cells):
            cells_of_row = [by_key[build, count, dtype] for dtype in DTYPES]
            rows.append(
                [
                    build,
                    str(count),
                    *(
                        f"{show_value(cell.kernels_seconds, 1e3)} | "
                        f"{show_value(cell.torch_seconds, 1e3)} | "
                        f"{cell.kernels_seconds / cell.torch_seconds:.2f}"
                        for cell in cells_of_row
                    ),
                ]
            )
    lines = [" | ".join(line) for line in (header, ["---"] * (2 + 3 * len(DTYPES)), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    """Measure every build that this processor supports, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=count_cores())
    parser.add_argument("--seconds", type=float, default=0.6, help="seconds per product")
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.add_argument("--build", choices=BUILDS, help="measure one build and print JSON")
    options = parser.parse_args()
    if options.build:
        print(json.dumps(measure(options.build, options.threads, options.seconds)))
        return
    features, foreign = processor_features(), ForeignCpu()
    builds = [name for name in find_compiled_builds() if features >= BUILDS[name]]
    limits = measured(options.threads)
    cells = [
        cell
        for build in builds
        for cell in measure_in_process(build, options.threads, options.seconds)
    ]
    rates = [
        show_value(limits.bytes_per_second, 1e-9),
        show_value(limits.flops_per_second, 1e-9),
    ]
    figures = "\n\n".join(
        [
            f"{origin('benchmarks.cpu.builds')} {options.threads} threads; others kept "
            f"{show_value(foreign.cores())} cores busy.",
            format_cells(cells),
            "Limits of the machine, measured in the same run:",
            format_table(["GB/s read", "bf16 GFLOP/s"], [rates]),
        ]
    )
    results = {"threads": options.threads, "limits": limits, "cells": cells}
    write_results(options.output, "Builds of the compiled kernels", figures, results)


if __name__ == "__main__":
    main()

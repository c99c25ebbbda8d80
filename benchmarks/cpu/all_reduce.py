"""Compare sums over the ranks of a stage in shared memory with those of gloo.

Every rank is a process with one thread. The ways to sum alternate, so that a busy machine slows all
of them. Run as `python -m benchmarks.cpu.all_reduce`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import torch
from torch import Tensor, distributed

from benchmarks.cpu.workplace import ROOT
from gllm.kernels.all_reduce import RankGroup
from gllm.kernels.attention_plan import AttentionPlan, PagedBatch
from gllm.kernels.attention_window import AttentionWindow
from gllm.kernels.native import library
from gllm.kernels.native.program import RecordedProgram, record_kernels
from gllm.kernels.threads import set_num_threads
from gllm.transport.groups import open_groups
from gllm.transport.region import Region, RegionLayout, create_region

ROWS = (1, 4, 16, 64, 512)
WIDTHS = (896, 4096)
RANKS = (2, 4)
SUMS = 24
"""Sums per measured time."""
WAYS = MappingProxyType(
    {
        "recorded": "in a recorded program",
        "eager": "called from Python",
        "torch": "without a compiler",
        "gloo": "gloo",
    }
)

Sum = Callable[[], None]
"""Computes SUMS sums."""


def recorded_sums(group: RankGroup, rows: int, width: int) -> Sum:
    """Return sums as a recorded program of a step with this number of rows."""
    kernels = library.load_library()
    assert kernels is not None, "the kernels were not compiled"
    memory = torch.empty(4 * rows * width + 64, dtype=torch.uint8)
    with record_kernels(kernels, rows, memory) as recorder:
        for _ in range(SUMS):
            recorder.reuse()
            partial = group.partial(rows, width)
            assert partial is not None
            group.sum(partial, None, torch.float32)
    program = RecordedProgram(recorder, {})
    ones = torch.ones(1, 1, dtype=torch.int64).numpy()
    batch = PagedBatch(ones, ones, ones, rows, 1, 1)
    plans: dict[AttentionWindow, AttentionPlan] = {
        None: AttentionPlan(batch, torch.zeros(rows, dtype=torch.int64), None, "native")
    }

    def run() -> None:
        assert len(memory)
        program.run(rows, plans, {})

    return run


def eager_sums(group: RankGroup, rows: int, width: int) -> Sum:
    """Return sums called one by one."""

    def run() -> None:
        for _ in range(SUMS):
            partial = group.partial(rows, width)
            assert partial is not None
            group.sum(partial, None, torch.float32)

    return run


def torch_sums(group: RankGroup, rows: int, width: int) -> Sum:
    """Return sums as on a machine without a compiler."""
    run = eager_sums(group, rows, width)

    def run_by_torch() -> None:
        with mock.patch.object(library, "load_library", return_value=None):
            run()

    return run_by_torch


def gloo_sums(part: Tensor) -> Sum:
    """Return sums by torch.distributed."""

    def run() -> None:
        for _ in range(SUMS):
            distributed.all_reduce(part)

    return run


def measure_us(group: RankGroup, run: Sum) -> float:
    """Return the microseconds of one sum, measured once on all ranks together."""
    group.agree_on_step(0, "")
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) / SUMS * 1e6


def run_rank(rank: int, args: argparse.Namespace) -> None:
    """Measure as one rank; rank 0 prints the microseconds of each way for each shape."""
    set_num_threads(1)
    layout = RegionLayout(max(ROWS), max(WIDTHS), 0)
    region = Region("auto", [args.region, args.region])
    groups = open_groups(region, rank, args.ranks, layout)
    distributed.init_process_group(
        "gloo", init_method=f"file://{args.store}", rank=rank, world_size=args.ranks
    )
    for rows, width in ((rows, width) for width in args.widths for rows in args.rows):
        part = torch.zeros(rows, width)
        ways = {
            "recorded": recorded_sums(groups.layers, rows, width),
            "eager": eager_sums(groups.layers, rows, width),
            "torch": torch_sums(groups.layers, rows, width),
            "gloo": gloo_sums(part),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(args.rounds + 1):
            for name, run in ways.items():
                elapsed = measure_us(groups.head, run)
                if number:
                    times[name].append(elapsed)
        if rank == 0:
            choose = min if args.fastest else statistics.median
            chosen = {name: choose(values) for name, values in times.items()}
            print(json.dumps([rows, width, chosen]), flush=True)
    distributed.destroy_process_group()


def measure(ranks: int, args: argparse.Namespace) -> list[tuple[int, int, dict[str, float]]]:
    """Return (rows, width, microseconds by way) of so many processes.

    Raises:
        SystemExit: a rank failed; the others, which would wait for it, are killed.
    """
    region = create_region("benchmark", "auto")
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            options = [f"--rank={rank}", f"--ranks={ranks}", f"--region={region.descriptors[0]}"]
            options += [f"--store={Path(folder) / 'store'}", f"--rounds={args.rounds}"]
            options += ["--fastest"] * args.fastest
            options += ["--rows", *map(str, args.rows), "--widths", *map(str, args.widths)]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.cpu.all_reduce", *options],
                    cwd=ROOT,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    pass_fds=region.descriptors[:1],
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        # Rank 0 prints less than a pipe holds.
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes):
                for process in processes:
                    process.kill()
            time.sleep(0.1)
    region.close()
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed")
    return [tuple(json.loads(line)) for line in processes[0].communicate()[0].splitlines()]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--fastest", action="store_true", help="not medians: on a busy machine")
    parser.add_argument("--ranks", type=int, help="2 and 4 by default")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--region", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args.rank, args)
        return
    kind = "fastest" if args.fastest else "medians"
    print(f"Microseconds per sum of float32, {kind} of {args.rounds} rounds\n")
    heads = ["ranks", "rows", "width", *WAYS.values(), "gloo / recorded"]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for ranks in RANKS if args.ranks is None else [args.ranks]:
        for rows, width, times in measure(ranks, args):
            cells = [f"{times[name]:.1f}" for name in WAYS]
            cells.append(f"{times['gloo'] / times['recorded']:.1f}")
            print(f"| {ranks} | {rows} | {width} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

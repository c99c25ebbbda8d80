"""`python -m gllm.kernels.tune`: times tiles of kernels on the GPU at hand, and writes a file.

Owns which tiles are tried, which of them are trusted, and which one is taken. Trusted is what
computes what the reference does, on all that its row of a table is timed by, and, compiled for all
that the row is for, neither spills registers nor needs more shared memory than there is. Taken is
the fastest of those, by the product of times. What is timed: gllm/kernels/triton/workloads.py; what
a file looks like: gllm/kernels/triton/tiles.py.

Every time is written down as it is measured (tune_journal.py) and the GPU's file after each row, so
that the command may be stopped and goes on where it was; `--minutes` stops it by itself.
"""

import argparse
import datetime
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gllm.kernels import aot
from gllm.kernels.triton import tiles
from gllm.kernels.triton.tiles import Row, TilesError
from gllm.kernels.tune_journal import Journal

if TYPE_CHECKING:
    from gllm.kernels.triton.workloads import Prepared, Workload

Use = Mapping[str, int]
Bench = Callable[["Prepared"], float]
"""Seconds, or any other unit, of one run."""
Fits = Callable[[str, Row, Use], bool]
"""Whether a row of a table can have these tiles on the GPU, for all that it is compiled for."""
Measure = Callable[[str, Row, Use], float | None]
"""Time with these tiles; None where they do not run or compute something wrong."""

TRIED: dict[str, dict[str, Sequence[int]]] = {
    "prefill": {"rows": (16, 32, 64, 128), "keys": (16, 32, 64, 128), "warps": (4, 8)},
    "decode": {"rows": (16,), "keys": (16, 32, 64, 128), "warps": (2, 4, 8)},
    "experts": {"rows": (32, 64, 128), "columns": (64, 128), "inner": (32, 64), "warps": (4, 8)},
    "experts_fp8": {"rows": (32, 64, 128), "columns": (32, 64, 128), "warps": (4, 8)},
    "experts_sum": {"elements": (256, 512, 1024, 2048), "warps": (2, 4, 8)},
    "linear_fp8": {"rows": (16, 32, 64, 128), "columns": (32, 64, 128), "warps": (4, 8)},
    "quantize": {"groups": (2, 4, 8, 16), "warps": (2, 4, 8)},
    "rms_norm": {"elements": (2048, 4096, 8192, 16_384), "warps": (4, 8, 16)},
    "activation": {"elements": (512, 1024, 2048, 4096), "warps": (2, 4, 8)},
    "qkv": {"elements": (512, 1024, 2048, 4096), "warps": (2, 4, 8)},
}
"""Of each table's choices; stages, where a row has them, are STAGES."""
STAGES = (1, 2, 3, 4, 5, 6)


@dataclass(frozen=True)
class Tuned:
    """What came of one row."""

    row: Row
    """With the tiles that are best."""
    default: float
    """Time of what was there before, and of the best; as products over what was timed, the times'
    geometric means."""
    best: float
    timed: int
    """Tiles whose results were right."""
    is_complete: bool = True
    """Whether all candidates were tried."""

    def said(self, table: str) -> str:
        """A line about it."""
        share, use = self.best / self.default, dict(self.row.use)
        rest = "" if self.is_complete else ", not all tried"
        return f"{table} {dict(self.row.up_to)}: {use}, {share:.2f} of the time before{rest}"


def candidates(table: str, row: Row) -> Iterator[dict[str, int]]:
    """Tiles to be tried for a row; first what it has."""
    yield dict(row.use)
    tried = {"stages": STAGES, **TRIED[table]}
    for values in product(*(tried[name] for name in row.use)):
        use = dict(zip(row.use, values, strict=True))
        if use != row.use:
            yield use


def tune_row(
    table: str,
    row: Row,
    measure: Measure,
    fits: Fits,
    is_late: Callable[[], bool] = lambda: False,
) -> Tuned:
    """The fastest tiles of a row that are trusted; its own where there are no others.

    No more tiles are tried once is_late says so. Raises ValueError where its own do not compute
    what they should.
    """
    times: list[tuple[float, int, dict[str, int]]] = []
    is_complete = True
    for number, use in enumerate(candidates(table, row)):
        if number and is_late():
            is_complete = False
            break
        found = measure(table, row, use)
        if found is not None:
            times.append((found, number, use))
        elif not number:
            raise ValueError(f"{table} {dict(row.up_to)} is wrong with its own tiles {use}")
    default = times[0][0]
    for best, number, use in sorted(times, key=lambda one: one[:2]):
        if not number or fits(table, row, use):
            return Tuned(Row(row.up_to, dict(use)), default, best, len(times), is_complete)
    raise AssertionError("a row's own tiles are among those that are timed")


class Measurements:
    """Measures a row's tiles, but for those that a journal has."""

    def __init__(
        self, journal: Journal, prepare: Callable[[], Sequence["Prepared"]], bench: Bench
    ) -> None:
        """`prepare`: makes what is timed, which takes seconds and memory; called once at most."""
        self._journal, self._prepare, self._bench = journal, prepare, bench
        self._prepared: Sequence[Prepared] | None = None

    def __call__(self, table: str, row: Row, use: Use) -> float | None:
        """As Measure; written down at once."""
        if (table, row, use) in self._journal:
            return self._journal.time(table, row, use)
        if self._prepared is None:
            self._prepared = self._prepare()
        found = measured(self._prepared, self._bench, table, row, use)
        self._journal.add(table, row, use, found)
        return found


def measured(
    prepared: Sequence["Prepared"], bench: Bench, table: str, row: Row, use: Use
) -> float | None:
    """The geometric mean of times with these tiles; None where a kernel does not run with them, or
    a result is wrong."""
    logarithms = []
    with tiles.using({table: [Row(row.up_to, dict(use))]}):
        for one in prepared:
            try:
                error = one.error()
            except Exception as failure:  # what a compiler refuses has no type of its own
                print(f"  {use}: {type(failure).__name__}", file=sys.stderr)
                return None
            # Written so that NaN is wrong.
            if not error <= one.limit:
                print(f"  {use}: off by {error:.2g}", file=sys.stderr)
                return None
            logarithms.append(math.log(bench(one)))
    return math.exp(sum(logarithms) / len(logarithms))


def jobs_for(table: str, row: Row, use: Use, arch: int) -> list[aot.Job]:
    """Everything of an architecture that a row's tiles are used for."""
    return [
        aot.Job(module, index, arch, tuple(use.items()))
        for module in aot.room()
        for index, one in enumerate(aot.listed(module))
        if one.tiled is not None
        and one.tiled.table == table
        and one.least <= arch
        and tiles.row_for(table, one.tiled.sizes).up_to == row.up_to
    ]


def fits(
    arch: int,
    compiled: Callable[[Iterable[aot.Job]], Iterable[aot.Result]],
    table: str,
    row: Row,
    use: Use,
) -> bool:
    """Whether nothing is wrong with what these tiles are compiled to."""
    return not any(map(aot.complaints, compiled(jobs_for(table, row, use, arch))))


def rows_of(
    tables: Sequence[str], every: Sequence["Workload"]
) -> Iterator[tuple[str, Row, list["Workload"]]]:
    """Rows of the default's tables, with what each is timed by."""
    for table in tables:
        for row in tiles.read(tiles.DEFAULT).tables[table]:
            own = [
                one
                for one in every
                if one.table == table and tiles.row_for(table, one.sizes) == row
            ]
            yield table, row, own


def time_on_gpu(prepared: "Prepared") -> float:
    """Milliseconds, the median of many runs, each with cold caches."""
    from triton.testing import do_bench

    return float(do_bench(prepared.run, quantiles=[0.5]))


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(prog="python -m gllm.kernels.tune", description=__doc__)
    made.add_argument("tables", nargs="*", help=f"of {', '.join(TRIED)}; all by default")
    made.add_argument("--output", type=Path, default=tiles.FOLDER, help="folder of the file")
    made.add_argument("--jobs", type=int, default=8, help="processes that compile")
    made.add_argument(
        "--minutes", type=minutes, default=math.inf, help="after which no more tiles are tried"
    )
    return made


def minutes(text: str) -> float:
    """Read a positive number of minutes. Raises ValueError."""
    value = float(text)
    if not value > 0:
        raise ValueError("has to be above 0")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune, and write the file of this GPU; tables that were not asked for stay as they are."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(given)
    unknown = sorted({*options.tables} - {*TRIED})
    if unknown:
        print(f"no table {unknown[0]}: there are {', '.join(TRIED)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("there is no GPU here, and tiles are timed on one", file=sys.stderr)
        return 2
    major, minor = torch.cuda.get_device_capability()
    gpu = Gpu(torch.cuda.get_device_name(), 10 * major + minor)
    command = shlex.join(["python", "-m", "gllm.kernels.tune", *given])
    try:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            trusted = partial(fits, gpu.arch, partial(pool.map, aot.run))
            return tune(options, gpu, command, time_on_gpu, trusted)
    except TilesError as error:
        print(error, file=sys.stderr)
        return 2


@dataclass(frozen=True)
class Gpu:
    """What tiles are tuned for."""

    name: str
    arch: int
    """As 90 for sm_90."""


def tune(options: argparse.Namespace, gpu: Gpu, command: str, bench: Bench, fits: Fits) -> int:
    """Tune row by row, each written as it is done; the exit status.

    Rows are begun until `options.minutes` have passed. Those of the journal are not timed again.
    """
    from gllm.kernels.triton.workloads import workloads

    stop = time.monotonic() + 60 * options.minutes
    path = options.output / f"{tiles.file_name(gpu.name)}.journal"
    journal = Journal(path, {"device": gpu.name, "architecture": gpu.arch, **versions()})
    if len(journal):
        print(f"{len(journal)} times are in {path}")
    wrong, left = False, 0
    for table, row, own in rows_of(options.tables or [*TRIED], workloads()):
        if time.monotonic() > stop:
            left += 1
            continue
        prepare = partial(_prepare, own)
        try:
            measure = Measurements(journal, prepare, bench)
            tuned = tune_row(table, row, measure, fits, lambda: time.monotonic() > stop)
        except ValueError as error:
            print(error, file=sys.stderr)
            wrong = True
            continue
        left += not tuned.is_complete
        write(options.output, gpu.name, gpu.arch, command, {table: [tuned.row]})
        print(tuned.said(table), flush=True)
    if left:
        print(f"{left} rows are left: the same command goes on with them")
    return int(wrong)


def _prepare(own: Sequence["Workload"]) -> list["Prepared"]:
    return [one.prepare(torch.device("cuda")) for one in own]


def versions() -> dict[str, str]:
    """Return what else times depend on."""
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__}


def write(
    folder: Path, device: str, arch: int, command: str, found: Mapping[str, Sequence[Row]]
) -> Path:
    """The file of a GPU; rows that it had and that are not among the found ones are kept."""
    path = folder / f"{tiles.file_name(device)}.json"
    default = tiles.read(tiles.DEFAULT).tables
    tables = {name: list(rows) for name, rows in found.items()}
    if path.exists():
        before = tiles.parse(str(path), json.loads(path.read_text()), default).tables
        kept = {name: list(rows) for name, rows in before.items()}
        for name, rows in tables.items():
            new = [row.up_to for row in rows]
            own = [row for row in kept.get(name, []) if row.up_to not in new]
            kept[name] = [*own, *rows]
        tables = kept
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    made = tiles.File(device, arch, True, command, date, versions(), tables)
    partly = path.with_suffix(".part")
    partly.write_text(made.text())
    # At once: a server that starts meanwhile reads one or the other.
    partly.replace(path)
    return path


if __name__ == "__main__":
    sys.exit(main())

"""`python -m gllm.kernels.tune`: time tile sizes of kernels on the local GPU and write its file.

For each row of a table the fastest trusted candidate is chosen, by the product of its times. A
candidate is trusted if its results match the reference in all workloads of the row and if, compiled
for all kernel variants of the row, it neither spills registers nor exceeds the shared memory.
Workloads: gllm/kernels/triton/workloads.py; file format: gllm/kernels/triton/tiles.py.

Every time is written to a journal as it is measured (`TuneJournal`), and the file of the GPU
after each row, so that an interrupted command resumes. `--minutes` limits the running time.
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
from gllm.kernels.triton.tiles import TileRow, TilesError

if TYPE_CHECKING:
    from gllm.kernels.triton.workloads import PreparedTuningCase, TuningCase

Key = tuple[str, str, str]


class TuneJournal:
    """File of measured kernel times by table, row and tile sizes; allows to resume tuning."""

    def __init__(self, path: Path, about: Mapping[str, object]) -> None:
        """Read the file, or start a new one if it is for another GPU or other versions.

        Drops a truncated last line.

        Raises:
            TilesError: The file is not a journal.
        """
        self._times: dict[Key, float | None] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        first = json.dumps(dict(about))
        if lines[:1] != [first]:
            lines = [first]
        kept = lines[:1]
        for number, line in enumerate(lines[1:], 2):
            try:
                entry = json.loads(line)
                key = entry["table"], _text(entry["up_to"]), _text(entry["use"])
                self._times[key] = entry["time"]
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):
                    break
                raise TilesError(
                    f"{path}, line {number} is not a journal entry: {line:.80}"
                ) from error
            kept.append(line)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(kept) + "\n")
        self._path = path

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, key: tuple[str, TileRow, Mapping[str, int]]) -> bool:
        return _key(*key) in self._times

    def time(self, table: str, row: TileRow, use: Mapping[str, int]) -> float | None:
        """Return the recorded time; None if the tile sizes fail or return wrong results.

        The unit is that of the benchmark function, milliseconds on a GPU.
        """
        return self._times[_key(table, row, use)]

    def add(self, table: str, row: TileRow, use: Mapping[str, int], time: float | None) -> None:
        """Append a measured time to the file; None: the tile sizes fail or return wrong results."""
        self._times[_key(table, row, use)] = time
        entry = {"table": table, "up_to": dict(row.up_to), "use": dict(use), "time": time}
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _key(table: str, row: TileRow, use: Mapping[str, int]) -> Key:
    return table, _text(row.up_to), _text(use)


def _text(numbers: Mapping[str, int]) -> str:
    return json.dumps(dict(numbers), sort_keys=True)


TileConfig = Mapping[str, int]
BenchmarkFunction = Callable[["PreparedTuningCase"], float]
"""Function that returns the time of one run, in any unit."""
TrustFunction = Callable[[str, TileRow, TileConfig], bool]
"""Predicate (table, row, tile sizes): all kernel variants of the row compile without problems."""
MeasureFunction = Callable[[str, TileRow, TileConfig], float | None]
"""Function (table, row, tile sizes) to the time; None for wrong results or failed launches."""

CANDIDATE_VALUES: dict[str, dict[str, Sequence[int]]] = {
    "prefill": {"rows": (16, 32, 64, 128), "keys": (16, 32, 64, 128), "warps": (4, 8)},
    "decode": {"rows": (16,), "keys": (16, 32, 64, 128), "warps": (2, 4, 8)},
    "experts": {"rows": (32, 64, 128), "columns": (64, 128), "inner": (32, 64), "warps": (4, 8)},
    "experts_fp8": {"rows": (32, 64, 128), "columns": (32, 64, 128), "warps": (4, 8)},
    "experts_grouped": {"rows": (32, 64, 128), "columns": (32, 64, 128), "warps": (4, 8)},
    "experts_sum": {"elements": (256, 512, 1024, 2048), "warps": (2, 4, 8)},
    "linear_fp8": {"rows": (16, 32, 64, 128), "columns": (32, 64, 128), "warps": (4, 8)},
    "linear_grouped": {"rows": (16, 32, 64, 128), "columns": (32, 64, 128), "warps": (4, 8)},
    "quantize": {"groups": (2, 4, 8, 16), "warps": (2, 4, 8)},
    "rms_norm": {"elements": (2048, 4096, 8192, 16_384), "warps": (4, 8, 16)},
    "activation": {"elements": (512, 1024, 2048, 4096), "warps": (2, 4, 8)},
    "qkv": {"elements": (512, 1024, 2048, 4096), "warps": (2, 4, 8)},
}
"""Candidate values per table; for stages, where a row has them, see CANDIDATE_STAGES."""
CANDIDATE_STAGES = (1, 2, 3, 4, 5, 6)


@dataclass(frozen=True)
class TuneResult:
    """Best tile sizes found for one row of a table, with the times before and after tuning.

    Times are in the unit of the benchmark function, milliseconds on a GPU.
    """

    row: TileRow
    """The row with the best tile sizes."""
    default: float
    """Time of the previous tile sizes: the geometric mean over the workloads."""
    best: float
    """Time of the best tile sizes, likewise."""
    timed: int
    """Number of candidates with correct results."""
    is_complete: bool = True
    """True if all candidates were tried."""

    def describe(self, table: str) -> str:
        """Return a log line: table, best tile sizes and their time relative to the old one."""
        share, use = self.best / self.default, dict(self.row.use)
        rest = "" if self.is_complete else ", not all tried"
        return f"{table} {dict(self.row.up_to)}: {use}, {share:.2f} of the time before{rest}"


def list_candidates(table: str, row: TileRow) -> Iterator[dict[str, int]]:
    """Yield the tile sizes to try for a row of a table, its current ones first."""
    yield dict(row.use)
    tried = {"stages": CANDIDATE_STAGES, **CANDIDATE_VALUES[table]}
    for values in product(*(tried[name] for name in row.use)):
        use = dict(zip(row.use, values, strict=True))
        if use != row.use:
            yield use


def tune_row(
    table: str,
    row: TileRow,
    measure: MeasureFunction,
    is_trusted: TrustFunction,
    is_late: Callable[[], bool] = lambda: False,
) -> TuneResult:
    """Find the fastest tile sizes of a row whose kernels compile without problems.

    The current tile sizes of the row are kept if no faster ones compile without problems.

    Args:
        table: name of the table.
        row: current tile sizes.
        measure: times tile sizes; returns None if results are wrong or the launch fails.
        is_trusted: returns True if all kernel variants compile without problems.
        is_late: returns True when no more candidates should be tried.

    Raises:
        ValueError: The current tile sizes of the row give wrong results.
    """
    times: list[tuple[float, int, dict[str, int]]] = []
    is_complete = True
    for number, use in enumerate(list_candidates(table, row)):
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
        if not number or is_trusted(table, row, use):
            return TuneResult(TileRow(row.up_to, dict(use)), default, best, len(times), is_complete)
    raise AssertionError("a row's own tiles are among those that are timed")


class JournaledMeasurement:
    """Function that times tile sizes, unless the journal already has their time."""

    def __init__(
        self,
        journal: TuneJournal,
        prepare: Callable[[], Sequence["PreparedTuningCase"]],
        bench: BenchmarkFunction,
    ) -> None:
        """Measure with `bench`; `prepare` allocates the workloads and is called at most once."""
        self._journal, self._prepare, self._bench = journal, prepare, bench
        self._prepared: Sequence[PreparedTuningCase] | None = None

    def __call__(self, table: str, row: TileRow, use: TileConfig) -> float | None:
        """Measure tile sizes and write the time to the journal at once."""
        if (table, row, use) in self._journal:
            return self._journal.time(table, row, use)
        if self._prepared is None:
            self._prepared = self._prepare()
        found = measure_tiles(self._prepared, self._bench, table, row, use)
        self._journal.add(table, row, use, found)
        return found


def measure_tiles(
    prepared: Sequence["PreparedTuningCase"],
    bench: BenchmarkFunction,
    table: str,
    row: TileRow,
    use: TileConfig,
) -> float | None:
    """Return the kernel time with the given tile sizes, the geometric mean over some workloads.

    Returns None if a kernel does not run with them or a result is wrong.
    """
    logarithms = []
    with tiles.override_tiles({table: [TileRow(row.up_to, dict(use))]}):
        for one in prepared:
            try:
                error = one.error()
            except Exception as failure:  # the compiler raises many types
                print(f"  {use}: {type(failure).__name__}", file=sys.stderr)
                return None
            # `not <=`, so that NaN counts as wrong.
            if not error <= one.limit:
                print(f"  {use}: off by {error:.2g}", file=sys.stderr)
                return None
            logarithms.append(math.log(bench(one)))
    return math.exp(sum(logarithms) / len(logarithms))


def list_compile_jobs(table: str, row: TileRow, use: TileConfig, arch: int) -> list[aot.CompileJob]:
    """List the compile jobs of all kernel variants that use a row of tile sizes.

    Args:
        table: name of the table.
        row: row of the table.
        use: tile sizes to compile with.
        arch: architecture, for example 90 for sm_90.
    """
    return [
        aot.CompileJob(module, index, arch, tuple(use.items()))
        for module in aot.list_kernel_modules()
        for index, one in enumerate(aot.load_kernel_specs(module))
        if one.tuned is not None
        and one.tuned.table == table
        and one.min_arch <= arch
        and tiles.find_default_row(table, one.tuned.sizes).up_to == row.up_to
    ]


def is_trusted(
    arch: int,
    compiled: Callable[[Iterable[aot.CompileJob]], Iterable[aot.CompileResult]],
    table: str,
    row: TileRow,
    use: TileConfig,
) -> bool:
    """Return True if all kernel variants that use a row compile without problems.

    Args:
        arch: architecture, for example 90 for sm_90.
        compiled: runs compile jobs, for example in other processes.
        table: name of the table.
        row: row of the table.
        use: tile sizes to compile with.
    """
    return not any(map(aot.find_problems, compiled(list_compile_jobs(table, row, use, arch))))


def list_rows(
    tables: Sequence[str], cases: Sequence["TuningCase"]
) -> Iterator[tuple[str, TileRow, list["TuningCase"]]]:
    """Yield each row of default.json with its table and the workloads that time it."""
    for table in tables:
        for row in tiles.read_tile_file(tiles.DEFAULT).tables[table]:
            own = [
                one
                for one in cases
                if one.table == table and tiles.find_default_row(table, one.sizes) == row
            ]
            yield table, row, own


def time_on_gpu(prepared: "PreparedTuningCase") -> float:
    """Return the median kernel time over many runs with cold caches, in milliseconds."""
    from triton.testing import do_bench

    return float(do_bench(prepared.run, quantiles=[0.5]))


def make_tune_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `python -m gllm.kernels.tune`."""
    made = argparse.ArgumentParser(prog="python -m gllm.kernels.tune", description=__doc__)
    made.add_argument("tables", nargs="*", help=f"of {', '.join(CANDIDATE_VALUES)}; all by default")
    made.add_argument("--output", type=Path, default=tiles.FOLDER, help="folder of the file")
    made.add_argument("--jobs", type=int, default=8, help="processes that compile")
    made.add_argument(
        "--minutes",
        type=parse_minutes,
        default=math.inf,
        help="after which no more tiles are tried",
    )
    return made


def parse_minutes(text: str) -> float:
    """Parse a positive number of minutes from a command-line argument.

    Raises:
        ValueError: The text is not a number above 0.
    """
    value = float(text)
    if not value > 0:
        raise ValueError("has to be above 0")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune the tile sizes of the requested tables on this GPU and write them to the GPU's file.

    Tables that are not requested stay unchanged.

    Returns:
        Exit status: 0 on success, 1 if the current tile sizes of a row give wrong results, 2 for an
        unknown table, an invalid file or without a GPU.
    """
    given = sys.argv[1:] if arguments is None else arguments
    options = make_tune_parser().parse_args(given)
    unknown = sorted({*options.tables} - {*CANDIDATE_VALUES})
    if unknown:
        print(f"no table {unknown[0]}: there are {', '.join(CANDIDATE_VALUES)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("tuning needs a GPU, and none is available", file=sys.stderr)
        return 2
    major, minor = torch.cuda.get_device_capability()
    gpu = GpuInfo(torch.cuda.get_device_name(), 10 * major + minor)
    command = shlex.join(["python", "-m", "gllm.kernels.tune", *given])
    try:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            trusted = partial(is_trusted, gpu.arch, partial(pool.map, aot.compile_kernel))
            return tune(options, gpu, command, time_on_gpu, trusted)
    except TilesError as error:
        print(error, file=sys.stderr)
        return 2


@dataclass(frozen=True)
class GpuInfo:
    """Name and architecture of the GPU whose tile sizes are tuned."""

    name: str
    arch: int
    """Architecture, for example 90 for sm_90."""


def tune(
    options: argparse.Namespace,
    gpu: GpuInfo,
    command: str,
    bench: BenchmarkFunction,
    is_trusted: TrustFunction,
    cases: Sequence["TuningCase"] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> int:
    """Tune tables row by row and write each row to the GPU's file as soon as it is done.

    Starts no further row after `options.minutes`. Times in the journal, the file of earlier
    measurements, are not measured again.

    Args:
        options: Parsed arguments of the command.
        gpu: GPU that the file is for.
        command: The command, which the file records.
        bench: Times a workload.
        is_trusted: Returns True for tile sizes whose kernels compile without problems.
        cases: Tuning cases that time the rows, by default all.
        now: Clock, in seconds.

    Returns:
        Exit status: 1 if the current tile sizes of a row give wrong results, else 0.
    """
    if cases is None:
        from gllm.kernels.triton.workloads import list_tuning_cases

        cases = list_tuning_cases()
    stop = now() + 60 * options.minutes
    path = options.output / f"{tiles.tile_file_name(gpu.name)}.journal"
    journal = TuneJournal(
        path, {"device": gpu.name, "architecture": gpu.arch, **get_package_versions()}
    )
    if len(journal):
        print(f"{len(journal)} times are in {path}")
    wrong, left = False, 0
    for table, row, own in list_rows(options.tables or [*CANDIDATE_VALUES], cases):
        if now() > stop:
            left += 1
            continue
        prepare = partial(_prepare, own)
        try:
            measure = JournaledMeasurement(journal, prepare, bench)
            tuned = tune_row(table, row, measure, is_trusted, lambda: now() > stop)
        except ValueError as error:
            print(error, file=sys.stderr)
            wrong = True
            continue
        left += not tuned.is_complete
        write_gpu_file(options.output, gpu.name, gpu.arch, command, {table: [tuned.row]})
        print(tuned.describe(table), flush=True)
    if left:
        print(f"{left} rows are left: run the same command to continue")
    return int(wrong)


def _prepare(own: Sequence["TuningCase"]) -> list["PreparedTuningCase"]:
    return [one.prepare(torch.device("cuda")) for one in own]


def get_package_versions() -> dict[str, str]:
    """Return the versions of torch and triton, which measured times depend on."""
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__}


def write_gpu_file(
    folder: Path, device: str, arch: int, command: str, found: Mapping[str, Sequence[TileRow]]
) -> Path:
    """Write tuned rows to the file of a GPU, keeping its other rows; return the path.

    Args:
        folder: folder of the file.
        device: name of the GPU.
        arch: architecture, for example 90 for sm_90.
        command: the command that was run, which the file records.
        found: tuned rows by table.
    """
    path = folder / f"{tiles.tile_file_name(device)}.json"
    default = tiles.read_tile_file(tiles.DEFAULT).tables
    tables = {name: list(rows) for name, rows in found.items()}
    if path.exists():
        before = tiles.parse_tile_file(str(path), json.loads(path.read_text()), default).tables
        kept = {name: list(rows) for name, rows in before.items()}
        for name, rows in tables.items():
            new = [row.up_to for row in rows]
            own = [row for row in kept.get(name, []) if row.up_to not in new]
            kept[name] = [*own, *rows]
        tables = kept
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    made = tiles.TileFile(device, arch, True, command, date, get_package_versions(), tables)
    partly = path.with_suffix(".part")
    partly.write_text(made.to_json())
    # Atomic: a server that starts meanwhile reads the old or the new file.
    partly.replace(path)
    return path


if __name__ == "__main__":
    sys.exit(main())

"""A tuner that is stopped has lost nothing, and goes on where it was."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gllm.kernels import tune
from gllm.kernels.triton import tiles
from gllm.kernels.triton.tiles import TileRow, TilesError
from gllm.kernels.triton.workloads import PreparedTuningCase, TuningCase
from gllm.kernels.tune import TileConfig, TuneJournal

GPU = tune.GpuInfo("NVIDIA H200", 90)
ABOUT = {"device": GPU.name, "architecture": GPU.arch}
TABLES = ["activation", "quantize"]
ROW = TileRow({}, {"elements": 1024, "warps": 4})


class Clock:
    """Counts what is timed; the larger the tiles, the faster."""

    def __init__(self) -> None:
        self.seen: list[TileConfig] = []
        self.workloads = [self.workload(table) for table in TABLES]
        self.table = TABLES[0]

    def workload(self, table: str) -> TuningCase:
        """A workload that is right, and that says which table is timed."""
        result = torch.ones(1)

        def run() -> torch.Tensor:
            self.table = table
            return result

        return TuningCase(table, {}, table, lambda device: PreparedTuningCase(run, result, 0.1))

    def __call__(self, prepared: PreparedTuningCase) -> float:
        prepared.run()
        use = tiles.choose_tiles(self.table)
        self.seen.append(use)
        return 1.0 / sum(use.values())


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run(folder: Path, clock: Clock, *arguments: str, seconds: float = 0.0) -> int:
    """The tuner's clock goes on by so many seconds at each look."""
    options = tune.make_tune_parser().parse_args([*TABLES, "--output", str(folder), *arguments])
    times = itertools.count(0.0, seconds)
    return tune.tune(
        options,
        GPU,
        "the command",
        clock,
        lambda table, row, use: True,
        clock.workloads,
        lambda: next(times),
    )


def written(folder: Path) -> dict[str, list[TileRow]]:
    path = folder / "nvidia-h200.json"
    found = tiles.parse_tile_file(
        str(path), json.loads(path.read_text()), tiles.read_tile_file(tiles.DEFAULT).tables
    )
    return {name: list(rows) for name, rows in found.tables.items()}


def test_each_row_is_written_as_it_is_done(tmp_path: Path, clock: Clock) -> None:
    class Stopped(BaseException):
        pass

    class Stopping(Clock):
        def __call__(self, prepared: PreparedTuningCase) -> float:
            prepared.run()
            if self.table == TABLES[1] and len(self.seen) > 14:
                raise Stopped
            return super().__call__(prepared)

    stopping = Stopping()
    with pytest.raises(Stopped):
        run(tmp_path, stopping)
    assert {*written(tmp_path)} == {TABLES[0]}
    before = stopping.seen
    clock.seen.extend(before)
    assert run(tmp_path, clock) == 0
    assert {*written(tmp_path)} == {*TABLES}
    # Nothing is timed twice, and nothing is left out.
    (own,) = tiles.read_tile_file(tiles.DEFAULT).tables[TABLES[1]]
    every = list(tune.list_candidates(TABLES[1], own))
    assert [use for use in clock.seen if "groups" in use] == every
    assert clock.seen[: len(before)] == before


def test_minutes_stop_the_tuner_between_two_tiles(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, clock, "--minutes", "1", seconds=10.0) == 0
    assert 1 < len(clock.seen) < 8
    assert [*written(tmp_path)] == TABLES[:1]
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 rows are left")
    assert run(tmp_path, clock, "--minutes", "1") == 0
    assert "left" not in capsys.readouterr().out
    count = sum(
        len(list(tune.list_candidates(table, row)))
        for table in TABLES
        for row in tiles.read_tile_file(tiles.DEFAULT).tables[table]
    )
    assert len(clock.seen) == count
    best = {"elements": 4096, "warps": 8}
    assert written(tmp_path)[TABLES[0]] == [TileRow({}, best)]


def test_rows_of_one_table_are_written_beside_each_other(tmp_path: Path) -> None:
    first, second = tiles.read_tile_file(tiles.DEFAULT).tables["rms_norm"][:2]
    for row in (first, second, TileRow(first.up_to, {**first.use, "warps": 8})):
        tune.write_gpu_file(tmp_path, GPU.name, GPU.arch, "", {"rms_norm": [row]})
    assert {row.use["warps"] for row in written(tmp_path)["rms_norm"]} == {8}
    assert len(written(tmp_path)["rms_norm"]) == 2


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "soon"])
def test_minutes_are_a_positive_number(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.make_tune_parser().parse_args([f"--minutes={minutes}"])
    assert "--minutes" in capsys.readouterr().err


def reopened(path: Path, change: Callable[[str], str], **about: object) -> TuneJournal:
    journal = TuneJournal(path, ABOUT)
    journal.add("activation", ROW, ROW.use, 1.5)
    journal.add("activation", ROW, {**ROW.use, "warps": 2}, None)
    path.write_text(change(path.read_text()))
    return TuneJournal(path, ABOUT | about)


def test_a_journal_is_read_again(tmp_path: Path) -> None:
    again = reopened(tmp_path / "journal", lambda text: text)
    turned = dict(reversed([*ROW.use.items()]))
    assert again.time("activation", ROW, turned) == 1.5
    assert again.time("activation", ROW, {**ROW.use, "warps": 2}) is None
    assert ("activation", ROW, {**ROW.use, "warps": 8}) not in again


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    again = reopened(path, lambda text: text[:-9])
    assert len(again) == 1
    again.add("activation", ROW, {**ROW.use, "warps": 8}, 2.0)
    assert len(TuneJournal(path, ABOUT)) == 2


def test_times_of_other_versions_do_not_count(tmp_path: Path) -> None:
    assert len(reopened(tmp_path / "journal", lambda text: text, triton="3.6")) == 0


def test_a_file_that_is_no_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(TilesError, match="journal, line 2 is not a journal entry: nonsense"):
        reopened(tmp_path / "journal", lambda text: text.replace("\n", "\nnonsense\n", 1))

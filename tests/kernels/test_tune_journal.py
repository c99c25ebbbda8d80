"""A tuner that is stopped has lost nothing, and goes on where it was."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from gllm.kernels import tune
from gllm.kernels.triton import tiles, workloads
from gllm.kernels.triton.tiles import TileRow, TilesError
from gllm.kernels.tune import TileConfig
from gllm.kernels.tune_journal import TuneJournal

GPU = tune.GpuInfo("NVIDIA H200", 90)
ABOUT = {"device": GPU.name, "architecture": GPU.arch}
TABLES = ["activation", "quantize"]
ROW = TileRow({}, {"elements": 1024, "warps": 4})


class Timed:
    """Something that is right, and whose time a test tells."""

    limit = 0.1

    def error(self) -> float:
        return 0.0


class Clock:
    """Counts what is timed; the larger the tiles, the faster."""

    def __init__(self) -> None:
        self.seen: list[TileConfig] = []

    def __call__(self, prepared: object) -> float:
        use = tiles.choose_tiles(self.table)
        self.seen.append(use)
        return 1.0 / sum(use.values())

    table = TABLES[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()

    def list_rows(tables: Sequence[str], every: object) -> object:
        for table in tables:
            made.table = table
            for row in tiles.read_tile_file(tiles.DEFAULT).tables[table]:
                yield table, row, []

    monkeypatch.setattr(tune, "list_rows", list_rows)
    monkeypatch.setattr(tune, "_prepare", lambda own: [Timed()])
    monkeypatch.setattr(workloads, "list_workloads", list)
    return made


def run(folder: Path, clock: Clock, *arguments: str, tables: Sequence[str] = TABLES) -> int:
    options = tune.parser().parse_args([*tables, "--output", str(folder), *arguments])
    return tune.tune(options, GPU, "the command", clock, lambda table, row, use: True)


def written(folder: Path) -> dict[str, list[TileRow]]:
    path = folder / "nvidia-h200.json"
    found = tiles.parse_tile_file(
        str(path), json.loads(path.read_text()), tiles.read_tile_file(tiles.DEFAULT).tables
    )
    return {name: list(rows) for name, rows in found.tables.items()}


def tick(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the tuner's clock go on by so many seconds at each look."""
    times = itertools.count(0.0, seconds)
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: next(times)))


def test_each_row_is_written_as_it_is_done(tmp_path: Path, clock: Clock) -> None:
    class Stopped(BaseException):
        pass

    def stopping(prepared: object) -> float:
        if clock.table == TABLES[1] and len(clock.seen) > 14:
            raise Stopped
        return Clock.__call__(clock, prepared)

    options = tune.parser().parse_args([*TABLES, "--output", str(tmp_path)])
    with pytest.raises(Stopped):
        tune.tune(options, GPU, "the command", stopping, lambda table, row, use: True)
    assert {*written(tmp_path)} == {TABLES[0]}
    before = [*clock.seen]
    assert run(tmp_path, clock) == 0
    assert {*written(tmp_path)} == {*TABLES}
    # Nothing is timed twice, and nothing is left out.
    (own,) = tiles.read_tile_file(tiles.DEFAULT).tables[TABLES[1]]
    every = list(tune.list_candidates(TABLES[1], own))
    assert [use for use in clock.seen if "groups" in use] == every
    assert clock.seen[: len(before)] == before


def test_minutes_stop_the_tuner_between_two_tiles(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tick(monkeypatch, 10.0)
    assert run(tmp_path, clock, "--minutes", "1") == 0
    assert 1 < len(clock.seen) < 8
    assert [*written(tmp_path)] == TABLES[:1]
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 rows are left")
    tick(monkeypatch, 0.0)
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
        tune.parser().parse_args([f"--minutes={minutes}"])
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

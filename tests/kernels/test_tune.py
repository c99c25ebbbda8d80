"""Which tiles are tried, trusted and taken, by a clock that says what a test wants."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gllm.kernels import aot, tune
from gllm.kernels.triton import tiles
from gllm.kernels.triton.tiles import TileRow, choose_tiles
from gllm.kernels.tune import TileConfig

ROW = tiles.find_default_row("linear_fp8", {"tokens": 16})


@dataclass
class Fake:
    """Something to time: what it computes and how long it takes is up to the tiles in use."""

    time: Callable[[TileConfig], float]
    off: Callable[[TileConfig], float] = lambda use: 0.0
    limit: float = 0.1
    seen: list[TileConfig] = field(default_factory=list)

    def error(self) -> float:
        self.seen.append(choose_tiles("linear_fp8", tokens=3))
        return self.off(self.seen[-1])


def clock(fake: Any) -> float:
    return fake.time(choose_tiles("linear_fp8", tokens=3))


def tuned(
    *fakes: Any, is_trusted: Callable[[TileConfig], bool] = lambda use: True
) -> tune.TuneResult:
    measure = partial(tune.measure_tiles, fakes, clock)
    return tune.tune_row("linear_fp8", ROW, measure, lambda table, row, use: is_trusted(use))


def size(use: TileConfig) -> float:
    return float(use["rows"] * use["columns"] * use["warps"] * use["stages"])


@pytest.mark.parametrize("table", tune.CANDIDATE_VALUES)
def test_candidates_are_all_different_good_rows_and_begin_with_their_own(table: str) -> None:
    for row in tiles.read_tile_file(tiles.DEFAULT).tables[table]:
        every = list(tune.list_candidates(table, row))
        assert every[0] == row.use
        assert len({tuple(use.items()) for use in every}) == len(every) > 5
        load_kernel_specs = [{"up_to": dict(row.up_to), **use} for use in every]
        about = {"device": "", "architecture": 90, "timed": True, "how": "", "date": ""}
        known = {table: [row]}
        tiles.parse_tile_file(
            "here", {**about, "versions": {}, "tables": {table: load_kernel_specs}}, known
        )


def test_the_fastest_is_taken() -> None:
    fake = Fake(lambda use: 1 / size(use))
    best = tuned(fake)
    every = list(tune.list_candidates("linear_fp8", ROW))
    assert best.row == TileRow(ROW.up_to, max(every, key=size))
    assert fake.seen == every
    assert best.timed == len(every)
    assert best.default / best.best == pytest.approx(size(best.row.use) / size(ROW.use))
    assert choose_tiles("linear_fp8", tokens=3) == ROW.use


def test_times_count_by_their_product() -> None:
    """Ten times as fast for one of two is more than thrice as slow for the other."""
    special = {"rows": 64, "columns": 64, "warps": 8, "stages": 2}
    first = Fake(lambda use: 0.1 if use == special else 1.0)
    second = Fake(lambda use: 3.0 if use == special else 1.0)
    best = tuned(first, second)
    assert best.row.use == special
    assert best.best == pytest.approx(math.sqrt(0.3))
    assert tuned(first, second, Fake(lambda use: 4.0 if use == special else 1.0)).row == ROW


def test_what_is_wrong_or_does_not_run_is_never_taken() -> None:
    def off(use: TileConfig) -> float:
        if use["warps"] == 8:
            raise RuntimeError("out of resource: shared memory")
        return math.nan if use["rows"] == 128 else 0.2 if use["columns"] == 128 else 0.1

    best = tuned(Fake(lambda use: 1 / size(use), off))
    assert best.row.use == {"rows": 64, "columns": 64, "warps": 4, "stages": 6}


def test_the_fastest_that_compiles_well_is_taken_and_no_more_are_compiled() -> None:
    asked: list[TileConfig] = []

    def is_trusted(use: TileConfig) -> bool:
        asked.append(use)
        return use["stages"] < 3

    best = tuned(Fake(lambda use: 1 / size(use)), is_trusted=is_trusted)
    assert best.row.use == {"rows": 128, "columns": 128, "warps": 8, "stages": 2}
    assert all(size(use) >= size(best.row.use) for use in asked)


def test_its_own_tiles_stay_where_nothing_better_fits() -> None:
    best = tuned(Fake(lambda use: 1 / size(use)), is_trusted=lambda use: False)
    assert best.row == ROW
    assert best.best == best.default
    assert tuned(Fake(lambda use: 1.0)).row == ROW


def test_a_kernel_that_is_wrong_with_its_own_tiles_is_an_error() -> None:
    wrong = Fake(lambda use: 1.0, lambda use: 1.0 if use == ROW.use else 0.0)
    with pytest.raises(ValueError, match=r"linear_fp8 {'tokens': 16} is wrong with its own tiles"):
        tuned(wrong)


def test_tiles_fit_where_nothing_that_they_are_compiled_for_has_a_fault() -> None:
    asked: list[aot.CompileJob] = []

    def compiled(spilled: int) -> Callable[[Iterable[aot.CompileJob]], list[aot.CompileResult]]:
        def run(jobs: Iterable[aot.CompileJob]) -> list[aot.CompileResult]:
            asked.extend(jobs)
            made = [aot.CompileResult("kernel", "label", 90, False) for _ in asked]
            return [*made[:-1], aot.CompileResult("kernel", "label", 90, False, spilled=spilled)]

        return run

    use = {**ROW.use, "warps": 2}
    assert tune.is_trusted(90, compiled(0), "linear_fp8", ROW, use)
    assert not tune.is_trusted(90, compiled(4), "linear_fp8", ROW, use)
    labels = {aot.load_kernel_specs(job.module)[job.index].label.split(",")[0] for job in asked}
    assert labels == {"decode", "16 tokens in parts"}
    assert {job.use for job in asked} == {tuple(use.items())}
    every = tune.list_compile_jobs("linear_fp8", ROW, use, 90)
    assert len(tune.list_compile_jobs("linear_fp8", ROW, use, 80)) < len(every)


def test_a_file_is_written_and_tables_that_were_not_tuned_stay(tmp_path: Path) -> None:
    default = tiles.read_tile_file(tiles.DEFAULT).tables
    found = {"linear_fp8": [TileRow(ROW.up_to, {**ROW.use, "warps": 2})]}
    path = tune.write_gpu_file(tmp_path, "NVIDIA H200", 90, "a command", found)
    assert path == tmp_path / "nvidia-h200.json"
    more = {"qkv": [TileRow({}, {"elements": 512, "warps": 2})]}
    tune.write_gpu_file(tmp_path, "NVIDIA H200", 90, "another command", more)
    read = tiles.parse_tile_file(str(path), json.loads(path.read_text()), default)
    assert read.tables == found | more
    assert (read.device, read.architecture, read.timed) == ("NVIDIA H200", 90, True)
    assert read.how == "another command"
    assert {*read.versions} == {"torch", "triton"}
    assert len(read.date) == 10


def test_bad_calls_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["linear"]) == 2
    assert "no table linear: there are prefill, decode," in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_there_has_to_be_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main([]) == 2
    assert "tuning needs a GPU" in capsys.readouterr().err

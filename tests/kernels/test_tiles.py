"""Tables of tiles: what a file has to be, and which one is used."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gllm.kernels.triton import tiles
from gllm.kernels.triton.tiles import TileRow, TilesError

SHIPPED = sorted(path.stem for path in tiles.FOLDER.glob("*.json"))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_are_well(name: str) -> None:
    """And written as the command writes them."""
    assert tiles.read_tile_file(name).to_json() == (tiles.FOLDER / f"{name}.json").read_text()


def test_the_default_was_not_timed_and_is_for_every_gpu() -> None:
    default = tiles.read_tile_file(tiles.DEFAULT)
    assert (default.timed, default.architecture) == (False, 0)


def content() -> Any:
    """Of a file for a GPU, with a row of one table."""
    row = {"up_to": {"tokens": 16}, "rows": 16, "columns": 64, "warps": 2, "stages": 4}
    about = {"device": "NVIDIA H200", "architecture": 90, "timed": True, "how": "a command"}
    return {**about, "date": "", "versions": {}, "tables": {"linear_fp8": [row]}}


def write(folder: Path, name: str, what: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps(what))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that has the default alone."""
    (tmp_path / "default.json").write_text((tiles.FOLDER / "default.json").read_text())
    return tmp_path


def test_a_gpu_has_its_file_or_that_of_its_architecture(folder: Path) -> None:
    default = tiles.read_tile_file(tiles.DEFAULT).tables
    assert tiles.load_tables("NVIDIA H200", 90, folder) == default
    write(folder, "nvidia-h200", content())
    other = content()
    other["device"], other["tables"]["linear_fp8"][0]["warps"] = "NVIDIA H100", 8
    write(folder, "nvidia-h100", other)
    for device, architecture, warps in (
        ("NVIDIA H200", 90, 2),
        ("NVIDIA H100", 90, 8),
        ("NVIDIA H20", 90, 8),
        ("NVIDIA L4", 89, default["linear_fp8"][0].use["warps"]),
    ):
        found = tiles.load_tables(device, architecture, folder)
        assert found["linear_fp8"][0].use["warps"] == warps
        assert found["linear_fp8"][1:] == default["linear_fp8"][1:]
        assert found["prefill"] == default["prefill"]


def test_the_first_row_that_fits_is_chosen_and_replaced_rows_come_back() -> None:
    assert tiles.choose_tiles("linear_fp8", tokens=1) == tiles.choose_tiles("linear_fp8", tokens=16)
    assert tiles.choose_tiles("linear_fp8", tokens=16) != tiles.choose_tiles(
        "linear_fp8", tokens=17
    )
    before = tiles.choose_tiles("linear_fp8", tokens=16)
    with tiles.override_tiles({"linear_fp8": [TileRow({"tokens": 16}, {"rows": 32})]}):
        assert tiles.choose_tiles("linear_fp8", tokens=3) == {"rows": 32}
        with tiles.override_tiles({"linear_fp8": [TileRow({"tokens": 32}, {"rows": 64})]}):
            assert tiles.choose_tiles("linear_fp8", tokens=3) == {"rows": 32}
            assert tiles.choose_tiles("linear_fp8", tokens=30) == {"rows": 64}
        assert tiles.choose_tiles("linear_fp8", tokens=30) != {"rows": 64}
    assert tiles.choose_tiles("linear_fp8", tokens=16) == before


def test_sizes_that_no_row_is_for() -> None:
    with pytest.raises(ValueError, match="no tiles for decode of head 1024, bytes 2: kernels"):
        tiles.choose_tiles("decode", head=1024, bytes=2)


def test_names_of_files() -> None:
    assert (
        tiles.tile_file_name("NVIDIA GeForce RTX 4090 (laptop)") == "nvidia-geforce-rtx-4090-laptop"
    )


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("device",), 3, "device is 3, but a str"),
        (("architecture",), "90", "architecture is '90', but a int"),
        (("timed",), 1, "timed is 1, but a bool"),
        (("versions",), None, "versions is None, but a dict"),
        (("tables",), [], "tables is [], but a dict"),
        (("more",), 1, "nothing is known of more"),
        (("tables", "linear"), [], "tables.linear is of no kernel"),
        (("tables", "linear_fp8"), [], "tables.linear_fp8 is no list of objects"),
        (("tables", "linear_fp8"), [3], "tables.linear_fp8 is no list of objects"),
        (("tables", "linear_fp8", 0, "up_to"), 3, "tables.linear_fp8[0].up_to is 3"),
        (("tables", "linear_fp8", 0, "up_to"), {"tokens": 17}, "default.json has no such row"),
        (("tables", "linear_fp8", 0, "warps"), 3, "[0].warps is 3, but a power of two from 1"),
        (("tables", "linear_fp8", 0, "warps"), 2.0, "[0].warps is 2.0, but a power of two"),
        (("tables", "linear_fp8", 0, "warps"), True, "[0].warps is True, but a power of two"),
        (("tables", "linear_fp8", 0, "rows"), 8, "[0].rows is 8, but a power of two from 16 to"),
        (("tables", "linear_fp8", 0, "stages"), 9, "[0].stages is 9, but an integer from 1 to 8"),
        (("tables", "linear_fp8", 0, "keys"), 16, "says rows, columns, warps, stages, keys, but"),
        (("tables", "linear_fp8", 0, "lanes"), 16, "[0].lanes is no choice: rows, keys,"),
    ],
    ids=str,
)
def test_a_bad_file_is_named_with_its_field(
    place: tuple[Any, ...], value: Any, said: str, folder: Path
) -> None:
    made = content()
    inside = made
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = copy.deepcopy(value)
    write(folder, "nvidia-h200", made)
    with pytest.raises(TilesError, match=re.escape(said)) as caught:
        tiles.read_tile_file("nvidia-h200", folder)
    assert str(folder / "nvidia-h200.json") in str(caught.value)


def test_what_is_no_json(folder: Path) -> None:
    (folder / "nvidia-h200.json").write_text("{")
    with pytest.raises(TilesError, match=r"nvidia-h200.json is no JSON"):
        tiles.read_tile_file("nvidia-h200", folder)
    write(folder, "other", [])
    with pytest.raises(TilesError, match=r"other.json is no object"):
        tiles.read_tile_file("other", folder)

"""The folder of packed weights, by a model's small modules: keys, limits and faults."""

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gllm.config.sized_folder import SizedFolder
from gllm.kernels.linear_unquantized import UnquantizedMatrix
from gllm.models.ranks import Ranks
from gllm.models.weight_cache import weight_cache
from gllm.models.weight_cache.weight_cache import WeightCache

RANKS = Ranks()


def save_model(folder: Path, value: float = 0.0) -> Path:
    """Write files that look like a model's."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.full((4,), value)}, folder / "model.safetensors")
    return folder


def matrix(index: int) -> UnquantizedMatrix:
    """Return the part of an index."""
    return UnquantizedMatrix(torch.full((8, 128), float(index)), 8, False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


def open_cache(folder: Path, model: Path, limit: int | None = None, **facts: object) -> WeightCache:
    """Open a cache whose parts are described by their index."""
    options = SizedFolder(folder, limit)
    return WeightCache(
        options, model, {"dtype": "torch.float32", **facts}, lambda index: index, RANKS
    )


def fill(cache: WeightCache, *indices: int) -> WeightCache:
    """Store parts, and check that those that are returned have the same weights."""
    for index in indices:
        part = cache.store(index, matrix(index), 7)
        assert torch.equal(part.weight, matrix(index).weight)
    return cache


def held(cache: WeightCache, *indices: int) -> list[int]:
    """Return the indices of those parts that the cache has, whose weights are checked."""
    found = []
    for index in indices:
        if (loaded := cache.load(index)) is not None:
            part, num_bytes = loaded
            assert torch.equal(part.weight, matrix(index).weight)
            assert num_bytes == 7
            found.append(index)
    return found


def paths(folder: Path) -> list[Path]:
    """Return the files of the folder, the oldest first."""
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)


def test_parts_are_written_once_and_mapped_by_others(folder: Path, model: Path) -> None:
    assert held(open_cache(folder, model), 0, 1) == []
    fill(open_cache(folder, model), 0, 1)
    written = {path.name: path.stat().st_ino for path in paths(folder)}
    assert len(written) == 2
    assert held(open_cache(folder, model), 0, 1, 2) == [0, 1]
    # Whoever packs the same meanwhile maps what is there.
    fill(open_cache(folder, model), 0, 1)
    assert {path.name: path.stat().st_ino for path in paths(folder)} == written
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "facts",
    [{"dtype": "torch.bfloat16"}, {"rank": [0, 2]}, {"kernels": "build avx2"}, {"overrides": "{}"}],
)
def test_other_facts_are_other_parts(folder: Path, model: Path, facts: dict[str, Any]) -> None:
    fill(open_cache(folder, model), 0)
    assert held(open_cache(folder, model, **facts), 0) == []
    fill(open_cache(folder, model, **facts), 0)
    assert len(paths(folder)) == 2
    assert held(open_cache(folder, model), 0) == [0]


def test_files_of_another_model_stay_and_those_of_changed_files_go(
    folder: Path, model: Path, tmp_path: Path
) -> None:
    fill(open_cache(folder, model), 0)
    fill(open_cache(folder, save_model(tmp_path / "other", 1.0)), 0, 1)
    assert len(paths(folder)) == 3
    save_model(model, 2.0)
    assert held(open_cache(folder, model), 0) == []
    assert len(paths(folder)) == 2


def test_the_same_bytes_at_another_time_are_other_files(folder: Path, model: Path) -> None:
    """hash_model reads samples: what it does not see has another time of change."""
    fill(open_cache(folder, model), 0)
    os.utime(model / "model.safetensors", (1, 1))
    assert held(open_cache(folder, model), 0) == []
    assert not paths(folder)


def test_files_of_another_version_of_the_code_go(
    folder: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(open_cache(folder, model), 0)
    fill(open_cache(folder, save_model(tmp_path / "other")), 0)
    monkeypatch.setattr(weight_cache, "hash_code", lambda: "of other code")
    assert held(open_cache(folder, model), 0) == []
    assert not paths(folder)


def test_engines_with_other_compiled_kernels_keep_their_files(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(open_cache(folder, model), 0)
    with monkeypatch.context() as patch:
        patch.setattr(weight_cache, "hash_build", lambda: "of another build")
        assert held(open_cache(folder, model), 0) == []
        fill(open_cache(folder, model), 0)
    assert held(open_cache(folder, model), 0) == [0]
    assert len(paths(folder)) == 2


def test_the_code_has_one_digest() -> None:
    assert len(weight_cache.hash_code.__wrapped__()) == 64
    assert weight_cache.hash_code.__wrapped__() == weight_cache.hash_code()


def test_a_model_that_changes_while_it_is_read_is_not_kept(folder: Path, model: Path) -> None:
    cache = open_cache(folder, model)
    fill(cache, 0)
    save_model(model, 3.0)
    fill(cache, 1)
    assert len(paths(folder)) == 1


def test_kernels_that_were_chosen_anew_pack_anew(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(open_cache(folder, model), 0)
    monkeypatch.setattr(weight_cache, "describe_kernels", lambda dtype: "torch for linear")
    assert held(open_cache(folder, model), 0) == []
    fill(open_cache(folder, model), 0)
    assert held(open_cache(folder, model), 0) == [0]
    assert len(paths(folder)) == 1


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def use_of_another_part(path: Path) -> None:
    (other,) = (each for each in path.parent.iterdir() if each != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [flip, truncate, open_to_all, use_of_another_part])
def test_a_damaged_file_is_packed_anew_and_said_once(
    folder: Path,
    model: Path,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill(open_cache(folder, model), 0, 1)
    damage(paths(folder)[0])
    cache = open_cache(folder, model)
    with caplog.at_level(logging.WARNING):
        (intact,) = held(cache, 0, 1)
        fill(cache, 1 - intact)
        assert held(cache, 0, 1) == [0, 1]
        flip(paths(folder)[0])
        assert len(held(cache, 0, 1)) == 1
    (record,) = caplog.records
    assert "is not used" in record.message
    assert str(folder) in record.message


def test_a_link_is_not_followed_and_replaced(folder: Path, model: Path, tmp_path: Path) -> None:
    fill(open_cache(folder, model), 0)
    (path,) = paths(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    cache = open_cache(folder, model)
    assert held(cache, 0) == []
    assert held(fill(cache, 0), 0) == [0]
    assert not path.is_symlink()
    assert (tmp_path / "elsewhere").exists()


def test_files_of_another_user_are_neither_used_nor_removed(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(open_cache(folder, model), 0)
    before = [path.stat().st_ino for path in paths(folder)]
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    cache = open_cache(folder, model)
    with caplog.at_level(logging.WARNING):
        assert held(cache, 0) == []
        fill(cache, 0)
    assert [path.stat().st_ino for path in paths(folder)] == before
    assert len(caplog.records) == 1
    assert f"belongs to user {me}" in caplog.records[0].message


def test_the_limit_removes_what_was_used_longest_ago(
    folder: Path, model: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path / "other", 1.0)
    (folder.parent / "cache").mkdir()
    (folder / "notes").write_bytes(bytes(10**6))
    fill(open_cache(folder, other), 0, 1, 2)
    size = max(path.stat().st_size for path in paths(folder) if path.name != "notes")
    for age, path in enumerate(path for path in paths(folder) if path.name != "notes"):
        os.utime(path, (time.time() - 100 + age, time.time() - 100 + age))
    assert held(open_cache(folder, other), 0) == [0]
    # Three files fit: of the two that nobody has used since, the older one goes.
    fill(open_cache(folder, model, 3 * size + size // 2), 0)
    assert held(open_cache(folder, other), 0, 1, 2) == [0, 2]
    assert held(open_cache(folder, model), 0) == [0]
    assert (folder / "notes").exists()


def test_what_exceeds_the_limit_is_served_without(
    folder: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(open_cache(folder, model), 0)
    size = paths(folder)[0].stat().st_size
    cache = open_cache(folder, model, 2 * size + size // 2)
    with caplog.at_level(logging.WARNING):
        assert held(cache, 0) == [0]
        fill(cache, 1, 2, 3)
    # None of the files of this load is removed for another one.
    assert held(open_cache(folder, model), 0, 1, 2, 3) == [0, 1]
    (record,) = caplog.records
    assert "not kept: its limit is" in record.message


def test_a_full_disk_is_served_without_and_said_once(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def allocate(descriptor: int, offset: int, size: int) -> None:
        calls.append(size)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with caplog.at_level(logging.WARNING):
        fill(open_cache(folder, model), 0, 1, 2, 3)
    assert len(calls) == 2
    (record,) = caplog.records
    assert "not kept: No space left on device" in record.message
    assert held(open_cache(folder, model), 0, 1, 2, 3) == [0]


def test_a_folder_that_cannot_be_is_served_without(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    cache = open_cache(tmp_path / "file" / "cache", model)
    assert held(fill(cache, 0), 0) == []
    (record,) = caplog.records
    assert "Not a directory" in record.message


def test_unfinished_files_of_the_dead_are_removed_later(folder: Path, model: Path) -> None:
    fill(open_cache(folder, model), 0)
    (path,) = paths(folder)
    old, new = folder / f".{path.name}.1f.tmp", folder / f".{path.name}.2f.tmp"
    for each in (old, new):
        each.touch()
    os.utime(old, (1, 1))
    open_cache(folder, model)
    assert not old.exists()
    assert new.exists()


def test_parts_that_cannot_be_encoded_stay_out(folder: Path, model: Path) -> None:
    cache = open_cache(folder, model)
    part = (matrix(0), lambda: None)
    assert cache.store(0, part, 7) is part
    options = SizedFolder(folder)
    by_function = WeightCache(options, model, {}, lambda index: print, RANKS)
    assert by_function.load(0) is None
    one = matrix(0)
    assert by_function.store(0, one, 7) is one
    assert not paths(folder)

"""Files of packed weights: written as a whole, and used only if they are whole."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.models.ranks import Ranks
from gllm.models.weight_cache.part_codec import decode_part, encode_part
from gllm.models.weight_cache.part_file import (
    MODE,
    PAGE_BYTES,
    TRAILER,
    PartHeader,
    UnusableFileError,
    map_part_file,
    write_part_file,
)

RANKS = Ranks()
WEIGHTS = torch.arange(3000, dtype=torch.int32)


def write(path: Path, weights: torch.Tensor = WEIGHTS, **options: Any) -> Path:
    """Write a file with one tensor."""
    part = encode_part((weights,), RANKS)
    write_part_file(path, part, PartHeader("key", {}, 5, 0, "", part.tree), **options)
    return path


def read(path: Path) -> torch.Tensor:
    """Map the tensor."""
    mapped = map_part_file(path)
    assert mapped is not None
    header, data = mapped
    assert (header.key, header.weight_bytes) == ("key", 5)
    (weights,) = decode_part(header.tree, data, RANKS)
    assert isinstance(weights, torch.Tensor)
    return weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a file."""
    return write(tmp_path_factory.mktemp("whole") / "part").read_bytes()


def rewrite(path: Path, content: bytes) -> Path:
    """Replace a file by one that only this user can read."""
    path.unlink(missing_ok=True)
    path.touch(MODE)
    path.write_bytes(content)
    return path


def test_a_file_is_mapped_read_only_from_shared_memory(tmp_path: Path) -> None:
    assert map_part_file(tmp_path / "part") is None
    path = write(tmp_path / "part")
    first, second = read(path), read(path)
    assert torch.equal(first, WEIGHTS)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    ranges = [line.split()[:2] for line in maps]
    assert [rights for _, rights in ranges] == ["r--s", "r--s"]
    for tensor in (first, second):
        owners = [
            span
            for span, _ in ranges
            if int(span.split("-")[0], 16) <= tensor.data_ptr() < int(span.split("-")[1], 16)
        ]
        assert len(owners) == 1
    assert path.stat().st_mode & 0o777 == MODE
    assert [each.name for each in tmp_path.iterdir()] == ["part"]


def test_mapped_weights_outlive_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "part")
    weights = read(path)
    path.unlink()
    assert torch.equal(weights, WEIGHTS)


def test_a_part_without_weights_has_a_file_too(tmp_path: Path) -> None:
    assert read(write(tmp_path / "part", torch.empty(0, 4))).shape == (0, 4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_flipped_bit_is_noticed(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    """Also in the padding: nobody knows that it does not matter."""
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(UnusableFileError):
        map_part_file(rewrite(tmp_path / "part", bytes(damaged)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_truncation_is_noticed(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(UnusableFileError):
        map_part_file(rewrite(tmp_path / "part", whole[:length]))


def test_pages_that_were_never_written_or_swapped_are_noticed(tmp_path: Path, whole: bytes) -> None:
    """As after a crash of the machine, when a file has its size and name already."""
    first, second, rest = whole[:PAGE_BYTES], whole[PAGE_BYTES : 2 * PAGE_BYTES], whole[8192:]
    for content in (first + bytes(PAGE_BYTES) + rest, second + first + rest):
        with pytest.raises(UnusableFileError, match="data are damaged"):
            map_part_file(rewrite(tmp_path / "part", content))


def test_a_file_of_another_schema_is_not_used(tmp_path: Path, whole: bytes) -> None:
    magic, schema, *rest = TRAILER.unpack(whole[-TRAILER.size :])
    content = whole[: -TRAILER.size] + TRAILER.pack(magic, schema + 1, *rest)
    with pytest.raises(UnusableFileError, match="another version"):
        map_part_file(rewrite(tmp_path / "part", content))


def test_files_that_others_can_write_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "part")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(UnusableFileError, match="symbolic link"):
        map_part_file(tmp_path / "link")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UnusableFileError, match="not a regular file"):
        map_part_file(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe", MODE)
    with pytest.raises(UnusableFileError, match="not a regular file"):
        map_part_file(tmp_path / "pipe")
    for mode in (0o620, 0o604, 0o666):
        path.chmod(mode)
        with pytest.raises(UnusableFileError, match=f"mode {mode:o}"):
            map_part_file(path)
    path.chmod(MODE)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(UnusableFileError, match=f"belongs to user {me}"):
        map_part_file(path)


def test_of_two_writers_one_wins_and_readers_see_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "part"
    barrier = threading.Barrier(8)
    seen: list[torch.Tensor] = []

    def run() -> None:
        barrier.wait()
        write(path)
        seen.append(read(path))

    threads = [threading.Thread(target=run) for _ in range(barrier.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == barrier.parties
    assert all(torch.equal(weights, WEIGHTS) for weights in seen)
    # One file for all: their pages are shared.
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[4] for line in maps if str(path) in line}) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["part"]


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "link"])
def test_a_full_disk_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "part")
    assert not list(tmp_path.iterdir())


def test_writes_that_end_early_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:1000], at))
    assert torch.equal(read(write(tmp_path / "part")), WEIGHTS)


def test_room_is_made_for_the_whole_file(tmp_path: Path) -> None:
    sizes: list[int] = []
    path = write(tmp_path / "part", reserve=sizes.append)
    assert sizes == [path.stat().st_size]

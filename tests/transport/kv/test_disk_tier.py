"""Disk tier of a KV mover: blocks that are stored and loaded, and disks that do not work."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from gllm.config.sized_folder import SizedFolder
from gllm.messages.kv_disk import (
    CopyKvToDisk,
    DiscardKvOnDisk,
    KvDiskCopied,
    KvDiskFailed,
    KvDiskLost,
    KvDiskOpened,
    KvDiskRecords,
    KvDiskWritten,
    LoadKvFromDisk,
    PrefetchKvOnDisk,
    WriteKvToDisk,
)
from gllm.messages.kv_layout import KvLayout
from gllm.messages.kv_transfer import CancelKvFetch, KvFetched
from gllm.scheduler.disk_index import DiskBlock
from gllm.transport.kv import disk_tier
from gllm.transport.kv.disk_tier import SECRET_NAME, hash_layout
from gllm.transport.kv.memory_pressure import HIGH_PERCENT
from gllm.transport.kv.record_file import PAGE_BYTES, count_record_bytes
from tests.support.engines.kv_caches import CachedEngine, make_contents
from tests.support.engines.kv_layouts import cut_layouts

BLOCKS = [2, 0, 3]
KEYS = [bytes([number]) * 16 for number in range(3)]
RECORDS = [
    DiskBlock(key, parent, 4 * number, 1.0)
    for number, (key, parent) in enumerate(zip(KEYS, [b"r" * 16, *KEYS], strict=False))
]
CONTENTS = make_contents(12, seed=3)
MEBIBYTE = 2**20


@contextmanager
def opened(
    folder: Path, layouts: list[KvLayout] | None = None, max_bytes: int = 2 * MEBIBYTE
) -> Iterator[CachedEngine]:
    engine = CachedEngine(layouts or cut_layouts(2, 1), disk=SizedFolder(folder, max_bytes))
    try:
        yield engine
    finally:
        engine.mover.close()
        wait_until_closed(engine)


def wait_until_closed(engine: CachedEngine) -> None:
    assert engine.mover._disk is not None
    engine.mover._disk._writer.shutdown(wait=True)


def store(engine: CachedEngine, block_ids: list[int] = BLOCKS) -> KvDiskWritten:
    engine.fill(CONTENTS, block_ids)
    engine.mover.handle(CopyKvToDisk(1, block_ids))
    assert engine.wait(KvDiskCopied).number == 1
    # What is overwritten after the copy is not stored.
    engine.fill(make_contents(12, seed=9), block_ids)
    engine.mover.handle(WriteKvToDisk(1, [0, 1, 2], RECORDS, []))
    return engine.wait(KvDiskWritten)


def load(engine: CachedEngine, block_ids: list[int], keys: list[bytes] = KEYS) -> KvFetched:
    engine.mover.handle(PrefetchKvOnDisk(keys))
    engine.mover.handle(LoadKvFromDisk(7, keys, block_ids))
    return engine.wait(KvFetched)


def damage(folder: Path) -> None:
    """Flip a bit of the second block in the file of the second stage."""
    name = hash_layout(cut_layouts(2, 1)[1]).hex()
    stride = count_record_bytes(cut_layouts(2, 1)[1].bytes_per_token * 4)
    with (folder / f"{name}.gllm-kv").open("r+b") as file:
        place = PAGE_BYTES + stride + 200
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 8]))


def test_blocks_of_all_workers_are_there_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with opened(folder) as engine:
        first = engine.wait(KvDiskOpened)
        assert store(engine).keys == KEYS
    assert folder.stat().st_mode & 0o777 == 0o700
    # More blocks of the same stages make no difference.
    with opened(folder, cut_layouts(2, 1, num_blocks=20)) as engine:
        assert sorted(engine.wait(KvDiskRecords).blocks) == sorted(RECORDS)
        assert engine.wait(KvDiskOpened).secret == first.secret
        done = load(engine, [5, 1, 4])
        assert done.is_ok, done.cause
        assert not engine.differs(CONTENTS, [5, 1, 4], 0)
        assert done.num_bytes == 3 * 4 * sum(each.layout.bytes_per_token for each in engine.pages)


def test_ranks_with_the_same_heads_share_a_file(tmp_path: Path) -> None:
    with opened(tmp_path, cut_layouts(1, 4)) as engine:
        assert store(engine).keys == KEYS
        assert load(engine, [5, 1, 4]).is_ok
        assert not engine.differs(CONTENTS, [5, 1, 4], 0)
    assert len(list(tmp_path.glob("*.gllm-kv"))) == 2


@pytest.mark.parametrize(
    "other",
    [
        cut_layouts(1, 1),
        cut_layouts(2, 1, block_size=2),
        cut_layouts(2, 1, dtype="bfloat16"),
        cut_layouts(2, 1, key_bytes=4, value_bytes=12),
        cut_layouts(2, 2),
        [msgspec.structs.replace(layout, model="other") for layout in cut_layouts(2, 1)],
    ],
)
def test_blocks_of_another_model_or_division_are_not_found(
    tmp_path: Path, other: list[KvLayout]
) -> None:
    """Groups of layers with other block sizes or shapes are not the same blocks either."""
    with opened(tmp_path) as engine:
        store(engine)
    with opened(tmp_path, other) as engine:
        engine.wait(KvDiskOpened)
        assert not load(engine, [1, 2, 3]).is_ok
    with opened(tmp_path) as engine:
        engine.wait(KvDiskOpened)
        assert load(engine, [5, 1, 4]).is_ok, "the files of others are left alone"


def test_a_damaged_block_fails_the_load_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as engine:
        store(engine)
        damage(tmp_path)
        engine.mover.handle(LoadKvFromDisk(7, KEYS, [5, 1, 4]))
        assert engine.wait(KvDiskLost).keys == [KEYS[1]]
        done = engine.wait(KvFetched)
        assert (done.is_ok, done.cause) == (False, "1 blocks on disk are damaged or missing")
        assert load(engine, [5], KEYS[:1]).is_ok
        assert not load(engine, [5], KEYS[1:2]).is_ok
        assert caplog.text.count("damaged or missing") == 1, "it is said once"
    with opened(tmp_path) as engine:
        # Found damaged by its header alone or not: it is not reported without the others' part.
        engine.wait(KvDiskOpened)
        assert not load(engine, [5, 1], KEYS[:2]).is_ok


def test_a_file_that_is_cut_while_it_is_open_loses_blocks_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        store(engine)
        path = tmp_path / f"{hash_layout(cut_layouts(2, 1)[1]).hex()}.gllm-kv"
        os.truncate(path, PAGE_BYTES + path.stat().st_size // 2)
        assert not load(engine, [5, 1, 4]).is_ok
        assert load(engine, [5], KEYS[:1]).is_ok, "what is before the cut"
        engine.mover.handle(CopyKvToDisk(2, [1]))
        engine.mover.handle(WriteKvToDisk(2, [0], RECORDS[2:], KEYS[2:]))
        assert engine.wait(KvDiskWritten).keys == KEYS[2:]
        assert load(engine, [5], KEYS[2:]).is_ok


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as engine:
        store(engine)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4321)
        with opened(tmp_path) as engine:
            engine.wait(KvDiskFailed)
            assert not load(engine, [1, 2, 3]).is_ok
    assert caplog.text.count("no KV blocks are kept on disk") == 1
    assert "another path" in caplog.text
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_discarded_and_evicted_blocks_are_gone(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        store(engine)
        engine.mover.handle(DiscardKvOnDisk(KEYS[:1]))
        engine.mover.handle(WriteKvToDisk(2, [], [], KEYS[1:2]))
        engine.wait(KvDiskWritten)
        assert not load(engine, [5], KEYS[:1]).is_ok
        assert not load(engine, [5], KEYS[1:2]).is_ok
        assert load(engine, [5], KEYS[2:]).is_ok


def test_a_write_of_another_copy_writes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        engine.wait(KvDiskOpened)
        engine.mover.handle(CopyKvToDisk(1, BLOCKS))
        engine.mover.handle(CopyKvToDisk(2, BLOCKS))
        engine.mover.handle(WriteKvToDisk(1, [0, 1, 2], RECORDS, []))
        assert engine.wait(KvDiskWritten).keys == []


def test_unusable_folders_are_refused_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    with opened(tmp_path) as engine:
        engine.wait(KvDiskFailed)
        assert not load(engine, [1, 2, 3]).is_ok
    assert caplog.text.count("no KV blocks are kept on disk") == 1
    assert "chmod go=" in caplog.text
    tmp_path.chmod(0o700)
    with opened(tmp_path) as engine:
        engine.wait(KvDiskOpened)
        with opened(tmp_path) as second:
            second.wait(KvDiskFailed)
        assert "in use by another engine" in caplog.text
        assert store(engine).keys == KEYS


def test_a_torn_secret_is_replaced(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        first = engine.wait(KvDiskOpened).secret
    (tmp_path / SECRET_NAME).write_bytes(b"torn")
    with opened(tmp_path) as engine:
        second = engine.wait(KvDiskOpened).secret
        assert second != first
        assert len(second) == 32
    (tmp_path / SECRET_NAME).chmod(0o644)
    with opened(tmp_path) as engine:
        engine.wait(KvDiskFailed)


def test_files_of_other_models_leave_half_of_the_space(tmp_path: Path) -> None:
    layouts = cut_layouts(1, 1)
    sizes = [900, 700, 300]
    for age, size in enumerate(sizes):
        path = tmp_path / f"{age:064x}.gllm-kv"
        path.write_bytes(bytes(size * 1024))
        path.chmod(0o600)
        os.utime(path, (age, age))
    (tmp_path / "notes.gllm-kv").write_bytes(bytes(MEBIBYTE))
    with opened(tmp_path, layouts) as engine:
        capacity = engine.wait(KvDiskOpened).capacity
    left = [path.stat().st_size for path in tmp_path.glob("00000*.gllm-kv")]
    assert sum(left) == 1000 * 1024, "the oldest one was removed"
    stride = count_record_bytes(layouts[0].bytes_per_token * 4)
    assert capacity == (2 * MEBIBYTE - 1000 * 1024 - PAGE_BYTES) // stride


def test_a_disk_that_does_not_answer_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_tier, "WATCH_SECONDS", 0.01)
    event = threading.Event()
    with opened(tmp_path) as engine:
        store(engine)
        tier = engine.mover._disk
        assert tier is not None
        for worker in tier._tier.workers:
            monkeypatch.setattr(worker.file._file, "read", lambda *args: event.wait() and b"")
        now = [0.0]
        tier._clock = lambda: now[0]
        engine.mover.handle(LoadKvFromDisk(7, KEYS, [5, 1, 4]))
        now[0] = 100.0
        done = engine.wait(KvFetched)
        assert (done.is_ok, done.cause) == (False, "the disk is slow")
        # Others are computed at once meanwhile.
        assert "has not answered" in load(engine, [6], KEYS[:1]).cause
        assert caplog.text.count("it is slow") == 1
        before = [pages.read_block(5) for pages in engine.pages]
        event.set()
        while tier._tier.running:
            threading.Event().wait(0.005)
        assert before == [pages.read_block(5) for pages in engine.pages]


def test_a_cancelled_load_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as engine:
        store(engine)
        tier = engine.mover._disk
        assert tier is not None
        event, file = threading.Event(), tier._tier.workers[0].file
        read = file.read
        monkeypatch.setattr(file, "read", lambda key: event.wait() and read(key))
        engine.mover.handle(LoadKvFromDisk(7, KEYS, [5, 1, 4]))
        engine.mover.handle(CancelKvFetch(7))
        assert engine.wait(KvFetched).cause == "the load was cancelled"
        before = [pages.read_block(5) for pages in engine.pages]
        event.set()
        while tier._tier.running:
            threading.Event().wait(0.005)
        assert before == [pages.read_block(5) for pages in engine.pages]


def test_a_full_disk_is_said_once_and_the_rest_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as engine:
        store(engine)
        tier = engine.mover._disk
        assert tier is not None

        def fail(*args: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            for worker in tier._tier.workers:
                patch.setattr(worker.file._file, "write", fail)
            for number in (2, 3):
                engine.mover.handle(CopyKvToDisk(number, [1]))
                record = RECORDS[0]._replace(key=bytes([100 + number]) * 16)
                engine.mover.handle(WriteKvToDisk(number, [0], [record], []))
                written = engine.wait(KvDiskWritten)
                assert (written.keys, written.capacity) == ([], 3)
        assert caplog.text.count("cannot be written") == 1
        assert load(engine, [5, 1, 4]).is_ok
        # Freed places are used.
        engine.mover.handle(CopyKvToDisk(4, [1]))
        record = RECORDS[0]._replace(key=b"n" * 16)
        engine.mover.handle(WriteKvToDisk(4, [0], [record], KEYS[:1]))
        assert engine.wait(KvDiskWritten).keys == [b"n" * 16]


def test_an_engine_without_the_tier_refuses_loads() -> None:
    engine = CachedEngine(cut_layouts(1, 1))
    engine.mover.handle(CopyKvToDisk(1, BLOCKS))
    engine.mover.handle(LoadKvFromDisk(7, KEYS, [5, 1, 4]))
    assert engine.wait(KvFetched).cause == "there is no disk tier"
    engine.mover.close()


def test_nothing_is_written_while_memory_is_short(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as engine:
        assert store(engine).keys == KEYS
        tier = engine.mover._disk
        assert tier is not None
        record = RECORDS[0]._replace(key=b"n" * 16)
        # The limit of the way back is lower: 5 % is still short.
        tier._read_pressure = iter((HIGH_PERCENT, 5.0, 50.0, 0.0)).__next__
        for number in (2, 3, 4):
            engine.mover.handle(CopyKvToDisk(number, [1]))
            written = engine.wait(KvDiskWritten)
            assert (written.number, written.keys) == (number, [])
            assert not tier._copy[1], "copies take memory"
        assert caplog.text.count("memory is short") == 1
        assert load(engine, [5, 1, 4]).is_ok, "blocks that are there stay in use"
        engine.mover.handle(CopyKvToDisk(5, [1]))
        engine.wait(KvDiskCopied)
        engine.mover.handle(WriteKvToDisk(5, [0], [record], []))
        assert engine.wait(KvDiskWritten).keys == [record.key]

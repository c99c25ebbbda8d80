"""Disk tier of the prefix cache on one machine: a file of KV blocks for each worker, and threads.

It is part of the KV mover, so that no worker and no step ever waits for a disk. One thread copies
blocks out of the KV caches and writes them; others read. What is kept and what is evicted decides
the driver (gllm/runtime/driver/driver_kv_disk.py).
"""

import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from gllm.config.sized_folder import SizedFolder
from gllm.messages.kv_disk import (
    MAX_BLOCKS,
    CopyKvToDisk,
    DiscardKvOnDisk,
    KvDiskCommand,
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
from gllm.messages.kv_transfer import KvFetched, KvFetchStarted, KvReport
from gllm.scheduler.disk_index import DiskBlock
from gllm.transport.kv.break_even import FetchDeadline
from gllm.transport.kv.fetch_queue import PeerCircuits
from gllm.transport.kv.memory_pressure import PressureGate, read_memory_pressure
from gllm.transport.kv.pages import KvPages, KvPagesError
from gllm.transport.kv.record_file import (
    FORMAT_VERSION,
    PAGE_BYTES,
    RandomAccessFile,
    RecordFile,
    RecordFileError,
    SystemFile,
    check_ownership,
    count_record_bytes,
)
from gllm.transport.kv.transfer_estimate import TransferEstimate

log = logging.getLogger(__name__)

MAX_COPIED_BYTES = 64 * 2**20
"""Memory of the blocks that wait to be written; one block at least."""
NUM_READ_THREADS = 4
"""Requests whose blocks are read at the same time."""
FIRST_GUESS_BYTES_PER_SECOND = 1e8
"""Rate that a deadline assumes before anything was read."""
WATCH_SECONDS = 0.5
"""Interval in which the deadline of a load is checked."""
CLOSE_SECONDS = 5.0
"""Time for which loads that were cancelled may go on before their files stay open."""
FILE_SUFFIX = ".gllm-kv"
SECRET_NAME = "secret.gllm-kv-key"
_SECRET_BYTES = 32
_WRITER_NICENESS = 10
"""Added to the niceness of the thread that writes: steps come first."""
_DISK = b"disk"
"""Name of the disk among the peers of a circuit breaker."""
_FILE_NAME = re.compile(rf"[0-9a-f]{{64}}{re.escape(FILE_SUFFIX)}")

OpenFile = Callable[[Path], RandomAccessFile]
"""Opens a file of KV blocks or creates it. Raises OSError, RecordFileError."""


def hash_layout(layout: KvLayout) -> bytes:
    """Return the 32-byte identity of a worker's KV blocks: model, dtype, block size, layers, heads.

    Workers with equal identities have equal blocks, whatever the number of their blocks.
    """
    same = msgspec.structs.replace(layout, num_blocks=1)
    data = msgspec.msgpack.encode((FORMAT_VERSION, same))
    return hashlib.blake2b(data, digest_size=32).digest()


class _Worker(NamedTuple):
    """KV cache of a worker, and the file of its blocks.

    Ranks whose KV heads are the same share a file.
    """

    pages: list[KvPages]
    """KV caches with equal blocks."""
    file: RecordFile


@dataclass(eq=False)
class _OpenTier:
    """Files of an epoch."""

    epoch: int
    pages: Sequence[KvPages]
    workers: list[_Worker] = field(default_factory=list)
    """Empty until the files are open, and if they cannot be used."""
    loads: "dict[int, _Load]" = field(default_factory=dict)
    """Loads whose end was not reported, by number of the fetch."""
    running: "set[_Load]" = field(default_factory=set)
    """Loads whose thread has not ended: it may still read the files."""
    is_closed: bool = False


@dataclass(eq=False)
class _Load:
    command: LoadKvFromDisk
    tier: _OpenTier
    deadline: FetchDeadline
    begin: float
    is_ended: bool = False
    """True once its end was reported: nothing is written to the KV caches any more."""
    num_bytes: int = 0


class KvDiskTier:
    """Keeps KV blocks of a machine's workers in files, and reads them into the KV caches."""

    def __init__(
        self,
        space: SizedFolder,
        on_report: Callable[[int, KvReport], None],
        clock: Callable[[], float] = time.monotonic,
        open_file: OpenFile = SystemFile,
        read_pressure: Callable[[], float] = read_memory_pressure,
    ) -> None:
        """Create a tier without files.

        Args:
            space: folder and size.
            on_report: called with the epoch and each report, on any thread.
            clock: returns the time in seconds.
            open_file: opens or creates the file of a worker.
            read_pressure: returns the memory pressure in percent, for PressureGate.
        """
        assert space.max_bytes is not None, "the value of the flag has a size"
        self._folder, self._max_bytes = space.folder, space.max_bytes
        self._on_report = on_report
        self._clock, self._open_file = clock, open_file
        self._tier = _OpenTier(0, [], is_closed=True)
        self._lock = threading.Lock()
        """Held while a load begins, writes a block to the KV caches, or ends."""
        self._writer = ThreadPoolExecutor(1, "kv-disk-write", _lower_priority)
        self._readers = ThreadPoolExecutor(NUM_READ_THREADS, "kv-disk-read")
        self._copy: tuple[int, list[list[bytes]]] = (0, [])
        """Number of the last copy, and the blocks of each worker."""
        self._estimate = TransferEstimate()
        self._circuits = PeerCircuits()
        self._has_warned_of_write = self._has_warned_of_read = False
        self._read_pressure, self._gate = read_pressure, PressureGate()
        self._has_warned_of_pressure = False

    def open(self, epoch: int, pages: Sequence[KvPages]) -> None:
        """Open the files of an epoch's workers on a thread; KvDiskOpened follows unless that fails.

        Those of the previous epoch are closed.
        """
        self.close()
        tier = self._tier = _OpenTier(epoch, pages)
        self._writer.submit(self._open, tier)

    def close(self) -> None:
        """End all loads, without reporting them, and close the files on a thread."""
        tier = self._tier
        with self._lock:
            was_closed, tier.is_closed = tier.is_closed, True
            for load in tier.loads.values():
                load.is_ended = True
            tier.loads.clear()
        if not was_closed:
            self._writer.submit(self._close, tier)

    def shut_down(self) -> None:
        """Close the files and end the threads; a disk that does not answer is not waited for."""
        self.close()
        self._writer.shutdown(wait=False)
        self._readers.shutdown(wait=False, cancel_futures=True)

    def handle(self, command: KvDiskCommand) -> None:
        """Execute a command of the driver, on threads of this object."""
        tier = self._tier
        match command:
            case CopyKvToDisk():
                self._writer.submit(self._run, self._copy_blocks, tier, command)
            case WriteKvToDisk():
                self._writer.submit(self._run, self._write_blocks, tier, command)
            case DiscardKvOnDisk():
                self._writer.submit(self._run, self._discard, tier, command)
            case PrefetchKvOnDisk():
                self._readers.submit(self._run, self._prefetch, tier, command)
            case LoadKvFromDisk():
                self._start_load(tier, command)

    def cancel(self, fetch: int) -> None:
        """End a load early; an unknown one is ignored."""
        if (load := self._tier.loads.get(fetch)) is not None:
            self._end(load, "the load was cancelled")

    # Files.

    def _open(self, tier: _OpenTier) -> None:
        """Open the files of an epoch, and report what they have."""
        workers: list[_Worker] = []
        try:
            secret = _prepare_folder(self._folder)
            groups: dict[bytes, list[KvPages]] = {}
            for pages in tier.pages:
                groups.setdefault(hash_layout(pages.layout), []).append(pages)
            names = {f"{identity.hex()}{FILE_SUFFIX}" for identity in groups}
            max_bytes = self._max_bytes
            max_bytes -= _free_other_files(self._folder, self._max_bytes // 2, names)
            strides = [count_record_bytes(group[0].block_bytes) for group in groups.values()]
            # All workers of the machine keep the same number of blocks.
            num_blocks = (max_bytes - PAGE_BYTES * len(strides)) // sum(strides)
            for (identity, group), stride in zip(groups.items(), strides, strict=True):
                path = self._folder / f"{identity.hex()}{FILE_SUFFIX}"
                file = self._open_file(path)
                try:
                    size = PAGE_BYTES + max(0, num_blocks) * stride
                    records = RecordFile(file, identity, group[0].block_bytes, size)
                except BaseException:
                    file.close()
                    raise
                workers.append(_Worker(group, records))
                if records.reset_cause:
                    log.warning("%s begins anew: %s", path, records.reset_cause)
        except (OSError, RecordFileError) as error:
            log.warning("no KV blocks are kept on disk: %s", error)
            for worker in workers:
                worker.file.close()
            self._report(tier, KvDiskFailed())
            return
        except Exception:
            log.exception("no KV blocks are kept on disk")
            self._report(tier, KvDiskFailed())
            return
        tier.workers = workers
        files = [worker.file for worker in workers]
        # A block is of no use if a worker lacks it.
        common = [block for block in files[0].records if all(block.key in each for each in files)]
        kept = {block.key for block in common}
        for each in files:
            each.evict([block.key for block in each.records if block.key not in kept])
        for begin in range(0, len(common), MAX_BLOCKS):
            self._report(tier, KvDiskRecords(common[begin : begin + MAX_BLOCKS]))
        block_bytes = sum(each.block_bytes for each in files)
        max_copied = max(1, min(MAX_BLOCKS, MAX_COPIED_BYTES // block_bytes))
        capacity = min(each.capacity for each in files)
        self._report(tier, KvDiskOpened(secret, capacity, max_copied))

    def _close(self, tier: _OpenTier) -> None:
        """Close the files of an epoch once its loads have ended."""
        self._copy = (0, [])
        end = time.monotonic() + CLOSE_SECONDS
        while tier.running and time.monotonic() < end:
            time.sleep(0.01)
        if tier.running:
            # A thread still reads: the descriptor must not become that of another file.
            log.warning("a disk does not answer: files of KV blocks stay open")
            return
        workers, tier.workers = tier.workers, []
        for worker in workers:
            worker.file.close()

    def _run(self, execute: Callable[..., None], tier: _OpenTier, command: KvDiskCommand) -> None:
        """Execute a command on a thread, unless its epoch has ended."""
        if tier.is_closed or not tier.workers:
            return
        try:
            execute(tier, command)
        except Exception:
            log.exception("%s is not executed", type(command).__name__)

    def _report(self, tier: _OpenTier, report: KvReport) -> None:
        if not tier.is_closed:
            self._on_report(tier.epoch, report)

    # Stores.

    def _copy_blocks(self, tier: _OpenTier, command: CopyKvToDisk) -> None:
        """Copy blocks for a write, or end the store at once while memory is short.

        Copies, and pages that wait to be written, take memory. Loads take none that their prompts
        would not take as well, and go on.
        """
        if self._is_resting():
            capacity = min(worker.file.capacity for worker in tier.workers)
            self._report(tier, KvDiskWritten(command.number, [], capacity))
            return
        blocks = command.block_ids
        self._copy = (
            command.number,
            [[worker.pages[0].read_block(block) for block in blocks] for worker in tier.workers],
        )
        self._report(tier, KvDiskCopied(command.number))

    def _is_resting(self) -> bool:
        """Return True while memory is short, and say so once."""
        is_resting = self._gate.update(self._read_pressure())
        if is_resting and not self._has_warned_of_pressure:
            self._has_warned_of_pressure = True
            log.warning(
                "memory is short (/proc/pressure/memory): no KV blocks are written to %s until "
                "that has ended, now and later",
                self._folder,
            )
        return is_resting

    def _write_blocks(self, tier: _OpenTier, command: WriteKvToDisk) -> None:
        (number, copies), self._copy = self._copy, (0, [])
        written: list[bytes] = []
        for worker in tier.workers:
            worker.file.evict(command.evicted)
        if number == command.number:
            for index, block in zip(command.indices, command.blocks, strict=True):
                is_written = True
                for worker, copy in zip(tier.workers, copies, strict=True):
                    is_written = is_written and self._write(worker.file, block, copy[index])
                if is_written:
                    written.append(block.key)
                    continue
                for worker in tier.workers:
                    worker.file.evict([block.key])
        capacity = min(worker.file.capacity for worker in tier.workers)
        self._report(tier, KvDiskWritten(command.number, written, capacity))

    def _write(self, file: RecordFile, block: DiskBlock, data: bytes) -> bool:
        """Write a block; return False if it is not on disk."""
        try:
            return file.write(block, data)
        except OSError as error:
            if not self._has_warned_of_write:
                self._has_warned_of_write = True
                log.warning(
                    "KV blocks cannot be written to %s: %s. Those on disk stay in use; further "
                    "ones replace them or are dropped",
                    self._folder,
                    error,
                )
            return False

    def _discard(self, tier: _OpenTier, command: DiscardKvOnDisk) -> None:
        for worker in tier.workers:
            with suppress(OSError):
                worker.file.discard(command.keys)

    # Loads.

    def _prefetch(self, tier: _OpenTier, command: PrefetchKvOnDisk) -> None:
        if self._gate.is_resting:
            return
        for worker in tier.workers:
            with suppress(OSError):
                worker.file.prefetch(command.keys)

    def _start_load(self, tier: _OpenTier, command: LoadKvFromDisk) -> None:
        now = self._clock()
        num_bytes = len(command.keys) * sum(worker.file.block_bytes for worker in tier.workers)
        predicted = self._estimate.predict(num_bytes) or num_bytes / FIRST_GUESS_BYTES_PER_SECOND
        load = _Load(command, tier, FetchDeadline(now, predicted), now)
        with self._lock:
            if tier.is_closed:
                return
            is_permitted = bool(tier.workers) and self._circuits.may_fetch(_DISK, now)
            if is_permitted:
                tier.loads[command.fetch] = load
                tier.running.add(load)
        if not is_permitted:
            cause = "the disk has not answered the last load" if tier.workers else "no files"
            self._report(tier, KvFetched(command.fetch, is_ok=False, cause=cause))
            return
        self._readers.submit(self._load, load)
        self._watch(load)

    def _watch(self, load: _Load) -> None:
        """End a load that is late: the disk may answer never."""
        if load.is_ended:
            return
        now = self._clock()
        if load.deadline.is_late(now):
            with self._lock:
                seconds = self._circuits.on_silence(_DISK, load.begin, now)
            if seconds:
                log.warning("no KV blocks are read from disk for %.0f s: it is slow", seconds)
            self._end(load, "the disk is slow")
            return
        timer = threading.Timer(WATCH_SECONDS, self._watch, [load])
        timer.daemon = True
        timer.start()

    def _load(self, load: _Load) -> None:
        """Read the blocks of a load into the KV caches of all workers.

        After a damaged block the rest is read too, but not used: it may be damaged as well.
        """
        command, tier, cause = load.command, load.tier, ""
        lost: list[bytes] = []
        try:
            for worker in tier.workers:
                for key, block in zip(command.keys, command.block_ids, strict=True):
                    if load.is_ended:
                        return
                    try:
                        data = worker.file.read(key)
                    except OSError as error:
                        data, cause = None, f"blocks on disk cannot be read: {error}"
                    if data is None:
                        lost.append(key)
                    elif not lost:
                        self._use_block(load, worker, block, data)
            if lost:
                cause = cause or f"{len(lost)} blocks on disk are damaged or missing"
                self._report(tier, KvDiskLost(lost))
                self._warn_of_read(cause)
        except KvPagesError as error:
            cause = str(error)
        except Exception as error:
            log.exception("load %d ends", command.fetch)
            cause = f"{type(error).__name__}: {error}"
        finally:
            self._end(load, cause)
            with self._lock:
                tier.running.discard(load)

    def _warn_of_read(self, cause: str) -> None:
        """Say once that blocks cannot be read."""
        if not self._has_warned_of_read:
            self._has_warned_of_read = True
            log.warning(
                "in %s %s: they are removed, and their tokens are computed. Further ones are "
                "counted as failed loads",
                self._folder,
                cause,
            )

    def _use_block(self, load: _Load, worker: _Worker, block: int, data: bytes) -> None:
        """Write a block to the KV caches, unless the load has ended. Raises KvPagesError."""
        with self._lock:
            if load.is_ended:
                return
            for pages in worker.pages:
                pages.write_block(block, data)
        if not load.num_bytes:
            self._report(load.tier, KvFetchStarted(load.command.fetch))
        load.num_bytes += len(data)
        load.deadline.last_arrival = self._clock()

    def _end(self, load: _Load, cause: str) -> None:
        """Report the end of a load, once; `cause` is empty for success."""
        now = self._clock()
        with self._lock:
            if load.is_ended:
                return
            load.is_ended = True
            del load.tier.loads[load.command.fetch]
            if not cause:
                self._circuits.on_answer(_DISK)
                self._estimate.observe(load.num_bytes, now - load.begin, now)
            else:
                self._circuits.on_cancelled(_DISK)
        number = load.command.fetch
        done = KvFetched(number, not cause, load.num_bytes, now - load.begin, cause)
        self._report(load.tier, done)


def _prepare_folder(folder: Path) -> bytes:
    """Create the folder if necessary; return the secret key of its digests.

    Raises OSError, RecordFileError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_ownership(folder.stat(), folder, is_folder=True)
    path = folder / SECRET_NAME
    for _ in range(2):
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                check_ownership(os.fstat(descriptor), path)
                secret = os.read(descriptor, _SECRET_BYTES + 1)
            finally:
                os.close(descriptor)
            if len(secret) == _SECRET_BYTES:
                return secret
            # A crash has torn it. The blocks of its digests are not found any more.
            path.unlink()
        temporary = folder / f".{secrets.token_hex(8)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(_SECRET_BYTES))
            os.fsync(descriptor)
            # Another engine may have been faster.
            with suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            os.close(descriptor)
            temporary.unlink()
    raise RecordFileError(f"{path} cannot be read: remove it")


def _free_other_files(folder: Path, max_bytes: int, names: Collection[str]) -> int:
    """Remove files of other models and divisions, the oldest first, until they are small enough.

    Files that another engine has open stay.

    Args:
        folder: folder of all files.
        max_bytes: size that they may have together.
        names: files that this engine opens.

    Returns:
        Bytes of those that stay.
    """
    others = []
    for path in folder.iterdir():
        if _FILE_NAME.fullmatch(path.name) and path.name not in names:
            with suppress(OSError):
                status = path.lstat()
                others.append((status.st_mtime, status.st_size, path))
    num_bytes = sum(size for _, size, _ in others)
    for _, size, path in sorted(others):
        if num_bytes <= max_bytes:
            break
        # OSError: it was removed meanwhile. RecordFileError: it is in use, or of another user.
        with suppress(OSError, RecordFileError):
            file = SystemFile(path)
            path.unlink()
            file.close()
            num_bytes -= size
    return num_bytes


def _lower_priority() -> None:
    """Let the steps of the workers go before the thread that writes."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICENESS)

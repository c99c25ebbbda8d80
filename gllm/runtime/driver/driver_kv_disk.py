"""The driver's part in the prefix cache's disk tier: which blocks are stored, evicted and read.

Blocks are stored once they are complete, in the order of their completion, when the KV movers have
written the ones before. Until then they only wait in a table: a block that leaves memory before its
turn is not stored. So a slow disk delays nothing and takes no memory.

A block counts as stored when all machines have it. Reading blocks is a fetch (SchedulerTransfers).
Pure: time is an argument.
"""

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    KvDiskReport,
    KvDiskTotals,
    KvDiskWritten,
    PrefetchKvOnDisk,
    WriteKvToDisk,
)
from gllm.scheduler.block_pool import BlockPool, chain_hashes, root_hash
from gllm.scheduler.disk_index import DiskBlock, DiskPrefixIndex
from gllm.scheduler.kv_cache_manager import KVCacheManager, OffloadListener, PublishedBlock
from gllm.scheduler.sequence import Sequence as ScheduledSequence
from gllm.scheduler.step_cost import StepCostCoefficients

log = logging.getLogger(__name__)

STORE_INTERVAL_SECONDS = 0.1
"""Least time between the starts of two stores that are not full: each one takes turns of the driver
and of the KV movers."""
OPEN_SECONDS = 3.0
"""Longest time for which the first step of an epoch, a warm-up, waits for the files: requests after
a restart should find their blocks."""
DISK = "the disk tier"
"""Name of the tier among the engines from which KV blocks are fetched."""
_NOTHING = KvDiskTotals()


class DiskSource(NamedTuple):
    """KV of a request's first tokens on disk."""

    keys: list[bytes]
    """Key of each block from the start of the request on."""
    engine: str = DISK
    """Name of the engine, as in KvSource: fetches from one engine have one measured rate."""


@dataclass
class _Machine:
    """Blocks that one machine has on disk."""

    blocks: dict[bytes, DiskBlock] = field(default_factory=dict)
    opened: KvDiskOpened | None = None
    """None until all blocks are reported."""


class _Candidate(NamedTuple):
    """Complete block in memory that is not on disk."""

    block_id: int
    key: bytes
    parent: bytes
    position: int


@dataclass
class _Store:
    """Store that runs on all machines."""

    number: int
    candidates: dict[bytes, _Candidate]
    """Blocks by their hash in memory; those that have left memory since are removed."""
    order: list[bytes]
    """Hashes in the order of the copy."""
    waiting: set[int]
    """Machines that have not answered."""
    is_copied: bool = False
    blocks: list[DiskBlock] = field(default_factory=list)
    """Blocks that are written, once they are copied."""
    written: dict[bytes, int] = field(default_factory=dict)
    """Machines that have written a block, by key."""


class DriverKvDisk(OffloadListener):
    """Decides what is kept on disk and what is read from there, for all machines of an engine."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        block_size: int,
        num_machines: int,
        send: Callable[[KvDiskCommand], None],
    ) -> None:
        """Create a tier of which no machine is ready.

        Args:
            kv_cache: KV cache of the scheduler; from now on it reports complete and removed blocks.
            block_size: tokens per block.
            num_machines: machines of the engine.
            send: sends a command to the KV movers of all machines.
        """
        self._pool: BlockPool = kv_cache.block_pool
        self._block_size, self._num_machines, self._send = block_size, num_machines, send
        self._machines: dict[int, _Machine] = {}
        """Machines that have reported blocks, by their index in the engine."""
        self._index = DiskPrefixIndex()
        self._attention_share: float | None = None
        self._capacity = self._max_copied = 0
        self._secret = b""
        """Key of the digests; empty while the tier does not work."""
        self._candidates: dict[bytes, _Candidate] = {}
        """Blocks to store by their hash in memory, in the order of their completion."""
        self._store: _Store | None = None
        self._num_stores = 0
        self._open_deadline: float | None = None
        """Time until which the first step waits; None before the first request."""
        self._has_started = False
        """True once the tier was ready, has failed or was late."""
        self._last_store = -STORE_INTERVAL_SECONDS
        self._totals = _NOTHING
        kv_cache.set_offload(self)

    @property
    def is_ready(self) -> bool:
        """True if all machines have opened their files."""
        return bool(self._secret)

    @property
    def has_blocks(self) -> bool:
        """True if a request may have blocks on disk."""
        return self.is_ready and len(self._index) > 0

    @property
    def is_active(self) -> bool:
        """True while blocks wait to be stored, or a step for the files: a timer is needed."""
        is_opening = self._open_deadline is not None and not self._has_started
        return is_opening or (self.is_ready and bool(self._candidates))

    def is_opening(self, now: float) -> bool:
        """Return True if the first step of the epoch should wait for the files."""
        if self._open_deadline is None:
            self._open_deadline = now + OPEN_SECONDS
        if now >= self._open_deadline:
            self._has_started = True
        return not self._has_started

    # Events of the prefix cache.

    def on_published(self, sequence: ScheduledSequence, blocks: list[PublishedBlock]) -> None:
        """Let complete blocks be stored."""
        if not self.is_ready:
            return
        size = self._block_size
        keys = sequence.get_disk_keys(blocks[-1].position + 1, size, self._secret)
        for block_id, digest, index in blocks:
            key = keys[index]
            if key in self._index:
                continue
            parent = keys[index - 1] if index else self._root(sequence.request.cache_salt)
            self._candidates[digest] = _Candidate(block_id, key, parent, index * size)

    def on_removed(self, block: int, digest: bytes) -> None:
        """Do not store a block that has left memory."""
        is_dropped = self._candidates.pop(digest, None) is not None
        if self._store is not None and not self._store.is_copied:
            is_dropped |= self._store.candidates.pop(digest, None) is not None
        if is_dropped:
            self._totals += KvDiskTotals(num_dropped_blocks=1)

    def on_cleared(self) -> None:
        """Store no block that is in memory now; those on disk stay."""
        self._candidates.clear()
        if self._store is not None and not self._store.is_copied:
            self._store.candidates.clear()

    def on_invalid(self, sequence: ScheduledSequence) -> None:
        """Remove blocks with an invalid content, and those behind them, from disk."""
        if not self.is_ready:
            return
        num_blocks = sequence.num_tokens // self._block_size
        keys = sequence.get_disk_keys(num_blocks, self._block_size, self._secret)
        invalid = set(keys)
        # The blocks that are published may be those of another sequence with the same tokens.
        _remove_keys(self._candidates, invalid)
        if (store := self._store) is not None:
            _remove_keys(store.candidates, invalid)
            # What is being written is removed afterwards.
            store.blocks = [block for block in store.blocks if block.key not in invalid]
        self._discard(keys)

    # Requests.

    def find_source(
        self, token_ids: Sequence[int], cache_salt: str, block_hashes: Sequence[bytes]
    ) -> tuple[int, DiskSource] | None:
        """Return where the KV of a new request is on disk, beyond what is in memory.

        Args:
            token_ids: known tokens of the request; the last one is always computed.
            cache_salt: of the request.
            block_hashes: hashes in memory of its full blocks before the last token.

        Returns:
            The number of leading blocks that are in memory, and the source of these and further
            blocks; None if there are no further ones.
        """
        num_blocks = len(block_hashes)
        if not (self.has_blocks and num_blocks):
            return None
        root = self._root(cache_salt)
        tokens = token_ids[: num_blocks * self._block_size]
        keys = chain_hashes(root, tokens, self._block_size, self._secret)
        # Also what is in memory is used: it may be on disk alone later.
        self._index.touch(keys[: self._index.count_prefix(keys, 0)])
        num_memory = len(self._pool.find_cached_blocks(block_hashes))
        num_queried = (num_blocks - num_memory) * self._block_size
        self._totals += KvDiskTotals(num_queried_tokens=num_queried)
        num_disk = self._index.count_prefix(keys, num_memory)
        if not num_disk:
            return None
        return num_memory, DiskSource(keys[: num_memory + num_disk])

    def prefetch(self, keys: list[bytes]) -> None:
        """Let the machines begin to read blocks of a request that is queued."""
        self._send(PrefetchKvOnDisk(keys))

    def has_all(self, keys: Sequence[bytes]) -> bool:
        """Return True if all blocks are on the disks of all machines."""
        return self.is_ready and self._index.count_prefix(keys, 0) == len(keys)

    def on_loaded(self, num_tokens: int, num_bytes: int, seconds: float) -> None:
        """Count a load that has succeeded."""
        self._totals += KvDiskTotals(
            num_hit_tokens=num_tokens, num_loads=1, num_read_bytes=num_bytes, read_seconds=seconds
        )

    def count_hits(self, num_tokens: int) -> None:
        """Count tokens that were read before their request was admitted, and used by it."""
        if num_tokens:
            self._totals += KvDiskTotals(num_hit_tokens=num_tokens)

    def on_load_failed(self) -> None:
        """Count a load that has failed."""
        self._totals += KvDiskTotals(num_failed_loads=1)

    # Movers.

    def set_step_cost(self, coefficients: StepCostCoefficients) -> None:
        """Set the measured costs of tokens, by which blocks are evicted."""
        if coefficients.token > 0:
            self._attention_share = coefficients.pair / coefficients.token
            self._index.attention_share = self._attention_share

    def on_gone(self, machine: int) -> None:
        """Handle the end of a machine's KV mover; the tier rests until the next one is ready."""
        self._machines.pop(machine, None)
        self._rest()

    def on_report(self, machine: int, report: KvDiskReport) -> None:
        """Handle a report of one machine's KV mover."""
        own = self._machines.setdefault(machine, _Machine())
        match report:
            case KvDiskRecords(blocks):
                own.blocks |= {block.key: block for block in blocks}
            case KvDiskOpened():
                own.opened = report
                self._start_if_complete()
            case KvDiskFailed():
                self._has_started = True
            case KvDiskCopied(number):
                self._on_copied(machine, number)
            case KvDiskWritten(number, keys, capacity):
                self._on_written(machine, number, keys, capacity)
            case KvDiskLost(keys):
                self._discard(keys)

    def update(self, now: float) -> None:
        """Start the next store if there is none; called once per turn of the driver."""
        if not self.is_ready or self._store is not None or not self._candidates:
            return
        if not self._capacity:
            self._candidates.clear()
            return
        is_full = len(self._candidates) >= self._max_copied
        if not is_full and now - self._last_store < STORE_INTERVAL_SECONDS:
            return
        chosen: dict[bytes, _Candidate] = {}
        for digest in list(self._candidates):
            candidate = self._candidates.pop(digest)
            if candidate.key not in self._index:
                chosen[digest] = candidate
            if len(chosen) == min(self._max_copied, self._capacity):
                break
        if not chosen:
            return
        self._last_store = now
        self._num_stores += 1
        self._store = _Store(self._num_stores, chosen, list(chosen), set(self._machines))
        blocks = [candidate.block_id for candidate in chosen.values()]
        self._send(CopyKvToDisk(self._num_stores, blocks))

    def pop_totals(self) -> KvDiskTotals | None:
        """Return the counters since the last call; None if nothing has changed."""
        totals, self._totals = self._totals, _NOTHING
        return None if totals is _NOTHING else totals

    def _root(self, cache_salt: str) -> bytes:
        return root_hash(cache_salt, self._secret)

    def _rest(self) -> None:
        """Forget the index and all blocks to store, until all machines are ready again."""
        self._count_kept(-len(self._index))
        self._index = DiskPrefixIndex()
        self._secret, self._store = b"", None
        self._candidates.clear()

    def _start_if_complete(self) -> None:
        """Build the index of the blocks that all machines have, once all are ready."""
        machines = self._machines
        opened = [machine.opened for machine in machines.values() if machine.opened is not None]
        if len(opened) < self._num_machines:
            return
        self._has_started = True
        first = machines[0]
        assert first.opened is not None
        self._secret = first.opened.secret
        self._capacity = min(report.capacity for report in opened)
        self._max_copied = min(report.max_copied_blocks for report in opened)
        others = [machine.blocks for number, machine in machines.items() if number]
        common = [
            block for key, block in first.blocks.items() if all(key in blocks for blocks in others)
        ]
        self._index = DiskPrefixIndex(common)
        if self._attention_share is not None:
            self._index.attention_share = self._attention_share
        self._count_kept(len(common))
        useless = {key for machine in machines.values() for key in machine.blocks}
        useless.difference_update(self._index.keys)
        self._discard(list(useless))
        log.info("%d KV blocks are on disk, of at most %d", len(common), self._capacity)

    def _on_copied(self, machine: int, number: int) -> None:
        """Write what has kept its content on all machines while it was copied."""
        store = self._store
        if store is None or store.number != number or store.is_copied:
            return
        store.waiting.discard(machine)
        if store.waiting:
            return
        store.is_copied, store.waiting = True, set(self._machines)
        indices = [i for i, digest in enumerate(store.order) if digest in store.candidates]
        for digest in store.order:
            if (candidate := store.candidates.get(digest)) is not None:
                priority = self._index.priority_of(candidate.position)
                _, key, parent, position = candidate
                store.blocks.append(DiskBlock(key, parent, position, priority))
        num_missing = len(self._index) + len(indices) - self._capacity
        parents = {block.parent for block in store.blocks}
        evicted = self._index.evict(num_missing, parents) if num_missing > 0 else []
        self._forget(evicted)
        self._totals += KvDiskTotals(num_evicted_blocks=len(evicted))
        # There are more than new blocks after the disk has become full.
        first, last = evicted[:-MAX_BLOCKS], evicted[-MAX_BLOCKS:]
        self._send_discards(first)
        self._send(WriteKvToDisk(number, indices, list(store.blocks), last))

    def _on_written(self, machine: int, number: int, keys: list[bytes], capacity: int) -> None:
        """Count the blocks of a store as kept once all machines have written them."""
        self._capacity = min(self._capacity, capacity)
        store = self._store
        if store is None or store.number != number:
            # Of a store that has ended with another machine's mover.
            self._discard(keys)
            return
        for key in keys:
            store.written[key] = store.written.get(key, 0) + 1
        store.waiting.discard(machine)
        if store.waiting:
            return
        self._store = None
        valid = {block.key: block for block in store.blocks}
        partial = []
        for key, count in store.written.items():
            if count < self._num_machines or key not in valid:
                partial.append(key)
                continue
            self._index.add(valid[key])
            for each in self._machines.values():
                each.blocks[key] = valid[key]
            self._count_kept(1)
            self._totals += KvDiskTotals(num_stored_blocks=1)
        self._discard(partial)

    def _discard(self, keys: list[bytes]) -> None:
        """Remove blocks from the disks of all machines."""
        self._forget([key for key in keys if key in self._index])
        for key in keys:
            self._index.remove(key)
        self._send_discards(keys)

    def _send_discards(self, keys: list[bytes]) -> None:
        for begin in range(0, len(keys), MAX_BLOCKS):
            self._send(DiscardKvOnDisk(keys[begin : begin + MAX_BLOCKS]))

    def _forget(self, keys: Iterable[bytes]) -> None:
        """Remove keys from the machines' tables, which the index had."""
        for key in keys:
            self._count_kept(-1)
            for machine in self._machines.values():
                machine.blocks.pop(key, None)

    def _count_kept(self, change: int) -> None:
        if change:
            self._totals += KvDiskTotals(num_kept_blocks=change)


def _remove_keys(candidates: dict[bytes, _Candidate], keys: Container[bytes]) -> None:
    """Remove candidates by their keys on disk."""
    for digest, candidate in list(candidates.items()):
        if candidate.key in keys:
            del candidates[digest]

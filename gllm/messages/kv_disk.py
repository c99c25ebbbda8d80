"""Messages about the prefix cache's disk tier, between the driver and the KV movers.

A block is stored in two steps. CopyKvToDisk lets each mover copy blocks into its own memory;
KvDiskCopied answers. The driver then knows which of the blocks have kept their content meanwhile,
and only those are written (WriteKvToDisk, KvDiskWritten). So nothing of the KV cache is reserved
for a disk, however slow it is. Blocks are read by LoadKvFromDisk, which is a fetch.
"""

from typing import Annotated

from msgspec import Meta

from gllm.messages.base import Int64, TotalsMessage, WireMessage
from gllm.messages.kv_layout import BlockId
from gllm.scheduler.disk_index import DiskBlock

MAX_BLOCKS = 1024
"""Most blocks per message."""
DiskKey = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""Keyed digest of the tokens of a block and of all tokens before them."""
StoreNumber = Annotated[int, Meta(ge=1, lt=2**47)]
"""Stores are numbered from 1 within an epoch; there is at most one at a time."""


class CopyKvToDisk(WireMessage, frozen=True):
    """Command: copy blocks of the KV caches into memory, to be written to disk.

    A copy that was not written before is discarded. KvDiskCopied answers.
    """

    number: StoreNumber
    block_ids: Annotated[list[BlockId], Meta(max_length=MAX_BLOCKS)]


class WriteKvToDisk(WireMessage, frozen=True):
    """Command: write copied blocks to disk, and discard the rest of the copy.

    KvDiskWritten answers.
    """

    number: StoreNumber
    indices: Annotated[list[int], Meta(max_length=MAX_BLOCKS)]
    """Indices of the blocks in the copy."""
    blocks: Annotated[list[DiskBlock], Meta(max_length=MAX_BLOCKS)]
    """Key of each of them, and what decides how long it is kept."""
    evicted: Annotated[list[DiskKey], Meta(max_length=MAX_BLOCKS)]
    """Blocks on disk that are removed first, to make space."""


class LoadKvFromDisk(WireMessage, frozen=True):
    """Command: read blocks from disk into the KV caches; KvFetched answers, as for FetchKv.

    The blocks may not be used for anything else until then.
    """

    fetch: Int64
    """Number of the fetch, as in FetchKv."""
    keys: list[DiskKey]
    block_ids: list[BlockId]
    """Block of the KV caches for each key."""


class PrefetchKvOnDisk(WireMessage, frozen=True):
    """Command: begin to read blocks into the memory of the operating system; there is no answer.

    Sent when a request is queued whose blocks will be loaded.
    """

    keys: list[DiskKey]


class DiscardKvOnDisk(WireMessage, frozen=True):
    """Command: remove blocks that are not on the disks of all machines, or whose content is wrong.

    Unknown keys are ignored. There is no answer.
    """

    keys: list[DiskKey]


class KvDiskRecords(WireMessage, frozen=True):
    """Report of a part of the blocks that a machine has on disk, before KvDiskOpened."""

    blocks: Annotated[list[DiskBlock], Meta(max_length=MAX_BLOCKS)]


class KvDiskOpened(WireMessage, frozen=True):
    """Report that the disk tier of a machine works."""

    secret: bytes
    """Key of the digests by which the blocks of this machine are found. All machines use that of
    the driver's machine."""
    capacity: Annotated[int, Meta(ge=1)]
    """Blocks that fit on disk."""
    max_copied_blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
    """Blocks that CopyKvToDisk may copy at once."""


class KvDiskFailed(WireMessage, frozen=True):
    """Report that the disk tier of a machine cannot be used in this epoch; the log has the cause.

    An epoch is the time between two restarts of the engine.
    """


class KvDiskCopied(WireMessage, frozen=True):
    """Report that the blocks of a copy are in the memory of the KV mover."""

    number: StoreNumber


class KvDiskWritten(WireMessage, frozen=True):
    """Report that the blocks of a copy are on disk, or were discarded."""

    number: StoreNumber
    keys: list[DiskKey]
    """Blocks that are on disk now."""
    capacity: Annotated[int, Meta(ge=0)]
    """Blocks that fit on disk; fewer than before if the disk is full."""


class KvDiskLost(WireMessage, frozen=True):
    """Report that blocks cannot be read from disk: they were damaged, and are removed."""

    keys: list[DiskKey]


class KvDiskTotals(TotalsMessage, frozen=True):
    """Counters of the disk tier.

    They are those of one driver since its last report, or of an engine since its start.
    """

    num_queried_tokens: int = 0
    """Prompt tokens beyond those in memory that were looked up."""
    num_hit_tokens: int = 0
    """Prompt tokens that were read and not computed."""
    num_loads: int = 0
    """Complete reads for a request. There is a second one of a request if the first one was made
    before its admission, and did not have all of its blocks."""
    num_failed_loads: int = 0
    """Reads that failed: their tokens are computed, unless a later read has them."""
    num_read_bytes: int = 0
    """Bytes that complete loads have read."""
    read_seconds: float = 0.0
    """Total duration of these loads."""
    num_stored_blocks: int = 0
    num_dropped_blocks: int = 0
    """Blocks that have left memory before they were written, because the disk was too slow."""
    num_evicted_blocks: int = 0
    """Blocks that were removed from disk to make space."""
    num_kept_blocks: int = 0
    """Change of the number of blocks that can be read from disk."""


KvDiskCommand = CopyKvToDisk | WriteKvToDisk | PrefetchKvOnDisk | LoadKvFromDisk | DiscardKvOnDisk
"""Commands of the driver."""
KvDiskReport = (
    KvDiskRecords | KvDiskOpened | KvDiskFailed | KvDiskCopied | KvDiskWritten | KvDiskLost
)
"""Answers of the mover."""

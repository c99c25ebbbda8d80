"""The KV cache as the scheduler sees it: which sequences hold blocks, and what they share.

Owns the holders of blocks and the way blocks get to them and back. Knows nothing of queues and of
who has to give way to whom.
"""

from collections.abc import Container

from gllm.scheduler.block_pool import BlockPool
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.sequence import Sequence


class KVCacheManager:
    """Blocks and their holders."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = BlockPool(config.num_blocks)
        self.holders: dict[int, Sequence] = {}
        """Sequences that hold blocks, by id."""
        self._size = config.block_size
        self._seats = config.max_num_seqs
        self._caches = config.prefix_cache

    @property
    def free_share(self) -> float:
        """KV_free: free share of the cache, evictable blocks counted as free, 0..1."""
        return self.pool.available / self.pool.num_blocks

    def cached_tokens(self, sequence: Sequence) -> int:
        """Tokens at a waiting sequence's beginning that others have computed."""
        return len(self.shareable(sequence)) * self._size

    def admit(self, sequence: Sequence) -> bool:
        """Let a waiting sequence hold what others computed for it, if it can go on from there."""
        shared = self.shareable(sequence)
        if len(self.holders) >= self._seats:
            return False
        if self.pool.available - self.pool.idle(shared) < 1:
            return False
        self.pool.share(shared)
        sequence.admit(shared, len(shared) * self._size)
        self.holders[sequence.seq] = sequence
        return True

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a sequence with prefill to schedule could have a chunk of it now."""
        if sequence.seq not in self.holders:
            return len(self.holders) < self._seats and self.pool.available > 0
        return self.capacity(sequence) > sequence.scheduled

    def capacity(self, sequence: Sequence) -> int:
        """Tokens that fit its blocks and all that are available."""
        return (len(sequence.blocks) + self.pool.available) * self._size

    def missing(self, sequence: Sequence, tokens: int) -> int:
        """Blocks it lacks for `tokens` more tokens."""
        return sequence.blocks_missing(sequence.scheduled + tokens, self._size)

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Give it the blocks for `tokens` more tokens. They are available."""
        sequence.blocks += self.pool.allocate(self.missing(sequence, tokens))

    def publish(self, sequence: Sequence) -> None:
        """Offer its full computed blocks to others."""
        full = sequence.computed // self._size
        if full == sequence.published or not self._caches:
            return
        chain = sequence.hash_chain(full, self._size)
        for index in range(sequence.published, full):
            self.pool.publish(sequence.blocks[index], chain[index])
        sequence.published = full

    def withdraw(self, sequence: Sequence) -> None:
        """Offer none of its blocks to others any more: their content is not to be trusted."""
        self.pool.withdraw(sequence.blocks)
        # Rows of it that are still in flight begin behind this, so they publish nothing.
        sequence.computed = 0

    def release(self, sequence: Sequence) -> None:
        """Take its blocks back. It has nothing in flight."""
        self.holders.pop(sequence.seq, None)
        self.pool.release(sequence.drop())

    def owners(self) -> list[Sequence]:
        """Sequences that hold blocks and keep them."""
        return [s for s in self.holders.values() if not s.leaving]

    def returning(self, victims: Container[int] = ()) -> int:
        """Blocks that are available, or will be once sequences on their way out have committed.

        victims: sequences counted as on their way out.
        """
        leaving = [s for s in self.holders.values() if s.leaving or s.seq in victims]
        return self.pool.available + sum(self.pool.sole(s.blocks) for s in leaving)

    def shareable(self, sequence: Sequence) -> list[int]:
        """Computed blocks of the sequence's beginning; its last token is always computed anew."""
        full = (sequence.target - 1) // self._size
        donor = sequence.donor
        if donor is not None and donor.blocks and donor.computed >= full * self._size:
            return donor.blocks[:full]
        if not self._caches:
            return []
        readable = sequence.readable_tokens // self._size
        return self.pool.lookup(sequence.hash_chain(min(full, readable), self._size))

"""KV cache manager: allocates blocks to sequences, shares prefixes and frees blocks."""

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from types import MappingProxyType
from typing import NamedTuple

from gllm.scheduler.block_pool import BlockListener, BlockPool, chain_hash, root_hash
from gllm.scheduler.cache_events import CacheEventLog, CacheEvents
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.eviction import EvictionOrder, create_eviction
from gllm.scheduler.kv_holds import KvHolds
from gllm.scheduler.sequence import Sequence
from gllm.scheduler.state_slots import StateCache, list_prefill_boundaries

NO_TAILS: Mapping[int, tuple[bytes, int]] = MappingProxyType({})


class PublishedBlock(NamedTuple):
    """KV block that has just been added to the prefix cache."""

    block_id: int
    digest: bytes
    """Hash in the prefix cache."""
    position: int
    """Position in the block table of its sequence."""


class OffloadListener(BlockListener, ABC):
    """Interface of a tier behind the prefix cache in memory."""

    @abstractmethod
    def on_published(self, sequence: Sequence, blocks: list[PublishedBlock]) -> None:
        """Handle blocks of a sequence that are complete and in the prefix cache now."""

    @abstractmethod
    def on_invalid(self, sequence: Sequence) -> None:
        """Handle that the blocks of a sequence have an invalid content, published or not."""


class KVCacheManager:
    """Allocates KV blocks to sequences, shares cached prefixes between them and frees blocks."""

    def __init__(self, config: SchedulerConfig, eviction: EvictionOrder | None = None) -> None:
        """Create an empty cache.

        Args:
            config: resolved configuration.
            eviction: order in which cached blocks are evicted; None: the configured one.
        """
        self.states: StateCache | None = None
        """State slots of the recurrent layers; None for a model without any."""
        if config.num_state_slots:
            sizes = config.num_state_slots, config.max_num_seqs, config.block_size
            self.states = StateCache(*sizes)
        if eviction is None:
            eviction = create_eviction(config.prefix_cache_eviction)
        self._eviction = eviction
        self._has_visits = config.prefix_cache and self._eviction.follows_sequences
        """The order of eviction depends on the sequences that arrive and end."""
        self.block_pool = BlockPool(config.num_blocks, self.states, self._eviction)
        self.running: dict[int, Sequence] = {}
        """Sequences that hold blocks, by sequence id."""
        self.loading: dict[int, Sequence] = {}
        """Sequences that stand for waiting ones while blocks are read from disk, by their negative
        id. They take no place among max_num_seqs."""
        self.holds = KvHolds(self.block_pool)
        """Blocks of ended sequences that other engines may fetch."""
        self._offload: OffloadListener | None = None
        self._block_size = config.block_size
        self._max_num_seqs = config.max_num_seqs
        self._has_prefix_cache = config.prefix_cache
        self._unreported: set[bytes] = set()
        """Hashes of adopted blocks whose tokens no sequence has had yet, so that no event had them.
        """
        self.event_log: CacheEventLog | None = None
        """Changes of the prefix cache since the last report; None if they are not reported."""
        self.names_tails = False
        """True if the computed tokens behind the last full block of each sequence are named, so
        that a later cache can adopt them."""
        self._tail_slots: dict[bytes, int] = {}
        """Usable slots of each adopted block that is not full, by the hash of its first ones."""
        self._num_reserved_blocks = math.ceil(config.kv_threshold * config.num_blocks)

    @property
    def free_share(self) -> float:
        """KV_free: free share of the cache, evictable blocks counted as free, 0..1."""
        return self.block_pool.num_free_blocks / self.block_pool.num_blocks

    @property
    def num_spare_blocks(self) -> int:
        """Free blocks above the share at which prefill pauses."""
        return max(0, self.block_pool.num_free_blocks - self._num_reserved_blocks)

    def admit(self, sequence: Sequence) -> bool:
        """Add a waiting sequence to the running ones, with the blocks of its cached prefix.

        Returns:
            False if max_num_seqs is reached or no further block is free.
        """
        shared = self.find_shareable_blocks(sequence)
        if len(self.running) >= self._max_num_seqs:
            return False
        if self.block_pool.num_free_blocks - self.block_pool.count_unreferenced(shared) < 1:
            return False
        self.block_pool.add_references(shared)
        if self.states is not None:
            self._admit_state(self.states, sequence, len(shared))
        sequence.start_with_blocks(shared, len(shared) * self._block_size)
        if self._tail_slots:
            self._add_tail(sequence)
        self.running[sequence.seq] = sequence
        if self._unreported:
            hashes = sequence.get_block_hashes(len(shared), self._block_size)
            for index, digest in enumerate(hashes):
                if digest in self._unreported:
                    self._report(sequence, index)
        return True

    def adopt(
        self, digests: Mapping[int, bytes], tails: Mapping[int, tuple[bytes, int]] = NO_TAILS
    ) -> None:
        """Fill the prefix cache with blocks that an earlier scheduler has published.

        Args:
            digests: hash by block; see BlockPool.adopt.
            tails: of other blocks the hash that it has given to their first slots, and the number
                of slots that can be used at most.

        Raises:
            ValueError: the cache is in use or off, the model has recurrent layers, whose states
                are not kept, or the blocks contradict each other.
        """
        if self.states is not None or not self._has_prefix_cache:
            raise ValueError("blocks are adopted by prefix caches without states alone")
        self.block_pool.adopt(digests, {block: digest for block, (digest, _) in tails.items()})
        self._tail_slots = dict(tails.values())
        self._unreported.update(digests.values())

    def on_arrival(self, sequence: Sequence, now: float) -> None:
        """Keep the blocks with which a new sequence can start, as the order of eviction permits.

        Adopted blocks, of whose use nothing is known, are evicted after all others.
        """
        self.block_pool.now = now
        if not (self._unreported or self._has_visits):
            return
        blocks = self.find_shareable_blocks(sequence)
        if self._unreported:
            self.block_pool.refresh(blocks)
        if self._has_visits:
            request, num_full = sequence.request, sequence.prompt_len // self._block_size
            hashes = sequence.get_block_hashes(num_full, self._block_size)
            name = request.client, request.session
            self._eviction.on_arrival(sequence.seq, *name, hashes, blocks, now)

    def can_extend_prefill(self, sequence: Sequence) -> bool:
        """Return True if at least one more prefill token of a sequence fits in the cache."""
        if sequence.seq not in self.running:
            has_slot = len(self.running) < self._max_num_seqs
            return has_slot and self.block_pool.num_free_blocks > 0
        return self.max_sequence_tokens(sequence) > sequence.num_scheduled_tokens

    def max_sequence_tokens(self, sequence: Sequence) -> int:
        """Return how long a sequence can become with its own blocks and all free blocks."""
        num_blocks = len(sequence.block_ids) + self.block_pool.num_free_blocks
        return num_blocks * self._block_size

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the number of blocks to allocate before `num_tokens` more tokens fit."""
        num_total = sequence.num_scheduled_tokens + num_tokens
        return sequence.num_missing_blocks(num_total, self._block_size)

    def num_admission_blocks(self, sequence: Sequence, num_new_tokens: int = 0) -> int:
        """Return the number of free blocks that a waiting sequence takes for its prefill.

        Args:
            sequence: a sequence without blocks.
            num_new_tokens: tokens to generate that have to fit as well.
        """
        shared = self.find_shareable_blocks(sequence)
        num_tokens = sequence.num_prefill_tokens + num_new_tokens
        missing = sequence.num_missing_blocks(num_tokens, self._block_size) - len(shared)
        return missing + self.block_pool.count_unreferenced(shared)

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate the blocks for `num_tokens` more tokens; enough blocks must be free."""
        missing = self.num_missing_blocks(sequence, num_tokens)
        if missing:
            sequence.block_ids += self.block_pool.allocate(missing)

    def publish(self, sequence: Sequence) -> None:
        """Add the full computed blocks of a sequence to the prefix cache, for reuse by others."""
        # An aborted sequence may have computed a position whose token was dropped.
        num_known = min(sequence.num_computed_tokens, sequence.num_tokens)
        num_full = num_known // self._block_size
        if num_full == sequence.num_published_blocks or not self._has_prefix_cache:
            return
        if sequence.request.is_kv_foreign:
            return
        hashes = sequence.get_block_hashes(num_full, self._block_size)
        pool = self.block_pool
        published: list[PublishedBlock] = []
        for index in range(sequence.num_published_blocks, num_full):
            block_id = sequence.block_ids[index]
            parent = hashes[index - 1] if index else None
            if pool.publish(block_id, hashes[index], parent, index * self._block_size):
                if self._offload is not None:
                    published.append(PublishedBlock(block_id, hashes[index], index))
                self._report(sequence, index)
            elif hashes[index] in self._unreported:
                self._report(sequence, index)
        if self.states is not None:
            self.states.publish(sequence.seq, num_known, hashes, pool.digests)
        sequence.num_published_blocks = num_full
        if published and self._offload is not None:
            self._offload.on_published(sequence, published)

    def name_tail(self, sequence: Sequence) -> None:
        """Name the computed tokens behind the last full block of a sequence; with `names_tails`."""
        if sequence.request.is_kv_foreign:
            return
        num_known = min(sequence.num_computed_tokens, sequence.num_tokens)
        num_full, num_slots = divmod(num_known, self._block_size)
        if num_slots:
            digest = self._hash_tail(sequence, num_full, num_slots)
            self.block_pool.name_tail(sequence.block_ids[num_full], digest)

    def _hash_tail(self, sequence: Sequence, num_full: int, num_slots: int) -> bytes:
        """Return the hash of some tokens of a sequence behind its first full blocks."""
        begin = num_full * self._block_size
        if not num_full:
            parent = root_hash(sequence.request.cache_salt)
        else:
            # This is called after every commit: the list of all hashes is not copied.
            if len(sequence.block_hashes) < num_full:
                sequence.get_block_hashes(num_full, self._block_size)
            parent = sequence.block_hashes[num_full - 1]
        return chain_hash(parent, sequence.token_ids[begin : begin + num_slots])

    def _add_tail(self, sequence: Sequence) -> None:
        """Let a sequence that starts with all of its full blocks go on behind an adopted tail."""
        num_full = len(sequence.block_ids)
        num_usable = sequence.num_prefill_tokens - 1 - num_full * self._block_size
        has_scores = (
            sequence.reads_prefix_cache or sequence.num_scored_tokens >= sequence.prompt_len
        )
        if num_usable >= self._block_size or not has_scores:
            return
        # What was committed last may not have reached the client.
        for num_slots in range(num_usable, 0, -1):
            digest = self._hash_tail(sequence, num_full, num_slots)
            if self._tail_slots.get(digest, 0) < num_slots:
                continue
            if (block := self.block_pool.pop_tail(digest)) is not None:
                sequence.add_tail(block, num_slots)
                del self._tail_slots[digest]
                return

    def _report(self, sequence: Sequence, index: int) -> None:
        """Report a block of a sequence, whose hash is computed, to those who watch the cache."""
        hashes = sequence.block_hashes
        self._unreported.discard(hashes[index])
        log = self.event_log
        if log is None:
            return
        token_ids: tuple[int, ...] = ()
        if log.with_token_ids:
            begin = index * self._block_size
            token_ids = tuple(sequence.token_ids[begin : begin + self._block_size])
        salt = sequence.request.cache_salt
        parent = hashes[index - 1] if index else root_hash(salt)
        log.on_stored(hashes[index], parent, token_ids, salt)

    def set_offload(self, listener: OffloadListener) -> None:
        """Tell a tier behind the prefix cache which blocks are added and removed from now on."""
        self._offload = listener
        self.block_pool.listeners.append(listener)

    def unpublish(self, sequence: Sequence) -> None:
        """Remove the blocks of a sequence with invalid content from the prefix cache."""
        self.block_pool.unpublish(sequence.block_ids)
        if self._offload is not None:
            self._offload.on_invalid(sequence)
        if self.states is not None:
            # Also states after blocks that another sequence has computed.
            for digest in sequence.block_hashes:
                self.states.remove(digest)
        # Its rows that are still in flight start behind position 0, so they publish nothing.
        sequence.num_computed_tokens = 0

    def watch(self, with_token_ids: bool) -> None:
        """Start to record changes of the prefix cache, beginning with its present content.

        Args:
            with_token_ids: True to record the tokens of the blocks that are added from now on.
        """
        self.unwatch()
        self.event_log = CacheEventLog(with_token_ids, self.block_pool.digests)
        self.block_pool.listeners.append(self.event_log)

    def unwatch(self) -> None:
        """Stop recording changes of the prefix cache."""
        if self.event_log is not None:
            self.block_pool.listeners.remove(self.event_log)
            self.event_log = None

    def pop_events(self) -> CacheEvents | None:
        """Return the changes since the last call; None without changes or without `watch`."""
        return None if self.event_log is None else self.event_log.pop_events()

    def free(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence without rows in flight."""
        if self.running.pop(sequence.seq, None) is not None and self.states is not None:
            self.states.free(sequence.seq)
        seq = sequence.seq
        self.block_pool.release(sequence.reset(), seq if seq >= 0 else None)
        if self._has_visits and sequence.is_finished:
            self._eviction.on_end(seq, self.block_pool.now)

    def start_loading(self, loader: Sequence, shared: list[int], num_tokens: int) -> None:
        """Allocate blocks into which KV of a waiting sequence is read.

        Args:
            loader: sequence without blocks that stands for the waiting one.
            shared: cached blocks that precede the new ones.
            num_tokens: tokens to read behind them; enough blocks must be free.
        """
        self.block_pool.add_references(shared)
        loader.start_with_blocks(shared, len(shared) * self._block_size)
        self.allocate(loader, num_tokens)
        self.loading[loader.seq] = loader

    def finish_loading(self, loader: Sequence, owner: Sequence | None, is_ok: bool) -> None:
        """Release the blocks of `start_loading`, which are no longer written.

        Args:
            loader: the sequence of `start_loading`.
            owner: the waiting sequence that will use them; None if there is none.
            is_ok: the full blocks have their content and are added to the prefix cache.
        """
        del self.loading[loader.seq]
        if is_ok:
            loader.num_computed_tokens = len(loader.block_ids) * self._block_size
            self.publish(loader)
        self.block_pool.release(loader.reset(), None if owner is None else owner.seq)

    def remaining_sequences(self) -> list[Sequence]:
        """Return the sequences with blocks that they do not free when their steps complete."""
        return [s for s in self.running.values() if not (s.is_preempting or s.is_finished)]

    def num_reclaimable_blocks(self, victims: Container[int] = ()) -> int:
        """Return the number of blocks that are free or will be freed without another step.

        They are freed when rows in flight have been computed, when another engine has stopped
        reading blocks that were kept for it, or when blocks have been read from disk.

        Args:
            victims: ids of further sequences whose blocks count as about to be freed.
        """
        freeing = [
            s for s in self.running.values() if s.is_preempting or s.is_finished or s.seq in victims
        ]
        pool = self.block_pool
        freeing += self.loading.values()
        num_freeing = sum(pool.count_exclusive(s.block_ids) for s in freeing)
        return pool.num_free_blocks + num_freeing + self.holds.count_returning_blocks()

    def find_shareable_blocks(self, sequence: Sequence) -> list[int]:
        """Return the blocks with which a sequence can start; its last token is never included.

        With recurrent layers they end where their state was kept.
        """
        blocks = self._find_computed_blocks(sequence)
        if self.states is None or not blocks:
            return blocks
        hashes = sequence.get_block_hashes(len(blocks), self._block_size)
        return blocks[: self.states.count_restorable_blocks(hashes)]

    def _admit_state(self, states: StateCache, sequence: Sequence, num_blocks: int) -> None:
        """Give a sequence a state slot, and the state after its first `num_blocks` blocks."""
        size = self._block_size
        boundaries: list[int] = []
        is_kept = self._has_prefix_cache and not sequence.request.is_kv_foreign
        if is_kept:
            num_shared = len(self._find_computed_blocks(sequence)) * size
            lengths = sequence.prompt_len, sequence.num_prefill_tokens
            boundaries = list_prefill_boundaries(num_blocks * size, num_shared, *lengths, size)
        hashes = sequence.get_block_hashes(num_blocks, size)
        states.admit(sequence.seq, hashes[-1] if hashes else None, boundaries, is_kept)

    def _find_computed_blocks(self, sequence: Sequence) -> list[int]:
        """Return the computed blocks of a sequence's prefix; its last token is never included."""
        num_full = (sequence.num_prefill_tokens - 1) // self._block_size
        shared = self._find_parent_blocks(sequence, num_full)
        if not self._has_prefix_cache or len(shared) == num_full:
            return shared
        num_hashed = num_full
        if not sequence.reads_prefix_cache and sequence.num_scored_tokens < sequence.prompt_len:
            # The cache provides only prompt tokens that have been scored.
            num_hashed = min(num_full, sequence.num_scored_tokens // self._block_size)
        hashes = sequence.get_block_hashes(num_hashed, self._block_size)
        return max(self.block_pool.find_cached_blocks(hashes), shared, key=len)

    def _find_parent_blocks(self, sequence: Sequence, num_full: int) -> list[int]:
        """Return the full prompt blocks that a choice shares with its parent.

        Empty if there is no parent or it does not hold all of them.

        Args:
            sequence: a waiting sequence.
            num_full: number of blocks that the sequence can share at all.
        """
        parent = sequence.fork_parent
        if parent is None or not parent.block_ids:
            return []
        num_shared = min(num_full, sequence.prompt_len // self._block_size)
        if parent.num_computed_tokens < num_shared * self._block_size:
            return []
        return parent.block_ids[:num_shared]

"""Eviction of cached KV blocks with knowledge of the future, to compare production orders with.

It evicts the block whose next use is farthest in the future (Belady, "A Study of Replacement
Algorithms for a Virtual-Storage Computer", 1966). Whoever uses a block uses all blocks before it,
so the farthest block is always one that no other cached block with an earlier use follows.

For requests that are served one at a time in a given order, and blocks of equal cost, no order of
eviction recomputes fewer blocks. Here requests overlap, and when a turn arrives depends on what was
evicted before: it is a yardstick, not a bound.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from gllm.scheduler.block_pool import chain_hashes, root_hash
from gllm.scheduler.eviction import EvictionOrder
from gllm.sim.sessions import find_next_turns
from gllm.sim.workloads.requests import PromptTokens, WorkloadRequest


class HindsightEviction(EvictionOrder):
    """Evicts the block that is used again last, or never.

    Args:
        jobs: All requests of the workload; a request's sequence has its position as its id.
        prompts: Token ids of the prompts.
        block_size: Tokens per block.
    """

    def __init__(
        self, jobs: Sequence[WorkloadRequest], prompts: PromptTokens, block_size: int
    ) -> None:
        self._jobs = jobs
        self._next_turns = find_next_turns(jobs)
        self._arrivals: dict[str, float] = {}
        """Time of the next request of each conversation; -inf while one waits or runs."""
        self._users: dict[bytes, list[str]] = {}
        """Conversations that use a block, by its hash."""
        for index, job in enumerate(jobs):
            if job.session:
                self._arrivals.setdefault(job.session, job.arrival_seconds)
                if self._next_turns[index] is None:
                    token_ids = prompts.make_request(index, job).prompt_token_ids
                    num_tokens = len(token_ids) // block_size * block_size
                    hashes = chain_hashes(root_hash(""), token_ids[:num_tokens], block_size)
                    for digest in hashes:
                        self._users.setdefault(digest, []).append(job.session)
        self._links: dict[int, tuple[bytes, int]] = {}
        """Hash and position of each cached block."""
        self._keys: dict[int, tuple[float, int]] = {}
        """Next use and position of each unreferenced block, both negative."""
        self._heap: list[tuple[tuple[float, int], int]] = []
        """Unreferenced blocks by key; outdated entries are removed lazily."""
        self._released: dict[int, list[int]] = {}
        """Blocks that each sequence has released before it ended."""

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, block: int, owner: int | None) -> None:
        """Add a block with its next use."""
        self._push(block)
        if owner is not None:
            self._released.setdefault(owner, []).append(block)

    def discard(self, block: int) -> None:
        """Remove a block that is referenced again."""
        del self._keys[block]

    def pop(self, now: float) -> int:
        """Remove and return the block whose next use is farthest."""
        while True:
            key, block = heappop(self._heap)
            if self._keys.get(block) == key:
                del self._keys[block]
                return block

    def clear(self) -> None:
        """Remove all blocks."""
        for container in (self._links, self._keys, self._heap, self._released):
            container.clear()

    def on_published(self, block: int, digest: bytes, parent: bytes | None, position: int) -> None:
        """Note the content of a block."""
        self._links[block] = digest, position

    def on_removed(self, block: int) -> None:
        """Forget a block."""
        del self._links[block]

    def on_arrival(
        self,
        owner: int,
        client: str,
        session: str,
        block_hashes: list[bytes],
        cached: Sequence[int],
        now: float,
    ) -> None:
        """Keep what a waiting request is about to use."""
        if session:
            self._arrivals[session] = -inf
        self._update(cached)

    def on_end(self, owner: int, now: float) -> None:
        """Set the next use of the blocks of a conversation."""
        job, following = self._jobs[owner], self._next_turns[owner]
        if job.session:
            time = inf
            if following is not None:
                pause = self._jobs[following].pause_seconds
                time = self._jobs[following].arrival_seconds if pause is None else now + pause
            self._arrivals[job.session] = time
        self._update(self._released.pop(owner, ()))

    def _update(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block in self._keys:
                self._push(block)

    def _push(self, block: int) -> None:
        digest, position = self._links[block]
        next_use = min(map(self._arrivals.__getitem__, self._users.get(digest, ())), default=inf)
        key = self._keys[block] = -next_use, -position
        heappush(self._heap, (key, block))

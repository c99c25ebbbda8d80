"""Order in which cached KV blocks without a reference are evicted.

`LruEviction` evicts what was used longest ago. `ReturnEviction` evicts what is worth least: the
blocks of the conversation whose learned rate of return is smallest. All blocks have the same number
of tokens, so that minimizes the tokens to recompute. Pure: time is an argument.
"""

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from math import inf
from typing import ClassVar, NamedTuple

from gllm.scheduler.return_times import (
    AGE_EDGES,
    NUM_BINS,
    UNKNOWN_GROUP,
    ConversationGroup,
    ReturnTimes,
    age_bin,
)

EVICTION_NAMES = ("lru", "return")
"""Names of the orders, for --prefix-cache-eviction."""


class EvictionOrder(ABC):
    """Cached blocks without a reference, in an order of eviction.

    The block pool calls `add`, `discard`, `pop`, `on_published` and `on_removed`; the KV cache
    manager reports the lives of sequences, which own the blocks that they release.
    """

    follows_sequences: ClassVar[bool] = True
    """True if `on_arrival` and `on_end` have to be called."""

    @abstractmethod
    def __contains__(self, block: int) -> bool: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Yield the blocks; the first one is evicted first, unless time changes the order."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def add(self, block: int, owner: int | None) -> None:
        """Add a block that has lost its last reference; those of a chain come last block first.

        Args:
            block: a cached block.
            owner: id of the sequence that had it; None if unknown.
        """

    @abstractmethod
    def discard(self, block: int) -> None:
        """Remove a block that is referenced again."""

    @abstractmethod
    def pop(self, now: float) -> int:
        """Remove and return the block to evict; there is at least one."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all blocks, because the prefix cache is emptied."""

    def on_published(  # noqa: B027 (not every order needs it)
        self, block: int, digest: bytes, parent: bytes | None, position: int
    ) -> None:
        """Handle that a block has entered the prefix cache.

        Args:
            block: the block.
            digest: its hash.
            parent: hash of the block before it; None if unknown.
            position: tokens before it; 0 if unknown.
        """

    def on_removed(self, block: int) -> None:  # noqa: B027
        """Handle that a block has left the prefix cache."""

    def on_arrival(  # noqa: B027
        self,
        owner: int,
        client: str,
        session: str,
        block_hashes: list[bytes],
        cached: Sequence[int],
        now: float,
    ) -> None:
        """Handle a new sequence.

        Args:
            owner: id of the sequence.
            client: name of the client that sent it.
            session: name of its conversation among those of the client; empty for none.
            block_hashes: hashes of the full blocks of its prompt.
            cached: blocks that the prefix cache has of it, its first block first.
            now: time in seconds.
        """

    def on_end(self, owner: int, now: float) -> None:  # noqa: B027
        """Handle the end of a sequence; its blocks have been released."""


class LruEviction(EvictionOrder):
    """Evicts the least recently used block first, the end of a chain before its beginning."""

    follows_sequences = False

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: int, owner: int | None) -> None:
        """Add a block as the last one to be evicted."""
        self._blocks[block] = None

    def discard(self, block: int) -> None:
        """Remove a block that is referenced again."""
        del self._blocks[block]

    def pop(self, now: float) -> int:
        """Remove and return the block that has been without a reference for longest."""
        return self._blocks.popitem(last=False)[0]

    def clear(self) -> None:
        """Remove all blocks."""
        self._blocks.clear()


class _Visit:
    """Blocks of one sequence that no sequence references, with what decides their value."""

    __slots__ = ("bin", "blocks", "end", "group", "last_hash", "parked_at", "session")

    def __init__(
        self, group: ConversationGroup, session: str = "", last_hash: bytes | None = None
    ) -> None:
        self.group = group
        self.session = session
        self.last_hash = last_hash
        """Hash of the last full block of the prompt; None if there is none."""
        self.blocks: OrderedDict[int, None] = OrderedDict()
        """In the order of eviction: those of a chain from its last to its first block."""
        self.end: float | None = None
        """Time at which the sequence ended; None while it waits or runs."""
        self.bin = -1
        """Bin of the idle time in which the visit is a candidate; -1 for none."""
        self.parked_at = -1
        """Block whose cached children have to be evicted first; -1 for none."""


class _LeastVisit(NamedTuple):
    """Visit of least value of a group, as long as the group has the same visits and values."""

    values: list[float]
    """Values of the group by bin."""
    due: float
    """Time at which one of its visits moves on to another bin."""
    rank: tuple[float, float]
    """Value, and time of the end."""
    visit: _Visit


class ReturnEviction(EvictionOrder):
    """Evicts blocks of the conversation that is least likely to need them soon.

    The value of a block is the learned rate at which its conversation returns
    (`ReturnTimes.values`); of equal values the conversation goes first that has been idle for
    longest. Blocks that a waiting sequence is about to use are evicted last. Only blocks without
    cached children are evicted, as long as there are any.

    Values depend on the group of a conversation and the bin of its idle time alone, so a choice
    compares one conversation of each group, and those of its bins only if something has changed.
    """

    def __init__(self) -> None:
        self.times = ReturnTimes()
        """Learned return times."""
        self._visit_of: dict[int, _Visit] = {}
        """By unreferenced block."""
        self._visits: dict[int, _Visit] = {}
        """By sequence that has not ended."""
        self._waiting: OrderedDict[_Visit, None] = OrderedDict()
        """Visits with blocks of sequences that have not ended, in the order of their arrival."""
        self._idle: dict[ConversationGroup, list[OrderedDict[_Visit, None]]] = {}
        """Ended visits with blocks by group and bin, the oldest one of a bin first."""
        self._least_visits: dict[ConversationGroup, _LeastVisit] = {}
        """Visit of least value of each group, as far as it is known."""
        self._parked: dict[int, _Visit] = {}
        """Visits by the block whose children have to be evicted first."""
        self._unknown = _Visit(UNKNOWN_GROUP)
        """Blocks without a known sequence, the least recently used one first."""
        self._unknown.end = 0.0
        self._links: dict[int, tuple[bytes, bytes | None]] = {}
        """Hash, and hash of the parent, of each cached block."""
        self._num_children: Counter[bytes] = Counter()
        """Cached blocks by the hash of their parent."""
        self._block_of: dict[bytes, int] = {}
        """Cached block by hash."""
        self._chosen: tuple[float, _Visit] | None = None
        """Last choice and its time, which holds while nothing else changes."""

    def __contains__(self, block: int) -> bool:
        return block in self._visit_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._visit_of)

    def __len__(self) -> int:
        return len(self._visit_of)

    def add(self, block: int, owner: int | None) -> None:
        """Add a block to those of its sequence."""
        self._chosen = None
        visit = self._unknown
        if owner is not None:
            if owner not in self._visits:
                # A further choice of a request, whose arrival was that of the first one.
                self._visits[owner] = _Visit(UNKNOWN_GROUP)
            visit = self._visits[owner]
        self._append(visit, block)

    def discard(self, block: int) -> None:
        """Remove a block that is referenced again."""
        self._chosen = None
        visit = self._visit_of.pop(block)
        del visit.blocks[block]
        if visit.parked_at == block:
            self._unpark(visit)
        if not visit.blocks:
            self._unfile(visit)

    def pop(self, now: float) -> int:
        """Remove and return the least valuable block."""
        while True:
            visit = self._choose(now)
            block = next(iter(visit.blocks))
            digest = self._links[block][0]
            if not self._num_children[digest] or visit.parked_at == block:
                break
            self._park(visit, block)
        self.discard(block)
        if visit.blocks:
            self._chosen = now, visit
        return block

    def clear(self) -> None:
        """Remove all blocks; what is learned stays."""
        for visit in set(self._visit_of.values()):
            visit.blocks.clear()
            visit.bin = visit.parked_at = -1
        for container in (
            self._visit_of, self._waiting, self._idle, self._least_visits, self._parked,
            self._links, self._num_children, self._block_of,
        ):  # fmt: skip
            container.clear()
        self._chosen = None

    def on_published(self, block: int, digest: bytes, parent: bytes | None, position: int) -> None:
        """Note the place of a block in the tree of prefixes."""
        self._links[block] = digest, parent
        self._block_of[digest] = block
        if parent is not None:
            self._num_children[parent] += 1

    def on_removed(self, block: int) -> None:
        """Forget a block; the block before it can be evicted if it has no other child."""
        digest, parent = self._links.pop(block)
        del self._block_of[digest]
        if parent is None:
            return
        self._num_children[parent] -= 1
        if self._num_children[parent]:
            return
        del self._num_children[parent]
        visit = self._parked.get(self._block_of.get(parent, -1))
        if visit is not None:
            self._unpark(visit)

    def on_arrival(
        self,
        owner: int,
        client: str,
        session: str,
        block_hashes: list[bytes],
        cached: Sequence[int],
        now: float,
    ) -> None:
        """Learn from the return of a conversation, and keep what its request is about to use."""
        group = self.times.on_arrival(client, session, block_hashes, now)
        last_hash = block_hashes[-1] if block_hashes else None
        visit = self._visits[owner] = _Visit(group, session, last_hash)
        for block in reversed(cached):
            if block in self._visit_of:
                self.discard(block)
                self._append(visit, block)

    def on_end(self, owner: int, now: float) -> None:
        """Await the return of the conversation."""
        visit = self._visits.pop(owner, None)
        if visit is None:
            return
        self._chosen = None
        self.times.on_end(visit.group, visit.session, visit.last_hash, now)
        visit.end = now
        self._waiting.pop(visit, None)
        if visit.blocks and visit.parked_at < 0:
            self._file(visit, 0)

    def _append(self, visit: _Visit, block: int) -> None:
        self._visit_of[block] = visit
        visit.blocks[block] = None
        if len(visit.blocks) > 1:
            return
        if visit.end is None:
            self._waiting[visit] = None
        else:
            self._file(visit, NUM_BINS - 1)

    def _file(self, visit: _Visit, index: int) -> None:
        """Make an ended visit a candidate in a bin."""
        self._least_visits.pop(visit.group, None)
        bins = self._idle.get(visit.group)
        if bins is None:
            bins = self._idle[visit.group] = [OrderedDict() for _ in range(NUM_BINS)]
        visit.bin = index
        bins[index][visit] = None

    def _unfile(self, visit: _Visit) -> None:
        """Remove a visit from the candidates."""
        if visit.bin >= 0:
            self._least_visits.pop(visit.group, None)
            bins = self._idle[visit.group]
            del bins[visit.bin][visit]
            visit.bin = -1
            if not any(bins):
                del self._idle[visit.group]
        self._waiting.pop(visit, None)

    def _park(self, visit: _Visit, block: int) -> None:
        """Let a visit wait until the cached children of its next block are evicted."""
        self._unfile(visit)
        visit.parked_at = block
        self._parked[block] = visit
        self._chosen = None

    def _unpark(self, visit: _Visit) -> None:
        del self._parked[visit.parked_at]
        visit.parked_at = -1
        self._chosen = None
        if not visit.blocks:
            return
        if visit.end is None:
            self._waiting[visit] = None
        else:
            # Bins are entered at the end; `_age` moves the visit on.
            self._file(visit, 0)

    def _choose(self, now: float) -> _Visit:
        """Return the visit of least value; a parked one only if nothing else is left."""
        if self._chosen is not None and self._chosen[0] == now:
            return self._chosen[1]
        best: _LeastVisit | None = None
        for group, bins in self._idle.items():
            values = self.times.values(group, now)
            candidate = self._least_visits.get(group)
            if candidate is None or candidate.values is not values or now >= candidate.due:
                candidate = self._least_visits[group] = self._find_least_visit(bins, values, now)
            if best is None or candidate.rank < best.rank:
                best = candidate
        if best is not None:
            visit = best.visit
        elif self._waiting:
            visit = next(reversed(self._waiting))
        else:
            visit = next(iter(self._parked.values()))
        self._chosen = now, visit
        return visit

    def _find_least_visit(
        self, bins: list["OrderedDict[_Visit, None]"], values: list[float], now: float
    ) -> "_LeastVisit":
        """Return the visit of least value of a group that has visits."""
        self._age(bins, now)
        best: _Visit | None = None
        least, due = (0.0, 0.0), inf
        for index, visits in enumerate(bins):
            if not visits:
                continue
            visit = next(iter(visits))
            assert visit.end is not None
            if index + 1 < NUM_BINS:
                due = min(due, visit.end + AGE_EDGES[index + 1])
            if best is None or (values[index], visit.end) < least:
                best, least = visit, (values[index], visit.end)
        assert best is not None, "groups without visits are removed"
        return _LeastVisit(values, due, least, best)

    def _age(self, bins: list["OrderedDict[_Visit, None]"], now: float) -> None:
        """Move the visits of a group on to the bins of their idle times."""
        for index in range(NUM_BINS - 2, -1, -1):
            visits = bins[index]
            while visits:
                visit = next(iter(visits))
                assert visit.end is not None
                age = now - visit.end
                if age < AGE_EDGES[index + 1]:
                    break
                visits.popitem(last=False)
                visit.bin = max(index + 1, age_bin(age))
                bins[visit.bin][visit] = None


def create_eviction(name: str) -> EvictionOrder:
    """Return a new order of eviction by its name in EVICTION_NAMES."""
    return ReturnEviction() if name == "return" else LruEviction()

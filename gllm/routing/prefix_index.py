"""Index of the prefix caches of all engines: which engine has cached which KV blocks.

The index is exact: it repeats the events by which an engine reports every change of its cache.
"""

from collections.abc import Iterable, Sequence
from typing import overload

from gllm.scheduler.block_pool import chain_hash, root_hash


class PrefixIndex:
    """Router's copy of all prefix caches: the engines that have each KV block, by block hash."""

    def __init__(self) -> None:
        self._owners: dict[bytes, int] = {}
        """Engines that have a block, as a mask of their bits."""
        self._bits: dict[str, int] = {}
        """Bit of each known engine."""
        self._engines: dict[int, str] = {}
        """Engine of each bit in use."""
        self._blocks: dict[str, set[bytes]] = {}
        """Blocks of each engine."""
        self._next_numbers: dict[str, int] = {}
        """Number of the next events of each engine that is up to date."""

    @property
    def num_blocks(self) -> dict[str, int]:
        """Number of indexed blocks by engine."""
        return {engine: len(blocks) for engine, blocks in self._blocks.items()}

    def on_events(
        self,
        engine: str,
        number: int,
        stored: Iterable[bytes],
        removed: Iterable[bytes],
        is_cleared: bool = False,
    ) -> bool:
        """Apply changes of an engine's prefix cache.

        Args:
            engine: name of the engine.
            number: sequence number of the report; counts up by one.
            stored: hashes of blocks that have been cached.
            removed: hashes of blocks that have been evicted, none of them in `stored`.
            is_cleared: the cache was emptied before; `stored` is all that it has.

        Returns:
            False if earlier reports are missing. The engine then has no blocks in the index until
            its next report with its whole cache, which has to be requested.
        """
        if is_cleared:
            self.forget(engine)
            self._blocks[engine] = set()
            self._bits[engine] = bit = self._find_free_bit()
            self._engines[bit] = engine
        elif self._next_numbers.get(engine) != number:
            self.forget(engine)
            return False
        self._next_numbers[engine] = number + 1
        self._remove(engine, removed)
        owners, blocks, bit = self._owners, self._blocks[engine], self._bits[engine]
        for digest in stored:
            owners[digest] = owners.get(digest, 0) | bit
            blocks.add(digest)
        return True

    def forget(self, engine: str) -> None:
        """Remove an engine and all of its blocks."""
        self._next_numbers.pop(engine, None)
        self._remove(engine, self._blocks.get(engine, set()).copy())
        self._blocks.pop(engine, None)
        self._engines.pop(self._bits.pop(engine, 0), None)

    def cached_blocks(self, hashes: Iterable[bytes]) -> dict[str, int]:
        """Return the length of the longest cached prefix by engine; engines without one are absent.

        Args:
            hashes: hash chain of a prompt; only the part that some engine has cached is read.
        """
        lengths: dict[str, int] = {}
        mask, length = sum(self._engines), 0
        for digest in hashes:
            remaining = mask & self._owners.get(digest, 0)
            if remaining != mask:
                if length:
                    self._end_prefixes(mask & ~remaining, length, lengths)
                mask = remaining
            if not mask:
                return lengths
            length += 1
        if length:
            self._end_prefixes(mask, length, lengths)
        return lengths

    def _end_prefixes(self, mask: int, length: int, lengths: dict[str, int]) -> None:
        """Set the length of the prefix of all engines in a mask."""
        while mask:
            bit = mask & -mask
            lengths[self._engines[bit]] = length
            mask ^= bit

    def _remove(self, engine: str, digests: Iterable[bytes]) -> None:
        owners, blocks, bit = self._owners, self._blocks.get(engine, set()), self._bits.get(engine)
        for digest in digests:
            # An engine may report a block that was stored before the snapshot that it has sent.
            if bit is None or digest not in blocks:
                continue
            blocks.remove(digest)
            if owners[digest] == bit:
                del owners[digest]
            else:
                owners[digest] &= ~bit

    def _find_free_bit(self) -> int:
        """Return the lowest bit that no engine has."""
        bit = 1
        while bit in self._engines:
            bit <<= 1
        return bit


class PromptBlockHashes(Sequence[bytes]):
    """Prefix-cache hashes of a prompt's full KV blocks; each is computed when it is first read.

    Args:
        token_ids: tokens of the prompt.
        block_size: tokens per KV block.
        cache_salt: prompts share blocks only within one salt.
    """

    def __init__(self, token_ids: Sequence[int], block_size: int, cache_salt: str = "") -> None:
        self._token_ids = token_ids
        self._block_size = block_size
        self._parent = root_hash(cache_salt)
        self._hashes: list[bytes] = []

    def __len__(self) -> int:
        """Return the number of full blocks."""
        return len(self._token_ids) // self._block_size

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        """Return the hash of one block, or of several."""
        if isinstance(index, slice):
            return [self[index] for index in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        while len(self._hashes) <= index:
            begin = len(self._hashes) * self._block_size
            block = self._token_ids[begin : begin + self._block_size]
            self._hashes.append(chain_hash(self._parent, block))
            self._parent = self._hashes[-1]
        return self._hashes[index]

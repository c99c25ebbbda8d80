"""A sequence on its way through the pipeline: its tokens, its blocks, how far it is.

Owns the two counters, computed and scheduled, which let chunk k + 1 of a prompt enter the pipeline
before chunk k has left. Knows nothing of other sequences.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from gllm.scheduler.block_pool import chain_hash, root_hash
from gllm.scheduler.plan import ON_DEVICE, ScheduledRow


class SchedulerRequest(NamedTuple):
    """What is asked of the scheduler: `n` sequences seq .. seq + n - 1 from one prompt."""

    seq: int
    """Above the id of every request before."""
    prompt: list[int]
    max_tokens: int
    """Tokens to generate at most."""
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    """Smaller runs earlier."""
    cache_salt: str = ""
    n: int = 1
    reads_cache: bool = True
    """Whether blocks that others computed may stand for its own; if not, its first sequence
    computes each token of the prompt once itself, because each is scored."""

    def check(self, max_model_len: int) -> None:
        """Raises ValueError where it can never run."""
        longest = len(self.prompt) + self.max_tokens
        if not self.prompt or self.max_tokens < 1 or longest > max_model_len:
            raise ValueError(
                f"prompt of {len(self.prompt)} tokens and max_tokens {self.max_tokens} have "
                f"to be at least 1 each and together at most {max_model_len}"
            )


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request."""

    seq: int
    request: SchedulerRequest
    tokens: list[int]
    """Prompt and generated tokens, as far as the driver knows them."""
    target: int
    """Tokens to prefill: all that were known when it was last (re-)admitted to waiting."""
    scheduled: int = 0
    """Tokens in the KV cache, those in flight included."""
    computed: int = 0
    """Tokens in the KV cache for sure."""
    in_flight: int = 0
    """Rows in plans not yet committed."""
    epoch: int = 0
    blocks: list[int] = field(default_factory=list)
    """Block table."""
    sent: int = 0
    """Blocks of the table that followers know of."""
    published: int = 0
    """Leading blocks offered to the prefix cache."""
    hashes: list[bytes] = field(default_factory=list)
    """Hash chain of the leading full blocks, computed on demand."""
    cached: int = 0
    """Prompt tokens that the prefix cache had at the first admission."""
    reused: int = 0
    """Tokens that it had from the prefix cache when it was last admitted."""
    expected: int = 0
    """Tokens that the prefix cache had when it began to wait: not counted as waiting."""
    scored: int = 0
    """Leading tokens that it has computed before it lost its blocks."""
    evicting: bool = False
    """A victim of preemption that still has rows in flight: fed no more."""
    ended: bool = False
    """Ended, but its blocks wait for rows in flight."""
    donor: "Sequence | None" = None
    """The first choice of the same request, whose prompt blocks can be shared."""
    arrival: float = 0.0
    """When its request was added, in the caller's seconds."""
    queue_seconds: float = 0.0
    """From its arrival to its first micro-batch."""

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: by priority, then arrival."""
        return (self.request.priority, self.seq)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def reads_cache(self) -> bool:
        """Whether it may begin with blocks from the prefix cache that others computed."""
        return self.request.reads_cache or self.seq != self.request.seq

    @property
    def readable_tokens(self) -> int:
        """Leading tokens that may come from the prefix cache, if that has them; the last one of
        its target is always computed."""
        if self.reads_cache or self.scored >= self.prompt_len:
            return self.target - 1
        return self.scored

    @property
    def prefilling(self) -> bool:
        """Part of the prefill is not scheduled yet."""
        return self.scheduled < self.target

    @property
    def waiting_tokens(self) -> int:
        """Its share of #WP."""
        return max(0, self.target - max(self.scheduled, self.expected))

    @property
    def leaving(self) -> bool:
        """Its blocks come back once its rows in flight have committed."""
        return self.evicting or self.ended

    def can_decode(self, lookahead: bool) -> bool:
        """Its next input token is known, or with lookahead will be once it is needed."""
        if lookahead:
            # Where all known tokens are scheduled, the last row in flight samples one more.
            coming = max(len(self.tokens), self.scheduled + 1)
            return coming < self.prompt_len + self.request.max_tokens
        return self.scheduled < len(self.tokens)

    @property
    def decode_tokens(self) -> int:
        """Tokens of its next decode: more than one where the last one drawn forced others."""
        return max(1, len(self.tokens) - self.scheduled)

    def blocks_missing(self, tokens: int, block_size: int) -> int:
        """Blocks to add before `tokens` tokens fit."""
        return max(0, -(-tokens // block_size) - len(self.blocks))

    def hash_chain(self, count: int, block_size: int) -> list[bytes]:
        """Hashes of the first `count` full blocks."""
        while len(self.hashes) < count:
            begin = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else root_hash(self.request.cache_salt)
            self.hashes.append(chain_hash(parent, self.tokens[begin : begin + block_size]))
        return self.hashes[:count]

    def feed(self, num_tokens: int) -> ScheduledRow:
        """Schedule the next `num_tokens` tokens; the blocks for them are there."""
        start = self.scheduled
        end = start + num_tokens
        known = self.tokens[max(start, self.prompt_len) : end]
        if end > len(self.tokens):
            known.append(ON_DEVICE)
        samples = end >= len(self.tokens)
        row = ScheduledRow(
            self.seq, self.epoch, start, num_tokens, self.blocks[self.sent :], known, samples
        )
        self.sent = len(self.blocks)
        self.scheduled = end
        self.in_flight += 1
        return row

    def admit(self, shared: list[int], cached: int) -> None:
        """Begin with blocks that hold its first `cached` tokens."""
        self.blocks = list(shared)
        self.scheduled = self.computed = self.reused = cached
        self.published = len(shared)
        self.expected = 0
        self.donor = None

    def drop(self) -> list[int]:
        """Forget the cache's content and return the blocks to give back."""
        blocks, self.blocks = self.blocks, []
        self.scored = max(self.scored, self.computed)
        self.epoch += 1
        self.sent = self.published = self.scheduled = self.computed = 0
        self.reused = self.expected = 0
        self.target = len(self.tokens)
        self.evicting = False
        return blocks

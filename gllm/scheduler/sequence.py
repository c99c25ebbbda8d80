"""Requests and sequences of the scheduler: tokens, blocks and progress; table of all sequences.

A sequence has two counters, computed and scheduled tokens. Chunk k + 1 of a prompt can therefore
enter the pipeline before chunk k has left it.
"""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from gllm.scheduler.block_pool import TOKEN_TYPE, chain_hashes, root_hash
from gllm.scheduler.plan import ON_DEVICE, ScheduledRow

UNGROUPED = (2**62, 0)
"""Prefill group of a sequence that has not joined one: behind all groups."""


class SchedulerRequest(NamedTuple):
    """Request to the scheduler: prompt, limits, and KV to fetch from or keep for other engines.

    It has `n` sequences (choices) with the ids seq .. seq + n - 1.
    """

    seq: int
    """Id of the first sequence; greater than all ids of earlier requests."""
    prompt_token_ids: Items[int]
    max_tokens: int
    """Maximum number of tokens to generate, `outputs` included."""
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    """Smaller values run earlier."""
    cache_salt: str = ""
    """Prompts share cached KV blocks only within one salt."""
    n: int = 1
    """Number of sequences (choices) with this prompt."""
    reads_prefix_cache: bool = True
    """True if the prefix cache may replace computation. False if every prompt token is scored: the
    first sequence then computes each of them once."""
    outputs: Items[list[int]] = ()
    """Tokens that each sequence generated in an earlier scheduler, which it continues after; empty
    if none did."""
    age_seconds: float = 0.0
    """Time since the request arrived at the first of these schedulers."""
    kv_ticket: int = 0
    """If not 0: when `max_tokens` ends the sequence, the blocks of its computed tokens are kept
    under this key until another engine has fetched them."""
    kv_source_tokens: int = 0
    """Leading tokens of the first sequence with KV that another engine holds."""
    is_kv_foreign: bool = False
    """True if an engine outside the fleet holds the KV; blocks of the request are not published."""
    predicted_output_tokens: int = 0
    """Lower end of the predicted output length in tokens, `outputs` included; 0: no prediction."""
    kv_source_ticket: int = 0
    """Key of the KV to fetch at the other engine; a prefetch may have fetched it already."""
    kv_source: object = None
    """Address of the KV to fetch, opaque to the scheduler; fetches return it."""
    reports_first_chunk: bool = False
    """True if the router has to know of `kv_ticket` once the first of several chunks is computed.
    """
    is_ticket_foreign: bool = False
    """True if a router outside the fleet has `kv_ticket`, which is neither renewed nor released."""
    is_kv_on_disk: bool = False
    """True if the KV of `kv_source_tokens` is in the prefix cache's disk tier, at no other engine.
    """
    client: str = ""
    """Name of the client that sent the request, such as the number of its API key."""
    session: str = ""
    """Name of the conversation among those of the client; empty: known by its prompt."""
    allows_guesses: bool = True
    """False if the sampler cannot verify guesses of its tokens."""

    @property
    def is_fleet_handoff(self) -> bool:
        """True if one engine of the fleet prefills the request and another one decodes it."""
        if self.kv_ticket:
            return not self.is_ticket_foreign
        return self.kv_source_tokens > 0 and not (self.is_kv_foreign or self.is_kv_on_disk)

    def check(self, max_model_len: int) -> None:
        """Check that the request can run.

        Raises:
            ValueError: the prompt or max_tokens is empty, both exceed `max_model_len`, `outputs`
                are not those of `n` unfinished sequences, or the fields of a hand-off contradict
                the others.
        """
        prompt_len = len(self.prompt_token_ids)
        if not prompt_len or self.max_tokens < 1 or prompt_len + self.max_tokens > max_model_len:
            raise ValueError(
                f"prompt of {prompt_len} tokens and max_tokens {self.max_tokens} have "
                f"to be at least 1 each and together at most {max_model_len}"
            )
        if self.outputs and len(self.outputs) != self.n:
            raise ValueError(f"outputs has to have {self.n} lists, one for each sequence")
        for output in self.outputs:
            if len(output) >= self.max_tokens or not self.stop_token_ids.isdisjoint(output):
                raise ValueError("outputs has a sequence that has ended")
        if self.kv_ticket or self.kv_source_tokens:
            self._check_hand_off()

    def _check_hand_off(self) -> None:
        if self.kv_ticket and self.n > 1:
            raise ValueError(f"kv_ticket holds the KV of one sequence, but n is {self.n}: use 1")
        num_tokens = self.kv_source_tokens
        num_known = len(self.prompt_token_ids) + (len(self.outputs[0]) if self.outputs else 0)
        if not 0 <= num_tokens < num_known:
            raise ValueError(
                f"kv_source_tokens {num_tokens} has to be at least 0 and below the {num_known} "
                "tokens of prompt and outputs, the last of which is always computed"
            )
        if num_tokens and not self.outputs and not self.reads_prefix_cache:
            raise ValueError(
                "kv_source_tokens with reads_prefix_cache off: the tokens of a prompt that is "
                "scored are computed, not fetched; leave kv_source_tokens out"
            )

    def initial_token_ids(self, seq: int) -> "array[int]":
        """Return the known tokens of a new sequence: the prompt and its earlier output."""
        token_ids = array(TOKEN_TYPE, self.prompt_token_ids)
        if self.outputs:
            token_ids.extend(self.outputs[seq - self.seq])
        return token_ids


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request in the scheduler: its tokens, block table, progress and priority."""

    seq: int
    request: SchedulerRequest
    token_ids: "array[int]"
    """Prompt and generated tokens that the driver knows, in a fifth of a list's memory."""
    num_prefill_tokens: int
    """Tokens to prefill: all tokens known when the sequence last entered the prefill queue."""
    num_scheduled_tokens: int = 0
    """Tokens in the KV cache, those in flight included."""
    num_computed_tokens: int = 0
    """Tokens in the KV cache, computed by committed steps."""
    num_rows_in_flight: int = 0
    """Rows in plans that have not committed."""
    num_preemptions: int = 0
    """Number of times that the sequence lost its blocks."""
    block_ids: list[int] = field(default_factory=list)
    """Block table."""
    num_sent_blocks: int = 0
    """Leading blocks of the block table that the stages have received."""
    num_published_blocks: int = 0
    """Leading blocks added to the prefix cache."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hash chain of the leading full blocks, computed on demand."""
    disk_keys: list[bytes] = field(default_factory=list)
    """Their keys on disk, computed on demand."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    num_reused_tokens: int = 0
    """Tokens found in the prefix cache at the last admission."""
    num_expected_cached_tokens: int = 0
    """Tokens in the prefix cache, or to be fetched, when the sequence entered the prefill queue;
    not counted as waiting."""
    num_scored_tokens: int = 0
    """Leading tokens that the sequence had computed before it last lost its blocks."""
    is_preempting: bool = False
    """True for a victim of preemption with rows in flight; it is not scheduled."""
    is_finished: bool = False
    """True once the sequence has ended; its blocks wait for the rows in flight."""
    num_source_tokens: int = 0
    """Leading tokens with KV to fetch; 0 once the fetch or a prefill has started."""
    is_fetching: bool = False
    """True while KV is fetched into the blocks; this counts as a row in flight."""
    has_fetched_bytes: bool = False
    """True if bytes of the fetch in flight have arrived."""
    has_yielded: bool = False
    """True once a fetch has lost its blocks to a sequence of worse rank: it loses none again."""
    fork_parent: "Sequence | None" = None
    """Sequence of the same request with which this one shares the blocks of the prompt."""
    arrival_time: float = 0.0
    """Time at which the request arrived, in seconds of the caller's clock."""
    queue_seconds: float = 0.0
    """Time from the arrival to the first micro-batch."""
    prefill_group: tuple[int, int] = UNGROUPED
    """Number of the group of prompts that are sorted together, and sort key within it
    (PrefillOrder)."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Guesses for the next row, at the positions behind all known and scheduled tokens."""
    guesses: list[int] = field(default_factory=list)
    """Draft tokens in flight, at the positions from `num_tokens` on."""
    num_displacements: int = 0
    """Number of micro-batches in which prompts postponed this decode (policy `splitwise`)."""

    rank: tuple[int, float, int] = field(init=False)
    """Order of service: priority, then arrival."""
    prompt_len: int = field(init=False)
    """Number of prompt tokens."""
    num_tokens: int = field(init=False)
    """Length of `token_ids`, which every row of every micro-batch reads."""

    def __post_init__(self) -> None:
        """Set what follows from the other fields."""
        self.rank = (self.request.priority, self.arrival_time, self.seq)
        self.prompt_len = len(self.request.prompt_token_ids)
        self.num_tokens = len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of known generated tokens."""
        return self.num_tokens - self.prompt_len

    @property
    def num_unscheduled_tokens(self) -> int:
        """Number of tokens to generate that no row in flight samples."""
        num_missing = self.request.max_tokens - self.num_output_tokens
        return max(0, num_missing - self.num_rows_in_flight)

    @property
    def has_run(self) -> bool:
        """True if the next prefill is a recomputation: after a preemption, or of earlier output."""
        return self.num_preemptions > 0 or self.num_output_tokens > 0

    @property
    def reads_prefix_cache(self) -> bool:
        """True if the sequence may start with blocks of the prefix cache."""
        return self.request.reads_prefix_cache or self.seq != self.request.seq

    @property
    def is_fetch_pending(self) -> bool:
        """True if the sequence waits for the start of its fetch instead of prefill."""
        return self.num_source_tokens > 0 and not self.is_finished

    @property
    def is_fetch_ending(self) -> bool:
        """True while a fetch is in flight whose source is complete, so that it ends by itself.

        The source of a prefetch, whose id is negative, may not be computed yet.
        """
        return self.is_fetching and self.seq >= 0

    @property
    def is_prefilling(self) -> bool:
        """True if part of the prefill is not scheduled yet."""
        return self.num_scheduled_tokens < self.num_prefill_tokens

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the sequence that count as waiting (its share of #WP)."""
        num_covered = max(self.num_scheduled_tokens, self.num_expected_cached_tokens)
        return max(0, self.num_prefill_tokens - num_covered)

    @property
    def is_freeing_blocks(self) -> bool:
        """True if the blocks are freed once the rows in flight have committed."""
        return self.is_preempting or self.is_finished

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the next decode: more than one if the last sampled token forced others."""
        num_tokens = self.num_tokens - self.num_scheduled_tokens
        return num_tokens if num_tokens > 1 else 1

    def num_missing_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return the number of blocks to allocate before `num_tokens` tokens fit in total."""
        return max(0, -(-num_tokens // block_size) - len(self.block_ids))

    def get_block_hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Return the hashes of the first `num_blocks` full blocks."""
        hashes = self.block_hashes
        if len(hashes) < num_blocks:
            token_ids = self.token_ids[len(hashes) * block_size : num_blocks * block_size]
            parent = hashes[-1] if hashes else root_hash(self.request.cache_salt)
            hashes += chain_hashes(parent, token_ids, block_size)
        return hashes[:num_blocks]

    def get_disk_keys(self, num_blocks: int, block_size: int, secret: bytes) -> list[bytes]:
        """Return the keys of the first `num_blocks` full blocks on disk.

        Args:
            num_blocks: number of blocks.
            block_size: tokens per block.
            secret: key of the digests, the same in all calls.
        """
        keys = self.disk_keys
        if len(keys) < num_blocks:
            token_ids = self.token_ids[len(keys) * block_size : num_blocks * block_size]
            parent = keys[-1] if keys else root_hash(self.request.cache_salt, secret)
            keys += chain_hashes(parent, token_ids, block_size, secret)
        return keys[:num_blocks]

    def schedule_row(self, num_tokens: int, draft_token_ids: Items[int] = ()) -> ScheduledRow:
        """Schedule the next tokens; their blocks must be allocated.

        Args:
            num_tokens: known tokens, or one that the row before samples; 0 in a row of guesses.
            draft_token_ids: guesses behind them.
        """
        start = self.num_scheduled_tokens
        end = start + num_tokens
        num_known = self.num_tokens
        if num_tokens == 1 and self.prompt_len <= start < num_known:
            token_ids = [self.token_ids[start]]
        else:
            token_ids = self.token_ids[max(start, self.prompt_len) : end].tolist()
        if end > num_known and not self.guesses and num_tokens:
            token_ids.append(ON_DEVICE)
        should_sample = end >= num_known
        if draft_token_ids:
            token_ids += draft_token_ids
            self.guesses += draft_token_ids
            num_tokens += len(draft_token_ids)
            end += len(draft_token_ids)
        new_block_ids: list[int] = []
        if self.num_sent_blocks < len(self.block_ids):
            new_block_ids = self.block_ids[self.num_sent_blocks :]
            self.num_sent_blocks = len(self.block_ids)
        self.num_scheduled_tokens = end
        self.num_rows_in_flight += 1
        # Half the time of the call ScheduledRow(...), once per row of every micro-batch.
        return tuple.__new__(
            ScheduledRow,
            (
                self.seq,
                self.num_preemptions,
                start,
                num_tokens,
                new_block_ids,
                token_ids,
                should_sample,
                len(draft_token_ids),
            ),
        )

    def append(self, token_id: int) -> None:
        """Append a token of the output; a guess in flight at its position becomes a known token."""
        self.token_ids.append(token_id)
        self.num_tokens += 1
        if self.guesses and self.guesses.pop(0) != token_id:
            # Rows in flight behind the wrong guess add nothing; the next row overwrites their KV.
            self.guesses.clear()
            self.num_scheduled_tokens = self.num_tokens - 1

    def start_with_blocks(self, block_ids: list[int], num_cached_tokens: int) -> None:
        """Start the sequence with blocks that hold its first `num_cached_tokens` tokens."""
        self.block_ids = list(block_ids)
        self.num_scheduled_tokens = self.num_computed_tokens = num_cached_tokens
        self.num_reused_tokens = num_cached_tokens
        self.num_published_blocks = len(block_ids)
        self.num_expected_cached_tokens = self.num_source_tokens = 0
        self.fork_parent = None

    def add_tail(self, block: int, num_slots: int) -> None:
        """Add a block whose first slots hold the next tokens, behind the blocks of the start."""
        self.block_ids.append(block)
        num_tokens = self.num_computed_tokens + num_slots
        self.num_scheduled_tokens = self.num_computed_tokens = num_tokens
        self.num_reused_tokens = num_tokens

    def reset(self) -> list[int]:
        """Discard the computed tokens; the sequence is prefilled again.

        Returns:
            The block table, whose blocks the caller releases.
        """
        block_ids, self.block_ids = self.block_ids, []
        self.num_scored_tokens = max(self.num_scored_tokens, self.num_computed_tokens)
        self.num_preemptions += 1
        self.num_sent_blocks = self.num_published_blocks = 0
        self.num_scheduled_tokens = self.num_computed_tokens = 0
        self.num_reused_tokens = self.num_expected_cached_tokens = 0
        self.num_prefill_tokens = self.num_tokens
        self.guesses.clear()
        self.is_preempting = False
        return block_ids


class SequenceTable:
    """Table of all sequences by id, including choices that are created once the prompt is computed.

    The n choices of a request share the KV blocks of one prompt: one sequence computes it, and the
    others are forked from it afterwards.
    """

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        """Sequences that the scheduler has created and not released."""
        self.pending_forks: dict[int, Sequence] = {}
        """Sequence that computes the prompt, by the id of a choice that waits for it."""
        self._released_seqs: list[int] = []

    def add(self, request: SchedulerRequest, now: float) -> Sequence:
        """Create the first sequence of a request; its other choices wait for `fork`."""
        first = self._create(request.seq, request, now - request.age_seconds)
        first.num_source_tokens = request.kv_source_tokens
        for seq in range(request.seq + 1, request.seq + request.n):
            self.pending_forks[seq] = first
        return first

    def fork(self, parent: Sequence) -> list[Sequence]:
        """Create the choices that wait for a sequence to compute the prompt.

        If it has ended before that, only the next choice is created: it computes the prompt for the
        others.
        """
        end = parent.request.seq + parent.request.n
        seqs = [seq for seq in range(parent.seq + 1, end) if self.pending_forks.get(seq) is parent]
        num_created = len(seqs) if parent.num_computed_tokens >= parent.prompt_len else 1
        choices = []
        for seq in seqs[:num_created]:
            del self.pending_forks[seq]
            choice = self._create(seq, parent.request, parent.arrival_time)
            choice.fork_parent = parent
            choices.append(choice)
        for seq in seqs[num_created:]:
            self.pending_forks[seq] = choices[0]
        return choices

    def cancel_fork(self, seq: int) -> bool:
        """Remove a choice that has not been created yet; return False if the id is not one."""
        if self.pending_forks.pop(seq, None) is None:
            return False
        self._released_seqs.append(seq)
        return True

    def release(self, sequence: Sequence) -> None:
        """Remove a finished sequence after all of its steps have committed."""
        del self.sequences[sequence.seq]
        self._released_seqs.append(sequence.seq)

    def unfinished_requests(self, now: float) -> list[SchedulerRequest]:
        """Return the requests that have not ended, as another scheduler can continue them.

        Each has the outputs of its unfinished sequences so far and its age. Its id is that of the
        first of them; with several sequences the others may have had any greater ids. Nothing is
        fetched for them again.
        """
        living: dict[int, list[tuple[int, list[int]]]] = {}
        requests: dict[int, tuple[SchedulerRequest, float]] = {}
        for seq, sequence in self._living_sequences():
            request = sequence.request
            known = sequence.token_ids if seq == sequence.seq else request.initial_token_ids(seq)
            requests[request.seq] = request, now - sequence.arrival_time
            living.setdefault(request.seq, []).append((seq, known[sequence.prompt_len :].tolist()))
        resumed = []
        for first_seq, (request, age_seconds) in sorted(requests.items()):
            seqs, outputs = zip(*sorted(living[first_seq]), strict=True)
            resumed.append(
                request._replace(
                    seq=seqs[0],
                    n=len(seqs),
                    outputs=outputs if any(outputs) else (),
                    age_seconds=age_seconds,
                    kv_source_tokens=0,
                    is_kv_on_disk=False,
                )
            )
        return resumed

    def _living_sequences(self) -> Iterator[tuple[int, Sequence]]:
        """Yield the id of each unfinished sequence with it, or with its parent before the fork."""
        for seq, sequence in self.sequences.items():
            if not sequence.is_finished:
                yield seq, sequence
        yield from self.pending_forks.items()

    def pop_released(self) -> list[int]:
        """Return the sequences released since the last call."""
        released, self._released_seqs = self._released_seqs, []
        return released

    def _create(self, seq: int, request: SchedulerRequest, arrival_time: float) -> Sequence:
        token_ids = request.initial_token_ids(seq)
        sequence = Sequence(seq, request, token_ids, len(token_ids), arrival_time=arrival_time)
        self.sequences[seq] = sequence
        return sequence

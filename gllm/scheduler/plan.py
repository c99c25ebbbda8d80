"""Data types between the scheduler and the stages: plans out, results in.

All types are NamedTuples, so that any codec can carry them as compact arrays.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

ON_DEVICE = -1
"""Placeholder for an input token that the previous step samples and the driver does not know."""


class ScheduledRow(NamedTuple):
    """Tokens of one sequence in a micro-batch: a decode step or a prefill chunk.

    A decode may have several tokens, if a grammar has determined tokens that need no sampling, or
    if it is a window: its last tokens are guesses that the step verifies.
    """

    seq: int
    """Sequence id, never reused."""
    num_preemptions: int
    """Number of times that the sequence lost its blocks; more than
    before replaces its block table."""
    start: int
    """Position of the row's first token: tokens in the KV cache, those in flight included."""
    num_tokens: int
    """Tokens that the row computes: positions start .. start + num_tokens - 1."""
    new_block_ids: list[int]
    """Block ids to append to the sequence's block table."""
    token_ids: list[int]
    """Token ids of the row's positions beyond the prompt, which every stage that needs it has
    received at registration; ON_DEVICE for a token that the previous step still samples."""
    should_sample: bool
    """True if a token is sampled from the row's last position; in a window also from the position
    before each draft token that the row has."""
    num_draft_tokens: int = 0
    """Last tokens of the row that are guesses. If all are, the row continues an earlier window: its
    first token is the guess of the token that the row before samples last."""

    @property
    def num_samples(self) -> int:
        """Positions of a sampling row from which a token is sampled, the last ones of the row."""
        return min(self.num_tokens, self.num_draft_tokens + 1)

    @property
    def first_sampled_position(self) -> int:
        """Position in the sequence of the first token that is sampled."""
        return self.start + self.num_tokens - self.num_samples + 1


def count_tokens(rows: Iterable[ScheduledRow]) -> int:
    """Return the total number of tokens to compute in rows of a micro-batch."""
    return sum([row.num_tokens for row in rows])


class StateSegment(NamedTuple):
    """Consecutive tokens of a row between two states of recurrent layers, with the slots of these.

    The segments of a row follow each other: each starts from the state that the one before wrote.
    """

    row: int
    """Index of the row in the plan."""
    num_tokens: int
    source: int
    """Slot of the state before the segment; -1 at the first token of a sequence: zeros."""
    target: int
    """Slot to which the state after the segment is written."""


class StepPlan(NamedTuple):
    """Description of a micro-batch for all stages: token rows, new KV blocks, ended sequences.

    Decode rows precede prefill rows; decodes of one token precede decodes of several.
    """

    step: int
    """Step number: increases by one, without gaps."""
    rows: list[ScheduledRow]
    released_seqs: list[int]
    """Finished sequences whose steps have all committed. No plan names them from this one on, and
    stages drop them."""
    lane: int = 0
    """DECODE_LANE or PREFILL_LANE if decode steps may overtake prefill steps
    (gllm/scheduler/lanes.py), else 0."""
    num_other_steps: int = 0
    """Number of earlier steps in the other lane; 0 with one lane."""
    state_segments: tuple[StateSegment, ...] = ()
    """Segments of all rows, in row order, for recurrent layers; empty for a model without any."""
    num_next_drafts: int = 0
    """Draft tokens that the last stage computes behind each sample, if it has a draft model or
    head."""

    @property
    def turn(self) -> int:
        """Number of the step among those of its lane; with one lane the step number."""
        return self.step - self.num_other_steps


class SampledToken(NamedTuple):
    """Token that the last stage sampled for one sequence of a micro-batch, or the error."""

    seq: int
    num_preemptions: int
    token_id: int
    error: str = ""
    """Reason why there is no token; the request ends with this error."""
    further_token_ids: tuple[int, ...] = ()
    """Tokens that follow: those sampled after accepted draft tokens, and those that the grammar
    forces."""
    is_finite: bool = True
    """False if the logits were not finite; the sequence's KV blocks are then not reused."""
    draft_token_ids: tuple[int, ...] = ()
    """Guesses of the tokens that follow all of these, computed by the last stage."""


def count_accepted(row: ScheduledRow, sampled: SampledToken | None) -> int:
    """Return the number of draft tokens of a window that are tokens of the text.

    Those are the ones that equal the samples before them. The first token of a window of guesses
    alone has no sample here: it was right, because the last stage has sampled the window.
    """
    if sampled is None or sampled.error:
        return 0
    num_samples = row.num_samples
    count = row.num_draft_tokens + 1 - num_samples
    drafts = row.token_ids[len(row.token_ids) + 1 - num_samples :]
    for draft, token in zip(drafts, (sampled.token_id, *sampled.further_token_ids), strict=False):
        if draft != token:
            break
        count += 1
    return count


class StepResult(NamedTuple):
    """Sampled tokens of one micro-batch, sent by the last stage."""

    step: int
    sampled_tokens: list[SampledToken]
    error: str = ""
    """Reason why the whole step failed; every sequence in it ends with this error."""


class StepTime(NamedTuple):
    """Measured start and end of a micro-batch's computation on one stage, in seconds.

    The wait for the input is not included.
    """

    step: int
    start: float
    end: float


class FinishedSequence(NamedTuple):
    """Report that a sequence has ended: the reason, and any KV that is kept for another engine."""

    seq: int
    finish_reason: str
    """stop, length, abort or error."""
    stop_token_id: int | None = None
    """The stop token that ended the sequence, if one did."""
    error: str = ""
    kv_ticket: int = 0
    """Key under which another engine can fetch the KV of the sequence; 0 if its blocks were freed.
    """
    num_kv_tokens: int = 0
    """Leading tokens with KV in the blocks that are kept: all but the last generated token."""
    num_accepted_guesses: int = 0
    """With speculation: draft tokens of the sequence that were right, in this scheduler."""
    num_rejected_guesses: int = 0
    """Draft tokens that were computed and not used."""


class SchedulerStats(NamedTuple):
    """Statistics of one scheduler: its present queues and cache use, and totals since its start."""

    running: int = 0
    """Sequences that hold KV blocks."""
    waiting: int = 0
    """Sequences without KV blocks."""
    kv_usage: float = 0.0
    """Share of KV blocks held by sequences, 0..1."""
    in_flight: int = 0
    """Micro-batches in flight."""
    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found in the prefix cache."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    waiting_tokens: int = 0
    """Prompt tokens neither cached nor scheduled, of running sequences too; no counter."""
    decode_context_tokens: int = 0
    """Tokens in the cache of the sequences in decode; no counter."""
    decoding: int = 0
    """#RD: sequences in decode, in flight or not; no counter."""
    depth: int = 0
    """#PP_depth: micro-batches over which the decodes are spread; no counter."""
    fetching: int = 0
    """Present number of sequences that fetch KV from another engine."""
    held_blocks: int = 0
    """KV blocks that other engines may fetch; no counter."""
    fetched_tokens: int = 0
    """Number of tokens with KV fetched from other engines."""
    failed_fetches: int = 0
    """Number of failed fetches, after which the sequences were prefilled."""
    in_flight_prefill_tokens: int = 0
    """Prefill tokens of the micro-batches in flight, no longer in `waiting_tokens`; no counter."""
    state_slots: int = 0
    """Slots for states of recurrent layers; 0 for a model without any."""
    used_state_slots: int = 0
    """State slots that running sequences refer to; no counter."""
    drafts: int = 0
    """Windows that were scheduled, those that continued a wrong guess included."""
    draft_tokens: int = 0
    """Draft tokens of the windows."""
    accepted_tokens: int = 0
    """Draft tokens that are tokens of the text."""
    accepted_per_position: tuple[int, ...] = ()
    """The same by position in the window; empty without speculation."""
    resumed_cached_tokens: int = 0
    """Tokens of sequences resumed with earlier output that were found in the prefix cache."""
    resumed_computed_tokens: int = 0
    """Tokens of such sequences that were computed again."""
    prefill_batch_tokens: int = 0
    """Prompt tokens per micro-batch that the policy aims at; no counter."""
    kv_push_threshold: int = 0
    """Least prompt tokens to compute for a transfer of KV during the prefill; 0 without such
    transfers; no counter."""

    @property
    def num_decoded_tokens(self) -> int:
        """Tokens computed in decode without wrong guesses: about the generated tokens."""
        return self.decode_tokens - self.draft_tokens + self.accepted_tokens

    def to_numbers(self) -> dict[str, float]:
        """Return the statistics that are single numbers, by name."""
        numbers = self._asdict()
        del numbers["accepted_per_position"]
        return numbers

    @property
    def unfinished(self) -> int:
        """Number of unfinished sequences."""
        return self.running + self.waiting


@dataclass
class SchedulerCounters:
    """Totals of steps, tokens, cache hits and fetches since the scheduler started.

    The fields are those of the same names in SchedulerStats.
    """

    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    fetched_tokens: int = 0
    failed_fetches: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    resumed_cached_tokens: int = 0
    resumed_computed_tokens: int = 0


class FirstToken(NamedTuple):
    """Number of cached prompt tokens and queueing time of a sequence that got its first token."""

    seq: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    queue_seconds: float
    """Time from the sequence's arrival to its first micro-batch."""


class StepOutput(NamedTuple):
    """Output of one completed micro-batch: new tokens by sequence, and the sequences that ended.

    Sequence seqs[i] has generated token_ids[i].
    """

    seqs: list[int]
    token_ids: list[int]
    first_tokens: list[FirstToken]
    finished: list[FinishedSequence]
    num_step_tokens: int = 0
    """Tokens that the micro-batch computed, prefill and decode together."""

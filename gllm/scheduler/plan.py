"""What the scheduler says and hears: plans out, results in.

Owns the plain data that crosses from decisions to arithmetic. Knows nothing of wires or tensors:
the types are NamedTuples so that any codec can carry them as compact arrays.
"""

from typing import NamedTuple

ON_DEVICE = -1
"""Stands for an input token that the step before samples and that never visits the driver first."""


class ScheduledRow(NamedTuple):
    """One sequence's part in a micro-batch: a decode token, with those it forced, or a chunk of its
    prefill."""

    seq: int
    """Sequence id, never reused."""
    epoch: int
    """Raised each time the sequence lost its blocks; a new epoch replaces its table whole."""
    start: int
    """Tokens of the sequence in the KV cache when this row runs, in flight ones included."""
    num_tokens: int
    """Tokens this row computes: positions start .. start + num_tokens - 1."""
    blocks: list[int]
    """Block ids to append to the sequence's block table."""
    token_ids: list[int]
    """Token ids of the row's positions at and beyond the prompt's length (the prompt itself was
    registered once); ON_DEVICE for one that the step before is still sampling."""
    samples: bool
    """Whether a token is sampled from the row's last position."""


class StepPlan(NamedTuple):
    """One micro-batch, the same for every stage. Rows of decodes come before those of prefill, and
    those of one token before those with forced tokens."""

    step: int
    """Step number: counts up by one, no gaps."""
    rows: list[ScheduledRow]
    released: list[int]
    """Sequences that ended, all their steps committed: neither this plan nor a later one names
    them, and followers forget them."""


class SampledToken(NamedTuple):
    """What one sampling row brought."""

    seq: int
    epoch: int
    token: int
    error: str = ""
    """Why there is no token; the request ends with this error."""
    forced: tuple[int, ...] = ()
    """Tokens that follow without being drawn: nothing else can."""
    is_finite: bool = True
    """Whether the logits were finite. If not, the sequence's KV blocks are not to be trusted."""


class StepResult(NamedTuple):
    """What the last stage returns for a plan, one entry for each row with `samples`."""

    step: int
    sampled: list[SampledToken]
    error: str = ""
    """Why the whole step failed; every sequence in it ends with this error."""


class StepTime(NamedTuple):
    """When a stage computed a step, seconds; waiting for its activations is not part of it."""

    step: int
    start: float
    end: float


class FinishedSequence(NamedTuple):
    """The end of a sequence."""

    seq: int
    reason: str
    """stop, length, abort or error."""
    stop_token: int | None = None
    """The token id that stopped it, where one did."""
    error: str = ""


class SchedulerStats(NamedTuple):
    """The scheduler's state; counters count from its start."""

    running: int = 0
    """Sequences that hold KV blocks."""
    waiting: int = 0
    """Sequences that do not."""
    kv_usage: float = 0.0
    """Share of KV blocks held by sequences, 0..1."""
    in_flight: int = 0
    """Micro-batches on their way."""
    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    prefill_tokens: int = 0
    decode_tokens: int = 0

    @property
    def unfinished(self) -> int:
        """Sequences that have not ended."""
        return self.running + self.waiting


class FirstToken(NamedTuple):
    """What is known of a sequence once it has its first token."""

    seq: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    queue_seconds: float
    """From its arrival to its first micro-batch."""


class StepOutput(NamedTuple):
    """What a commit brought: seqs[i] got tokens[i]; `ends` come after the tokens."""

    seqs: list[int]
    tokens: list[int]
    firsts: list[FirstToken]
    ends: list[FinishedSequence]
    step_tokens: int = 0
    """Tokens that the micro-batch computed, prefill and decode together."""

"""Messages between the frontend and the driver about requests."""

from typing import Annotated

from msgspec import Meta

from gllm.messages.base import TokenId, WireMessage
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams
from gllm.scheduler.plan import SchedulerStats, StepOutput


class SubmitRequest(WireMessage, frozen=True):
    """Command to the driver: run a request. Its choices are the sequences seq .. seq + n - 1."""

    seq: int
    prompt: list[TokenId]
    sampling: SequenceSamplingParams
    max_tokens: int
    """Most tokens to generate for each choice; prompt and output fit the context."""
    stop_ids: list[TokenId]
    """Token ids that end a sequence; includes those of EOS unless the request ignores EOS."""
    n: Annotated[int, Meta(ge=1)] = 1
    """Number of choices."""
    priority: int = 0
    """Requests with smaller values run earlier."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""


class RejectedRequest(WireMessage, frozen=True):
    """A SubmitRequest that could not be decoded; `decode` returns it, no process sends it."""

    seq: int
    n: int
    error: str


class AbortSequences(WireMessage, frozen=True):
    """Command to the driver: end sequences whose output nobody reads any more."""

    seqs: list[int]


class EngineOutputs(WireMessage, frozen=True):
    """Report of the driver on a committed step; an empty outcome reports statistics only."""

    outcome: StepOutput
    stats: SchedulerStats
    details: list[SampleDetails] = []
    """Details of sequences in the outcome that requested any."""

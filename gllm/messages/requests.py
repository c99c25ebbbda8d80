"""Messages between the frontend and the driver about requests."""

from typing import Annotated

from msgspec import Meta

from gllm.messages.base import TokenId, WireMessage
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams
from gllm.scheduler.plan import SchedulerStats, StepOutput


class SubmitRequest(WireMessage, frozen=True):
    """A request. Its choices are the sequences seq .. seq + n - 1."""

    seq: int
    prompt: list[TokenId]
    sampling: SequenceSamplingParams
    max_tokens: int
    """Tokens to generate at most, for each choice; prompt + max_tokens fit the context."""
    stop_ids: list[TokenId]
    """Token ids that end a sequence, those of EOS among them unless the request ignores EOS."""
    n: Annotated[int, Meta(ge=1)] = 1
    priority: int = 0
    """Smaller runs earlier."""
    cache_salt: str = ""


class RejectedRequest(WireMessage, frozen=True):
    """A Submit that could not be decoded; `decode` returns it, nobody sends it."""

    seq: int
    n: int
    error: str


class AbortSequences(WireMessage, frozen=True):
    """Sequences nobody waits for any more."""

    seqs: list[int]


class EngineOutputs(WireMessage, frozen=True):
    """What a commit brought, for all its sequences at once; an empty outcome brings statistics."""

    outcome: StepOutput
    stats: SchedulerStats
    logprobs: list[SampleDetails] = []
    """Of sequences in the outcome that asked for them."""

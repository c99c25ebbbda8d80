"""Messages between the scheduler and the stages about micro-batches."""

from gllm.messages.base import WireMessage
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams
from gllm.scheduler.plan import StepPlan, StepResult


class RegisterSequences(WireMessage, frozen=True):
    """Command to a stage: store prompt and sampling parameters of new sequences.

    They are the sequences seq .. seq + n - 1. Fields that the receiving stage does not need are
    empty.
    """

    seq: int
    prompt_len: int
    """Number of prompt tokens."""
    prompt: list[int] = []
    sampling: SequenceSamplingParams | None = None
    """Parameters of the sequences; without `choices`, `choice` counts up from the first one's."""
    n: int = 1
    choices: list[int] = []
    """Index of each sequence among the choices of its request."""
    outputs: list[list[int]] = []
    """Tokens that each sequence reported before a recovery; empty if there are none."""


class RunStep(WireMessage, frozen=True):
    """Command to a stage: compute a micro-batch; sent before its activations arrive."""

    plan: StepPlan


class StepDone(WireMessage, frozen=True):
    """Report of the last stage: the sampled tokens of a micro-batch."""

    result: StepResult
    details: list[SampleDetails] = []
    """Details of the rows that requested any."""


class GrammarReady(WireMessage, frozen=True):
    """Report of the last stage: the grammar of a request is compiled, or cannot be.

    With an error, the request, with or without a grammar, cannot be sampled.
    """

    seq: int
    error: str = ""
    n: int = 1
    """Number of the request's sequences, seq .. seq + n - 1."""

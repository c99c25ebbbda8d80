"""Messages between the driver and the stages about micro-batches."""

from gllm.messages.base import WireMessage
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams
from gllm.scheduler.plan import StepPlan, StepResult


class RegisterSequences(WireMessage, frozen=True):
    """A sequence that plans will name; fields the receiving stage has no use for are empty."""

    seq: int
    prompt_len: int
    prompt: list[int] = []
    sampling: SequenceSamplingParams | None = None
    n: int = 1
    """It stands for n sequences, seq .. seq + n - 1, whose `choice` counts up."""


class RunStep(WireMessage, frozen=True):
    """The metadata of a micro-batch, sent ahead of its activations."""

    plan: StepPlan


class StepDone(WireMessage, frozen=True):
    """The tokens of a micro-batch."""

    result: StepResult
    logprobs: list[SampleDetails] = []
    """Of the rows that were asked for them."""


class GrammarReady(WireMessage, frozen=True):
    """The grammar of a registered request is compiled; or, with an error, a registered request
    cannot be sampled."""

    seq: int
    error: str = ""
    n: int = 1
    """As in its Register."""

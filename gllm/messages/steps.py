"""Messages between the driver and the stages about micro-batches."""

from gllm.messages.base import Message
from gllm.messages.sampling import RowLogprobs, Sampling
from gllm.scheduler.plan import StepPlan, StepResult


class Register(Message, frozen=True):
    """A sequence that plans will name; fields the receiving stage has no use for are empty."""

    seq: int
    prompt_len: int
    prompt: list[int] = []
    sampling: Sampling | None = None
    n: int = 1
    """It stands for n sequences, seq .. seq + n - 1, whose `choice` counts up."""


class Step(Message, frozen=True):
    """The metadata of a micro-batch, sent ahead of its activations."""

    plan: StepPlan


class Result(Message, frozen=True):
    """The tokens of a micro-batch."""

    result: StepResult
    logprobs: list[RowLogprobs] = []
    """Of the rows that were asked for them."""


class Begun(Message, frozen=True):
    """The grammar of a registered request is compiled; or, with an error, a registered request
    cannot be sampled."""

    seq: int
    error: str = ""
    n: int = 1
    """As in its Register."""

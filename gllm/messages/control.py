"""Questions of the frontend to all stages, and the answer of each."""

from gllm.messages.base import WireMessage


class ResetPrefixCache(WireMessage, frozen=True):
    """Empty the prefix cache; Done is the answer."""

    question: int


class Profile(WireMessage, frozen=True):
    """To every stage: record what is computed, or end that and write it down; Done answers each."""

    question: int
    folder: str
    """Where each stage's record goes; empty: end."""


class CommandDone(WireMessage, frozen=True):
    """A stage has done what the frontend asked for."""

    question: int
    """Number of the message that this answers."""
    stage: int
    error: str = ""
    """Why it could not."""

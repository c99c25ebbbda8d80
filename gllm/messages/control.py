"""Commands of the frontend to stages, and the report that a stage has finished one."""

from gllm.messages.base import WireMessage


class ResetPrefixCache(WireMessage, frozen=True):
    """Command to the driver: empty the prefix cache."""

    command_id: int


class StartProfile(WireMessage, frozen=True):
    """Command to every stage: start to record a profile."""

    command_id: int
    folder: str
    """Folder of the stage's file."""


class StopProfile(WireMessage, frozen=True):
    """Command to every stage: stop the profile and write its file."""

    command_id: int


class CommandDone(WireMessage, frozen=True):
    """Report of a stage that a command has finished."""

    command_id: int
    stage: int
    error: str = ""
    """The reason of a failure; empty on success."""

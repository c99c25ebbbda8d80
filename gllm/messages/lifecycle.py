"""Messages that start and stop a stage."""

from gllm.messages.base import WireMessage


class LoadProgress(WireMessage, frozen=True):
    """How far a stage's loading is, in bytes."""

    stage: int
    done: int
    total: int


class StageConnected(WireMessage, frozen=True):
    """The first message of a stage to the driver: the way is open."""

    stage: int


class StageLoaded(WireMessage, frozen=True):
    """A stage has its weights."""

    stage: int
    weight_bytes: int
    block_bytes: int
    """Bytes of one KV block of the stage's layers."""
    room: int | None = None
    """Bytes for KV blocks in memory of the stage's own; None where stages share the machine's."""


class InitializeCache(WireMessage, frozen=True):
    """The number of KV blocks, the same on every stage."""

    num_blocks: int


class StageReady(WireMessage, frozen=True):
    """A stage has its KV cache and takes plans."""

    stage: int


class StageFailed(WireMessage, frozen=True):
    """A worker cannot go on."""

    stage: int
    cause: str


class Shutdown(WireMessage, frozen=True):
    """End this process."""

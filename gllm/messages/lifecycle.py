"""Messages that start and stop a stage."""

from gllm.messages.base import WireMessage


class LoadProgress(WireMessage, frozen=True):
    """Report on the loading of a stage's weights."""

    stage: int
    done_bytes: int
    total_bytes: int


class StageConnected(WireMessage, frozen=True):
    """First message of a stage to the driver: its socket is connected."""

    stage: int


class StageLoaded(WireMessage, frozen=True):
    """Report that a stage has loaded its weights."""

    stage: int
    weight_bytes: int
    block_bytes: int
    """Bytes of one KV block over the stage's layers."""
    available_bytes: int | None = None
    """Bytes for KV blocks in the stage's own memory; None if all stages share the host's memory."""


class InitializeCache(WireMessage, frozen=True):
    """Command to a stage: allocate the KV cache and start to run plans."""

    num_blocks: int
    """The same on every stage."""


class StageReady(WireMessage, frozen=True):
    """Report that a stage has its KV cache and runs plans."""

    stage: int


class StageFailed(WireMessage, frozen=True):
    """Report that a worker ends because of an error."""

    stage: int
    cause: str


class Shutdown(WireMessage, frozen=True):
    """Command to a worker: end the process."""

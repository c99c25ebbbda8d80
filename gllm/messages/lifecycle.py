"""Messages that start and stop a stage, commands to stages, and those about a worker process."""

from gllm.messages.base import ProcessMessage, WireMessage
from gllm.messages.kv_layout import KvLayout
from gllm.scheduler.intact_slots import NO_SLOTS, IntactSlots


class Hello(ProcessMessage, frozen=True):
    """First message of a connection: the id of the process that sends it."""

    sender: int


class Heartbeat(ProcessMessage, frozen=True):
    """Heartbeat of a worker's event loop, with the step that it computes and its CPU time."""

    step: int
    """Number of the step; -1 while none is computed."""
    step_seconds: float
    """Time since the step began."""
    num_tokens: int
    """Tokens in the step."""
    cpu_seconds: float
    """CPU time of the process since its start."""
    is_waiting: bool = False
    """True if the step waits for another rank of the stage."""


class LoadProgress(WireMessage, frozen=True):
    """Report of a worker while it loads weights: bytes loaded so far, and in total."""

    stage: int
    done_bytes: int
    total_bytes: int


class StageLoaded(WireMessage, frozen=True):
    """Report of a worker that has loaded its weights: their size, and the memory left for KV."""

    stage: int
    weight_bytes: int
    block_bytes: int
    """Bytes of one KV block over the layers and KV heads of the worker."""
    available_bytes: int | None = None
    """Bytes for KV blocks in the stage's own memory; None if all stages share the host's memory."""
    keeps_weights: bool = True
    """True if the process can close the stage and use its weights in the next epoch."""
    numerics: str = ""
    """Description of all that decides the rounding: device, dtypes, quantization and kernels."""
    host_available_bytes: int | None = None
    """Available bytes of the machine's memory, with the weights loaded; None if the stage has
    memory of its own."""
    state_bytes: int = 0
    """Bytes of one state slot over the recurrent layers of the worker."""


class LayersPrepared(ProcessMessage, frozen=True):
    """Report of a serving worker that it has loaded weights for a planned change of layers."""

    change: int
    """Number of the change."""
    num_bytes: int = 0
    """Bytes that were read."""
    cause: str = ""
    """Reason for which nothing was loaded before the change; empty for none."""
    is_failed: bool = False
    """True if the layers cannot be loaded at all for this reason."""


class InitializeCache(WireMessage, frozen=True):
    """Command to a worker: allocate the KV cache and start to run steps."""

    num_blocks: int
    """Number of KV blocks, equal on all stages."""
    num_state_slots: int = 0
    """Number of state slots, equal on all stages; 0 for a model without recurrent layers."""


class StageReady(WireMessage, frozen=True):
    """Report of a worker that it has allocated its KV cache and runs steps."""

    stage: int
    kv_layout: KvLayout | None = None
    """Layout of the KV cache in StageAssignment.kv_memory; None without --kv-transfer."""
    intact: IntactSlots = NO_SLOTS
    """Slots of the KV blocks of the earlier worker in this place that can be used."""


class StageFailed(ProcessMessage, frozen=True):
    """Report of a worker that it exits because of an error."""

    stage: int
    cause: str


class CloseEpoch(WireMessage, frozen=True):
    """Command to a worker before a pipeline restart: free the KV cache, keep the weights."""


class EpochClosed(WireMessage, frozen=True):
    """Report of a worker that it has freed its KV cache, so that the pipeline can be restarted."""


class Shutdown(ProcessMessage, frozen=True):
    """Command to a worker: exit."""


class ResetPrefixCache(WireMessage, frozen=True):
    """Command to the scheduler: empty the prefix cache."""

    command_id: int


class StartProfile(WireMessage, frozen=True):
    """Command to every stage: start to record a profile with torch.profiler."""

    command_id: int
    folder: str
    """Folder of the stage's file."""


class StopProfile(WireMessage, frozen=True):
    """Command to every stage: stop the profile and write its file."""

    command_id: int


class CommandDone(WireMessage, frozen=True):
    """Report of a stage that a command is finished, or has failed."""

    command_id: int
    stage: int
    error: str = ""
    """The reason of a failure; empty on success."""

"""What a worker process is told once the parent knows it.

Owns the one message that goes by standard input. Imports no torch: the parent writes it.
"""

import msgspec

from gllm.config.engine import EngineConfig
from gllm.observability.logs import LogConfig


class WorkerSpec(msgspec.Struct, frozen=True):
    """What a worker is to be."""

    stage: int
    stages: int
    layers: tuple[int, int]
    """First layer, and the one after the last."""
    layer_counts: list[int]
    """Layers of every stage."""
    folder: str
    """The model's."""
    config: EngineConfig
    """max_model_len resolved."""
    frontend: str
    """Address of the parent's inbox."""
    inboxes: list[str]
    """Address of each stage's inbox."""
    incoming: list[int]
    """Descriptors of the edge from the stage before; none on the first."""
    outgoing: list[int]
    """Descriptors of the edge to the next stage; none on the last."""
    logs: LogConfig
    kernel_ratios: int | None = None
    """Descriptor of the file in which stages share measurements of compiled kernels."""
    transport: str = "shared-memory"
    """How activations travel; a name of gllm.transport.registry."""
